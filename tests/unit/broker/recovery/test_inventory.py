"""What stays over a change of plan: who keeps its room, and who has to wait for some."""

from __future__ import annotations

from collections.abc import Callable

from swarm.broker.state import SequenceState
from swarm.wire.messages import BLOCK
from tests.unit.broker.bench import Bench, submit


def test_who_has_the_better_claim_keeps_its_room(make_bench: Callable[..., Bench]) -> None:
    """The stages of the next plan hold one sequence of three. The others wait, forget what the stages had of them, and
    come to their ends all the same."""
    bench = make_bench().serve(1, kv_capacity=9 * BLOCK)
    for name, priority in (("first", 0), ("high", 50), ("last", 0)):
        bench.say(submit(name, num_prompt=BLOCK + 3, max_tokens=40, priority=priority, ignore_eos=True))
    for _ in range(4):
        bench.finish()
    assert len(bench.state.running) == 3
    bench.lose("w0")
    bench.join("w1", kv_capacity=3 * BLOCK)
    bench.tick()
    states = {name: bench.sequence(name).state for name in ("first", "high", "last")}
    assert states == {
        "first": SequenceState.WAITING,
        "high": SequenceState.RUNNING,
        "last": SequenceState.WAITING,
    }
    assert bench.sequence("first").kv == bench.sequence("first").blocks == 0
    bench.run_dry()
    assert [bench.sequence(name).reason for name in states] == ["length"] * 3
