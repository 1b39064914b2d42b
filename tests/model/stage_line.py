"""Stages with their cores and torch executors in one process, and a driver that sends them steps as a broker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import Computed, Event, Loaded, OrderArrived, StepArrived
from swarm.stage.executor import Capacity, is_end_token
from swarm.wire.messages import (
    Activate,
    DataPathError,
    Edge,
    Failure,
    Fence,
    LayerRange,
    Open,
    Prepare,
    ProposedTail,
    Row,
    SequencePosition,
    Step,
    StepDone,
    TokenLogprob,
)
from tests.model.cutting import Pipeline, never, nothing

if TYPE_CHECKING:
    from swarm.stage.engine.torch_executor import TorchExecutor

LIMIT = 320
CHUNK = 40  # positions of a prompt in a step
MAX_STEPS = 2000  # of a driver, so that a defect ends its test
CAPACITY = Capacity(kv_tokens=4096, max_sequences=8, load_s=0.1, warm_up_s=0.1, resident_bytes=9)

EDGE = Edge("next.1", "tcp://next")

Token = tuple[int, tuple[TokenLogprob, ...]]
Propose = Callable[["Answer"], Sequence[int]]


def propose_nothing(_: Answer) -> Sequence[int]:
    return ()


class StageLine:
    """Stages behind each other. ``epoch`` is in force."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.executors: list[TorchExecutor] = list(pipeline.stages)
        self.num_layers = self.executors[-1].manifest.num_layers
        self.cores = [StageCore(StageSettings(f"w{n}", f"w{n}.1", self.num_layers)) for n in range(len(self.executors))]
        self.epoch = self.next_step = 0
        self.errors: list[str] = []
        self.activate({})

    def activate(self, live: dict[int, int]) -> None:
        """Begin an epoch with these sequences and positions."""
        self.epoch, self.next_step = self.epoch + 1, 1
        for place, executor in enumerate(self.executors):
            layers = executor._active_stage().layers
            order = Prepare(epoch=self.epoch, layers=layers, standby=(), edge=EDGE, max_sequences=8)
            self.feed(place, OrderArrived(order))
            self.feed(place, Loaded(self.epoch, CAPACITY))
            self.feed(place, OrderArrived(Fence(epoch=self.epoch)))
            positions = tuple(SequencePosition(*item) for item in live.items())
            self.feed(place, OrderArrived(Activate(epoch=self.epoch, first_step=1, live=positions)))

    def run(self, step: Step) -> StepDone:
        """Send a step through all stages."""
        done = self.feed(0, StepArrived(step, None, 1))
        assert done is not None, self.errors
        return done

    def feed(self, place: int, event: Event) -> StepDone | None:
        """Handle an event in a stage, with what follows from it here and in the stages behind it."""
        done: StepDone | None = None
        for action in self.cores[place].handle(event, 0.0):
            match action:
                case act.Compute():
                    forwarded = self.executors[place].forward(action.batch, never, nothing)
                    done = self.feed(place, Computed(action.epoch, action.step, forwarded))
                case act.SendStep(step, hidden):
                    done = self.feed(place + 1, StepArrived(step, hidden, 1))
                case act.SendDone(message):
                    done = message
                case act.SendToBroker(DataPathError() as error):
                    self.errors.append(error.reason)
                case act.UseLayers(layers):
                    self.executors[place].activate(layers)
                case act.OpenSequence() | act.ForkSequence() | act.TruncateSequence() | act.ReleaseSequence():
                    act.apply_to_executor(self.executors[place], action)
                case _:
                    pass
        return done


@dataclass(slots=True)
class Answer:
    """A sequence that the driver lets grow."""

    sequence: int
    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    source: Answer | None = None  # the sequence with whose prompt it begins
    drawn: list[Token] = field(default_factory=list)
    kv: int = 0  # certain positions
    end: int = 0  # positions that the stages hold
    is_open: bool = False
    is_ended: bool = False
    failure: Failure | None = None
    proposed: list[int] = field(default_factory=list)  # by step
    accepted: list[int] = field(default_factory=list)  # by step with proposals
    forced: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # with the number of tokens before them

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *(token for token, _ in self.drawn)]

    def open_record(self) -> Open:
        shared = 0 if self.source is None else len(self.prompt) - 1
        source = None if self.source is None else self.source.sequence
        tokens = tuple(self.tokens)
        return Open(self.sequence, self.params, self.seed, len(self.prompt), LIMIT, tokens, source, shared)


class Driver:
    """Broker of a line: takes the accepted tokens, and cuts what was refused with the next step."""

    def __init__(self, line: StageLine, propose: Propose = propose_nothing) -> None:
        self.line, self.propose = line, propose
        self.num_steps = 0
        self.answers: list[Answer] = []

    def add(self, answer: Answer) -> Answer:
        self.answers.append(answer)
        return answer

    def run(self) -> None:
        while any(not answer.is_ended for answer in self.answers):
            self.step()

    def step(self) -> None:
        """Let each sequence take one more step."""
        self.num_steps += 1
        assert self.num_steps <= MAX_STEPS, "the answers do not end"
        running = [answer for answer in self.answers if not answer.is_ended]
        opened = [answer for answer in running if not answer.is_open]
        for answer in opened:
            answer.is_open, answer.end = True, answer.open_record().shared
            answer.kv = answer.end
        opens = tuple(answer.open_record() for answer in opened)
        rows: list[Row] = []
        tails: list[ProposedTail] = []
        tokens: list[int] = []
        cuts: list[SequencePosition] = []
        proposals: dict[int, list[int]] = {}
        for answer in running:
            known = answer.tokens
            start = min(answer.kv, len(known) - 1)
            if answer.end != start:
                cuts.append(SequencePosition(answer.sequence, start))
            row_tokens = known[start : start + CHUNK]
            is_whole = start + len(row_tokens) == len(known)
            remaining = answer.params.max_tokens - len(answer.drawn)
            guess = list(self.propose(answer))[: remaining - 1] if is_whole and answer.drawn else []
            if guess:
                tails.append(ProposedTail(answer.sequence, len(guess)))
            proposals[answer.sequence] = guess
            rows.append(Row(answer.sequence, start, len(row_tokens) + len(guess), is_whole))
            tokens += row_tokens + guess
            answer.end = start + len(row_tokens) + len(guess)
        step = Step(
            epoch=self.line.epoch,
            step=self.line.next_step,
            rows=tuple(rows),
            tokens=tuple(tokens),
            open=opens,
            truncate=tuple(cuts),
            **({"proposed": tuple(tails)} if tails else {}),
        )
        self.line.next_step += 1
        self._take(self.line.run(step), running, proposals)

    def _take(self, done: StepDone, running: list[Answer], proposals: dict[int, list[int]]) -> None:
        positions = {item.sequence: item.position for item in done.kv}
        for answer in running:
            guess, before = proposals[answer.sequence], len(answer.tokens)
            drawn = [item for item in done.sampled if item.sequence == answer.sequence]
            assert [item.position for item in drawn] == [*range(before, before + len(drawn))]
            assert [item.token for item in drawn[:-1]] == guess[: max(0, len(drawn) - 1)]
            answer.kv = positions[answer.sequence]
            answer.failure = next((item for item in done.failed if item.sequence == answer.sequence), None)
            if answer.failure is not None:
                assert answer.kv == before + len(drawn)
                answer.is_ended = True
            elif drawn:
                assert answer.kv == drawn[-1].position
                if len(drawn) <= len(guess) and not self._is_end(answer, drawn[-1].token):
                    assert drawn[-1].token != guess[len(drawn) - 1]
            if guess:
                answer.proposed.append(len(guess))
                answer.accepted.append(sum(item.token == token for item, token in zip(drawn, guess, strict=False)))
            for item in drawn:
                if not answer.is_ended:
                    self._append(answer, item.token, item.logprobs)
            for item in done.forced or ():
                if item.sequence == answer.sequence:
                    answer.forced.append((len(answer.drawn), item.tokens))

    def _append(self, answer: Answer, token: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        answer.drawn.append((token, logprobs))
        answer.is_ended = self._is_end(answer, token) or len(answer.drawn) >= answer.params.max_tokens

    def _is_end(self, answer: Answer, token: int) -> bool:
        return is_end_token(token, answer.params, self.line.executors[-1].manifest.eos_token_ids)


def layers_of(executor: TorchExecutor) -> LayerRange:
    return executor._active_stage().layers
