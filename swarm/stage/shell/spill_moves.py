"""The compute thread's share of spilling: it reads chunks from the device for the disk's thread, and stores what that
thread has read.

A step waits for it for about ``PART_S`` at most. So a chunk is read in parts, one after the other in several turns: a
block of as many layers as fit ``UNIT_BYTES`` per chunk. Whole units go to the disk's thread. An order that differs from
the last one drops what was read for that. The parts of a chunk from disk are stored in the same way, unless the core
ends the restoration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from swarm.clock import Clock
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.actions import CHUNK
from swarm.stage.events import ChunkLost, ChunkSpilled, SpilledRead, SpilledStored
from swarm.stage.executor import Executor, KvData
from swarm.stage.shell.kv_channels import MOVE_ERRORS
from swarm.stage.shell.spill_thread import SpillThread
from swarm.wire.messages import BLOCK, LayerRange, Manifest

PART_S: Final = 0.001  # for which a step waits at most, apart from the last block, as for copies
UNIT_BYTES: Final = 8 << 20  # of a chunk in some layers, at least one

log = get_logger(__name__)


@dataclass(slots=True)
class _PartialChunk:
    """A chunk of which some blocks are read."""

    action: act.SpillChunk
    units: deque[LayerRange]  # that remain; the blocks are of the first one
    blocks: list[KvData] = field(default_factory=list)


class SpillMoves:
    """Chunks on their way between the device and the disk's thread."""

    def __init__(self, executor: Executor, thread: SpillThread, clock: Clock) -> None:
        self.thread = thread
        self._executor = executor
        self._clock = clock
        self._partial: _PartialChunk | None = None
        self._storing: act.StoreSpilled | None = None
        self._pieces: deque[KvData] = deque()  # of ``_storing``, which remain

    @property
    def is_storing(self) -> bool:
        return self._storing is not None

    @property
    def has_work(self) -> bool:
        """Whether ``next_event`` has something to do."""
        return self.is_storing or self.thread.has_results

    def next_event(self) -> SpilledRead | ChunkLost | SpilledStored | None:
        """Store for a moment, or return what the disk's thread has done."""
        return self._store() if self.is_storing else self.thread.take()

    # --- from the device ---------------------------------------------------------------------------------------------

    def spill(self, action: act.SpillChunk) -> ChunkSpilled:
        """Read the next blocks of a chunk."""
        stops_at = (began_at := self._clock.now()) + PART_S
        if self._partial is None or self._partial.action != action:
            self._partial = _PartialChunk(action, deque(_units(action.layers, self._executor.manifest)))
        partial, is_taken = self._partial, True
        try:
            while self._read_block(partial) and self._clock.now() < stops_at and self.thread.accepts_chunk:
                pass
        except MOVE_ERRORS as error:
            log.warning("kv_chunk_unreadable", sequence=action.sequence, reason=str(error))
            is_taken = False
        is_whole = not (is_taken and partial.units)
        if is_whole:
            self._partial = None
        return ChunkSpilled(action.sequence, self._clock.now() - began_at, is_taken, is_whole)

    def _read_block(self, partial: _PartialChunk) -> bool:
        """Read a block of a unit. Return whether there are more."""
        action, unit = partial.action, partial.units[0]
        start = action.start + len(partial.blocks) * BLOCK
        partial.blocks.append(self._executor.read_kv(action.sequence, unit, start, start + BLOCK))
        if start + BLOCK >= action.stop:
            partial.units.popleft()
            self.thread.write(replace(action, layers=unit), partial.blocks, is_last=not partial.units)
            partial.blocks = []
        return bool(partial.units)

    # --- to the device -----------------------------------------------------------------------------------------------

    def store(self, action: act.StoreSpilled) -> None:
        """Store these blocks in the next turns."""
        manifest = self._executor.manifest
        self._storing = action
        self._pieces = deque(piece for data in action.blocks for piece in _split(data, manifest))

    def stop(self, ticket: int) -> None:
        """Read and store nothing more for this ticket."""
        self.thread.stop_reading(ticket)
        if self._storing is not None and self._storing.ticket == ticket:
            self._end()

    def _store(self) -> SpilledStored | None:
        """Store the next pieces. Return the answer once there are no more."""
        action, stops_at = self._storing, self._clock.now() + PART_S
        assert action is not None
        try:
            while self._pieces:
                self._executor.write_kv(action.sequence, action.limit, self._pieces.popleft())
                if self._pieces and self._clock.now() >= stops_at:
                    return None
        except MOVE_ERRORS as error:
            self._end()
            return SpilledStored(action.ticket, action.sequence, f"{type(error).__name__}: {error}")
        self._end()
        return SpilledStored(action.ticket, action.sequence)

    def _end(self) -> None:
        self._storing = None
        self._pieces.clear()


def _units(layers: LayerRange, manifest: Manifest) -> Iterator[LayerRange]:
    """Yield ranges of layers whose part of a chunk fits ``UNIT_BYTES``, or of one layer."""
    first, num_bytes = layers.first, 0
    for layer in range(layers.first, layers.stop):
        own = manifest.kv_bytes_per_token[layer] * CHUNK
        if layer > first and num_bytes + own > UNIT_BYTES:
            yield LayerRange(first, layer)
            first, num_bytes = layer, 0
        num_bytes += own
    yield LayerRange(first, layers.stop)


def _split(data: KvData, manifest: Manifest) -> Iterator[KvData]:
    """Yield a block's units."""
    sizes = manifest.kv_bytes_per_token
    flat, total, begin = data.numbers.reshape(-1), sum(sizes[data.layers.first : data.layers.stop]), 0
    for unit in _units(data.layers, manifest):
        end = begin + sum(sizes[unit.first : unit.stop])
        numbers = flat[flat.size * begin // total : flat.size * end // total]
        yield KvData(unit, data.start, data.stop, data.dtype, numbers)
        begin = end
