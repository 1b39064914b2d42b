"""The invariants: checked at every event, and once more at the end.

I1  every accepted request reaches exactly one end;
I2  its tokens are the same as in an undisturbed run;
I3  its stream is contiguous: nothing lost, nothing twice, nothing held back from a client that reads;
I4  verdicts are given in time, and none is false (``verdict_check``);
I5  messages of an older epoch have no effect;
I6  the state that processes keep is bounded;
I7  corrupt data is refused and never used;
I8  stages hold exactly the keys and values that they report; survivors keep theirs, and replays go through the lost
    layers only, where a log makes that possible;
I9  capacity is restored: after all faults every worker is a member, and at the end nothing is left in any stage;
I10 everything that arrives at a listener that checks keys was sent by the plan's sender (``sender_check``);
I11 no plan is activated with an unreachable listener on its route (``actors.routes``);
I12 a look-up changes nothing about any request (``fates``);
I13 a request kept without a reader is given up neither early nor late (``fates``);
I14 no process connects to an address that a worker reported without coming from there (``actors.routes``);
I15 steps that raise are blamed on the worker or request that makes them raise (``blame``);
I16 copies of keys and values hold exactly what they claim, fit into memory, and vanish with their sequences
    (``kv_check``);
I18 a request has the adapter that its name stood for when it was accepted, to its end; a loaded adapter can be named
    until it is dropped, a dropped one can't, and members have exactly the broker's set (``adapter_check``);
I19 tokens of an image are computed from its own pixels; broker and journal keep them until the request's end, and not
    longer (``image_check``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from swarm.broker.members.integrity import QUARANTINE_AFTER
from swarm.broker.requests.admission import max_positions
from swarm.broker.requests.durability import derive_seed
from swarm.broker.requests.tokens import WINDOW
from swarm.broker.state import Plan, Request, Sequence, SequenceState, State
from swarm.broker.steps.kv_capacity import MAX_PREEMPTIONS
from swarm.client.events import Deliver
from swarm.errors import ClientError, ReadElsewhere
from swarm.sim.checks.exact import Expectation
from swarm.testing import fake_draws
from swarm.wire.messages import Finished, LayerRange, Manifest, Rejected, StepDone, Submit, num_blocks

if TYPE_CHECKING:
    from swarm.sim.journal import SimDisk
    from swarm.sim.views import WorkerView


MAX_GONE = 17  # workers; the broker keeps the last 16 that left, and may just have lost one more
MAX_WAITING = 80  # steps or replays, in any place: the broker never has more in flight
# events of the broker between two checks of everything; in between, only sequences that can have changed are checked
CHECK_ALL_EVERY = 64


class Violation(AssertionError):
    """An invariant does not hold; the text names it and the place."""


@dataclass(slots=True)
class Audit:
    """Expected and received tokens of all requests, and checks of the processes' state."""

    manifest: Manifest
    expected: dict[tuple[str, int], Expectation] = field(default_factory=dict)  # by request and index
    may_fail: set[str] = field(default_factory=set)  # requests with a fault that allows them to fail
    # devices that break and still pass their tests: each may cost one request, if it is the only device
    num_undetected_faults: int = 0
    abandoned: set[str] = field(default_factory=set)  # requests whose clients have left
    leaving: set[str] = field(default_factory=set)  # the ones in ``abandoned`` whose clients are still there
    orphans: set[str] = field(default_factory=set)  # detached requests whose clients died: other clients read them
    shared: set[str] = field(default_factory=set)  # requests to which another client attaches
    accepted: set[str] = field(default_factory=set)  # requests whose clients received the acceptance
    submits: dict[str, Submit] = field(default_factory=dict)
    log_bytes: int = 1 << 20
    num_delivered: int = 0  # tokens delivered to clients
    num_faults: int = 0  # deaths, hangs and broken connections so far
    faults_before: dict[str, int] = field(default_factory=dict)  # request -> ``num_faults`` when it was submitted
    highest_epoch: int = 0
    # sequence -> its state at the last check
    _last_checked: dict[int, tuple[object, ...]] = field(default_factory=dict)
    # sequence -> number of generated tokens already compared
    _num_verified: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)  # sequences whose ends the broker has written
    _planned: tuple[Plan, list[tuple[str, LayerRange]]] | None = None  # the plan in force and its route
    _stops: dict[str, dict[int, int]] = field(default_factory=dict)  # by request
    _wants_hops: bool = False  # some request asks for the hops of its tokens
    _num_checks: int = 0

    def expect(self, submit: Submit, stops: dict[int, int]) -> None:
        self.submits[submit.request_id] = submit
        self._wants_hops |= submit.hops
        self.faults_before[submit.request_id] = self.num_faults
        self._stops[submit.request_id] = stops
        self._expect(submit, stops)

    def is_submission(self, submit: Submit) -> bool:
        """Whether this is what was submitted, without the pixels of images, which are not returned."""
        own = self.submits.get(submit.request_id)
        return own is not None and submit == msgspec.structs.replace(own, pixels=())

    def on_adapter_chosen(self, submit: Submit) -> None:
        """Expect the tokens of the adapter whose key an accepted request has. A client that has the acceptance can
        count on that adapter."""
        request_id = submit.request_id
        case = self.expected.get((request_id, 0))
        if case is None or case.submit.params.adapter == submit.params.adapter:
            return
        where = f"{request_id} was accepted with {case.submit.params.adapter}"
        _demand(request_id not in self.accepted, "I18", f"{where}, and now has {submit.params.adapter}")
        self._expect(submit, self._stops[request_id])

    def _expect(self, submit: Submit, stops: dict[int, int]) -> None:
        for index in range(submit.params.n):
            seed = derive_seed(submit.seed, index)
            is_drawn = submit.params.max_answer > 0
            draws = fake_draws(submit.prompt, submit.params, seed, self.manifest) if is_drawn else []
            stop_at = stops.get(index)
            if stop_at is not None and stop_at >= len(draws):
                stop_at = None
            self.expected[submit.request_id, index] = Expectation(submit, index, draws, self.manifest, stop_at)

    # --- at the clients ----------------------------------------------------------------------------------------------

    def on_delivered(self, action: Deliver) -> None:
        case = self.expected[action.request_id, action.index]
        where = f"{action.request_id}[{action.index}]"
        _demand(case.end is None, "I1", f"{where} got tokens after its end")
        _demand(action.start == len(case.received), "I3", f"{where} got {action.start}, expected {len(case.received)}")
        case.received.extend(action.ids)
        self.num_delivered += len(action.ids)
        self._demand_exact(where, case.delivery_error(action))

    def on_ended(self, request_id: str, index: int, finished: Finished) -> None:
        case = self.expected[request_id, index]
        where = f"{request_id}[{index}]"
        _demand(case.end is None, "I1", f"{where} ended twice")
        case.end = finished.reason
        if finished.reason in ("stop", "length"):
            self._demand_exact(where, case.end_error(finished))
            _demand(len(case.received) >= finished.num_tokens, "I3", f"{where}: the end came before its tokens")
        else:
            self._allow_failure(request_id, f"{where}: {finished.reason} {finished.detail}")

    def _demand_exact(self, where: str, problem: str) -> None:
        _demand(not problem, "I2", f"{where}: {problem}")

    def check_step(self, done: StepDone, state: State) -> None:
        """Check that a step's tokens went through the stages of the plan in force, each once and in order."""
        current = state.plans.current
        if current is None or current.epoch != done.epoch or done.lineage != state.lineage:
            return
        route = [(hop.worker, hop.layers) for hop in done.hops]
        if self._planned is None or self._planned[0] is not current:
            self._planned = current, [(stage.name, stage.layers) for stage in current.stages]
        if route != self._planned[1]:
            raise Violation(f"I2: step {done.step} went through {route}, epoch {done.epoch} has {self._planned[1]}")
        for item in done.sampled if self._wants_hops else ():
            sequence = state.sequences.get(item.sequence)
            case = self.expected.get((sequence.request.id, sequence.index)) if sequence is not None else None
            if case is not None and case.submit.hops:
                case.add_route(item.position - len(case.submit.prompt), done.hops)

    def has_ended(self, request_id: str) -> bool:
        """Whether the request has ended for its submitter."""
        cases = [case for (other, _), case in self.expected.items() if other == request_id]
        return bool(cases) and all(case.end is not None for case in cases)

    def on_failed(self, request_id: str, error: ClientError) -> None:
        for (other, _), case in self.expected.items():
            if other == request_id and case.end is None:
                case.end = "failed"
        if not (isinstance(error, ReadElsewhere) and request_id in self.shared):
            self._allow_failure(request_id, str(error))

    def _allow_failure(self, request_id: str, what: str) -> None:
        _demand(
            request_id in self.may_fail | self.abandoned, "I1", f"{request_id} failed though nothing allows it: {what}"
        )

    def check_too_large(self, request_id: str, state: State) -> None:
        """Check the only reason for which the broker may give a request up: the plan in force could not hold it even
        alone."""
        limit = max_positions(self.submits[request_id], self.manifest)
        fits = num_blocks(limit) <= state.plans.kv_blocks
        _demand(
            state.plans.is_serving and not fits, "I1", f"{request_id} ({limit} positions) would fit into the stages"
        )
        self.may_fail.add(request_id)

    def check_rejected(self, request_id: str, state: State, max_queue: int, num_unwritten: int) -> None:
        """Check that a rejected request had no room in the queue: in all of it, or in a tenant's three quarters.

        ``num_unwritten``: sequences that wait for the journal, which count even if they were cancelled meanwhile.
        """
        accepted = [request for request in state.requests.values() if request.accepted]
        waiting = (
            sum(s.state is SequenceState.WAITING for request in accepted for s in request.sequences) + num_unwritten
        )
        num = self.submits[request_id].params.n
        _demand(
            4 * (waiting + num) > 3 * max_queue, "I1", f"{request_id} is sent away, and {waiting} of {max_queue} wait"
        )

    def check_deadline(self, request: Request, state: State, now: float) -> None:
        """Check that a request given up had reached its deadline, or could not meet it even with the fastest steps."""
        least_s = request.submit.params.max_answer * state.costs.min_step_s
        is_late = request.deadline_at is not None and now + least_s >= request.deadline_at
        _demand(is_late, "I1", f"{request.id} was given up before its deadline")
        self.may_fail.add(request.id)

    def on_sequence_end(self, sequence: int) -> None:
        """Record that the broker writes a sequence's end."""
        _demand(sequence not in self._ended, "I1", f"sequence {sequence} ended twice")
        self._ended.add(sequence)

    def on_broker_restarted(self, state: State, disk: SimDisk) -> None:
        """Continue with another broker, which has the journal's content: only ends in the journal are final."""
        self._last_checked.clear()
        self._num_verified.clear()
        self._ended = {sequence for sequence in self._ended if disk.ledger.has_ended(sequence)}
        self.highest_epoch = state.plans.epoch

    def on_journal_changed(self, disk: SimDisk) -> None:
        """Allow requests to fail whose acceptance is not in this journal."""
        self.may_fail |= self.submits.keys() - disk.ledger.requests.keys()

    def on_journal_rewritten(self, disk: SimDisk) -> None:
        """Allow ended requests to be unknown if only the lost journal file had them.

        The new file has what could be read from the lost one, and what is in memory. An ended request is in memory only
        while a client reads it, so a client that was frozen meanwhile finds its request unknown.
        """
        self.may_fail |= disk.forgotten

    def on_rejected(self, rejected: Rejected) -> None:
        """Allow a request to fail that was rejected before its acceptance was sent."""
        if rejected.code in ("unavailable", "journal") and rejected.request_id not in self.accepted:
            self.may_fail.add(rejected.request_id)

    def check_quarantined(self, request: Request, *, for_its_steps: bool) -> None:
        """Check that a quarantined request was present at enough faults or, for failed steps, caused them itself."""
        if for_its_steps:
            self.num_undetected_faults -= request.id not in self.may_fail
            _demand(self.num_undetected_faults >= 0, "I15", f"{request.id} is quarantined, but is harmless")
            self.may_fail.add(request.id)
            return
        # One that struck just before the request was submitted may be noticed afterwards.
        num_faults = self.num_faults - self.faults_before[request.id] + 1
        _demand(num_faults >= QUARANTINE_AFTER, "I1", f"{request.id} is quarantined after {num_faults} blows")
        self.may_fail.add(request.id)

    # --- at the broker and the stages --------------------------------------------------------------------------------

    def check_broker(self, state: State) -> bool:
        """Check what can have changed in an event of the broker's core; return True when everything was checked, now
        and then."""
        _demand(state.plans.epoch >= self.highest_epoch, "I5", f"epoch fell from {self.highest_epoch}")
        self.highest_epoch = state.plans.epoch
        _check_rules(state)
        self._num_checks += 1
        if self._num_checks % CHECK_ALL_EVERY == 0:
            self.check_all(state)
            return True
        for sequence in state.running:
            self._check_sequence(sequence)
        return False

    def check_all(self, state: State) -> None:
        """Check every sequence and all of its tokens, including the ones already compared."""
        self._last_checked.clear()
        self._num_verified.clear()
        for sequence in state.sequences.values():
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        """Check a sequence, unless it has not changed since the last check."""
        sampled = len(sequence.tokens)
        current = (sequence.state, sampled, sequence.committed, sequence.sent, sequence.delivered)
        if self._last_checked.get(sequence.id) == current:
            return
        self._last_checked[sequence.id] = current
        if sequence.sent - sequence.delivered > WINDOW:
            raise Violation(f"I3: sequence {sequence.id} overran the window")
        if _is_held_back(sequence):
            raise Violation(f"I3: sequence {sequence.id} has tokens for a client that reads, and does not send them")
        if sequence.num_preempted > MAX_PREEMPTIONS:
            raise Violation(f"I1: sequence {sequence.id} gave way too often")
        self._check_tokens(sequence, sampled - sequence.num_prompt)

    def _check_tokens(self, sequence: Sequence, num_generated: int) -> None:
        """Compare the tokens that are new since the last check."""
        case = self.expected.get((sequence.request.id, sequence.index))
        before = self._num_verified.get(sequence.id, 0)
        self._num_verified[sequence.id] = num_generated
        if case is not None and num_generated != before:
            start = min(before, num_generated)
            generated = sequence.tokens[sequence.num_prompt + start :]
            _demand(
                generated == case.tokens[start:num_generated] and num_generated <= len(case.tokens),
                "I2",
                f"sequence {sequence.id} has wrong tokens",
            )

    def check_stage(self, node: WorkerView, state: State) -> None:
        """Check that a stage holds what it reports."""
        core, chains = node.core, node.executor.chains
        if (core.active or 0) > state.plans.epoch and core.lineage == state.lineage:
            raise Violation(f"I5: {node.incarnation} is in an epoch that was never announced")
        for sequence, held in core.sequences.items():
            by_layer = chains.get(sequence) or {}
            for part in held.kv:
                position = part.position
                for layer in range(part.layers.first, part.layers.stop) if position else ():
                    really = len(by_layer.get(layer, ()))
                    if really < position:
                        text = f"sequence {sequence} layer {layer}: reports {position}, holds {really}"
                        raise Violation(f"I8: {node.incarnation} {text}")
        if core.sequences.keys() | core.store.copies.sequences.keys() != chains.keys():
            raise Violation(f"I9: {node.incarnation}: the executor holds others")

    def check_bounds(self, state: State, workers: Collection[WorkerView]) -> None:
        """Demand that state about workers, steps and logs is bounded."""
        num_gone = sum(worker.is_gone for worker in state.workers.values())
        _demand(num_gone <= MAX_GONE, "I6", f"{num_gone} workers that are gone are remembered")
        _demand(len(state.in_flight) <= MAX_WAITING, "I6", f"{len(state.in_flight)} steps are in flight")
        for node in workers:
            waiting = len(node.core.steps.early) + len(node.core.steps.ready) + len(node.core.replays.waiting)
            _demand(waiting <= MAX_WAITING, "I6", f"{node.incarnation} has {waiting} steps waiting")
            _demand(node.core.log.num_bytes <= self.log_bytes, "I6", f"{node.incarnation}: its log is too large")

    def check_members(self, state: State, workers: Iterable[WorkerView]) -> None:
        """Demand that the swarm serves and every living worker is a member, a while after all faults ended."""
        _demand(state.plans.current is not None, "I9", f"no plan is in force: it waits for {state.plans.waits_for}")
        for node in workers:
            worker = state.workers.get(node.incarnation)
            text = "unknown" if worker is None else f"{worker.state.value} ({worker.reason})"
            _demand(worker is not None and not worker.is_gone, "I9", f"{node.incarnation} lives and is {text}")

    def check_end(self, state: State, workers: Collection[WorkerView]) -> None:
        """Demand that every request has ended and nothing is left, when nothing moves any more."""
        self.check_all(state)
        for node in workers:
            self.check_stage(node, state)
        for (request_id, index), case in self.expected.items():
            if request_id not in self.abandoned | self.orphans:
                _demand(
                    case.end is not None, "I1", f"{request_id}[{index}] never ended; {len(case.received)} tokens came"
                )
        _demand(not state.running and not state.waiting, "I9", f"running {state.running}, waiting {state.waiting}")
        for node in workers:
            leaked = node.core.sequences.keys() - state.prefix.retired.keys()
            _demand(not leaked, "I9", f"{node.incarnation} still holds {leaked}")
            logged = {entry.sequence for entry in node.core.log.ranges()} - state.prefix.retired.keys()
            _demand(not logged, "I9", f"{node.incarnation} still logs {logged}")


def _check_rules(state: State) -> None:
    """Check the broker's own rules: positions (I3, I8), lists and capacity (I9)."""
    for wrong in state.check():
        invariant = "I8" if wrong.startswith("kv ") else "I3" if wrong.startswith("delivered ") else "I9"
        raise Violation(f"{invariant}: {wrong}")


def _is_held_back(sequence: Sequence) -> bool:
    """Whether the sequence has tokens that may be sent and were not sent in the same event."""
    request = sequence.request
    if request.reachable_client is None or not request.accepted or sequence.reader_position_unknown:
        return False
    return sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW


def _demand(holds: bool, invariant: str, text: str) -> None:
    if not holds:
        raise Violation(f"{invariant}: {text}")
