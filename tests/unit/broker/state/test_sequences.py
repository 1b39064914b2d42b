"""What a sequence may become, and what the state says of itself when it is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.events import Tick
from swarm.broker.state import Sequence, SequenceState, State
from swarm.broker.state.lifecycle import ALLOWED_STATES, TRANSITIONS, Rebuild
from swarm.errors import IllegalMove
from swarm.wire.messages import LayerRange
from tests.unit.broker.bench import Bench, settings, submit

MOVING: dict[str, tuple[SequenceState, Callable[[Sequence], None]]] = {
    "enter": (SequenceState.RUNNING, lambda s: s.admit(None)),
    "take_back": (SequenceState.RUNNING, lambda s: s.resume(1, 0.0)),
    "wait_again": (SequenceState.WAITING, lambda s: s.requeue()),
    "end": (SequenceState.ENDED, lambda s: s.end("stop", "", 0.0)),
}


@pytest.mark.parametrize("verb", MOVING)
@pytest.mark.parametrize("state", SequenceState)
def test_a_move_is_refused_where_the_table_has_no_such_move(serving: Bench, state: SequenceState, verb: str) -> None:
    """And the error tells the sequence's story."""
    serving.say(submit("a", num_prompt=3))
    sequence = Sequence(7, serving.sequence("a").request, 0, 1, [1, 2, 3], 20, state=state)
    to, act = MOVING[verb]
    if to in TRANSITIONS[state]:
        act(sequence)
        assert sequence.state is to
    else:
        with pytest.raises(IllegalMove, match=f"it can't become {to.value}: sequence 7 of a is {state.value}: kv 0"):
            act(sequence)


RUN = Rebuild(None, LayerRange(0, 3), 3, stop=2, start=0, done=0)
GIVEN: dict[str, tuple[object, ...]] = {
    "acknowledge": (1,),
    "start_counting_overtakes": (0.0,),
    "record_not_finite": ("w0",),
    "lower_limit": (10,),
    "recompute_from": (1,),
    "truncate_answer": (0,),
    "truncate_to": (1,),
    "dispatch": (1,),
    "expect_stop": (1,),
    "append_token": (5, (), None, 0.0),
    "add_prompt_logprobs": (1, b"", 12),
    "set_vector": (b"0000",),
    "start_rebuild": ([RUN],),
    "finish_rebuild": (RUN,),
    "finish_restore": (1,),
    "add_unfit_time": (1.0,),
    "start": (0.0,),
}


@pytest.mark.parametrize("verb", ALLOWED_STATES)
@pytest.mark.parametrize("state", SequenceState)
def test_a_verb_is_refused_in_a_state_where_it_does_not_belong(serving: Bench, state: SequenceState, verb: str) -> None:
    """A step of one that waits, a token of one that has ended: nothing is changed, and the error tells its story."""
    serving.say(submit("a", num_prompt=3))
    sequence = Sequence(7, serving.sequence("a").request, 0, 1, [1, 2, 3], 20, state=state, rebuilds=[RUN])
    before, act = sequence.describe(), getattr(sequence, verb)
    if state in ALLOWED_STATES[verb]:
        act(*GIVEN.get(verb, ()))
    else:
        with pytest.raises(IllegalMove, match=f"it can't {verb.replace('_', ' ')}: sequence 7 of a is {state.value}"):
            act(*GIVEN.get(verb, ()))
        assert (sequence.describe(), sequence.rebuilds) == (before, [RUN])


def one_more_block(state: State) -> None:
    state.running.blocks += 1


def acknowledged_before_dispatched(state: State) -> None:
    next(iter(state.running)).kv = 50


def shown_before_written(state: State) -> None:
    next(iter(state.running)).sent += 1


def past_its_limit(state: State) -> None:
    sequence = next(iter(state.running))
    sequence.tokens += [0] * sequence.limit


def logprobs_of_no_token(state: State) -> None:
    next(iter(state.running)).logprobs.append(())


def forgotten_by_the_list(state: State) -> None:
    state.running.remove(next(iter(state.running)))


def due_and_under_way(state: State) -> None:
    sequence = next(iter(state.running))
    state.running.due[sequence.id] = sequence


def room_without_running(state: State) -> None:
    sequence = next(iter(state.running))
    sequence.state = SequenceState.ENDED


def no_plan(state: State) -> None:
    state.plans.current = None


def counted_on_though_gone(state: State) -> None:
    next(iter(state.workers.values())).put_out("its connection closed")


def levelled_without_a_plan(state: State) -> None:
    state.in_flight.clear()
    state.plans.current = None
    state.rebuilding.queue.append(next(iter(state.running)))


def levelled_twice(state: State) -> None:
    state.rebuilding.in_progress += [next(iter(state.running))] * 2


def running_among_the_ended(state: State) -> None:
    state.ended_requests.add(next(iter(state.running)).request)


def shelf_of_another_weight(state: State) -> None:
    state.ended_requests.weight += 1


WRONG = {
    one_more_block: "blocks are counted",
    acknowledged_before_dispatched: "kv <= scheduled <= sampled",
    shown_before_written: "delivered <= sent <= committed",
    past_its_limit: "past its limit",
    logprobs_of_no_token: "differ in number",
    forgotten_by_the_list: "are in the list",
    due_and_under_way: "due are",
    room_without_running: "holds blocks but does not run",
    counted_on_though_gone: "which are gone",
    levelled_without_a_plan: "rebuilt without a plan",
    levelled_twice: "rebuilt twice",
    running_among_the_ended: "are listed as ended",
    shelf_of_another_weight: "weight of ended requests",
    no_plan: "without a plan",
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_a_broken_rule_is_told_and_logged(damage: Callable[[State], None]) -> None:
    """With ``broker.check_rules`` a broker in production looks for it at every tick."""
    found = Bench(settings(check_rules=True)).serve(2)
    found.say(submit("a", num_prompt=3))
    assert list(found.state.check()) == []
    damage(found.state)
    assert any(WRONG[damage] in wrong for wrong in found.state.check())
    if damage not in (no_plan, levelled_without_a_plan, levelled_twice):  # which a tick mends at once
        noted = [action for action in found.core.handle(Tick(), found.now) if isinstance(action, WriteLog)]
        assert any(note.event == "rule_broken" and WRONG[damage] in str(note.fields["what"]) for note in noted)
