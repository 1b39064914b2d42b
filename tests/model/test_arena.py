"""What keys and values take of a device other than a CPU, shown on one that only reckons: torch's ``meta``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import CELL, round_up
from swarm.stage.engine import torch_executor
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import MANY, nothing

HEADS, SIZE, LAYERS = 2, 16, 3
PER_POSITION = 2 * HEADS * SIZE * 2 * LAYERS  # bytes of keys and values in bfloat16
FAKE = torch.device("meta")


def some(count: int) -> torch.Tensor:
    return torch.zeros(HEADS, count, SIZE, dtype=torch.bfloat16, device=FAKE)


def write(arena: KvArena, sequence: int, start: int, count: int) -> None:
    """As a pass does: first it is counted, then each layer writes."""
    arena.mark_used(Row(sequence, start, count, False))
    for layer in range(LAYERS):
        arena.ensure_region(sequence, layer, some(count), some(count)).write(start, some(count), some(count))


def test_what_counts_is_what_is_allocated() -> None:
    """Eight sequences of 1,100 positions: 1,152 each, and not a byte before they are written."""
    arena = KvArena(FAKE)
    for sequence in range(8):
        arena.open(sequence, 4000)
    assert (arena.used, arena.allocated_bytes) == (0, 0)
    for sequence in range(8):
        write(arena, sequence, 0, 1100)
    assert arena.used == 8 * 1152
    assert arena.allocated_bytes == arena.used * PER_POSITION


def test_a_sequence_that_is_made_shorter_gives_its_memory_back() -> None:
    """As one whose beginning is kept for others; and one that ended gives back all."""
    arena = KvArena(FAKE)
    arena.open(1, 2000)
    write(arena, 1, 0, 1100)
    arena.shrink(1, 64)
    assert (arena.used, arena.allocated_bytes) == (CELL, CELL * PER_POSITION)
    arena.release(1)
    assert (arena.used, arena.allocated_bytes) == (0, 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "write", "shrink", "cut", "fork", "release"]), st.integers(0, 3), st.integers(1, 900)
    )
)


@given(MOVES)
def test_counting_and_allocation_never_part(moves: list[tuple[str, int, int]]) -> None:
    """Whatever is done in whatever order; and never more than one cell beyond the blocks that are filled."""
    arena, held = KvArena(FAKE), dict[int, tuple[int, int]]()  # limit, written
    for move, sequence, size in moves:
        if move == "open":
            arena.open(sequence, size)
            held[sequence] = size, 0
        elif move == "release":
            arena.release(sequence)
            held.pop(sequence, None)
        elif sequence in held:
            limit, written = held[sequence]
            if move == "write":
                count = max(1, min(size, limit - written))
                write(arena, sequence, limit - count if written >= limit else written, count)
                held[sequence] = limit, min(limit, max(written, written + count))
            elif move == "shrink" and size <= limit:
                arena.shrink(sequence, size)
                held[sequence] = size, min(size, written)
            elif move == "cut":
                arena.truncate(sequence, 0)
                held[sequence] = limit, 0
            elif move == "fork" and written:
                arena.fork(sequence + 4, sequence, written, limit)
                held[sequence + 4] = limit, written
        assert arena.allocated_bytes == arena.used * PER_POSITION
        assert arena.used <= sum(round_up(written) + arena.wasted for _, written in held.values())


def test_by_default_a_worker_takes_what_its_device_has_free(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the machine has free, which is another memory; and it promises no more positions than there will be,
    whatever each sequence takes beyond its blocks."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 80 << 30))
    assert torch_executor.free_memory(torch.device("cuda")) == 5 << 30
    with monkeypatch.context() as fake:
        fake.setattr(torch_executor, "free_memory", lambda device: 77 << 20)
        assert TorchExecutor(str(llama), dtype="float32").memory_bytes == 77 << 20
    executor = TorchExecutor(str(llama), dtype="float32", memory_limit=MANY)
    whole = LayerRange(0, 8)
    plain = executor.prepare(whole, (), 8, nothing).kv_tokens
    executor._arena = KvArena(FAKE)
    assert executor.prepare(whole, (), 8, nothing).kv_tokens == plain - 8 * (CELL - 32)
