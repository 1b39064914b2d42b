"""Prefixes that sequences go on sharing over a change of plan: who shares with whom."""

from __future__ import annotations

from swarm.broker.planner.lost_positions import LostSequence
from swarm.broker.planner.takeover import ReplayWork
from swarm.broker.planning.measurements import list_lost_sequences
from swarm.broker.recovery.kept_sequences import find_link
from swarm.broker.state.shared_prefixes import estimate_links
from swarm.wire.messages import BLOCK, SharedPrefix
from swarm.wire.shared_positions import SharedPositions
from tests.unit.broker.bench import Bench, scheduling, submit

UNIT = 2 * BLOCK


def serve(make_bench) -> Bench:
    bench = make_bench(scheduling(mode="batch", kv_headroom=BLOCK, step_tokens=4096, prefill_chunk=4096))
    bench.serve(2, kv_capacity=100 * BLOCK, share_unit=UNIT)
    bench.say(submit("r", num_prompt=5 * UNIT + 5, max_tokens=BLOCK, ignore_eos=True, n=3))
    for _ in range(3):
        bench.finish()
    assert len(bench.state.running) == 3
    return bench


def test_the_account_knows_what_two_sequences_have_in_common() -> None:
    shared = SharedPositions(unit=UNIT)
    shared.fork(2, 1, 4 * UNIT)
    shared.fork(3, 2, 2 * UNIT)
    shared.fork(4, 2, 6 * UNIT)  # two chunks of them are what sequence 2 has computed itself
    assert [shared.common_stop(4, other) // UNIT for other in (1, 2, 3, 5)] == [4, 6, 2, 0]
    assert [shared.common_stop(other, 4) // UNIT for other in (1, 2, 3, 5)] == [4, 6, 2, 0]
    shared.release(1)
    shared.release(2)
    assert shared.common_stop(3, 4) == 2 * UNIT
    assert shared.inherited(1) == ()
    assert [end for _, end in shared.inherited(4)] == [4 * UNIT, 6 * UNIT]


def test_a_forecast_counts_a_shared_prompt_once(make_bench) -> None:
    """Before a plan has failed and after: only the first one's would be replayed. Copies may reach further."""
    bench = serve(make_bench)
    sequences = list(bench.state.running)
    assert estimate_links(bench.state.shared, sequences) == {2: 5 * UNIT, 3: 5 * UNIT}
    expected = [LostSequence(s.kv, {}, shared) for s, shared in zip(sequences, (0, 5 * UNIT, 5 * UNIT), strict=True)]
    assert list(list_lost_sequences(bench.state)) == expected
    bench.lose("w1")
    assert list(list_lost_sequences(bench.state)) == expected
    assert ReplayWork.from_sequences(expected, 256).positions == sum(s.kv for s in sequences) - 2 * 5 * UNIT
    copied = LostSequence(1000, {"a": [300], "b": [900]}, shared=600)
    assert [copied.lacking(device, 0) for device in "abc"] == [400, 100, 400]


def test_sequences_whose_tokens_differ_share_no_prefix(make_bench) -> None:
    """Whatever the account has: the stages would map one sequence's keys and values into the other."""
    bench = serve(make_bench)
    first, second = bench.sequence("r", 0), bench.sequence("r", 1)
    before, same = bench.state.shared, second.tokens[0]
    link = find_link(bench.state, before, second, [first])
    assert link == SharedPrefix(second.id, first.id, 5 * UNIT)
    second.tokens[0] += 1
    assert find_link(bench.state, before, second, [first]) is None
    second.tokens[0] = same


def test_a_longer_prefix_is_preferred(make_bench) -> None:
    """And a sequence without anything behind its prefix has none to share."""
    bench = serve(make_bench)
    second = bench.sequence("r", 1)
    shared = SharedPositions(unit=UNIT)
    shared.fork(2, 1, UNIT)
    shared.fork(3, 2, 4 * UNIT)
    assert estimate_links(shared, list(bench.state.running)) == {2: UNIT, 3: 4 * UNIT}
    held, second.kv = second.kv, UNIT
    assert estimate_links(shared, list(bench.state.running)) == {3: 4 * UNIT}
    second.kv = held
