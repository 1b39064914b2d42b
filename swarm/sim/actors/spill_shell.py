"""Disks with keys and values, and a simulated worker's access to them.

All workers share one disk, which outlives them. Reading and writing take time, sometimes too much; files get lost; some
orders to read and some answers do not arrive, and some answers are late or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarm.errors import IllegalMove
from swarm.sim.checks.spill_check import SpillCheck
from swarm.sim.checks.verdict_check import VerdictCheck
from swarm.sim.views import WorkerView
from swarm.sim.world import World
from swarm.stage.actions import ReadSpilled, SpillChunk, StopReadingSpilled, StoreSpilled
from swarm.stage.events import ChunkLost, ChunkSpilled, KvTurn, SpilledRead, SpilledStored
from swarm.stage.executor import KvData
from swarm.wire.messages import BLOCK, KvRestored, LayerRange, Order, RestoreKv

CHUNK = BLOCK  # positions of a chunk: prompts are short here
SPILL_FROM = BLOCK + 1  # length from which sequences are written and read
LOST_FILES, LOST_MESSAGES, FAILED_STORES = 0.05, 0.05, 0.05  # shares
LATE_ANSWERS, WRONG_ANSWERS = 0.05, 0.05  # shares
WRONG_BY = (-2 * CHUNK, -1, 1, CHUNK, 1 << 20)  # positions; more than it has, within the order, fail the next step
WRONGED_S = 60.0  # a worker whose answers are wrong may be excluded for this long
DiskAction = SpillChunk | ReadSpilled | StoreSpilled | StopReadingSpilled
SLOW = 0.05  # share of reads that take ``SLOW_S``
TURN_S, WRITE_S, READ_S, SLOW_S = (0.002, 0.04), (0.0, 0.05), (0.0, 0.02), (0.5, 4.0)


class SimSpillDisk:
    """The files of all workers: the numbers of a chunk, by name and layer."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"spill {seed}")
        self.files: dict[tuple[str, str, int], NDArray[np.generic]] = {}  # by bits, name and layer
        self.num_read = 0  # chunks

    def write(self, bits: str, name: str, layers: LayerRange, blocks: list[KvData]) -> None:
        numbers = np.concatenate([data.numbers for data in blocks], axis=1)
        for layer, row in zip(range(layers.first, layers.stop), numbers, strict=True):
            if self.random.random() >= LOST_FILES:
                self.files[bits, name, layer] = row

    def read(self, bits: str, name: str, layers: LayerRange, start: int, begin: int) -> tuple[KvData, ...]:
        """Return the blocks of a chunk from ``start`` on; nothing if a layer is missing. ``begin``: where it begins."""
        rows = [self.files.get((bits, name, layer)) for layer in range(layers.first, layers.stop)]
        if self.random.random() < LOST_FILES:
            self.files.pop((bits, name, layers.first), None)
        found = [row for row in rows if row is not None]
        if len(found) < len(rows):
            return ()
        numbers, size = np.stack(found), found[0].size // CHUNK
        self.num_read += 1
        return tuple(
            KvData(layers, at, at + BLOCK, "float32", numbers[:, (at - begin) * size : (at - begin + BLOCK) * size])
            for at in range(begin, begin + CHUNK, BLOCK)
            if at >= start
        )


class SpillNode(WorkerView, Protocol):
    """View of a worker for its disk. ``make_kv_turn``: the turn that its compute thread could offer now."""

    def make_kv_turn(self) -> KvTurn | None: ...


class SpillScene(Protocol):
    """View of the cluster."""

    world: World
    spill_check: SpillCheck
    verdict_check: VerdictCheck


class SimSpillShell:
    """One worker's reads and writes."""

    def __init__(self, scene: SpillScene, node: SpillNode, disk: SimSpillDisk) -> None:
        self._world, self._check, self._node, self._disk = scene.world, scene.spill_check, node, disk
        self._verdict_check = scene.verdict_check
        self._chance = disk.random
        self._reading: dict[int, str] = {}  # by ticket: the bits
        self._schedule_turn()

    def loses(self, order: Order) -> bool:
        """Return whether an order does not arrive."""
        return isinstance(order, RestoreKv) and self._chance.random() < LOST_MESSAGES

    def report(self, message: KvRestored, send: Callable[[KvRestored], None]) -> None:
        """Send an answer, unless it gets lost; some are late, and some are wrong."""
        if self._chance.random() < LOST_MESSAGES:
            return
        if self._chance.random() < WRONG_ANSWERS:
            position = max(0, message.position + self._chance.choice(WRONG_BY))
            message = msgspec.structs.replace(message, position=position)
            self._verdict_check.record_incident(self._node.name, WRONGED_S)
        if self._chance.random() >= LATE_ANSWERS:
            send(message)
            return

        def send_late() -> None:
            if self._node.is_alive:
                send(message)

        self._world.schedule(self._chance.uniform(*SLOW_S), send_late)

    def perform(self, action: DiskAction) -> tuple[ChunkSpilled | SpilledStored, ...]:
        """Carry out an action. Return the core's next event, if there is one now."""
        match action:
            case SpillChunk():
                return (self._spill(action),)
            case ReadSpilled(ticket):
                self._reading[ticket] = action.bits
                self._read_after(action, 0)
            case StoreSpilled():
                return (self._store(action),)
            case StopReadingSpilled(ticket):
                self._reading.pop(ticket, None)
        return ()

    def _spill(self, action: SpillChunk) -> ChunkSpilled:
        """Read a chunk now, and write it a while later, unless the worker has died."""
        self._check.on_spilled(action, self._node.incarnation)
        executor, starts = self._node.executor, range(action.start, action.stop, BLOCK)
        blocks = [executor.read_kv(action.sequence, action.layers, at, at + BLOCK) for at in starts]

        def write() -> None:
            if self._node.is_alive and self._chance.random() < LOST_FILES:
                self._node.post(ChunkLost(action.sequence, action.start))
            elif self._node.is_alive:
                self._disk.write(action.bits, action.name, action.layers, blocks)

        self._world.schedule(self._chance.uniform(*WRITE_S), write)
        return ChunkSpilled(action.sequence, self._chance.uniform(0.0, 0.002), is_taken=True)

    def _read_after(self, action: ReadSpilled, number: int) -> None:
        delay_s = self._chance.uniform(*(SLOW_S if self._chance.random() < SLOW else READ_S))
        self._world.schedule(delay_s, lambda: self._read(action, number))

    def _read(self, action: ReadSpilled, number: int) -> None:
        if not self._node.is_alive or action.ticket not in self._reading:
            return
        begin = action.start // CHUNK * CHUNK + number * CHUNK
        blocks = self._disk.read(action.bits, action.names[number], action.layers, action.start, begin)
        is_last = not blocks or number + 1 == len(action.names)
        if not is_last:
            self._read_after(action, number + 1)
        self._node.post(SpilledRead(action.ticket, action.sequence, blocks, is_last))

    def _store(self, action: StoreSpilled) -> SpilledStored:
        try:
            for data in action.blocks:
                if self._chance.random() < FAILED_STORES:
                    return SpilledStored(action.ticket, action.sequence, "MemoryError: no memory")
                self._node.executor.write_kv(action.sequence, action.limit, data)
        except IllegalMove as error:
            return SpilledStored(action.ticket, action.sequence, str(error))
        self._check.on_stored(action, self._reading.get(action.ticket, ""))
        return SpilledStored(action.ticket, action.sequence)

    def _schedule_turn(self) -> None:
        self._world.schedule(self._chance.uniform(*TURN_S), self._turn)

    def _turn(self) -> None:
        if not self._node.is_alive:
            return
        turn = self._node.make_kv_turn()
        if turn is not None and self._node.core.wants_kv_turn(turn, self._world.now):
            self._node.post(turn)
        self._schedule_turn()
