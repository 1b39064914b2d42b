"""Checks that the broker journals every promise before it sends it, and that every later broker keeps it.

* An epoch is announced after it is synced, and every epoch that a broker announces is above all earlier ones.
* A client receives an acceptance after it is synced, and a token or an end after it is written.
* Positions of a sequence that all stages hold survive a restart of the broker: none is computed again (I8).
* A request's deadline counts from its acceptance, however often the broker restarts (I1).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from swarm.broker import actions as broker_act
from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.state import Request, Sequence, SequenceState, State
from swarm.broker.steps.kv_capacity import shareable_positions
from swarm.sim.checks.audit import Audit, Violation
from swarm.wire.messages import (
    Accepted,
    Activate,
    Fence,
    Finished,
    Hello,
    Order,
    Prepare,
    Rejected,
    ServerMessage,
    Tokens,
    num_blocks,
)

if TYPE_CHECKING:
    from swarm.sim.journal import SimDisk
    from swarm.sim.views import SceneView

DRIFT_S = 3.0  # tolerance of a deadline at a restart: the time for writing the acceptance


class PromiseCheck:
    """Check of every action of the broker, and of its state once it serves again."""

    def __init__(self, scene: SceneView, audit: Audit) -> None:
        self._scene = scene
        self._audit = audit
        self._announced = 0  # the highest epoch announced so far
        self._announced_before = 0  # the same when this broker started
        self._awaits_first_plan = False  # the first plan after a restart is still to be checked
        self._histories: dict[tuple[str, int], list[int]] = {}  # tokens that workers held when this broker started
        self._duplicated_names: set[str] = set()  # names under which several processes run
        # Request -> its deadlines, as its first broker saw them. A request that is submitted again, to a broker with
        # another journal, has two: either journal may come back.
        self._deadlines: dict[str, tuple[float, ...]] = {}
        self.num_adopted = 0  # positions that stages held over the broker's death, and that counted

    def on_broker_restarted(self, state: State) -> None:
        self._announced_before = self._announced
        self._awaits_first_plan = state.plans.epoch > 0  # a backup may precede the first plan
        self._histories = {  # now, before positions that do not count are dropped
            (incarnation, number): list(held.history)
            for incarnation, node in self._scene.workers.items()
            for number, held in node.core.sequences.items()
        }
        names = Counter(node.name for node in self._scene.workers.values())
        self._duplicated_names = {name for name, count in names.items() if count > 1}
        if state.plans.epoch < self._announced:
            raise Violation(f"I5: a new broker begins with epoch {state.plans.epoch}, {self._announced} was announced")
        for request in state.requests.values():
            self._check_deadline(request)

    def on_journal_rewritten(self, state: State) -> None:
        """Check that a new journal file has everything that the broker has. Later writes may still be on their way."""
        if self._disk.is_damaged:
            return  # the file was lost again
        lost = [r.id for r in state.requests.values() if r.accepted and r.id not in self._disk.safe.requests]
        if lost:
            raise Violation(f"I1: a new journal has nothing of {', '.join(lost)}")
        if self._disk.safe.epoch < self._announced or self._disk.safe.next_sequence < max(state.sequences, default=0):
            raise Violation("I5: a new journal would give epochs or numbers of sequences out a second time")

    def on_journal_changed(self) -> None:
        """Reset the highest epoch: workers can tell a broker with another journal, or a former state of it, from the
        earlier ones."""
        self._announced = self._disk.ledger.epoch

    def on_duplicate_started(self, name: str) -> None:
        """Record that a second process of this name runs."""
        self._duplicated_names.add(name)

    def check_action(self, action: broker_act.Action) -> None:
        """Check an action that the broker is about to carry out."""
        match action:
            case broker_act.SendToWorker(_, message):
                self._check_order(message)
            case broker_act.SendToClient(_, message, _):
                self._check_client_message(message)
            case broker_act.WriteAcceptance(submit, _, _, age_s) if submit.deadline_s is not None:
                due = self._scene.world.now - age_s + submit.deadline_s
                self._deadlines[submit.request_id] = (*self._deadlines.get(submit.request_id, ()), due)
            case _:
                pass

    def _check_order(self, order: Order) -> None:
        if not isinstance(order, Prepare | Fence | Activate):
            return
        # A living worker that is out is fenced with the latest announced epoch.
        if order.epoch < self._announced_before or (
            order.epoch == self._announced_before and not isinstance(order, Fence)
        ):
            raise Violation(f"I5: epoch {order.epoch} is announced, which another broker used")
        is_certain = self._scene.broker.has_journal and not self._disk.is_damaged
        if is_certain and order.epoch > max(self._announced, self._disk.safe.epoch):
            raise Violation(f"I5: epoch {order.epoch} is announced, and a power cut would lose it")
        self._announced = max(self._announced, order.epoch)

    def _check_client_message(self, message: ServerMessage) -> None:
        match message:
            case Rejected():
                self._audit.on_rejected(message)
            case Accepted(request_id=request_id):
                self._audit.accepted.add(request_id)
                is_certain = self._scene.broker.has_journal and not self._disk.is_damaged
                if is_certain and request_id not in self._disk.safe.requests:
                    raise Violation(f"I1: {request_id} is accepted, and a power cut would lose it")
            case Tokens() | Finished() if self._is_strict and self._is_kept(message.request_id):
                self._check_shown(message)
            case _:
                pass

    def _check_shown(self, message: Tokens | Finished) -> None:
        request = self._disk.ledger.requests.get(message.request_id)
        if request is None:
            raise Violation(f"I3: {message.request_id} is answered, but is not in the journal")
        continuation = request.continuations[message.index]
        if isinstance(message, Tokens) and message.start + len(message.ids) > continuation.length:
            raise Violation(f"I3: {message.request_id} shows more tokens than the journal has: {continuation.length}")
        whole = continuation.whole
        if isinstance(message, Finished) and (whole is None or whole.reason != message.reason):
            raise Violation(f"I3: {message.request_id} is sent an end that is not in the journal")
        if isinstance(message, Finished) and whole is not None and whole.tokens:
            # a second reader receives the number from the journal
            reported, noted = message.num_cached, whole.num_cached
            if reported != noted:
                raise Violation(f"I2: {message.request_id} is sent {reported} cached tokens, the journal has {noted}")

    @property
    def _is_strict(self) -> bool:
        """Whether the journal works: while the disk refuses writes or a file is lost, running sequences are shown
        without it."""
        broker = self._scene.broker
        return broker.has_journal and not broker.journal.ever_broke and not broker.disk.is_damaged

    def _is_kept(self, request_id: str) -> bool:
        """Whether the broker still has the request. It confirms a cancelled one and forgets it; no client reads the
        rest."""
        return request_id in self._scene.broker.core.state.requests

    @property
    def _disk(self) -> SimDisk:
        return self._scene.broker.disk

    # --- after a restart ---------------------------------------------------------------------------------------------

    def check_first_plan(self, state: State) -> None:
        """Check the first plan that serves after a restart: positions held by all of its stages must count."""
        if not self._awaits_first_plan or state.plans.current is None or state.plans.phase.value != "serving":
            return
        self._awaits_first_plan = False
        for sequence in state.sequences.values():
            held = self._held_everywhere(sequence, state)
            if held > 0 and sequence.state is not SequenceState.ENDED:
                self._check_waste(sequence, held, state)

    def _held_everywhere(self, sequence: Sequence, state: State) -> int:
        """Return the position up to which all stages of the plan reported to hold the sequence, in layers that they
        still have."""
        num_known = sequence.sampled
        position = num_known - 1
        assert state.plans.current is not None
        if sequence.request.arrived_at > self._scene.broker.started_at:
            return 0  # the request was submitted again: the broker did not recognise its former sequence
        for stage in state.plans.current.stages:
            worker = state.workers[stage.incarnation]
            if worker.joined_at > self._scene.broker.started_at + REJOIN_S:
                return 0  # its first Hello was lost, and the broker waited no longer
            hello = worker.hello
            if hello.lineage.journal != state.lineage.journal:
                return 0  # numbers of another journal mean other sequences, even if their tokens are equal
            if hello.held_layers != stage.layers or stage.name in self._duplicated_names:
                return 0  # of two processes under one name, the wrong one may have returned first
            held = next((held_sequence for held_sequence in hello.held if held_sequence.sequence == sequence.id), None)
            if held is None or self._is_foreign(hello, sequence):
                return 0
            most = max((part.position for part in held.kv), default=0)
            # The power cut lost tokens beyond ``num_known``; the same number of positions may count for nothing.
            if most > num_known:
                position = min(position, num_known - (most - num_known) + 1)
            position = min(position, min((part.position for part in held.kv), default=0))
        return position

    def _is_foreign(self, hello: Hello, sequence: Sequence) -> bool:
        """Whether the worker computed another sequence under this number."""
        history = self._histories.get((hello.incarnation, sequence.id))
        return history is None or history[: sequence.sampled] != sequence.tokens[: len(history)]

    def _check_waste(self, sequence: Sequence, num_held: int, state: State) -> None:
        if sequence.num_preempted or sequence.keeps_sum:
            return  # it was preempted by sequences with a higher claim, or its sum is gone
        if sequence.request.submit.params.prompt_logprobs is not None and not sequence.num_restored:
            return  # its prompt's log probabilities came with the lost positions
        if sequence.state is SequenceState.WAITING:
            if self._would_fit(sequence, state) and not _starts_from_sibling(sequence, state):
                raise Violation(f"I8: sequence {sequence.id} is held everywhere up to {num_held}, and waits")
            return
        # Without room for all in full, continuations are sent back. They are admitted at the same moment if they can
        # start from the prompt of another one, and what follows it is computed again.
        if sequence.residency and (sequence.fork_of is not None or state.shared.inherited(sequence.id)):
            return
        counts = min([sequence.kv, *(run.start for run in sequence.rebuilds)])
        num_kept = num_held if state.manifest is None else state.manifest.floor_to_state(num_held)
        if counts < num_kept:
            raise Violation(f"I8: of sequence {sequence.id} {num_held} positions are held, {counts} count")
        self.num_adopted += num_held

    def _would_fit(self, sequence: Sequence, state: State) -> bool:
        """Whether the sequence fits in addition to the running ones, with memory for all known tokens of each."""
        plans = state.plans
        needed = sum(num_blocks(running.sampled) for running in (*state.running, sequence))
        fits = needed <= plans.kv_blocks and len(state.running) < plans.max_sequences
        return fits and num_blocks(sequence.limit) <= plans.kv_blocks

    def _check_deadline(self, request: Request) -> None:
        at, dues = request.deadline_at, self._deadlines.get(request.id, ())
        if at is not None and dues and not any(due - 0.01 <= at <= due + DRIFT_S for due in dues):
            raise Violation(f"I1: {request.id} was due at {dues[-1]:.2f}, and after a restart at {at:.2f}")


def _starts_from_sibling(sequence: Sequence, state: State) -> bool:
    """Whether a waiting sequence is to share the prompt of a running one of its request."""
    is_shareable = shareable_positions(sequence, state.shared.unit) > 0
    return is_shareable and any(other.state is SequenceState.RUNNING for other in sequence.request.sequences)
