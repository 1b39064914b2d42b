"""What must hold, whatever happens: checked at every event, and once more when all is quiet.

I1  every accepted request reaches exactly one end;
I2  its tokens are those of an undisturbed run;
I3  its stream is contiguous: nothing lost, nothing twice, nothing held back from a client that reads;
I4  verdicts come in time, and none is false (``watch``);
I5  nothing of an older epoch has an effect;
I6  what is remembered stays bounded;
I7  corrupt data is refused and never used;
I8  stages hold exactly the keys and values that they say they hold; survivors keep theirs, and replays go through no
    other layers than those that lost something, where a log can spare them that;
I9  capacity comes back: when all is healed everybody is a member, and when all is over nothing is left in any stage;
I10 whatever comes through a door that goes by keys was sent by who the plan says (``neighbours``);
I11 no plan comes into force with a way between its stages that is shut (``actors.ways``);
I12 a look-up changes nothing about any request (``fates``);
I13 what is kept without a reader is given up neither before its time nor later (``fates``);
I14 nobody connects to an address that a worker named, if the worker does not come from there (``actors.ways``);
I15 steps that raise are blamed on who makes them raise (``blame``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.broker.members.trust import QUARANTINE_AFTER
from swarm.broker.requests.intake import limit_of
from swarm.broker.requests.requests import WINDOW, derive_seed
from swarm.broker.state import Plan, Request, Sequence, SequenceState, State
from swarm.broker.steps.room import MAX_PREEMPTED
from swarm.client.events import Deliver
from swarm.errors import ClientError, ReadElsewhere
from swarm.sim.checks.exact import Expectation
from swarm.testing import fake_draws
from swarm.wire.messages import Finished, LayerRange, Manifest, Rejected, StepDone, Submit, num_blocks

if TYPE_CHECKING:
    from swarm.sim.journal import Disk
    from swarm.sim.roles import Worker


MAX_GONE = 17  # workers; the broker keeps the last 16 that went, and may just have lost one
MAX_WAITING = 80  # steps or replays, anywhere: the broker never has as many in flight
ALL_EVERY = 64  # events of the broker between two looks at everything; between them, at what can have changed


class Violation(AssertionError):
    """An invariant does not hold; the text says which one and where."""


@dataclass(slots=True)
class Audit:
    """Keeps the expected beside the received."""

    manifest: Manifest
    expected: dict[tuple[str, int], Expectation] = field(default_factory=dict)
    may_fail: set[str] = field(default_factory=set)
    num_deceived: int = 0  # devices that break and pass their tests: each may cost one request, if it is the only one
    left: set[str] = field(default_factory=set)
    to_leave: set[str] = field(default_factory=set)  # of these, those whose clients are still there
    orphans: set[str] = field(default_factory=set)  # detached ones whose clients died: others read them
    read_elsewhere: set[str] = field(default_factory=set)  # another client than the submitting one attaches to these
    promised: set[str] = field(default_factory=set)  # whose clients were told that they are accepted
    submits: dict[str, Submit] = field(default_factory=dict)
    log_bytes: int = 1 << 20
    num_taken: int = 0  # tokens that came to clients
    num_blows: int = 0  # deaths, hangs and broken connections so far
    blows_at: dict[str, int] = field(default_factory=dict)  # request -> those before it was submitted
    highest_epoch: int = 0
    _seen: dict[int, tuple[object, ...]] = field(default_factory=dict)  # sequence -> its numbers at the last look
    _verified: dict[int, int] = field(default_factory=dict)  # sequence -> generated tokens that were compared
    _ended: set[int] = field(default_factory=set)
    _planned: tuple[Plan, list[tuple[str, LayerRange]]] | None = None  # the way of the plan in force
    _tells_ways: bool = False  # to somebody
    _num_checks: int = 0

    def expect(self, submit: Submit, stops: dict[int, int]) -> None:
        self.submits[submit.request_id] = submit
        self._tells_ways |= submit.hops
        self.blows_at[submit.request_id] = self.num_blows
        for index in range(submit.params.n):
            seed = derive_seed(submit.seed, index)
            draws = fake_draws(submit.prompt, submit.params, seed, self.manifest)
            stop_at = stops.get(index)
            if stop_at is not None and stop_at >= len(draws):
                stop_at = None
            self.expected[submit.request_id, index] = Expectation(submit, draws, self.manifest, stop_at)

    # --- at the clients ----------------------------------------------------------------------------------------------

    def delivered(self, action: Deliver) -> None:
        case = self.expected[action.request_id, action.index]
        where = f"{action.request_id}[{action.index}]"
        _demand(case.end is None, "I1", f"{where} got tokens after its end")
        _demand(action.start == len(case.received), "I3", f"{where} got {action.start}, expected {len(case.received)}")
        case.received.extend(action.ids)
        self.num_taken += len(action.ids)
        self._demand_exact(where, case.astray(action))

    def ended(self, request_id: str, index: int, finished: Finished) -> None:
        case = self.expected[request_id, index]
        where = f"{request_id}[{index}]"
        _demand(case.end is None, "I1", f"{where} ended twice")
        case.end = finished.reason
        if finished.reason in ("stop", "length"):
            self._demand_exact(where, case.wrong_end(finished))
            _demand(len(case.received) >= finished.num_tokens, "I3", f"{where}: the end came before its tokens")
        else:
            self._allow_failure(request_id, f"{where}: {finished.reason} {finished.detail}")

    def _demand_exact(self, where: str, problem: str) -> None:
        _demand(not problem, "I2", f"{where}: {problem}")

    def step_came(self, done: StepDone, state: State) -> None:
        """By which way the tokens of a step that counts came: the stages of the plan in force, each once and in
        order."""
        current = state.book.current
        if current is None or current.epoch != done.epoch or done.lineage != state.lineage:
            return
        way = [(hop.worker, hop.layers) for hop in done.hops]
        if self._planned is None or self._planned[0] is not current:
            self._planned = current, [(stage.name, stage.layers) for stage in current.stages]
        if way != self._planned[1]:
            raise Violation(f"I2: step {done.step} went through {way}, epoch {done.epoch} has {self._planned[1]}")
        for item in done.sampled if self._tells_ways else ():
            sequence = state.sequences.get(item.sequence)
            case = self.expected.get((sequence.request.id, sequence.index)) if sequence is not None else None
            if case is not None and case.submit.hops:
                case.drawn(item.position - len(case.submit.prompt), done.hops)

    def has_ended(self, request_id: str) -> bool:
        """For who submitted it."""
        cases = [case for (other, _), case in self.expected.items() if other == request_id]
        return bool(cases) and all(case.end is not None for case in cases)

    def failed(self, request_id: str, error: ClientError) -> None:
        for (other, _), case in self.expected.items():
            if other == request_id and case.end is None:
                case.end = "failed"
        if not (isinstance(error, ReadElsewhere) and request_id in self.read_elsewhere):
            self._allow_failure(request_id, str(error))

    def _allow_failure(self, request_id: str, what: str) -> None:
        _demand(request_id in self.may_fail | self.left, "I1", f"{request_id} failed though nothing allows it: {what}")

    def refused_for_size(self, request_id: str, state: State) -> None:
        """The one reason for which the broker may give a request up: the plan in force could not hold it even alone."""
        limit = limit_of(self.submits[request_id], self.manifest)
        fits = num_blocks(limit) <= state.book.kv_blocks
        _demand(state.book.serving and not fits, "I1", f"{request_id} ({limit} positions) would fit into the stages")
        self.may_fail.add(request_id)

    def sent_away(self, request_id: str, state: State, places: int, at_door: int) -> None:
        """Only where the queue has no places for it: for all, or for one tenant, who gets three quarters. ``at_door``:
        those that wait to be written down count too, even if they were cancelled meanwhile."""
        accepted = [request for request in state.requests.values() if request.accepted]
        waiting = sum(s.state is SequenceState.WAITING for request in accepted for s in request.sequences) + at_door
        num = self.submits[request_id].params.n
        _demand(4 * (waiting + num) > 3 * places, "I1", f"{request_id} is sent away, and {waiting} of {places} wait")

    def too_late(self, request: Request, state: State, now: float) -> None:
        """A request may be given up at its deadline; before, only if no steps are quick enough."""
        least_s = request.submit.params.max_tokens * state.costs.least_step_s
        is_late = request.deadline_at is not None and now + least_s >= request.deadline_at
        _demand(is_late, "I1", f"{request.id} was given up before its deadline")
        self.may_fail.add(request.id)

    def ends(self, sequence: int) -> None:
        """The broker writes down how it ended."""
        _demand(sequence not in self._ended, "I1", f"sequence {sequence} ended twice")
        self._ended.add(sequence)

    def restarted(self, state: State, disk: Disk) -> None:
        """Another broker, which knows what the journal told: only ends that are in there are final."""
        self._seen.clear()
        self._verified.clear()
        self._ended = {sequence for sequence in self._ended if disk.ledger.has_ended(sequence)}
        self.highest_epoch = state.book.epoch

    def journal_changed(self, disk: Disk) -> None:
        """Of what this journal does not tell, nobody knows any more that it was accepted."""
        self.may_fail |= self.submits.keys() - disk.ledger.requests.keys()

    def rewritten(self, disk: Disk) -> None:
        """The journal was lost under the broker that runs, and begun anew with what it still gave and what memory has.
        A request that has ended is in memory only while somebody reads it: a client that was frozen meanwhile is told
        that it is not known."""
        self.may_fail |= disk.forgotten

    def refused(self, rejected: Rejected) -> None:
        """Whoever was never told that his request is accepted may be told to come again."""
        if rejected.code in ("unavailable", "journal") and rejected.request_id not in self.promised:
            self.may_fail.add(rejected.request_id)

    def quarantined(self, request: Request, *, for_its_steps: bool) -> None:
        """Only who was there when the swarm was struck often enough may be suspected; for steps that failed, only who
        makes them fail."""
        if for_its_steps:
            self.num_deceived -= request.id not in self.may_fail
            _demand(self.num_deceived >= 0, "I15", f"{request.id} is quarantined, and does nobody any harm")
            self.may_fail.add(request.id)
            return
        blows = self.num_blows - self.blows_at[request.id]
        _demand(blows >= QUARANTINE_AFTER, "I1", f"{request.id} is quarantined after {blows} blows")
        self.may_fail.add(request.id)

    # --- at the broker and the stages --------------------------------------------------------------------------------

    def check_broker(self, state: State) -> bool:
        """After every event that made the broker's core act: what can have changed, and now and then everything (then
        it is True)."""
        _demand(state.book.epoch >= self.highest_epoch, "I5", f"epoch fell from {self.highest_epoch}")
        self.highest_epoch = state.book.epoch
        _hold(state)
        self._num_checks += 1
        if self._num_checks % ALL_EVERY == 0:
            self.check_all(state)
            return True
        for sequence in state.running:
            self._check_sequence(sequence)
        return False

    def check_all(self, state: State) -> None:
        """Every sequence and all of its tokens, whatever was seen of it before."""
        self._seen.clear()
        self._verified.clear()
        for sequence in state.sequences.values():
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        """Unless it is as it was when it was last looked at."""
        sampled = len(sequence.tokens)
        seen = (sequence.state, sampled, sequence.committed, sequence.sent, sequence.delivered)
        if self._seen.get(sequence.id) == seen:
            return
        self._seen[sequence.id] = seen
        if sequence.sent - sequence.delivered > WINDOW:
            raise Violation(f"I3: sequence {sequence.id} overran the window")
        if _is_held_back(sequence):
            raise Violation(f"I3: sequence {sequence.id} has tokens for a client that reads, and does not tell them")
        if sequence.num_preempted > MAX_PREEMPTED:
            raise Violation(f"I1: sequence {sequence.id} gave way too often")
        self._check_tokens(sequence, sampled - sequence.num_prompt)

    def _check_tokens(self, sequence: Sequence, num_generated: int) -> None:
        """Check what came since the last look; all of it now and then (``check_all``)."""
        case = self.expected.get((sequence.request.id, sequence.index))
        before = self._verified.get(sequence.id, 0)
        self._verified[sequence.id] = num_generated
        if case is not None and num_generated != before:
            start = min(before, num_generated)
            generated = sequence.tokens[sequence.num_prompt + start :]
            _demand(
                generated == case.tokens[start:num_generated] and num_generated <= len(case.tokens),
                "I2",
                f"sequence {sequence.id} went astray",
            )

    def check_stage(self, node: Worker, state: State) -> None:
        """A stage holds what it says that it holds."""
        core, chains = node.core, node.executor.chains
        if (core.active or 0) > state.book.epoch and core.lineage == state.lineage:
            raise Violation(f"I5: {node.incarnation} is in an epoch that nobody announced")
        for sequence, held in core.sequences.items():
            by_layer = chains.get(sequence) or {}
            for part in held.kv:
                position = part.position
                for layer in range(part.layers.first, part.layers.stop) if position else ():
                    really = len(by_layer.get(layer, ()))
                    if really < position:
                        text = f"{node.incarnation} sequence {sequence} layer {layer}: says {position}, holds {really}"
                        raise Violation(f"I8: {text}")
        if core.sequences.keys() != chains.keys():
            raise Violation(f"I9: {node.incarnation}: the executor holds others")

    def check_bounds(self, state: State, workers: Collection[Worker]) -> None:
        """Demand that what is remembered of those who are gone is bounded."""
        gone = sum(worker.is_gone for worker in state.workers.values())
        _demand(gone <= MAX_GONE, "I6", f"{gone} workers that are gone are remembered")
        _demand(len(state.flights) <= MAX_WAITING, "I6", f"{len(state.flights)} steps are in flight")
        for node in workers:
            waiting = len(node.core.steps.early) + len(node.core.steps.ready) + len(node.core.replays.waiting)
            _demand(waiting <= MAX_WAITING, "I6", f"{node.incarnation} has {waiting} steps waiting")
            _demand(node.core.log.num_bytes <= self.log_bytes, "I6", f"{node.incarnation}: its log is too large")

    def check_members(self, state: State, workers: Iterable[Worker]) -> None:
        """All is healed since a while: the swarm serves, and everybody who lives is a member."""
        _demand(state.book.current is not None, "I9", f"no plan is in force: it waits for {state.book.waits_for}")
        for node in workers:
            known = state.workers.get(node.incarnation)
            text = "unknown" if known is None else f"{known.state.value} ({known.reason})"
            _demand(known is not None and not known.is_gone, "I9", f"{node.incarnation} lives and is {text}")

    def check_end(self, state: State, workers: Collection[Worker]) -> None:
        """Demand, when all is quiet, that everything has ended and nothing is left."""
        self.check_all(state)
        for node in workers:
            self.check_stage(node, state)
        for (request_id, index), case in self.expected.items():
            if request_id not in self.left | self.orphans:
                _demand(
                    case.end is not None, "I1", f"{request_id}[{index}] never ended; {len(case.received)} tokens came"
                )
        _demand(not state.running and not state.waiting, "I9", f"running {state.running}, waiting {state.waiting}")
        for node in workers:
            leaked = node.core.sequences.keys() - state.prefix.retired.keys()
            _demand(not leaked, "I9", f"{node.incarnation} still holds {leaked}")
            logged = {entry.sequence for entry in node.core.log.ranges()} - state.prefix.retired.keys()
            _demand(not logged, "I9", f"{node.incarnation} still logs {logged}")


def _hold(state: State) -> None:
    """The broker's own rules: positions (I3, I8), lists and room (I9)."""
    for wrong in state.check():
        invariant = "I8" if wrong.startswith("kv ") else "I3" if wrong.startswith("delivered ") else "I9"
        raise Violation(f"{invariant}: {wrong}")


def _is_held_back(sequence: Sequence) -> bool:
    """Demand that what may be told is told with the event that makes it so."""
    request = sequence.request
    if request.listener is None or not request.accepted or sequence.unsure:
        return False
    return sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW


def _demand(holds: bool, invariant: str, text: str) -> None:
    if not holds:
        raise Violation(f"{invariant}: {text}")
