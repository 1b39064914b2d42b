"""Memory that is reserved for chunks on their way to the disk and back."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from swarm.stage import actions as act
from swarm.stage.actions import CHUNK
from swarm.stage.events import SpilledRead
from swarm.stage.executor import KvData
from swarm.stage.shell import spill_memory, spill_moves, spill_thread
from swarm.stage.shell.spill_files import SpillFiles
from swarm.stage.shell.spill_memory import buffer_bytes, reserve_bytes
from swarm.stage.shell.spill_moves import SpillMoves
from swarm.stage.shell.spill_thread import SpillThread
from swarm.testing import ManualClock, fake_manifest
from swarm.wire.messages import BLOCK, LayerRange, Manifest

KIB, MIB = 1 << 10, 1 << 20


def model(*kv_bytes: int, layer_bytes: int = 0) -> Manifest:
    manifest = fake_manifest(len(kv_bytes))
    return msgspec.structs.replace(
        manifest, kv_bytes_per_token=kv_bytes, layer_bytes=(layer_bytes,) * len(kv_bytes), embed_bytes=0, head_bytes=0
    )


@dataclass
class SlowDevice:
    """An executor whose blocks are zeros. Storing a piece takes longer than a turn."""

    manifest: Manifest
    clock: ManualClock
    pieces: list[int] = field(default_factory=list)

    def read_kv(self, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        size = sum(self.manifest.kv_bytes_per_token[layers.first : layers.stop]) * (stop - start)
        return KvData(layers, start, stop, "bfloat16", np.zeros(size // 2, np.uint16))

    def write_kv(self, sequence: int, limit: int, data: KvData) -> None:
        self.clock.advance(2 * spill_moves.PART_S)
        self.pieces.append(data.start)


def write(moves: SpillMoves, chunk: act.SpillChunk) -> None:
    """The disk's thread works whenever its queue is full, and in the end."""
    is_whole = False
    while not is_whole:
        while not moves.thread.accepts_chunk:
            assert moves.thread.work()
        is_whole = moves.spill(chunk).is_whole
    while moves.thread.work():
        pass


@pytest.mark.parametrize(
    ("sizes", "ahead_bytes", "unit_bytes"),
    [
        pytest.param((KIB,) * 4, 32 * MIB, 8 * MIB, id="a small chunk"),
        pytest.param((KIB,) * 32, 32 * MIB, MIB, id="read ahead, written in units"),
        pytest.param((KIB,) * 32, MIB, MIB, id="a large chunk"),
        pytest.param((KIB, 12 * KIB, KIB), MIB, 512 * KIB, id="a large layer"),
    ],
)
def test_no_more_is_in_memory_than_is_reserved(
    sizes: tuple[int, ...], ahead_bytes: int, unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While chunks wait to be written, others are read, and one of them is stored."""
    for module in (spill_thread, spill_memory):
        monkeypatch.setattr(module, "AHEAD_BYTES", ahead_bytes)
    for module in (spill_moves, spill_memory):
        monkeypatch.setattr(module, "UNIT_BYTES", unit_bytes)
    manifest, clock = model(*sizes), ManualClock(100.0)
    files = SpillFiles(tmp_path / "kv", 1 << 30)
    nothing: Any = lambda *_: True  # noqa: E731
    thread = SpillThread(files, manifest, clock, identity="", fits=nothing, on_read=nothing, on_crash=nothing)
    device: Any = SlowDevice(manifest, clock)
    moves, layers = SpillMoves(device, thread, clock), LayerRange(0, len(sizes))
    names = tuple(f"{number:040x}" for number in range(4))
    chunks = [act.SpillChunk(1, layers, n * CHUNK, (n + 1) * CHUNK, name, "b") for n, name in enumerate(names)]
    tracemalloc.start()
    try:
        for chunk in chunks:
            write(moves, chunk)
        assert thread.num_written == 4
        others = (replace(chunk, sequence=2, name=f"{n + 9:040x}") for n, chunk in enumerate(chunks))
        waiting = next(others)
        while thread.accepts_chunk:  # until the queue is full
            if moves.spill(waiting).is_whole:
                waiting = next(others)
        thread.read(act.ReadSpilled(7, 3, layers, 0, 4 * CHUNK, names, "b"))
        while thread._can_read:
            thread.work()
        for _ in names[1:]:
            event = moves.next_event()
            assert isinstance(event, SpilledRead)
            moves.store(act.StoreSpilled(7, 3, 2048, event.blocks))
            del event
            assert moves.next_event() is None, "it stores the first piece"
            while thread._can_read:
                thread.work()
            while moves.is_storing:
                moves.next_event()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(device.pieces) == set(range(0, 3 * CHUNK, BLOCK))
    reserved = buffer_bytes(CHUNK * sum(sizes), CHUNK * max(sizes))
    assert reserved / 2 < peak < reserved + 256 * KIB, "which Python's own objects take"


def test_the_largest_stage_that_fits_decides() -> None:
    """Others load the rest of the layers."""
    manifest = model(KIB, KIB, 4 * KIB, KIB, layer_bytes=100)
    whole, two, one = (buffer_bytes(CHUNK * size * KIB, CHUNK * 4 * KIB) for size in (7, 5, 4))
    assert whole > two > one
    found = [reserve_bytes(manifest, limit) for limit in (1000, 400, 299, 200, 100)]
    assert found == [whole, whole, two, two, one]
    assert reserve_bytes(manifest, 99) == 0


def test_a_chunk_of_a_large_model_is_reserved_twice() -> None:
    """32 layers with plain heads of 4,096 numbers: 128 MiB in a chunk."""
    manifest = model(*(16 * KIB,) * 32)
    assert 256 * MIB < reserve_bytes(manifest, 1 << 40) < 300 * MIB
