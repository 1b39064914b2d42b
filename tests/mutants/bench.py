"""Mutants of swarm/bench."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="bench-goodput-of-failures",
        breaks="The benchmark counts requests that failed quickly as goodput.",
        target="swarm.bench.figures:keeps",
        old="return record.is_ok and all(limit is None or time is None or time <= limit for time, limit in pairs)",
        new="return all(limit is None or time is None or time <= limit for time, limit in pairs)",
        caught_by="tests/unit/bench/test_figures.py::test_goodput_needs_every_limit_and_failures_keep_none",
    ),
    Mutant(
        name="bench-warm-up-counts",
        breaks="The benchmark measures requests of the warm-up.",
        target="swarm.bench.figures:measured",
        old="return [record for record in records if 0 <= record.due <= seconds]",
        new="return [record for record in records if record.due <= seconds]",
        caught_by="tests/unit/bench/test_figures.py::test_rates_are_what_came_within_the_window_and_latencies_of_what_was_due_within_it",
    ),
    Mutant(
        name="bench-latency-from-sending",
        breaks="The benchmark measures latency from when a request was sent, not from when it was due.",
        target="swarm.bench.records:Record.e2e",
        old="return self.end - self.due",
        new="return self.end - self.sent",
        caught_by="tests/unit/bench/test_figures.py::test_latencies_begin_when_a_request_was_due_not_when_it_was_sent",
    ),
)
