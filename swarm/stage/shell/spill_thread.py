"""The thread that writes keys and values to the local disk and reads them back (``spill_files``).

The compute thread hands it chunks from the device's memory, at most ``MAX_CHUNKS`` at a time, and takes what was read,
also at most ``MAX_CHUNKS``. So neither a slow nor a full disk holds up a step, and memory is bounded. Reading goes
before writing: a request waits for it. While one access to the disk takes longer than ``_HUNG_S``, as on a network disk
without a connection, orders to read are answered at once, with nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash

from swarm.cache_folder import cache_folder
from swarm.clock import Clock
from swarm.errors import report_thread_errors
from swarm.log import LogRateLimiter, get_logger
from swarm.stage import actions as act
from swarm.stage.actions import CHUNK
from swarm.stage.events import ChunkLost, SpilledRead
from swarm.stage.executor import KvData
from swarm.stage.shell.spill_files import ChunkFile, SpillFiles
from swarm.wire.messages import BLOCK, Manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_CHUNKS: Final = 2  # that wait for the disk (of some layers), and that wait for the compute thread (of all)
AHEAD_BYTES: Final = 32 << 20  # a larger chunk is read only when none waits for the compute thread
_FORMAT: Final = 2  # changes with the order of numbers in a file
_HUNG_S: Final = 1.0  # a file takes milliseconds
_TIDY_S: Final = 60.0  # between two looks at the whole folder
_REST_S: Final = 10.0  # without writing, after the disk had no space or failed

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some layers of a chunk to be written, block after block. ``is_last``: no layers of it follow."""

    action: act.SpillChunk
    blocks: tuple[KvData, ...]
    is_last: bool


@dataclass(slots=True)
class _Reading:
    """An order to read, and the number of its chunks that were read."""

    action: act.ReadSpilled
    num_read: int = 0


class SpillThread:
    """Owner of the folder and of the thread that works in it.

    ``identity``: the executor's ``kv_identity``. ``fits``: whether such data can be this model's. ``on_read`` is called
    by the thread when something was read, and ``on_crash`` when a bug has ended it.
    """

    def __init__(
        self,
        files: SpillFiles,
        manifest: Manifest,
        clock: Clock,
        *,
        identity: str,
        fits: Callable[[KvData], bool],
        on_read: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._clock = clock
        self._identity = identity
        self._fits, self._on_read, self._on_crash = fits, on_read, on_crash
        # protected by ``_changed``
        self._chunks: deque[_Chunk] = deque()
        self._readings: deque[_Reading] = deque()
        self._results: deque[SpilledRead | ChunkLost] = deque()
        self._is_stopping = False
        self._changed = threading.Condition()
        self._rests_until = 0.0
        self._tidy_at = -inf
        self._disk_since = inf  # when the thread began its present access to the disk
        self._models: dict[str, str] = {}  # digest of the model by the text of the bits
        self._has_new_files = False  # of the chunk that is being written
        self._log_limiter = LogRateLimiter()
        self.num_written = self.num_dropped = self.num_read = 0  # chunks
        self._thread = threading.Thread(target=self._run, name="spill", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """End the thread. Returns False if it is still busy after the grace time."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(0.0 if self._is_hung else grace_s)
        return not self._thread.is_alive()

    @property
    def _is_hung(self) -> bool:
        return self._clock.now() - self._disk_since >= _HUNG_S

    # --- called by the compute thread --------------------------------------------------------------------------------

    @property
    def accepts_chunk(self) -> bool:
        return len(self._chunks) < MAX_CHUNKS and self._clock.now() >= self._rests_until

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def write(self, action: act.SpillChunk, blocks: Sequence[KvData], *, is_last: bool = True) -> None:
        """Have some layers of a chunk written, which are the action's. ``is_last``: no layers of it follow."""
        with self._changed:
            self._chunks.append(_Chunk(action, tuple(blocks), is_last))
            self._changed.notify()

    def read(self, action: act.ReadSpilled) -> None:
        """Have chunks read."""
        if self._is_hung:
            self._warn("the disk does not answer")
            with self._changed:
                self._results.append(SpilledRead(action.ticket, action.sequence, (), is_last=True))
            self._on_read()
            return
        with self._changed:
            self._readings.append(_Reading(action))
            self._changed.notify()

    def stop_reading(self, ticket: int) -> None:
        """Read nothing more for this ticket."""
        with self._changed:
            self._readings = deque(reading for reading in self._readings if reading.action.ticket != ticket)
            results = [item for item in self._results if isinstance(item, ChunkLost) or item.ticket != ticket]
            self._results = deque(results)
            self._changed.notify()

    def take(self) -> SpilledRead | ChunkLost | None:
        """Return what was read next, or a chunk that could not be written; or None."""
        if not self._results:
            return None
        with self._changed:
            self._changed.notify()
            return self._results.popleft() if self._results else None

    def values(self) -> dict[str, float]:
        """Return counters for ``swarmctl stats``. May be called from any thread."""
        return {
            "spill_bytes": self._files.num_bytes,
            "spill_limit_bytes": self._files.limit_bytes,
            "spill_chunks_written": self.num_written,
            "spill_chunks_dropped": self.num_dropped,
            "spill_chunks_read": self.num_read,
            "spill_files_damaged": self._files.num_damaged,
            "spill_files_removed": self._files.num_removed,
        }

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with report_thread_errors(self._report_crash):
            while not self._is_stopping:
                if self._clock.now() >= self._tidy_at:
                    self.tidy()
                if not self.work():
                    with self._changed:
                        self._changed.wait_for(self._has_work, max(0.0, self._tidy_at - self._clock.now()))

    def _report_crash(self, error: BaseException) -> None:
        log.exception("spill_thread_died")
        self._on_crash(error)

    def tidy(self) -> None:
        """Read the folder, whose size other workers change, too, and remove what exceeds the limit."""
        self._tidy_at = self._clock.now() + _TIDY_S
        self._disk_since = self._clock.now()
        try:
            self._files.tidy()
        except OSError as error:
            self._warn(error.strerror or str(error))
        finally:
            self._disk_since = inf

    def work(self) -> bool:
        """Read or write one chunk. Return whether there was one."""
        with self._changed:
            reading = self._readings[0] if self._can_read else None
            chunk = self._chunks[0] if reading is None and self._chunks else None
        if reading is not None:
            self._read_next(reading)
        elif chunk is not None:
            is_written = self._write(chunk)
            with self._changed:
                self._chunks.popleft()
                if not is_written:
                    self._results.append(ChunkLost(chunk.action.sequence, chunk.action.start))
        return reading is not None or chunk is not None

    def _has_work(self) -> bool:
        return self._is_stopping or self._can_read or bool(self._chunks)

    @property
    def _can_read(self) -> bool:
        if not self._readings:
            return False
        layers = self._readings[0].action.layers
        num_bytes = CHUNK * sum(self._manifest.kv_bytes_per_token[layers.first : layers.stop])
        return len(self._results) < (MAX_CHUNKS if num_bytes <= AHEAD_BYTES else 1)

    def _read_next(self, reading: _Reading) -> None:
        action, number = reading.action, reading.num_read
        begin = action.start // CHUNK * CHUNK + number * CHUNK
        blocks = self._read_chunk(reading, action.names[number], begin)
        is_last = not blocks or number + 1 == len(action.names)
        result = SpilledRead(action.ticket, action.sequence, blocks, is_last)
        with self._changed:
            if reading not in self._readings:
                return  # stopped meanwhile
            reading.num_read += 1
            self.num_read += bool(blocks)
            if is_last:
                self._readings.remove(reading)
            self._results.append(result)
        self._on_read()

    def _read_chunk(self, reading: _Reading, name: str, begin_of_chunk: int) -> tuple[KvData, ...]:
        """Return a chunk's blocks from the action's start on; nothing if a layer is missing.

        If a layer is damaged, the others are read, too, so that all damaged ones are removed: a power cut tears several
        files, and each restart would find only one of them.
        """
        action = reading.action
        num_damaged, dtypes, begin = self._files.num_damaged, set(), 0
        sizes = self._manifest.kv_bytes_per_token[action.layers.first : action.layers.stop]
        joined: NDArray[np.generic] | None = None  # by block, layer after layer
        for layer, size in zip(range(action.layers.first, action.layers.stop), sizes, strict=True):
            with self._changed:
                if reading not in self._readings:
                    return ()  # stopped meanwhile
            self._disk_since = self._clock.now()
            found = self._files.read(self._file(action.bits, name, begin_of_chunk, layer))
            self._disk_since = inf
            if found is None and self._files.num_damaged == num_damaged:
                return ()
            if self._files.num_damaged > num_damaged:
                continue
            assert found is not None
            dtype, numbers = found
            if numbers.size % (CHUNK // BLOCK):
                return ()
            numbers = numbers.reshape(CHUNK // BLOCK, -1)
            if joined is None:
                joined = np.empty((CHUNK // BLOCK, numbers.shape[1] * sum(sizes) // size), numbers.dtype)
            dtypes.add(dtype)
            if len(dtypes) > 1 or begin + numbers.shape[1] > joined.shape[1]:
                return ()
            joined[:, begin : begin + numbers.shape[1]] = numbers
            begin += numbers.shape[1]
        if self._files.num_damaged > num_damaged or joined is None or begin < joined.shape[1]:
            return ()
        (dtype,) = dtypes
        starts = range(begin_of_chunk, begin_of_chunk + CHUNK, BLOCK)
        blocks = tuple(
            KvData(action.layers, start, start + BLOCK, dtype, numbers)
            for start, numbers in zip(starts, joined, strict=True)
            if start >= action.start
        )
        return blocks if all(map(self._fits, blocks)) else ()

    def _write(self, chunk: _Chunk) -> bool:
        """Write a chunk; return whether all of it is on the disk."""
        action, dtype, num_files = chunk.action, chunk.blocks[0].dtype, self._files.num_written
        try:
            for layer, numbers in self._split(chunk):
                self._disk_since = self._clock.now()
                is_there = self._files.write(self._file(action.bits, action.name, action.start, layer), dtype, numbers)
                self._disk_since = inf
                if not is_there:
                    self._rest("there is no space for it: worker.spill, or the disk's last twentieth")
                    return False
        except OSError as error:
            self._rest(error.strerror or str(error))
            return False
        finally:
            self._disk_since = inf
        self._has_new_files |= self._files.num_written > num_files
        if chunk.is_last:
            self.num_written += self._has_new_files
            self._has_new_files = False
        return True

    def _rest(self, reason: str) -> None:
        self.num_dropped += 1
        self._has_new_files = False
        self._rests_until = self._clock.now() + _REST_S
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if (left_out := self._log_limiter.take(self._clock.now())) is not None:
            log.warning("kv_not_spilled", reason=reason, left_out=left_out)

    def _split(self, chunk: _Chunk) -> list[tuple[int, NDArray[np.generic]]]:
        """Return the chunk's numbers for each layer, block after block."""
        layers = chunk.action.layers
        per_token = self._manifest.kv_bytes_per_token[layers.first : layers.stop]
        total, begin, parts = sum(per_token), 0, []
        for number, size in enumerate(per_token):
            flat = [data.numbers.reshape(-1) for data in chunk.blocks]
            own = [block[block.size * begin // total : block.size * (begin + size) // total] for block in flat]
            parts.append((layers.first + number, np.concatenate(own)))
            begin += size
        return parts

    def _file(self, bits: str, name: str, begin: int, layer: int) -> ChunkFile:
        if bits not in self._models:
            self._models[bits] = model_digest(self._manifest, self._identity, bits)
        return ChunkFile(self._models[bits], name, begin // CHUNK, layer)


def model_digest(manifest: Manifest, identity: str, bits: str) -> str:
    """Return a digest of all that decides the bits of keys and values, except the tokens. Names of models don't.

    ``identity``: see the executor's ``kv_identity``.
    """
    facts = msgspec.msgpack.encode(msgspec.structs.replace(manifest, name="model"))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((_FORMAT, facts, identity, bits)))


def open_spill_files(limit_bytes: int) -> SpillFiles | None:
    """Return the folder for keys and values; None if the settings give it no space. Then files of earlier settings
    are removed."""
    files = SpillFiles(cache_folder("kv"), limit_bytes)
    if limit_bytes:
        return files
    try:
        files.tidy()
    except OSError as error:
        log.warning("kv_not_removed", folder=str(cache_folder("kv")), reason=error.strerror or str(error))
    return None
