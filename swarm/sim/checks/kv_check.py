"""Copies of keys and values hold exactly what they claim, fit into memory, and vanish with their sequences (I16). A
stage takes over only what was computed with its own bits.

Whatever a stage claims to hold, computed by itself or copied, must be the states that an undisturbed computation gives
for the tokens that it names; and once the broker's plan is in force there, these tokens must be the broker's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from swarm.broker.state import SequenceState, State
from swarm.params import SamplingParams
from swarm.sim.checks.audit import Violation
from swarm.sim.checks.chains import ExpectedStates
from swarm.stage.events import Event, KvArrived, OrderArrived, SpilledStored, StageTick
from swarm.testing import STATE_BYTES
from swarm.wire.messages import Activate, KvPart, ReceiveKv

if TYPE_CHECKING:
    from swarm.sim.views import SceneView, WorkerView

LEAK_S = 20.0  # how long copies of an ended sequence may stay while a plan serves


class KvCheck:
    """Check of the copies of all workers, after each of their events."""

    def __init__(self, scene: SceneView, num_layers: int, unlike: Collection[str] = ()) -> None:
        self._scene = scene
        self._unlike = unlike  # workers whose kernels compute other bits
        self._expected = ExpectedStates(num_layers)
        self._sources: dict[str, set[str]] = {}  # by receiver: incarnations that its last order names
        self._leaking_since: dict[tuple[str, int], float] = {}  # by holder and sequence
        # before the event that is being handled: bytes of the worker's copies; at an Activate, their positions by layer
        self._copy_bytes = self._evictable_bytes = 0
        self._copied: dict[int, dict[int, int]] = {}
        # by holder, sequence and layer: whether the senders of its copy are among ``unlike``
        self._bits: dict[tuple[str, int, int], set[bool]] = {}
        self.num_parts = 0  # parts that were stored
        self.num_adopted = 0  # layers × positions that a stage took over from copies

    def sources_of(self, incarnation: str) -> set[str]:
        """Return the workers from which this one is to receive copies."""
        return self._sources.get(incarnation, set())

    def before_event(self, event: Event, node: WorkerView) -> None:
        """Record what the worker holds, to compare it with what the event leaves."""
        self._copy_bytes = node.executor.kv_copy_bytes()
        self._evictable_bytes = _evictable_bytes(node) if isinstance(event, StageTick) else 0
        self._copied = {}
        if isinstance(event, OrderArrived) and isinstance(event.order, Activate):
            copies = node.core.store.copies.sequences
            self._copied = {sequence: dict(copy.positions) for sequence, copy in copies.items()}

    def after_event(self, event: Event, node: WorkerView) -> None:
        """Check what the event can have changed."""
        match event:
            case OrderArrived(ReceiveKv() as order) if order.lineage == node.core.lineage:
                self._sources[node.incarnation] = {source.incarnation for source in order.sources}
            case OrderArrived(Activate() as order) if order.epoch == node.core.active:
                self.check_node(node)
                self._count_adopted(node)
            case KvArrived():
                self._check_arrival(event, node)
            case SpilledStored():
                self.check_node(node)
            case StageTick(kv_free_bytes=free) if free < 0:
                self._check_evicted(-free, node)
            case _:
                pass

    def _count_adopted(self, node: WorkerView) -> None:
        for sequence, copied in self._copied.items():
            held = node.core.sequences.get(sequence)
            for part in held.kv if held is not None else ():
                for layer in range(part.layers.first, part.layers.stop):
                    num_adopted = min(copied.get(layer, 0), part.position)
                    self.num_adopted += num_adopted
                    bits = self._bits.get((node.incarnation, sequence, layer), set())
                    if num_adopted and bits != {node.name in self._unlike}:
                        where = f"{node.incarnation} sequence {sequence} layer {layer}"
                        raise Violation(f"I16: {where}: copies were taken over that have other bits")

    def check_node(self, node: WorkerView) -> None:
        """Check everything that a stage claims to hold."""
        for sequence, tokens, layers, params in _claims(node):
            states = self._expected.of(sequence, tokens, params)
            chains = node.executor.chains.get(sequence, {})
            for layer, position in layers:
                if chains.get(layer, [])[:position] != states[layer][:position]:
                    where = f"{node.incarnation} sequence {sequence} layer {layer}"
                    raise Violation(f"I16: {where}: the first {position} positions are not those of its tokens")

    def check_tokens(self, node: WorkerView, state: State) -> None:
        """Check that the tokens that a stage holds under the plan in force are the broker's."""
        if node.core.active != state.plans.epoch or node.core.lineage != state.lineage:
            return
        for number, tokens, layers, _ in _claims(node):
            sequence = state.sequences.get(number)
            if sequence is None or sequence.state is SequenceState.ENDED:
                continue
            position = max((position for _, position in layers), default=0)
            if tokens[:position] != sequence.tokens[:position]:
                raise Violation(f"I16: {node.incarnation} holds other tokens of sequence {number} than the broker")

    def check_leaks(self, workers: Collection[WorkerView], state: State) -> None:
        """Check that copies of ended sequences vanish, a while after the broker's plan serves."""
        now, leaking = self._scene.world.now, {}
        for node in workers if state.plans.is_serving and not self._scene.broker.is_away else ():
            for number in node.core.store.copies.sequences if node.core.lineage == state.lineage else ():
                sequence = state.sequences.get(number)
                if sequence is None or sequence.state is SequenceState.ENDED:
                    key = node.incarnation, number
                    since = self._leaking_since.get(key, now)
                    # a broker that has slept has had no time to order anything
                    leaking[key] = now if self._scene.broker.has_paused_since(since) else since
                    if now - leaking[key] > LEAK_S:
                        raise Violation(f"I16: {node.incarnation} has kept a copy of ended sequence {number}")
        self._leaking_since = leaking

    def _check_arrival(self, event: KvArrived, node: WorkerView) -> None:
        """Check what was stored of a part that has just arrived, and its memory."""
        part, data = event.part, event.data
        grown = node.executor.kv_copy_bytes() - self._copy_bytes
        if grown > max(0, event.free_bytes):
            raise Violation(f"I16: {node.incarnation} stores {grown} bytes of copies, {event.free_bytes} are free")
        copy = node.core.store.copies.sequences.get(part.sequence)
        layers = range(part.layers.first, part.layers.stop)
        stored = [layer for layer in layers if copy is not None and copy.positions.get(layer, 0) >= data.stop]
        if copy is None or not stored:
            return
        if grown and part.sender not in self.sources_of(node.incarnation):
            raise Violation(f"I10: {node.incarnation} stores a part from {part.sender}, which no order names")
        self.num_parts += bool(grown)
        self._record_bits(part, stored, node)
        states = self._expected.of(part.sequence, copy.tokens, copy.open.params)
        chains = node.executor.chains[part.sequence]
        for layer in stored:
            if chains[layer][data.start : data.stop] != states[layer][data.start : data.stop]:
                where = f"{node.incarnation} sequence {part.sequence} layer {layer}"
                raise Violation(f"I16: {where}: positions {data.start} to {data.stop} are not those of its tokens")

    def _record_bits(self, part: KvPart, layers: list[int], node: WorkerView) -> None:
        """Record whose bits the copied layers have by now. A part at the beginning replaces what was before."""
        name, _, _ = part.sender.rpartition(".")
        for layer in layers:
            key = node.incarnation, part.sequence, layer
            before = set() if part.block == 0 else self._bits.get(key, set())
            self._bits[key] = before | {name in self._unlike}

    def _check_evicted(self, num_bytes: int, node: WorkerView) -> None:
        """Check that a stage has dropped copies until this much memory was free, or all of them."""
        left, allowed = _evictable_bytes(node), max(0, self._evictable_bytes - num_bytes)
        if left > allowed:
            raise Violation(f"I16: {node.incarnation} keeps {left} bytes of copies, {allowed} fit into its memory")


def _claims(node: WorkerView) -> Iterator[tuple[int, Sequence[int], list[tuple[int, int]], SamplingParams]]:
    """Yield what a stage claims to hold: a sequence, its tokens, the position of each layer, and its parameters."""
    for sequence, held in node.core.sequences.items():
        computed = [(layer, r.position) for r in held.kv for layer in range(r.layers.first, r.layers.stop)]
        yield sequence, held.history, computed, held.open.params
    for sequence, copy in node.core.store.copies.sequences.items():
        yield sequence, copy.tokens, list(copy.positions.items()), copy.open.params


def _evictable_bytes(node: WorkerView) -> int:
    """Return the memory of all copies that a stage may drop, also of layers that it has loaded since."""
    copies, chains = node.core.store.copies.sequences, node.executor.chains
    return STATE_BYTES * sum(len(chains[s][layer]) for s, copy in copies.items() for layer in copy.positions)
