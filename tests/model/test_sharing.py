"""Sequences that begin alike share the pages of their prefix, and nothing of it shows but the memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import KvFull
from swarm.stage import native
from swarm.stage.attention import racks, shared_slots, sharing
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import round_up
from swarm.stage.attention.racks import KvShape
from swarm.wire.messages import LayerRange, Row

pytestmark = pytest.mark.skipif(not sharing.can_share(), reason="this system can't map one file at several addresses")

CPU = torch.device("cpu")
LAYERS = LayerRange(0, 3)
SHAPES = [KvShape(2, 64, 64), KvShape(1, 64, 32), KvShape(3, 16, 128)]
UNIT = 128  # positions that fill whole pages in every layer: 64 keys of 16 numbers are half a page
LIMIT = 1024


def numbers(count: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    total = sum(shape.numbers for shape in SHAPES) * count
    return torch.randn(total, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write(
    arena: KvArena, sequence: int, start: int, count: int, *, seed: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """As a pass does: first the positions are counted, then they are written."""
    arena.mark_used(Row(sequence, start, count, False))
    span, flat = (start, start + count), numbers(count, seed, dtype)
    arena.write_positions(sequence, LAYERS, span, flat, shapes=SHAPES, active=LAYERS)


def read(arena: KvArena, sequence: int, stop: int) -> torch.Tensor:
    return arena.read_positions(sequence, LAYERS, 0, stop)


def shared_with(arena: KvArena, num: int, *, position: int = 800, written: int = 900) -> None:
    """Open sequence 0, and ``num`` forks of it."""
    arena.open(0, LIMIT)
    write(arena, 0, 0, written, seed=1)
    for sequence in range(1, num + 1):
        arena.fork(sequence, 0, position, LIMIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [False, True])
def test_a_shared_prefix_has_the_bits_of_a_copy(dtype: torch.dtype, plain: bool) -> None:
    with native.disabled("to see torch's layout") if plain else nullcontext():
        arena = KvArena(CPU)
        arena.open(0, LIMIT)
        write(arena, 0, 0, 900, seed=1, dtype=dtype)
        before = read(arena, 0, 900)
        arena.fork(1, 0, 800, LIMIT)
        arena.fork(2, 0, 800, LIMIT, may_share=False)
        assert arena.shared_stop(1) >= 640  # not a copy
        assert arena.shared_stop(2) == 0
        assert torch.equal(read(arena, 1, 800), read(arena, 2, 800))
        assert torch.equal(read(arena, 0, 900), before)


def test_a_prefix_counts_once() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 8)
    assert arena.used == round_up(900) + 8 * (800 - 768)
    arena.release(0)
    assert arena.used == 768 + 8 * 32
    for sequence in range(1, 9):
        arena.release(sequence)
    assert arena.used == 0


def test_a_prefix_takes_memory_once() -> None:
    """Private and file pages behind the arena's addresses, as the kernel counts them in proportion to the mappings."""
    arena = KvArena(CPU)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 1024, seed=1)
    arena.fork(1, 0, 1024, LIMIT)
    read(arena, 1, 1024)
    before = _proportional_kib(arena)
    per_sequence = sum(shape.numbers for shape in SHAPES) * 2 * 1024 // 1024
    assert before >= per_sequence
    for sequence in range(2, 31):
        arena.fork(sequence, 0, 1024, LIMIT)
        read(arena, sequence, 1024)
    assert _proportional_kib(arena) - before < 2 * per_sequence  # 29 copies would take fifteen times as much


def _proportional_kib(arena: KvArena, name_of_count: str = "Pss:") -> int:
    """Return the memory behind the arena's addresses only: what else this process does must not count."""
    ranges = [
        range(tensor.data_ptr(), tensor.data_ptr() + len(pages))
        for rack in arena._memory.racks
        for buffer in rack.buffers.values()
        for tensor, pages in zip((buffer.keys, buffer.values), buffer.pages, strict=True)
    ]
    total, is_own = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *rest = line.split()
            if name == name_of_count:
                total += int(rest[0]) if is_own else 0
            elif not name.endswith(":"):
                start, stop = (int(address, 16) for address in name.split("-"))
                is_own = any(start < own.stop and own.start < stop for own in ranges)
    return total


def test_what_is_written_after_a_fork_shows_in_no_other_sequence() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 2)
    prefix = read(arena, 0, 800)
    for sequence in (0, 1, 2):
        write(arena, sequence, 900 if sequence == 0 else 800, 100, seed=10 + sequence)
    for sequence in (0, 1, 2):
        assert torch.equal(read(arena, sequence, 800), prefix)
    assert torch.equal(arena.read_positions(0, LAYERS, 900, 1000), numbers(100, 10))
    assert torch.equal(arena.read_positions(1, LAYERS, 800, 900), numbers(100, 11))
    assert torch.equal(arena.read_positions(2, LAYERS, 800, 900), numbers(100, 12))


@pytest.mark.parametrize("position", [0, 1, 300, 767])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_sequence_cut_below_its_fork_writes_for_itself_only(position: int, cut: int) -> None:
    arena = KvArena(CPU)
    shared_with(arena, 2)
    prefix = read(arena, 0, 800)
    arena.truncate(cut, position)
    write(arena, cut, position, 800 - position, seed=5)
    for sequence in {0, 1, 2} - {cut}:
        assert torch.equal(read(arena, sequence, 800), prefix)
    assert torch.equal(arena.read_positions(cut, LAYERS, position, 800), numbers(800 - position, 5))
    # what was cut counts as the sequence's own from then on
    others = 768 + 32 + 32 if cut == 0 else round_up(900) + 32
    assert arena.used == others + (round_up(900) if cut == 0 and position > 0 else 800)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_sequences_are_released_in_any_order(order: tuple[int, ...]) -> None:
    """A slot that is used again reads as zeros, whatever was mapped there."""
    arena, files = KvArena(CPU), _open_files()
    shared_with(arena, 2)
    prefix, left = read(arena, 0, 800), [0, 1, 2]
    for number, sequence in enumerate(order):
        arena.release(sequence)
        left.remove(sequence)
        for other in left:
            assert torch.equal(read(arena, other, 800), prefix)
        arena.open(10 + number, LIMIT)
        write(arena, 10 + number, 1000, 1, seed=3)
        assert not read(arena, 10 + number, 1000).any()
    assert arena.used == 3 * 1024
    assert _open_files() == files


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_fork_of_a_fork_shares_with_both() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 1)
    write(arena, 1, 800, 224, seed=2)
    arena.fork(4, 1, 1000, LIMIT)
    assert arena.shared_stop(4) == 768  # less than the least prefix follows, so it is copied
    arena.fork(2, 1, 1024, LIMIT)
    assert arena.shared_stop(2) == 1024
    assert torch.equal(read(arena, 4, 1000), read(arena, 1, 1000))
    arena.truncate(0, 500)
    write(arena, 0, 500, 500, seed=7)
    arena.fork(3, 0, 1000, LIMIT)
    assert torch.equal(read(arena, 3, 1000), read(arena, 0, 1000))
    assert torch.equal(read(arena, 2, 1024), read(arena, 1, 1024))


def test_what_a_shrunken_sequence_gave_up_reads_as_zeros() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 1)
    prefix = read(arena, 1, 800)
    arena.shrink(0, 384)
    arena._sequences[0].limit = LIMIT  # to look beyond
    after = arena.read_positions(0, LAYERS, 384, 1024)
    assert not after.any()
    assert torch.equal(read(arena, 1, 800), prefix)
    assert arena.used == 384 + 768 + 32


def _file_bytes(arena: KvArena) -> int:
    """Memory of the arena's file, of which only written pages count."""
    file = None if arena._shared._file is None else arena._shared._file()
    return 0 if file is None else os.fstat(file._file).st_blocks * 512


POSITION_BYTES = sum(shape.numbers for shape in SHAPES) * 2


def test_a_chunk_is_freed_with_its_last_holder() -> None:
    arena = KvArena(CPU)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 1024, seed=1)
    arena.fork(1, 0, 1024, LIMIT)
    arena.fork(2, 0, 300, LIMIT)
    prefix = read(arena, 2, 300)
    assert _file_bytes(arena) == 1024 * POSITION_BYTES
    arena.release(0)
    assert _file_bytes(arena) == 1024 * POSITION_BYTES
    arena.release(1)
    assert _file_bytes(arena) == 256 * POSITION_BYTES
    assert torch.equal(read(arena, 2, 300), prefix)
    assert arena.used == 320


def test_forks_share_alike_in_any_order() -> None:
    """Also if a short one comes before a long one."""
    for order in permutations((300, 800, 600)):
        arena = KvArena(CPU)
        arena.open(0, LIMIT)
        write(arena, 0, 0, 900, seed=1)
        before = read(arena, 0, 900)
        for position in order:
            arena.fork(position, 0, position, LIMIT)
        assert [arena.shared_stop(each) for each in (300, 600, 800)] == [256, 512, 768]
        assert _file_bytes(arena) == 768 * POSITION_BYTES
        for position in order:
            assert torch.equal(read(arena, position, 256), read(arena, 0, 256))
        assert torch.equal(read(arena, 0, 900), before)


@pytest.mark.parametrize("source", [0, 1])
def test_a_new_plan_counts_in_full_until_sequences_are_forked_again(source: int) -> None:
    """Its pages stay shared until then; a sequence that is forked again gets pages of its own first."""
    arena = KvArena(CPU)
    shared_with(arena, 2)
    before = [read(arena, sequence, 800) for sequence in range(3)]
    arena.start_sharing(384)
    assert arena.used == round_up(900) + 2 * 800
    assert _file_bytes(arena) == 768 * POSITION_BYTES
    arena.fork(5, source, 800, LIMIT)
    assert arena.shared_stop(5) == 768
    assert arena.used == round_up(900) + 2 * 800 + 32
    assert _file_bytes(arena) == 2 * 768 * POSITION_BYTES  # of the others, which count in full, and of these two
    for sequence in range(3):
        assert torch.equal(read(arena, sequence, 800), before[sequence])
    for sequence in {0, 1, 2} - {source}:
        arena.release(sequence)
    assert _file_bytes(arena) == 768 * POSITION_BYTES
    assert torch.equal(read(arena, 5, 800), before[source])


def test_a_plan_after_many_others_leaves_mappings_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = KvArena(CPU)
    shared_with(arena, 3)
    before = read(arena, 2, 800)
    monkeypatch.setattr(shared_slots, "max_ranges", lambda: 2 * 24)
    arena.start_sharing(256)
    assert sum(bool(held.place.mappings.runs) for held in arena._sequences.values()) == 2
    assert torch.equal(read(arena, 2, 800), before)


# --- prefixes that are shared over a change of plan -------------------------------------------------------------------

HELD = LayerRange(1, 2)  # the layer that stays while the others are computed again


def write_layers(arena: KvArena, sequence: int, start: int, stop: int) -> None:
    """A replay of the layers that are new writes what sequence 0 has."""
    arena.mark_used(Row(sequence, start, stop - start, False), is_replay=True)
    for layer, shape in enumerate(SHAPES):
        if layer != HELD.first:
            generator = torch.Generator().manual_seed(layer)
            flat = torch.randn(900 * shape.numbers, generator=generator).to(torch.bfloat16)
            spare = KvArena(CPU)
            spare.open(0, LIMIT)
            own = LayerRange(layer, layer + 1)
            spare.write_positions(0, own, (0, 900), flat, shapes=[shape], active=own)
            part = spare.read_positions(0, own, start, stop)
            arena.write_positions(sequence, own, (start, stop), part, shapes=[shape], active=LAYERS)


def test_sequences_that_stay_share_as_before() -> None:
    """Nothing moves, and the account is the same again."""
    arena = KvArena(CPU)
    shared_with(arena, 8)
    before = [read(arena, sequence, 800) for sequence in range(9)]
    used, num_bytes = arena.used, _file_bytes(arena)
    arena.keep_layers(LAYERS)
    arena.start_sharing(UNIT * 2)
    assert arena.used > used
    for sequence in range(1, 9):
        arena.share(sequence, 0, 768, is_mapped=True)
        arena.share(sequence, 0, 768, is_mapped=True)
    assert (arena.used, _file_bytes(arena)) == (used, num_bytes)
    assert all(torch.equal(read(arena, sequence, 800), before[sequence]) for sequence in range(9))
    arena.fork(9, 3, 800, LIMIT)
    assert torch.equal(read(arena, 9, 800), before[3])
    assert _file_bytes(arena) == num_bytes


def test_layers_that_are_new_are_computed_for_the_first_sequence_only() -> None:
    """The others map its pages, and have their own positions behind them. Memory is taken once."""
    arena = KvArena(CPU)
    shared_with(arena, 8)
    for sequence in range(9):
        write(arena, sequence, 800, 60, seed=20 + sequence)
    kept = [arena.read_positions(sequence, HELD, 0, 850) for sequence in range(9)]
    arena.keep_layers(HELD)
    arena.keep_layers(LAYERS)
    arena.start_sharing(UNIT * 2)
    for sequence in range(1, 9):
        arena.share(sequence, 0, 768, is_mapped=False)
    used = arena.used
    assert used < round_up(900) + 8 * 200
    write_layers(arena, 0, 0, 860)
    for sequence in range(1, 9):
        arena.share(sequence, 0, 768, is_mapped=True)
        write_layers(arena, sequence, 768, 860)
        arena.share(sequence, 0, 768, is_mapped=True)
    assert arena.used == used
    assert _file_bytes(arena) == 768 * POSITION_BYTES
    assert all(torch.equal(arena.read_positions(s, HELD, 0, 850), kept[s]) for s in range(9))
    for layer in (0, 2):
        parts = [arena.read_positions(sequence, LayerRange(layer, layer + 1), 0, 850) for sequence in range(9)]
        assert all(torch.equal(part, parts[0]) for part in parts)
        assert parts[0].any()
    for sequence in (0, 3, 1, 2, 4, 5, 6, 7, 8):
        arena.release(sequence)
    assert arena.used == 0


def test_a_replay_over_shared_pages_takes_no_memory() -> None:
    """It writes what is there, in pages of its own; they are given back after each chunk."""
    arena = KvArena(CPU)
    shared_with(arena, 2)
    before = [read(arena, sequence, 900 if sequence == 0 else 800) for sequence in range(3)]
    kib = _proportional_kib(arena, "Anonymous:")
    for start in range(0, 800, 200):
        row = Row(0, start, 200, False)
        arena.mark_used(row, is_replay=True)
        for layer in range(LAYERS.first, LAYERS.stop):
            region = arena.region(0, layer)
            assert region is not None
            region.write(start, *region.read(start, start + 200))
        assert _proportional_kib(arena, "Anonymous:") > kib
        arena.end_replay(row)
        assert _proportional_kib(arena, "Anonymous:") == kib
    assert all(
        torch.equal(read(arena, s, len_), b) for s, len_, b in zip(range(3), (900, 800, 800), before, strict=True)
    )
    arena.release(1)
    arena.release(2)
    assert torch.equal(read(arena, 0, 900), before[0])


def test_a_sequence_that_leads_others_can_share_itself() -> None:
    """Sequence 2 shares more with sequence 1 than that with sequence 0."""
    arena = KvArena(CPU)
    arena.start_sharing(UNIT)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 900, seed=1)
    arena.fork(1, 0, 400, LIMIT)
    write(arena, 1, 400, 500, seed=2)
    arena.fork(2, 1, 800, LIMIT)
    before = [read(arena, sequence, 800) for sequence in range(3)]
    used = arena.used
    arena.keep_layers(LAYERS)
    arena.start_sharing(UNIT)
    arena.share(1, 0, 384, is_mapped=True)
    arena.share(2, 1, 768, is_mapped=True)
    assert arena.used == used
    assert all(torch.equal(read(arena, sequence, 800), before[sequence]) for sequence in range(3))
    arena.release(1)
    assert torch.equal(read(arena, 2, 800), before[2])


@pytest.mark.parametrize("limit", ["mappings", "ranges"])
def test_a_prefix_that_cannot_be_mapped_again_is_reported(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    arena = KvArena(CPU)
    shared_with(arena, 2)
    before = read(arena, 2, 800)
    arena.keep_layers(HELD)
    arena.keep_layers(LAYERS)
    arena.start_sharing(UNIT * 2)
    write_layers(arena, 0, 0, 860)
    if limit == "ranges":
        monkeypatch.setattr(shared_slots, "max_ranges", lambda: 1)
    else:
        monkeypatch.setattr(sharing, "map_pages", refuse)
    with pytest.raises(KvFull, match="sequence 1 can't share the first 768 positions with 0"):
        arena.share(1, 0, 768, is_mapped=True)
    monkeypatch.undo()
    assert not arena.can_share
    arena.release(1)
    held = HELD.first
    assert torch.equal(
        arena.read_positions(2, HELD, 0, 800), before[_offset(held) : _offset(held) + 800 * SHAPES[held].numbers]
    )


def _offset(layer: int) -> int:
    return sum(shape.numbers for shape in SHAPES[:layer]) * 800


def test_layers_that_leave_give_back_their_part_of_the_file() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 2)
    arena.keep_layers(LayerRange(1, 2))
    assert _file_bytes(arena) == 768 * SHAPES[1].numbers * 2


def test_layers_that_come_and_go_leave_the_others() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 2)
    one = LayerRange(1, 2)
    before = arena.read_positions(2, one, 0, 800)
    arena.keep_layers(one)
    arena.release(0)
    assert torch.equal(arena.read_positions(1, one, 0, 800), before)
    assert torch.equal(arena.read_positions(2, one, 0, 800), before)
    assert arena.used == 2 * 800  # nothing counts as shared, since a layer that is computed again is not
    arena.fork(3, 2, 800, LIMIT)
    assert torch.equal(arena.read_positions(3, one, 0, 800), before)
    assert arena.used == 2 * 800 + 32


def test_copies_of_other_layers_are_not_shared() -> None:
    arena, other = KvArena(CPU), LayerRange(3, 4)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 900, seed=1)
    flat = torch.ones(SHAPES[0].numbers * 640, dtype=torch.bfloat16)
    arena.write_positions(0, other, (0, 640), flat, shapes=SHAPES[:1], active=LAYERS)
    arena.fork(1, 0, 800, LIMIT)
    arena.write_positions(1, other, (0, 640), -flat, shapes=SHAPES[:1], active=LAYERS)
    assert arena.shared_stop(1) == 768  # the broker counts on it, whatever copies arrive
    assert torch.equal(arena.read_positions(0, other, 0, 640), flat)
    assert torch.equal(arena.read_positions(1, other, 0, 640), -flat)
    arena.drop_copies(1, other)
    assert torch.equal(arena.read_positions(0, other, 0, 640), flat)
    assert torch.equal(read(arena, 1, 800), read(arena, 0, 800))


def test_a_reset_arena_holds_no_file() -> None:
    arena, files = KvArena(CPU), _open_files()
    shared_with(arena, 3)
    assert _open_files() == files + 1
    arena.reset()
    assert _open_files() == files
    assert arena.used == 0


@pytest.mark.parametrize("limit", ["files", "mappings", "ranges"])
def test_where_nothing_can_be_mapped_prefixes_are_copied(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    if limit == "files":
        monkeypatch.setattr(os, "memfd_create", refuse)
    elif limit == "mappings":
        monkeypatch.setattr(sharing, "map_pages", refuse)
    else:
        monkeypatch.setattr(shared_slots, "max_ranges", lambda: 30)
    arena = KvArena(CPU)
    shared_with(arena, 2)
    assert torch.equal(read(arena, 1, 800), read(arena, 0, 800))
    assert arena.used == round_up(900) + 2 * 800
    assert arena.can_share is (limit == "ranges")  # after a refusal, the next plan counts every sequence in full


@pytest.mark.parametrize("limit", ["files", "mappings", "ranges"])
def test_what_the_plan_counts_as_shared_is_never_copied(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would take memory that the broker does not count. The next plan counts every sequence in full."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    arena = KvArena(CPU)
    arena.start_sharing(UNIT * 2)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 900, seed=1)
    before = read(arena, 0, 900)
    if limit == "ranges":
        monkeypatch.setattr(shared_slots, "max_ranges", lambda: 1)
    else:
        monkeypatch.setattr(*((os, "memfd_create") if limit == "files" else (sharing, "map_pages")), refuse)
    for sequence in (1, 2):
        with pytest.raises(KvFull, match=f"sequence {sequence} can't share the first 768 positions of 0"):
            arena.fork(sequence, 0, 800, LIMIT)
    assert (len(arena), arena.used, arena.can_share) == (1, round_up(900), False)
    arena.fork(3, 0, 255, LIMIT)  # the plan counts nothing of it as shared
    arena.start_sharing(0)
    arena.fork(1, 0, 800, LIMIT)
    assert arena.used == round_up(900) + 256 + 800
    assert torch.equal(read(arena, 0, 900), before)
    assert torch.equal(read(arena, 1, 800), read(arena, 0, 800))


def test_pages_that_could_not_all_be_mapped_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has its keys and values in pages of its own again."""
    arena = KvArena(CPU)
    arena.open(0, LIMIT)
    write(arena, 0, 0, 900, seed=1)
    before, file, num_calls = read(arena, 0, 900), sharing.PageFile(), 0
    monkeypatch.setattr(shared_slots.SharedSlots, "_open_file", lambda _: file)
    map_pages = sharing.map_pages

    def fail_once(*args: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise OSError(12, "Cannot allocate memory")
        map_pages(*args)

    monkeypatch.setattr(sharing, "map_pages", fail_once)
    arena.fork(1, 0, 800, LIMIT)
    assert num_calls > 5
    assert os.fstat(file._file).st_blocks == 0
    assert torch.equal(read(arena, 0, 900), before)
    assert torch.equal(read(arena, 1, 800), read(arena, 0, 800))
    assert not arena._sequences[0].place.mappings.runs
    monkeypatch.undo()  # it holds the file


@pytest.mark.parametrize("does", ["write", "truncate", "shrink", "plan", "release", "cut"])
def test_a_system_that_maps_nothing_more_costs_memory_only(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences keep their shared pages, which are private, and their bytes; a slot that can't be cleared is not used
    again. It is counted, and the next plan shares nothing."""
    arena = KvArena(CPU)
    shared_with(arena, 2)
    before, beginning = {sequence: read(arena, sequence, 800) for sequence in (0, 1, 2)}, read(arena, 1, 100)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(sharing, "map_pages", refuse)
    monkeypatch.setattr(racks, "map_pages", refuse)
    slot = arena._sequences[1].place.slot
    if does == "write":
        arena.mark_used(Row(1, 100, 4, False))
        write(arena, 1, 100, 4, seed=9)
    elif does == "truncate":
        arena.truncate(1, 100)
    elif does == "cut":
        arena.truncate(1, 0)
    elif does == "shrink":
        arena.shrink(1, 100)
    elif does == "plan":
        monkeypatch.setattr(shared_slots, "max_ranges", lambda: 0)
        arena.start_sharing(0)
    else:
        arena.release(1)
        arena.open(7, LIMIT)
        assert arena._sequences[7].place.slot != slot
    assert arena.num_pages_kept > 0
    assert not arena.can_share
    assert all(torch.equal(read(arena, sequence, 800), before[sequence]) for sequence in (0, 2))
    if does in ("truncate", "plan"):
        assert torch.equal(read(arena, 1, 100), beginning)
    for sequence in (0, 1, 2):
        arena.release(sequence)
    assert arena.used == 0


def test_a_process_that_is_forked_writes_for_itself_only() -> None:
    arena = KvArena(CPU)
    shared_with(arena, 1)
    before = read(arena, 1, 800)
    part, _ = arena._sequences[1].place.rack.buffers[0].parts(arena._sequences[1].place.slot, 0, 768)
    child = os.fork()
    if child == 0:  # torch's threads are missing here
        ctypes.memset(part.address, 0, part.num_bytes)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(read(arena, 1, 800), before)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["fork", "fork", "fork", "write", "truncate", "shrink", "release", "plan"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, LIMIT),
    ),
    max_size=25,
)


@given(MOVES)
@settings(max_examples=60, deadline=None)
def test_an_arena_that_shares_holds_what_one_that_copies_holds(moves: list[tuple[str, int, int, int]]) -> None:
    """Whatever is done in whatever order; and it never counts more, or less than nothing."""
    sharing_arena, copying = KvArena(CPU), KvArena(CPU)
    ends: dict[int, int] = {}
    for number, (move, sequence, other, position) in enumerate(moves):
        if move == "fork" and other in ends and other != sequence:
            stop = min(position, ends[other])
            sharing_arena.fork(sequence, other, stop, LIMIT)
            copying.fork(sequence, other, stop, LIMIT, may_share=False)
            ends[sequence] = stop
        for arena in (sharing_arena, copying):
            _apply(arena, move, sequence, position, end=ends.get(sequence), seed=number)
        if move == "release":
            ends.pop(sequence, None)
        elif move == "write":
            ends[sequence] = LIMIT if sequence not in ends else _limit(sharing_arena, sequence)
        elif move in ("truncate", "shrink") and sequence in ends:
            ends[sequence] = min(ends[sequence], position)
        if move == "plan":
            sharing_arena.start_sharing(position // UNIT * UNIT)
        assert 0 <= sharing_arena.used <= copying.used
        assert _file_bytes(sharing_arena) == _mapped_bytes(sharing_arena) <= sharing_arena.used * POSITION_BYTES
        for held, stop in ends.items():
            assert (stop == 0) or torch.equal(read(sharing_arena, held, stop), read(copying, held, stop))
    for held in list(ends):
        sharing_arena.release(held)
    assert sharing_arena.used == 0


def _mapped_bytes(arena: KvArena) -> int:
    """Memory of the chunks that are mapped over at least one slot."""
    runs = [run for held in arena._sequences.values() for run in held.place.mappings.runs]
    chunks = {(pages, at) for pages, stop in runs for at in range(pages.start, stop, pages.unit)}
    return sum(pages.unit for pages, _ in chunks) * POSITION_BYTES


def _limit(arena: KvArena, sequence: int) -> int:
    return arena._sequences[sequence].limit


def _apply(arena: KvArena, move: str, sequence: int, position: int, *, end: int | None, seed: int) -> None:
    if move == "write":
        if end is None:
            arena.open(sequence, LIMIT)
        begin = end or 0
        if begin < _limit(arena, sequence):
            write(arena, sequence, begin, _limit(arena, sequence) - begin, seed=seed)
    elif move == "truncate" and end is not None:
        arena.truncate(sequence, min(position, end))
    elif move == "shrink" and end is not None:
        arena.shrink(sequence, position)
    elif move == "release":
        arena.release(sequence)


@pytest.fixture(autouse=True)
def _no_file_stays() -> Iterator[None]:
    files = _open_files()
    yield
    assert _open_files() == files
