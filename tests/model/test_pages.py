"""The pool of pages: what a sequence stored is what is read, whatever others do, and nothing more is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import IllegalMove, KvFull
from swarm.stage.attention import function
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans, round_up
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.attention.pages import PAGE, PagePool
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.attention.racks import KvShape
from swarm.wire.messages import LayerRange, Row
from tests import fake_device

OWN, COPIED = LayerRange(0, 2), LayerRange(2, 3)
SHAPES = (KvShape(2, 3, 5), KvShape(1, 4, 0), KvShape(2, 2, 2))  # the second has latents
DEVICE = fake_device.install()


def page_bytes(layer: int) -> int:
    return SHAPES[layer].numbers * PAGE * 4


@dataclass
class Expected:
    """A sequence as it should be: what each layer has of the positions that were written."""

    limit: int
    numbers: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(shape.numbers, 0) for shape in SHAPES])
    used: int = 0  # pages in layers in use
    copied: int = 0  # pages in the layer of copies

    @property
    def written(self) -> int:
        return self.numbers[0].shape[1]

    def set(self, layer: int, start: int, numbers: torch.Tensor) -> None:
        self.numbers[layer] = torch.cat((self.numbers[layer][:, :start], numbers), 1)


class Model:
    """An arena on the fake device, and what it should hold."""

    def __init__(self) -> None:
        self.arena = KvArena(DEVICE)
        self.arena.keep_layers(OWN, {2})
        self.held: dict[int, Expected] = {}
        self._values = count()

    def write(self, sequence: int, layers: LayerRange, start: int, num: int) -> None:
        """Write positions as they come from another machine."""
        expected = self.held[sequence]
        value = float(next(self._values))
        parts = [
            torch.arange(shape.numbers * num).view(shape.numbers, num) % 97 + value
            for shape in SHAPES[layers.first : layers.stop]
        ]
        flat = torch.cat([_to_flat(SHAPES[layers.first + n], part) for n, part in enumerate(parts)])
        shapes = list(SHAPES[layers.first : layers.stop])
        span = (start, start + num)
        self.arena.write_positions(sequence, layers, span, flat.to(DEVICE), shapes=shapes, active=OWN)
        for layer, part in enumerate(parts, layers.first):
            expected.set(layer, start, part)
        pages = -(-(start + num) // PAGE)
        if layers == OWN:
            expected.used = max(expected.used, pages)
        else:
            expected.copied = max(expected.copied, pages)

    def check(self) -> None:
        arena, num_bytes = self.arena, 0
        assert arena.used == sum(each.used for each in self.held.values()) * PAGE
        assert arena.copied[2] == sum(each.copied for each in self.held.values()) * PAGE
        for sequence, expected in self.held.items():
            num_bytes += expected.used * (page_bytes(0) + page_bytes(1)) + expected.copied * page_bytes(2)
            for layer, numbers in enumerate(expected.numbers):
                if numbers.shape[1]:
                    read = arena.read_positions(sequence, LayerRange(layer, layer + 1), 0, numbers.shape[1])
                    assert torch.equal(read.cpu(), _to_flat(SHAPES[layer], numbers)), (sequence, layer)
        assert arena.allocated_bytes == num_bytes
        pool = arena.pool
        assert pool is not None
        assert pool.num_used == sum(max(each.used, each.copied) for each in self.held.values())
        taken = [page for sequence in self.held for page in arena.pages(sequence)]
        assert len(set(taken)) == len(taken)
        addresses = pool.addresses(DEVICE).cpu()
        for layer in pool.layers.values():
            for number, page in layer.pages.items():
                assert addresses[layer.row, number] == page.data_ptr()


def _to_flat(shape: KvShape, numbers: torch.Tensor) -> torch.Tensor:
    """Return a layer's numbers ``[numbers of a position, positions]`` in the form of transfers."""
    num_keys = shape.heads * shape.key_size
    return torch.cat(
        [
            part.view(shape.heads, size, -1).transpose(1, 2).flatten()
            for part, size in ((numbers[:num_keys], shape.key_size), (numbers[num_keys:], shape.value_size))
            if size
        ]
    )


def _open(model: Model, sequence: int, size: int) -> None:
    model.arena.open(sequence, size)
    model.held[sequence] = Expected(round_up(size))


def _write(model: Model, sequence: int, size: int) -> None:
    held = model.held[sequence]
    num = min(size, held.limit - held.written)
    if num > 0:
        model.write(sequence, OWN, held.written, num)


def _copy(model: Model, sequence: int, size: int) -> None:
    held = model.held[sequence]
    start = held.numbers[2].shape[1]
    num = min(size, held.limit - start)
    if num > 0:
        model.write(sequence, COPIED, start, num)


def _drop_copies(model: Model, sequence: int, _: int) -> None:
    model.arena.drop_copies(sequence, COPIED)
    model.held[sequence].copied, model.held[sequence].numbers[2] = 0, torch.empty(SHAPES[2].numbers, 0)


def _cut(model: Model, sequence: int, size: int) -> None:
    held = model.held[sequence]
    position = size % (held.written + 1)
    model.arena.truncate(sequence, position)
    if position:
        for layer in (0, 1):
            held.numbers[layer] = held.numbers[layer][:, :position]
    else:
        model.held[sequence] = Expected(held.limit)


def _shrink(model: Model, sequence: int, size: int) -> None:
    held, limit = model.held[sequence], round_up(min(size, model.held[sequence].limit))
    model.arena.shrink(sequence, limit)
    held.limit, held.numbers = limit, [part[:, :limit] for part in held.numbers]
    held.used, held.copied = (min(num, -(-limit // PAGE)) for num in (held.used, held.copied))


def _fork(model: Model, sequence: int, size: int) -> None:
    source = model.held[sequence]
    position = size % (source.written + 1)
    if position:
        model.arena.fork(sequence + 4, sequence, position, source.limit)
        model.held[sequence + 4] = Expected(source.limit, used=-(-position // PAGE))
        for layer in (0, 1):
            model.held[sequence + 4].set(layer, 0, source.numbers[layer][:, :position])


def _release(model: Model, sequence: int, _: int) -> None:
    model.arena.release(sequence)
    del model.held[sequence]


MOVES: dict[str, Callable[[Model, int, int], None]] = {
    "open": _open,
    "write": _write,
    "copy": _copy,
    "drop copies": _drop_copies,
    "cut": _cut,
    "shrink": _shrink,
    "fork": _fork,
    "release": _release,
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*MOVES, "write", "fork"]), st.integers(0, 3), st.integers(1, 400), st.booleans()),
    max_size=25,
)


@settings(max_examples=60)
@given(STEPS)
def test_whatever_is_done_in_whatever_order(steps: list[tuple[str, int, int, bool]]) -> None:
    """Also where memory ends: what failed has changed nothing, and a fork that failed is not open."""
    model = Model()
    for name, sequence, size, is_full in steps:
        if sequence not in model.held and name != "open":
            continue
        if is_full and name in ("write", "copy", "fork"):
            forked = name == "fork" and sequence + 4 in model.held  # opening it again releases it first
            fake_device.memory.limit = fake_device.memory.used + 4 * page_bytes(0) // PAGE
            with suppress(torch.OutOfMemoryError, KvFull):
                MOVES[name](model, sequence, size)
            fake_device.memory.limit = None
            if forked and sequence + 4 not in model.arena:
                del model.held[sequence + 4]
        else:
            MOVES[name](model, sequence, size)
        model.check()
    for sequence in list(model.held):
        model.arena.release(sequence)
    assert (model.arena.allocated_bytes, model.arena.used, model.arena.copied.total()) == (0, 0, 0)


def test_layers_come_and_go() -> None:
    """A layer that is taken over has the copy, and memory for all positions in use; one that is given up has none."""
    model = Model()
    _open(model, 0, 600)
    _write(model, 0, 300)
    _copy(model, 0, 100)
    model.check()
    before = model.arena.read_positions(0, COPIED, 0, 100)
    model.arena.keep_layers(LayerRange(1, 3))
    assert model.arena.allocated_bytes == 3 * (page_bytes(1) + page_bytes(2))
    assert (model.arena.used, model.arena.copied.total()) == (3 * PAGE, 0)
    assert torch.equal(model.arena.read_positions(0, COPIED, 0, 100).cpu(), before.cpu())
    with pytest.raises(IllegalMove, match="nothing of sequence 0 is stored"):
        model.arena.read_positions(0, OWN, 0, 100)
    model.arena.open(1, 600)
    model.arena.mark_used(Row(1, 0, 200, False))  # memory is allocated before a step, not in its layers
    assert model.arena.allocated_bytes == 5 * (page_bytes(1) + page_bytes(2))


def test_layers_taken_over_without_memory_can_be_kept_again() -> None:
    """The copy of one sequence is longer than what it has of other layers, that of the next one is shorter."""
    model = Model()
    for sequence, (own, copied) in enumerate(((100, 300), (300, 100))):
        _open(model, sequence, 600)
        _write(model, sequence, own)
        _copy(model, sequence, copied)
    for missing in range(1, 4):
        fake_device.memory.limit = fake_device.memory.used + missing * page_bytes(1)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                model.arena.keep_layers(LayerRange(0, 3))
        finally:
            fake_device.memory.limit = None
    model.arena.keep_layers(LayerRange(0, 3))
    assert (model.arena.used, model.arena.copied.total()) == (6 * PAGE, 0)
    assert model.arena.allocated_bytes == 6 * sum(page_bytes(layer) for layer in range(3))


def test_addresses_where_a_layer_has_no_pages_any_more() -> None:
    model = Model()
    _open(model, 0, 600)
    _copy(model, 0, 100)
    _drop_copies(model, 0, 0)
    _write(model, 0, 100)
    model.check()


def test_only_new_pages_are_added_to_the_table_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = Model(), []
    _open(model, 0, 4000)
    _write(model, 0, 3000)
    model.check()

    def data_ptr(page: fake_device.FakeTensor) -> int:
        read.append(page)
        return page.inner.data_ptr()

    monkeypatch.setattr(fake_device.FakeTensor, "data_ptr", data_ptr)
    _write(model, 0, PAGE)
    assert model.arena.pool is not None
    model.arena.pool.addresses(DEVICE)
    assert len(read) == len(OWN)


def test_memory_that_ends_in_the_middle_of_a_page_s_layers() -> None:
    """One layer has its page, the next gets none: both are given back, and the sequence goes on."""
    model = Model()
    _open(model, 0, 600)
    _write(model, 0, 100)
    fake_device.memory.limit = fake_device.memory.used + page_bytes(0) + page_bytes(1) // 2
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model.arena.mark_used(Row(0, 100, 100, False))
        model.check()
    finally:
        fake_device.memory.limit = None
    _write(model, 0, 100)
    model.check()


def attend(arena: KvArena, rows: list[Row], parts: list[torch.Tensor], num_proposed: int = 0) -> torch.Tensor:
    for row in rows:
        arena.mark_used(row)
    spans = tuple(layout_spans(rows, {0: num_proposed}))
    with use_pass(ForwardPass(arena, LayerRange(0, 1), spans)):
        query, key, value = parts
        return function.attend_rows(0, query, key, value, AttentionOptions(0.25, None, None, None))


@pytest.fixture
def pooled() -> KvArena:
    """A pool in memory that tests can look into."""
    arena = KvArena(torch.device("cpu"))
    arena._memory = PagePool()
    for sequence in (0, 1):
        arena.open(sequence, 300)
    return arena


def random_parts(num: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randn(num, heads, 16, generator=chance) for heads in (4, 2, 2)]


def test_what_is_not_a_number_ends_with_its_sequence(pooled: KvArena) -> None:
    """Its pages are taken again: a weight of 0 would not hide it."""
    parts = random_parts(140)
    expected = attend(pooled, [Row(0, 0, 140, False)], parts)
    attend(pooled, [Row(1, 0, 140, False)], [torch.full_like(part, torch.nan) for part in parts])
    pages = pooled.pages(1)
    pooled.release(1)
    pooled.release(0)
    pooled.open(2, 300)
    assert torch.equal(attend(pooled, [Row(2, 0, 140, False)], parts), expected)
    assert set(pooled.pages(2)) <= {0, 1, *pages}


def test_a_guess_that_is_not_finite_harms_no_row_before_it(pooled: KvArena) -> None:
    """Its own results and those behind it are not finite; what it stores is."""
    parts = random_parts(40)
    expected = attend(pooled, [Row(0, 0, 40, False)], parts)
    parts[2][38] = torch.inf
    found = attend(pooled, [Row(1, 0, 40, False)], parts, num_proposed=3)
    assert torch.equal(found[:38], expected[:38])
    assert torch.isnan(found[38:]).all()
    region = pooled.region(1, 0)
    assert region is not None
    assert all(torch.isfinite(part).all() for part in region.read(0, 40))
