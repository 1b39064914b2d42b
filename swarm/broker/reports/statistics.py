"""Figures of the pipeline and of requests: little arithmetic per figure and step, and constant memory.

The result of a step contains the time that it spent in each stage (hops). The rest of its time is called the bridge:
encoding, sockets, networks and decoding together. Clocks of different machines are never compared.

For requests: waiting times, how they ended, and numbers of tokens. A sequence's time in the queue, time to first token
and prompt tokens are counted when its first token arrives; a sequence without tokens only counts among the outcomes.
Times are measured by the broker: from a request's arrival, and between the arrivals of two tokens of a sequence, so
recoveries are included. Tokens drawn by an earlier broker are excluded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from swarm.broker.state import Request, Sequence
from swarm.series import LONG_S, POWERS, SHORT_S, Histogram, ProfiledCalls, RunningStats
from swarm.wire.messages import FinishReason, Json, Step, StepDone


def _histograms() -> dict[str, Histogram]:
    by_size = ("step_rows", "step_positions", "batch_rows", "micro_batches")
    sizes = {name: Histogram(POWERS) for name in by_size}
    return {**sizes, "queue_depth": Histogram((0.0, *POWERS)), "step_s": Histogram(SHORT_S)}


@dataclass(slots=True)
class PipelineStatistics(ProfiledCalls):
    """Figures of steps, updated at every dispatch and every answer."""

    SIZES: ClassVar = (
        "rows",
        "positions",
        "batch_rows",
        "micro_batches",
        "queue_depth",
        "bytes_bridged",
    )
    TIMES: ClassVar = ("total", "bridge", "wait", "compute", "sample")

    rows: RunningStats = field(default_factory=RunningStats)  # sequences in a micro-batch
    positions: RunningStats = field(default_factory=RunningStats)  # tokens in a micro-batch
    batch_rows: RunningStats = field(default_factory=RunningStats)  # sequences in all micro-batches in flight
    # micro-batches in flight, which equals the number of busy stages
    micro_batches: RunningStats = field(default_factory=RunningStats)
    queue_depth: RunningStats = field(default_factory=RunningStats)
    bytes_bridged: RunningStats = field(default_factory=RunningStats)  # bytes received by all stages, per step
    total: RunningStats = field(default_factory=RunningStats)
    bridge: RunningStats = field(default_factory=RunningStats)  # seconds between stages
    wait: RunningStats = field(default_factory=RunningStats)  # seconds in stages, waiting for other micro-batches
    compute: RunningStats = field(default_factory=RunningStats)
    sample: RunningStats = field(default_factory=RunningStats)
    spread: dict[str, Histogram] = field(default_factory=_histograms)
    # seconds of computation by worker, under the active plan
    stages: dict[str, RunningStats] = field(default_factory=dict)
    _epoch: int = 0
    _in_flight_rows: int = 0  # rows of all steps in flight

    def record_dispatch(self, step: Step, num_in_flight: int, num_waiting: int) -> None:
        """Count a dispatched step; ``num_in_flight`` includes it."""
        if step.epoch != self._epoch:
            self._epoch, self._in_flight_rows = step.epoch, 0  # steps of the old epoch will never be answered
            self.stages.clear()
        num_rows = len(step.rows)
        if num_rows == 0:  # the step only carries releases
            return
        self.calls += 1
        self.overlapped_calls += num_in_flight > 1
        self._in_flight_rows = num_rows if num_in_flight == 1 else self._in_flight_rows + num_rows
        self.rows.add(num_rows)
        self.positions.add(len(step.tokens))
        self.spread["step_rows"].add(num_rows)
        self.spread["step_positions"].add(len(step.tokens))
        self.batch_rows.add(self._in_flight_rows)
        self.micro_batches.add(num_in_flight)
        self.queue_depth.add(num_waiting)
        self.spread["batch_rows"].add(self._in_flight_rows)
        self.spread["micro_batches"].add(num_in_flight)
        self.spread["queue_depth"].add(num_waiting)

    def record_done(self, seconds: float, done: StepDone) -> bool:
        """Count a completed step. Return False if it had no rows; such a step is not counted."""
        self._in_flight_rows = max(0, self._in_flight_rows - len(done.kv))
        if not done.hops or not done.kv:
            return False
        wait = compute = sample = in_stages_s = 0.0  # ``in_stages_s``: seconds in stages
        num_bytes = 0
        for hop in done.hops:
            wait += hop.wait_s
            compute += hop.compute_s
            sample += hop.sample_s
            in_stages_s += hop.whole_s
            num_bytes += hop.wire_bytes
            stage = self.stages.get(hop.worker)
            if stage is None:
                stage = self.stages[hop.worker] = RunningStats()
            stage.add(hop.compute_s)
        self.total.add(seconds)
        self.spread["step_s"].add(seconds)
        self.bridge.add(max(0.0, seconds - in_stages_s))
        self.wait.add(wait)
        self.compute.add(compute)
        self.sample.add(sample)
        self.bytes_bridged.add(num_bytes)
        return True

    def is_due(self, every: int) -> bool:
        """Whether a profile line is due, after every ``every`` steps; 0: never."""
        return every > 0 and self.total.num % every == 0

    def histograms(self) -> Json:
        """Return the distributions of rows, positions and seconds of steps."""
        return {name: histogram.report() for name, histogram in self.spread.items()}

    def report(self) -> Json:
        """Return all figures, for ``swarmctl stats``."""
        times: Json = {name: self.series(name).time_report() for name in self.TIMES}
        times["stages"] = {worker: series.time_report() for worker, series in self.stages.items()}
        return {
            "calls": self.calls,
            "overlapped_calls": self.overlapped_calls,
            "sizes": {name: self.series(name).size_report() for name in self.SIZES},
            "microseconds": times,
        }


# Outcome of a request with several sequences: the first of these that occurs.
WORST_FIRST: tuple[FinishReason, ...] = ("failed", "cancelled", "length", "stop")
assert set(WORST_FIRST) == set(get_args(FinishReason))


class RequestLatencies:
    """Latencies of requests; costs an addition and a search in a short tuple per step of a sequence."""

    __slots__ = ("_num_cached", "_num_prompt", "_outcomes", "between_tokens", "first_token", "queue", "whole")

    def __init__(self) -> None:
        self.queue = Histogram(LONG_S)
        self.first_token = Histogram(LONG_S)
        self.between_tokens = Histogram(SHORT_S)
        self.whole = Histogram(LONG_S)
        self._num_prompt = 0
        self._num_cached = 0
        self._outcomes: Counter[str] = Counter()

    def record_tokens(self, sequence: Sequence, num: int, before: float | None, now: float) -> None:
        """Count the tokens that a step has given a sequence: they share the time since the step before. ``before``:
        time of its last token before them; None: these are its first ones."""
        if before is not None:
            self.between_tokens.add((now - before) / num, num)
        elif not sequence.num_restored:
            self._record_first(sequence, now)

    def _record_first(self, sequence: Sequence, now: float) -> None:
        arrived_at = sequence.request.arrived_at
        self.first_token.add(max(0.0, now - arrived_at))
        if sequence.started_at is not None:
            self.queue.add(max(0.0, sequence.started_at - arrived_at))
        self._num_prompt += sequence.num_prompt
        self._num_cached += sequence.num_cached

    def record_end(self, request: Request, now: float) -> None:
        """Count a request whose last sequence has ended. Its duration counts only if it is complete. A request that was
        never accepted is not counted."""
        if not request.accepted:
            return
        reasons = {sequence.reason for sequence in request.sequences}
        outcome = next(reason for reason in WORST_FIRST if reason in reasons)
        self._outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self.whole.add(max(0.0, now - request.arrived_at))

    def counts(self) -> Json:
        """Return the number of requests by outcome, and the prompt tokens of answered requests."""
        ended: Json = {outcome: self._outcomes[outcome] for outcome in WORST_FIRST}
        return {"ended": ended, "prompt_tokens": self._num_prompt, "cached_prompt_tokens": self._num_cached}

    def histograms(self) -> Json:
        return {
            "queue_s": self.queue.report(),
            "first_token_s": self.first_token.report(),
            "between_tokens_s": self.between_tokens.report(),
            "request_s": self.whole.report(),
        }
