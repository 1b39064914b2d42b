"""Files of keys and values hold only what was computed with the bits that they name (I16).

A position depends on the kernels of all stages that have computed it and those before it. The check follows each
sequence through the steps that the broker sends, replays and files included, and ignores what stages exclude.
"""

from __future__ import annotations

from swarm.broker.actions import Action, Dispatch, SendToWorker
from swarm.broker.state import State
from swarm.sim.checks.audit import Violation
from swarm.stage.actions import SpillChunk, StoreSpilled
from swarm.wire.messages import Replay, RestoreKv, SequenceRange, Step

Part = tuple[int, int, frozenset[str]]  # first position, end, and the bits of the stages that computed them


class SpillCheck:
    """Bits with which each sequence's positions were computed."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Part]] = {}
        self._bits: dict[str, str] = {}  # of all workers, also of those that have died; by incarnation

    def record_worker(self, incarnation: str, bits: str) -> None:
        """Record the bits of a worker that starts."""
        self._bits[incarnation] = bits

    def on_action(self, action: Action, state: State) -> None:
        """Follow what the broker orders."""
        match action:
            case Dispatch(step):
                self._on_step(step, self._plan_bits(state))
            case SendToWorker(_, Replay() as order):
                for part in (SequenceRange(order.sequence, order.start, order.stop), *order.more):
                    self._add(part.sequence, part.start, part.stop, self._plan_bits(state))
            case SendToWorker(_, RestoreKv() as order):
                self._cut(order.sequence, order.start)
            case _:
                pass

    def on_spilled(self, action: SpillChunk, incarnation: str) -> None:
        """Check a chunk that a stage writes."""
        parts = self._parts.get(action.sequence, [])
        bits = frozenset[str]().union(*(part[2] for part in parts if part[0] < action.stop))
        if bits - {action.bits}:
            where = f"{incarnation} sequence {action.sequence} before {action.stop}"
            raise Violation(f"I16: {where}: written as {action.bits!r}, but computed with {sorted(bits)}")

    def on_stored(self, action: StoreSpilled, bits: str) -> None:
        """Record positions from files with these bits."""
        for data in action.blocks:
            self._add(action.sequence, data.start, data.stop, frozenset([bits]))

    def _plan_bits(self, state: State) -> frozenset[str]:
        plan = state.plans.current
        return frozenset(self._bits[stage.incarnation] for stage in plan.stages) if plan is not None else frozenset()

    def _on_step(self, step: Step, bits: frozenset[str]) -> None:
        for item in step.open:
            if item.source is not None:
                self._parts[item.sequence] = list(self._parts.get(item.source, []))
                self._cut(item.sequence, item.shared)
        for cut in step.truncate:
            self._cut(cut.sequence, cut.position)
        for row in step.rows:
            if not step.replay:
                self._cut(row.sequence, row.start)
            self._add(row.sequence, row.start, row.start + row.count, bits)

    def _cut(self, sequence: int, position: int) -> None:
        parts = self._parts.get(sequence, [])
        self._parts[sequence] = [(start, min(stop, position), bits) for start, stop, bits in parts if start < position]

    def _add(self, sequence: int, start: int, stop: int, bits: frozenset[str]) -> None:
        parts = self._parts.setdefault(sequence, [])
        if parts and parts[-1][1:] == (start, bits):
            start = parts.pop()[0]
        if (start, stop, bits) not in parts:
            parts.append((start, stop, bits))
