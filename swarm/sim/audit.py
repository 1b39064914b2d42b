"""What must hold, whatever happens: checked at every event, and once more when all is quiet.

I1  every accepted request reaches exactly one end;
I2  its tokens are those of an undisturbed run;
I3  its stream is contiguous: nothing lost, nothing twice;
I5  nothing of an older epoch has an effect;
I8  stages hold exactly the keys and values that they say they hold;
I9  when all is over, nothing is left behind in any stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.broker.admission import limit_of
from swarm.broker.blocks import num_blocks
from swarm.broker.requests import WINDOW, derive_seed
from swarm.broker.room import MAX_PREEMPTED
from swarm.broker.state import Request, SequenceState, State
from swarm.client.events import Deliver
from swarm.testing import fake_continuation
from swarm.wire.messages import Finished, Manifest, Submit

if TYPE_CHECKING:
    from swarm.sim.nodes import WorkerNode


class Violation(AssertionError):
    """An invariant does not hold; the text says which one and where."""


@dataclass(slots=True)
class Expectation:
    """What one continuation must give."""

    tokens: list[int]
    stop_at: int | None = None
    received: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass(slots=True)
class Audit:
    """Keeps the expected beside the received."""

    manifest: Manifest
    expected: dict[tuple[str, int], Expectation] = field(default_factory=dict)
    may_fail: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    submits: dict[str, Submit] = field(default_factory=dict)
    highest_epoch: int = 0

    def expect(self, submit: Submit, stops: dict[int, int]) -> None:
        self.submits[submit.request_id] = submit
        for index in range(submit.params.n):
            seed = derive_seed(submit.seed, index)
            tokens = fake_continuation(submit.prompt, submit.params, seed, self.manifest)
            stop_at = stops.get(index)
            if stop_at is not None and stop_at >= len(tokens):
                stop_at = None
            self.expected[submit.request_id, index] = Expectation(tokens, stop_at)

    # --- at the clients ----------------------------------------------------------------------------------------------

    def delivered(self, action: Deliver) -> None:
        case = self.expected[action.request_id, action.index]
        where = f"{action.request_id}[{action.index}]"
        _demand(case.end is None, "I1", f"{where} got tokens after its end")
        _demand(action.start == len(case.received), "I3", f"{where} got {action.start}, expected {len(case.received)}")
        case.received.extend(action.ids)
        wanted = case.tokens[: len(case.received)]
        _demand(
            case.received == wanted, "I2", f"{where}: {case.received[action.start :]} is not {wanted[action.start :]}"
        )

    def ended(self, request_id: str, index: int, finished: Finished) -> None:
        case = self.expected[request_id, index]
        where = f"{request_id}[{index}]"
        _demand(case.end is None, "I1", f"{where} ended twice")
        case.end = finished.reason
        if finished.reason in ("stop", "length"):
            length = len(case.tokens) if case.stop_at is None else case.stop_at
            _demand(finished.num_tokens in (length, len(case.tokens)), "I2", f"{where}: {finished.num_tokens} tokens")
            _demand(len(case.received) >= finished.num_tokens, "I3", f"{where}: the end came before its tokens")
        else:
            self._allow_failure(request_id, f"{where}: {finished.reason} {finished.detail}")

    def failed(self, request_id: str, error: str) -> None:
        for (other, _), case in self.expected.items():
            if other == request_id and case.end is None:
                case.end = "failed"
        self._allow_failure(request_id, error)

    def _allow_failure(self, request_id: str, what: str) -> None:
        _demand(request_id in self.may_fail | self.left, "I1", f"{request_id} failed though nothing allows it: {what}")

    def refused_for_size(self, request_id: str, state: State) -> None:
        """The one reason for which the broker may give a request up: the plan in force could not hold it even alone."""
        limit = limit_of(self.submits[request_id], self.manifest)
        fits = num_blocks(limit) <= state.book.kv_blocks
        _demand(state.book.serving and not fits, "I1", f"{request_id} ({limit} positions) would fit into the stages")
        self.may_fail.add(request_id)

    def too_late(self, request: Request, state: State, now: float) -> None:
        """A request may be given up at its deadline; before, only if no steps are quick enough."""
        least_s = request.submit.params.max_tokens * state.pace.least_step_s
        is_late = request.deadline_at is not None and now + least_s >= request.deadline_at
        _demand(is_late, "I1", f"{request.id} was given up before its deadline")
        self.may_fail.add(request.id)

    # --- at the broker and the stages --------------------------------------------------------------------------------

    def check_broker(self, state: State) -> None:
        _demand(state.book.epoch >= self.highest_epoch, "I5", f"epoch fell from {self.highest_epoch}")
        self.highest_epoch = state.book.epoch
        for sequence in state.sequences.values():
            ordered = sequence.kv <= sequence.scheduled <= sequence.sampled
            _demand(
                ordered or sequence.state is SequenceState.ENDED,
                "I8",
                f"sequence {sequence.id}: {sequence.kv} {sequence.scheduled} {sequence.sampled}",
            )
            visible = (
                sequence.delivered <= sequence.committed <= sequence.sampled and sequence.sent <= sequence.committed
            )
            _demand(visible, "I3", f"sequence {sequence.id} shows what is not in the journal")
            _demand(sequence.sent - sequence.delivered <= WINDOW, "I3", f"sequence {sequence.id} overran the window")
            case = self.expected.get((sequence.request.id, sequence.index))
            if case is not None:
                generated = sequence.tokens[sequence.num_prompt :]
                _demand(generated == case.tokens[: len(generated)], "I2", f"sequence {sequence.id} went astray")
            _demand(sequence.num_preempted <= MAX_PREEMPTED, "I1", f"sequence {sequence.id} gave way too often")
        running = [s for s in state.sequences.values() if s.state is SequenceState.RUNNING]
        _demand(len(running) == len(state.running), "I9", "the running list and the sequences disagree")
        if state.book.serving:
            blocks = sum(s.blocks for s in state.running) + state.prefix.num_blocks
            for sequence in state.running:
                _demand(num_blocks(sequence.scheduled) <= sequence.blocks, "I9", f"sequence {sequence.id} has no room")
            _demand(blocks <= state.book.kv_blocks, "I9", f"{blocks} blocks promised of {state.book.kv_blocks}")

    def check_stage(self, node: WorkerNode, epoch: int) -> None:
        core, executor = node.core, node.executor
        _demand((core.active or 0) <= epoch, "I5", f"{node.incarnation} is in an epoch that nobody announced")
        for sequence, held in core.sequences.items():
            chains = executor.chains.get(sequence, {})
            for part in held.kv:
                for layer in range(part.layers.first, part.layers.stop):
                    really = len(chains.get(layer, ()))
                    text = f"{node.incarnation} sequence {sequence} layer {layer}: says {part.position}, holds {really}"
                    _demand(really >= part.position, "I8", text)
        _demand(core.sequences.keys() == executor.chains.keys(), "I9", f"{node.incarnation}: the executor holds others")

    def check_end(self, state: State, workers: list[WorkerNode]) -> None:
        """All is quiet: everything has ended, nothing is left."""
        for (request_id, index), case in self.expected.items():
            if request_id not in self.left:
                _demand(
                    case.end is not None, "I1", f"{request_id}[{index}] never ended; {len(case.received)} tokens came"
                )
        _demand(not state.running and not state.waiting, "I9", f"running {state.running}, waiting {state.waiting}")
        for node in workers:
            leaked = node.core.sequences.keys() - state.prefix.retired.keys()
            _demand(not leaked, "I9", f"{node.incarnation} still holds {leaked}")
            logged = {entry.sequence for entry in node.core.log.ranges()} - state.prefix.retired.keys()
            _demand(not logged, "I9", f"{node.incarnation} still logs {logged}")


def _demand(holds: bool, invariant: str, text: str) -> None:
    if not holds:
        raise Violation(f"{invariant}: {text}")
