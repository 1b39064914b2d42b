"""Sequences that leave the stages and come back: what was under way before counts no more as held there."""

from __future__ import annotations

from swarm.broker.state import SequenceState
from swarm.wire.messages import BLOCK
from tests.unit.broker.bench import scheduling, submit


def test_what_was_under_way_before_a_stay_is_not_acknowledged_in_it(make_bench) -> None:
    """A sequence gives its room back with a step in the pipe and enters anew at once: the old step's end says nothing
    about the new room, which is empty until its own steps are through."""
    bench = make_bench(scheduling(mode="overlapped", kv_headroom=1)).serve(2, kv_capacity=8 * BLOCK)
    bench.say(submit("a", num_prompt=8, max_tokens=9, ignore_eos=True))
    (before,) = bench.pipe
    sequence = bench.sequence("a")
    bench.state.preempt(sequence)
    bench.tick()
    assert (sequence.state, sequence.kv, sequence.scheduled) == (SequenceState.RUNNING, 0, 8)
    bench.finish(before, token=55)
    assert (sequence.tokens[-1], sequence.kv) == (55, 0)
    bench.run_dry()
    assert (sequence.reason, sequence.num_generated) == ("length", 9)
