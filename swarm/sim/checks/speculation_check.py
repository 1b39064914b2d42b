"""Proposed tokens leave no trace unless they are accepted (I17).

A stage never copies, spills or lists positions of proposed tokens before the broker's next header or order has settled
which of them were accepted. After each step, all stages hold what the broker's tokens give. The journal gets each token
once, and the tokens of a sequence that one step gave in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from swarm.broker.actions import Action as BrokerAction
from swarm.broker.actions import Dispatch, SendToWorker, WriteTokens
from swarm.broker.state import SequenceState, State
from swarm.sim.checks.audit import Violation
from swarm.sim.checks.chains import ExpectedStates
from swarm.sim.checks.effects import BrokerSnapshot, is_in_force
from swarm.stage.actions import (
    Action,
    Compute,
    ForkSequence,
    OpenSequence,
    ReleaseSequence,
    SendKvParts,
    SendToBroker,
    SpillChunk,
    TruncateSequence,
)
from swarm.wire.messages import REPLAY_STEP, Activated, HeldSequence, Order, SendKv, Step

if TYPE_CHECKING:
    from swarm.sim.views import SceneView, WorkerView


class SpeculationCheck:
    """Check of what processes do with proposed tokens."""

    def __init__(self, scene: SceneView, num_layers: int) -> None:
        self._scene = scene
        self._expected = ExpectedStates(num_layers)
        # by worker and sequence: the position from which on its tokens are proposals that nothing has settled
        self._certain: dict[tuple[str, int], int] = {}
        self._named: dict[str, dict[int, int]] = {}  # by worker: positions that the broker ordered it to send
        self._journalled: dict[int, int] = {}  # by sequence: the end of what this broker has had written
        self._num_preempted = 0  # by this broker
        self.num_proposed = 0  # tokens
        self.num_drafted = 0  # the draft model's among them

    # --- at the stages -----------------------------------------------------------------------------------------------

    def on_order(self, order: SendKv, node: WorkerView) -> None:
        """Record exact positions that the broker names: it knows which proposals were accepted."""
        self._named[node.incarnation] = {
            item.sequence: item.position for target in order.targets for item in target.until
        }

    def on_stage_action(self, action: Action, node: WorkerView) -> None:
        """Check an action that a stage's core has ordered."""
        match action:
            case Compute(step=number) if number != REPLAY_STEP:
                running = node.core.runner.running
                if running is not None:
                    self._on_rows(running.arrived.step, node.incarnation)
            case TruncateSequence() | ReleaseSequence() | OpenSequence() | ForkSequence():
                self._certain.pop((node.incarnation, action.sequence), None)
            case SendKvParts(parts):
                for part in parts:
                    self._demand_certain(node, part.sequence, part.start + len(part.tokens), "sends")
            case SpillChunk(sequence, _, _, stop):
                self._demand_certain(node, sequence, stop, "spills")
            case SendToBroker(Activated(held=held)):
                self.check_inventory(held, node)
            case _:
                pass

    def check_inventory(self, held: Iterable[HeldSequence], node: WorkerView) -> None:
        """Check what a stage reports to hold."""
        for item in held:
            self._demand_certain(node, item.sequence, max((part.position for part in item.kv), default=0), "lists")

    def _on_rows(self, step: Step, incarnation: str) -> None:
        proposed = {tail.sequence: tail.count for tail in step.proposed or ()}
        for row in step.rows:
            count = proposed.get(row.sequence, 0)
            if count:
                self._certain[incarnation, row.sequence] = row.start + row.count - count
            else:
                self._certain.pop((incarnation, row.sequence), None)

    def _demand_certain(self, node: WorkerView, sequence: int, stop: int, verb: str) -> None:
        certain = self._certain.get((node.incarnation, sequence))
        named = self._named.get(node.incarnation, {}).get(sequence, 0)
        if certain is not None and stop > max(certain, named):
            raise Violation(
                f"I17: {node.incarnation} {verb} {stop} positions of sequence {sequence}, {certain} are certain"
            )

    # --- at the broker -----------------------------------------------------------------------------------------------

    def on_broker_restarted(self) -> None:
        self._journalled.clear()
        self._num_preempted = 0

    def on_action(self, action: BrokerAction, state: State, *, is_repeated: bool) -> None:
        """Check what the broker is about to do. ``is_repeated``: writes are those of an earlier moment."""
        match action:
            case Dispatch(step):
                self._on_dispatch(step)
                if step.proposed:
                    proposals = state.in_flight[step.step].proposals.values()
                    self.num_drafted += sum(len(each.tokens) for each in proposals if each.proposer == "draft")
            case SendToWorker(_, message):
                self._on_message(message, state)
            case WriteTokens() if not is_repeated:
                self._on_written(action, state)
            case _:
                pass

    def _on_message(self, order: Order, state: State) -> None:
        """Check the positions that an order names."""
        for item in (item for target in order.targets for item in target.until) if isinstance(order, SendKv) else ():
            sequence = state.sequences.get(item.sequence)
            if sequence is not None and item.position > sequence.kv:
                raise Violation(f"I17: {item.position} positions of {item.sequence} are named, {sequence.kv} count")

    def _on_dispatch(self, step: Step) -> None:
        """Check a step that the broker sends."""
        rows = {row.sequence: row for row in step.rows}
        for tail in step.proposed or ():
            row = rows.get(tail.sequence)
            if row is None or tail.count != row.count - 1 or not row.sample:
                raise Violation(f"I17: step {step.step} proposes {tail.count} tokens in {row}")
            self.num_proposed += tail.count

    def check_preemptions(self, state: State) -> None:
        """Check, after each event, that no sequence was preempted while blocks were taken for proposals only."""
        num_preempted = int(state.counters.get("preemptions", 0))
        if num_preempted > self._num_preempted and (holders := _holders_for_proposals(state)):
            raise Violation(f"I17: a sequence was preempted, and {holders} hold blocks for proposals only")
        self._num_preempted = num_preempted

    def _on_written(self, action: WriteTokens, state: State) -> None:
        """Check new tokens on their way to the journal."""
        sequences = [new.sequence for new in action.tokens]
        if len(set(sequences)) < len(sequences):
            raise Violation(f"I17: the tokens of a sequence are written in several pieces: {sequences}")
        for new in action.tokens:
            stop, written = new.position + len(new.ids), self._journalled.get(new.sequence)
            if written is not None and new.position != written:
                raise Violation(
                    f"I17: sequence {new.sequence} is written from {new.position} on, and was written up to {written}"
                )
            if tuple(state.sequences[new.sequence].tokens[new.position : stop]) != new.ids:
                raise Violation(f"I17: sequence {new.sequence} is written with other tokens than it has")
            self._journalled[new.sequence] = stop

    def check_step(self, snapshot: BrokerSnapshot | None, state: State) -> None:
        """Check that all stages hold the states of the broker's tokens, after a step has been acknowledged.

        A state depends on all tokens before it, so that one of each layer shows everything.
        """
        plan = state.plans.current
        if snapshot is None or plan is None:
            return
        for number, counted, residency in snapshot.stepped:
            sequence = state.sequences.get(number)
            if sequence is None or sequence.rebuilds or sequence.state is not SequenceState.RUNNING:
                continue
            if not sequence.is_open_in_stages or sequence.residency != residency or sequence.kv <= counted:
                continue
            states = self._expected.of(number, sequence.tokens[: sequence.kv], sequence.request.submit.params)
            for stage in plan.stages:
                node = self._scene.workers.get(stage.incarnation)
                if node is None or not is_in_force(plan.epoch, node, state):
                    continue
                for layer in range(stage.layers.first, stage.layers.stop):
                    chain = node.executor.chains.get(number, {}).get(layer, [])
                    if chain[sequence.kv - 1 : sequence.kv] != [states[layer][sequence.kv - 1]]:
                        raise Violation(
                            f"I17: of sequence {number} {sequence.kv} positions count, and {stage.incarnation} holds "
                            f"those of other tokens in layer {layer}"
                        )


def _holders_for_proposals(state: State) -> list[int]:
    """Return the sequences that hold blocks only for proposed tokens in flight."""
    return [
        number
        for flight in state.in_flight.values()
        for number, proposal in flight.proposals.items()
        if (sequence := state.sequences.get(number)) is not None
        and flight.is_current(sequence)
        and sequence.blocks > proposal.blocks
    ]
