"""Which proposer guesses for which request, and for how long a sequence waits for one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from swarm.broker.events import StepFinished
from swarm.broker.speculation.grammar import GrammarProposer
from swarm.broker.speculation.proposer import ProposerName
from swarm.broker.speculation.speculation import ProposerFigures
from swarm.broker.state import Sequence
from swarm.params import SPECULATION_MODES, SpeculationMode
from swarm.wire.messages import MAX_PROPOSED, Cancel, ForcedTokens, Step
from tests.unit.broker.bench import Bench, row, scheduling, settings, steps, submit, verified

ANSWER = list(range(40, 60))
ANSWERS = dict.fromkeys(range(1, 9), ANSWER)


@dataclass
class Guesser:
    """Guesses as many right tokens as it may, and remembers what it was asked for."""

    name: ProposerName
    num_tokens: int = 3
    forgotten: list[int] = field(default_factory=list)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return tuple(ANSWER[sequence.num_generated :][: min(most, self.num_tokens)])

    def forget(self, sequence: int) -> None:
        self.forgotten.append(sequence)


@dataclass
class Slow(Guesser):
    """Delays sequences for its guess, which comes when the test lets it."""

    wait_s: float = 1.0
    ready: bool = False
    prepared: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return Guesser.propose(self, sequence, most) if self.ready else ()

    def prepare(self, sequence: Sequence, most: int, now: float) -> float | None:
        self.prepared.append((sequence.id, most))
        return now + self.wait_s

    def record(self, sequence: int, num_proposed: int, num_accepted: int) -> None:
        pass


def decode(bench: Bench, **fields: object) -> Step | None:
    """Compute a request's prompt; return the first step of its answer."""
    bench.say(submit(**({"max_tokens": 20} | fields)))
    bench.verify(ANSWERS)
    return bench.pipe[0] if bench.pipe else None


def proposer_of(step: Step | None, bench: Bench) -> str | None:
    assert step is not None
    flight = bench.state.in_flight[step.step]
    return flight.proposals[1].proposer if flight.proposals else None


@pytest.mark.parametrize("mode", SPECULATION_MODES)
@pytest.mark.parametrize("own", [None, *SPECULATION_MODES])
def test_both_the_broker_and_the_request_choose_the_proposers(
    make_bench, mode: SpeculationMode, own: SpeculationMode | None
) -> None:
    """The draft model guesses more tokens here, so that it is chosen where both may guess."""
    proposers = (Guesser("suffix"), Guesser("draft", num_tokens=5))
    bench = make_bench(settings(speculation=mode), proposers=proposers).serve(1)
    step = decode(bench, speculation=own)
    modes = {mode, own or mode} - {"auto"}
    expected = "draft" if not modes else modes.pop() if len(modes) == 1 else None
    assert proposer_of(step, bench) == (None if expected == "off" else expected)


def test_tokens_that_a_grammar_forces_are_proposed_once(make_bench) -> None:
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=20))
    step = bench.pipe.popleft()
    done = verified(step, bench.state, ANSWERS)
    (after,) = steps(bench.feed(StepFinished(structs.replace(done, forced=(ForcedTokens(1, (41, 42)),)))))
    assert (row(after), proposer_of(after, bench)) == ([(1, 3, 3)], "grammar")
    (later,) = steps(bench.verify(ANSWERS))
    assert row(later) == [(1, 6, 1)]


def test_forced_tokens_are_dropped_when_the_sequence_has_moved_on(make_bench) -> None:
    """They came with a step of an earlier residency."""
    bench = make_bench().serve(2)
    bench.say(submit(max_tokens=20))
    step = bench.pipe.popleft()
    bench.state.in_flight[step.step].residencies[1] -= 1
    done = verified(step, bench.state, ANSWERS)
    (after,) = steps(bench.feed(StepFinished(structs.replace(done, forced=(ForcedTokens(1, (41, 42)),)))))
    assert row(after) == [(1, 3, 1)]


@pytest.mark.parametrize("own", ["off", "suffix"])
def test_forced_tokens_are_proposed_unless_it_is_off(make_bench, own: SpeculationMode) -> None:
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=20, speculation=own))
    step = bench.pipe.popleft()
    done = verified(step, bench.state, ANSWERS)
    (after,) = steps(bench.feed(StepFinished(structs.replace(done, forced=(ForcedTokens(1, (41, 42)),)))))
    assert row(after) == [(1, 3, 1 if own == "off" else 3)]


def test_a_sequence_joins_no_step_while_it_waits_for_its_proposal(make_bench) -> None:
    slow = Slow("draft")
    bench = make_bench(proposers=(slow,)).serve(1)
    assert decode(bench) is None
    assert slow.prepared == [(1, 18)]
    bench.tick(0.5)
    assert not bench.pipe
    slow.ready = True
    bench.core.speculation.end_wait(1)
    bench.tick(0.1)
    assert row(bench.pipe[0]) == [(1, 3, 4)]


def test_a_proposal_that_is_late_is_not_waited_for(make_bench) -> None:
    bench = make_bench(proposers=(Slow("draft", wait_s=0.5),)).serve(1)
    decode(bench)
    bench.tick(0.4)
    assert not bench.pipe
    bench.tick(0.2)
    assert row(bench.pipe[0]) == [(1, 3, 1)]


def test_others_go_on_while_a_sequence_waits(make_bench) -> None:
    """Where several steps may be in flight; one that is alone waits for all (test_drafts)."""
    bench = make_bench(scheduling(mode="overlapped"), proposers=(Slow("draft"),)).serve(2)
    decode(bench)
    bench.say(submit("other", max_tokens=5, speculation="off"))
    bench.verify(ANSWERS)
    assert row(bench.pipe[0]) == [(2, 3, 1)]


@pytest.mark.parametrize("end", ["answer", "cancel", "preemption"])
def test_proposers_forget_sequences_that_have_left(make_bench, end: str) -> None:
    guesser = Guesser("suffix")
    bench = make_bench(proposers=(guesser,)).serve(1)
    decode(bench, max_tokens=3)
    assert guesser.forgotten == []
    if end == "answer":
        bench.verify(ANSWERS)
    elif end == "cancel":
        bench.say(Cancel(request_id="r"))
    else:
        bench.state.preempt(bench.sequence())
    bench.tick()
    assert guesser.forgotten == [1]


def test_figures_count_by_proposer_and_position(make_bench) -> None:
    """Of three guesses the first is right."""
    guesser = Guesser("suffix")
    bench = make_bench(proposers=(guesser,)).serve(1)
    decode(bench)
    bench.verify({1: [*ANSWER[:2], 9, 9, 9]})
    figures = bench.core.speculation.figures["suffix"]
    assert (figures.num_proposals, figures.num_proposed, figures.num_accepted) == (1, 3, 1)
    assert (dict(figures.proposed_at), dict(figures.accepted_at)) == ({0: 1, 1: 1, 2: 1}, {0: 1})


def test_what_is_left_of_forced_tokens_is_proposed_after_a_step_without_them(make_bench) -> None:
    """Another proposal was expected to bring more. What the sequence has gained since must be their beginning."""
    grammar = GrammarProposer()
    bench = make_bench().serve(1)
    decode(bench)
    sequence = bench.sequence()
    grammar.store(sequence, (41, 42, 43))
    assert grammar.propose(sequence, 9) == grammar.propose(sequence, 9) == (41, 42, 43)
    bench.verify(ANSWERS)
    assert (sequence.tokens[-1], grammar.propose(sequence, 9), grammar.propose(sequence, 1)) == (41, (42, 43), (42,))
    bench.verify({1: [40, 41, 9]})
    assert grammar.propose(sequence, 9) == ()
    grammar.store(sequence, (43, 44))
    bench.verify({1: [40, 41, 9, 43, 44, 45]})
    bench.verify({1: [40, 41, 9, 43, 44, 45]})
    assert grammar.propose(sequence, 9) == ()


def test_tokens_are_counted_by_position_in_groups() -> None:
    figures = ProposerFigures()
    figures.record(3, 1)
    figures.record(MAX_PROPOSED, 20)
    counts = {name: (value["proposed"], value["accepted"]) for name, value in figures.by_position().items()}  # type: ignore[index, call-overload]
    assert counts == {
        "1": (2, 2),
        "2": (2, 1),
        "3": (2, 1),
        **{str(position): (1, 1) for position in range(4, 9)},
        "9-16": (8, 8),
        "17-64": (48, 4),
    }
