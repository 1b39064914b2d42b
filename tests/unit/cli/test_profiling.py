"""The figures of a profile, and the drawing of hops."""

from __future__ import annotations

import pytest

from swarm.cli.generate.hops import timeline
from swarm.cli.profile.measure import cache_rates, percentiles, time_shares
from swarm.wire.messages import Hop, LayerRange


def test_percentiles_are_measured_values() -> None:
    """The nearest rank: of a hundred, the 95th; of a few, the last; of none, nothing."""
    hundred = percentiles([value / 1000 for value in range(1, 101)])
    assert hundred == {"mean": 0.0505, "p50": 0.05, "p95": 0.095, "p99": 0.099}
    assert percentiles([3.0, 1.0]) == {"mean": 2.0, "p50": 1.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {"mean": None, "p50": None, "p95": None, "p99": None}


def test_cache_rates_are_of_what_was_done_between() -> None:
    """Hits before don't count; the stages' tables are summed up; nothing done is no rate."""
    before = {
        "pipeline": {"prefix_hits": 5, "sequences_length": 10},
        "stages": {"w0": {"rope_hits": 10, "rope_misses": 2}, "w1": {"rope_hits": 0}},
    }
    after = {
        "pipeline": {"prefix_hits": 6, "sequences_length": 14},
        "stages": {"w0": {"rope_hits": 20, "rope_misses": 3}, "w1": {"rope_hits": 9}},
    }
    found = cache_rates(before, after)
    assert found["rope"] == {"hits": 19, "misses": 1, "rate": 0.95}
    assert found["mask"] == {"hits": 0, "misses": 0, "rate": None}
    assert found["prefix"] == {"hits": 1, "misses": 3, "rate": 0.25}


def test_communication_is_a_share_of_all_tokens_time() -> None:
    """Queue, wire and broker against the whole."""
    sums = {
        "total_s": 1.0,
        "queue_s": 0.1,
        "wire_s": 0.2,
        "wait_s": 0.05,
        "compute_s": 0.5,
        "sample_s": 0.05,
        "broker_s": 0.1,
        "unaccounted_s": 0.0,
    }
    trace = {"sequences": [{"num_traced": 10, "sums": sums}]}
    found = time_shares([trace, trace])
    assert (found["tokens"], found["communication"]) == (20, pytest.approx(0.4))
    assert found["per_token_s"]["compute_s"] == pytest.approx(0.05)  # type: ignore[index]
    assert sum(found["share"].values()) == pytest.approx(1.0)  # type: ignore[attr-defined]
    assert time_shares([]) == {"tokens": 0, "per_token_s": {}, "share": {}, "communication": None}


def hop(worker: str, wait: float, compute: float, sample: float = 0.0) -> Hop:
    return Hop(worker, LayerRange(0, 4), wait, compute, sample, 0.0, 8)


def test_bars_have_one_scale() -> None:
    """The longest hop of the later tokens is the longest bar; the prompt's is cut and says so; what is next to nothing
    has none."""
    prompt, long, short = hop("w0", 0.0, 0.1), hop("w0", 0.002, 0.004, 0.002), hop("w0", 0.0, 0.002)
    lines = list(timeline([(prompt,), (long, short), (hop("w0", 0.0, 0.00001),)]))
    assert lines == [
        "0  0–3 100.00 " + "█" * 15 + "…",
        "1  0–3   8.00 ░░░░████████▒▒▒▒  0–3   2.00 ████",
        "2  0–3   0.01",
    ]


def test_long_answers_are_shown_in_part() -> None:
    """The first and the last tokens, and how many are between."""
    lines = list(timeline([(hop("w0", 0.0, 0.001),)] * 100))
    assert len(lines) == 25
    assert lines[12] == " …  76 tokens between (--json has them)"
    assert (lines[11].split()[0], lines[13].split()[0]) == ("11", "88")


def test_hops_without_time_are_drawn() -> None:
    """A swarm whose clock stands still divides by nothing."""
    assert list(timeline([(hop("w0", 0.0, 0.0),)])) == ["0  0–3   0.00"]
