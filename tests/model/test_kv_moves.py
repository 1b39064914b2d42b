"""Keys and values that move between executors keep their bits, whatever layouts hold them at the two ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.errors import IllegalMove
from swarm.stage import native
from swarm.stage.attention import layouts, rack_memory
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.racks import KvShape
from swarm.stage.attention.transfer import from_patterns, to_patterns
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import KvData
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import Pipeline, never, nothing, random_tokens, ready
from tests.model.models import named_config

CPU = torch.device("cpu")
TOKENS = random_tokens(300, seed=21)
WHOLE = LayerRange(0, 8)
LIMIT = 512
UNLIKE = (KvShape(3, 20, 12), KvShape(1, 7, 33))  # sizes that fill no vector, and differ as those of latent attention


def random_numbers(shapes: tuple[KvShape, ...], positions: int, dtype: torch.dtype) -> torch.Tensor:
    count = sum(shape.numbers for shape in shapes) * positions
    return torch.randn(count, generator=torch.Generator().manual_seed(5)).to(dtype)


def opened(limit: int = LIMIT, *, device: torch.device = CPU) -> KvArena:
    arena = KvArena(device)
    arena.open(1, limit)
    return arena


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 64), (32, 256), (64, 75), (0, 1), (96, 161), (0, 512)])
def test_positions_move_between_layouts(dtype: torch.dtype, start: int, stop: int) -> None:
    """Packed to plain and back: the same numbers, and the positions beside them are untouched."""
    layers, flat = LayerRange(4, 6), random_numbers(UNLIKE, stop - start, dtype)
    sides = random_numbers(UNLIKE, LIMIT, dtype)
    for plain in (False, True):
        with native.disabled("to see torch's layout") if plain else nullcontext():
            arena = opened()
            arena.write_positions(1, layers, (0, LIMIT), sides, shapes=[*UNLIKE], active=layers)
            before = arena.read_positions(1, layers, 0, LIMIT)
            assert torch.equal(before, sides)
            arena.write_positions(1, layers, (start, stop), flat, shapes=[*UNLIKE], active=layers)
            assert torch.equal(arena.read_positions(1, layers, start, stop), flat)
            region = arena.region(1, 4)
            assert region is not None
            assert (region.layouts is layouts.PLAIN) == (plain or dtype == torch.float16)
            for begin, end in ((0, start), (stop, LIMIT)):
                if begin < end:
                    assert torch.equal(arena.read_positions(1, layers, begin, end), _part(sides, begin, end))


def _part(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """These positions of the numbers of all positions."""
    parts, done = [], 0
    for shape in UNLIKE:
        for size in (shape.key_size, shape.value_size):
            count = shape.heads * LIMIT * size
            parts.append(whole[done : done + count].view(shape.heads, LIMIT, size)[:, start:stop].flatten())
            done += count
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bit_patterns_survive(dtype: torch.dtype) -> None:
    """Numbers that are none, infinite or denormal travel as they are."""
    wide = torch.tensor([0x7FC12345, 0x7F800000, -0x800000, 1, -1, 0x3F800001], dtype=torch.int64).to(torch.int32)
    flat = wide.view(dtype)
    array = to_patterns(flat)
    array.flags.writeable = False
    assert from_patterns(array, dtype, CPU).view(torch.int32).tolist() == wide.tolist()
    with pytest.raises(TypeError, match="keys and values of int8"):
        from_patterns(array.view(np.int8), dtype, CPU)


# --- copies in an arena ----------------------------------------------------------------------------------------------


def write(arena: KvArena, sequence: int, layers: LayerRange, span: tuple[int, int], active: LayerRange | None) -> None:
    shapes = [KvShape(2, 16, 16)] * len(layers)
    flat = torch.ones(
        sum(shape.numbers for shape in shapes) * (span[1] - span[0]), device="cpu" if arena.pool is None else "meta"
    )
    arena.write_positions(sequence, layers, span, flat, shapes=shapes, active=active)


def test_copies_are_counted_apart() -> None:
    """By layer and in whole blocks; they are no positions in use, until their layer is."""
    arena, own = opened(), LayerRange(0, 2)
    write(arena, 1, LayerRange(0, 3), (0, 40), own)
    assert (arena.used, dict(arena.copied)) == (64, {2: 64})
    write(arena, 1, LayerRange(2, 4), (40, 96), own)
    assert (arena.used, dict(arena.copied)) == (64, {2: 96, 3: 96})
    arena.keep_layers(LayerRange(2, 3), {3})
    assert (arena.used, arena.copied.total()) == (96, 96)
    arena.drop_copies(1, LayerRange(0, 8))
    assert arena.copied.total() == 0
    assert (arena.region(1, 2) is None, arena.region(1, 3) is None) == (False, True)
    arena.drop_copies(9, LayerRange(0, 8))  # unknown, which is no error


@pytest.mark.parametrize("end", ["release", "reset", "open", "truncate"])
def test_copies_end_with_their_sequence(end: str) -> None:
    """And the slot that the next sequence gets reads as zeros, in layers of copies, too."""
    arena, own = opened(), LayerRange(0, 2)
    write(arena, 1, LayerRange(0, 4), (0, 40), own)
    match end:
        case "release":
            arena.release(1)
            arena.open(1, LIMIT)
        case "reset":
            arena.reset()
            arena.open(1, LIMIT)
        case "open":
            arena.open(1, LIMIT)
        case "truncate":
            arena.truncate(1, 0)
    assert (arena.used, arena.copied.total()) == (0, 0)
    write(arena, 1, LayerRange(0, 4), (64, 65), own)
    assert not arena.read_positions(1, LayerRange(0, 4), 0, 64).any()


def test_a_layer_that_is_given_up_keeps_nothing_of_its_own() -> None:
    """A slot in a layer that stays warm holds zeros, unless it holds a copy."""
    arena, kept = opened(), {0, 1}
    arena.open(2, LIMIT)
    write(arena, 1, LayerRange(0, 1), (0, 40), LayerRange(0, 1))
    write(arena, 2, LayerRange(0, 1), (0, 40), None)
    arena.keep_layers(LayerRange(2, 4), kept)
    assert arena.region(1, 0) is None
    assert arena.read_positions(2, LayerRange(0, 1), 0, 40).all()
    write(arena, 1, LayerRange(0, 1), (39, 40), None)
    assert not arena.read_positions(1, LayerRange(0, 1), 0, 39).any()
    arena.keep_layers(LayerRange(2, 4), ())
    assert arena.copied.total() == 0
    assert arena.allocated_bytes == 0


def test_forks_and_cuts_leave_copies_consistent() -> None:
    """A fork begins with its source's own layers only; a cut sequence's copies count no further than the cut."""
    arena, own = opened(), LayerRange(0, 1)
    write(arena, 1, LayerRange(0, 2), (0, 96), own)
    arena.fork(2, 1, 40, LIMIT)
    assert (arena.region(2, 0) is None, arena.region(2, 1) is None) == (False, True)
    arena.shrink(1, 40)
    assert (arena.used, arena.copied[1]) == (128, 64)
    with pytest.raises(IllegalMove, match="40 to 96 don't fit"):
        write(arena, 1, LayerRange(1, 2), (40, 96), own)


def test_a_copy_without_memory_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have less than is counted: then the copy is dropped, and its sequence goes on."""
    arena, own, given = opened(), LayerRange(0, 1), rack_memory.new_buffer
    write(arena, 1, own, (0, 40), own)

    def fail(*args: Any) -> Any:
        if len(arena._memory.racks[0].buffers) == 2:
            raise MemoryError("no memory on the device")
        return given(*args)

    monkeypatch.setattr(rack_memory, "new_buffer", fail)
    with pytest.raises(MemoryError):
        write(arena, 1, LayerRange(1, 4), (0, 40), own)
    arena.drop_copies(1, LayerRange(1, 4))
    assert (arena.used, arena.copied.total()) == (64, 0)
    assert set(arena.shapes(1)) == {0}
    assert arena.read_positions(1, own, 0, 40).all()


def test_a_pool_grows_with_copies() -> None:
    """By copies as by steps, layer by layer, and copies survive when their sequence grows."""
    arena, own, size = KvArena(torch.device("meta")), LayerRange(0, 1), 2 * 2 * 16 * 4
    arena.open(1, LIMIT)
    write(arena, 1, LayerRange(1, 3), (0, 40), own)
    assert (arena.used, dict(arena.copied)) == (0, {1: 128, 2: 128})
    assert arena.allocated_bytes == 2 * 128 * size
    arena.mark_used(Row(1, 0, 40, False))
    write(arena, 1, LayerRange(1, 2), (128, 160), own)
    assert arena.allocated_bytes == (256 + 128) * size
    arena.mark_used(Row(1, 0, 200, False))
    arena.truncate(1, 0)
    assert (arena.allocated_bytes, arena.used, arena.copied.total()) == (0, 0, 0)


# --- executors -------------------------------------------------------------------------------------------------------

KINDS = {
    "float32": ("float32", Quantization()),
    "bfloat16": ("bfloat16", Quantization()),
    "bfloat16 int4": ("bfloat16", Quantization("int4")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_continues_from_copies(llama: Path, kind: str) -> None:
    """A stage that holds another's layers warm, with copies of their keys and values, takes over in the middle of a
    block: logits have the bits of the undisturbed run, and only what no copy held is computed again."""
    dtype, quantization = KINDS[kind]
    first, second, position, copied = LayerRange(0, 4), LayerRange(4, 8), 291, 267
    pipeline = Pipeline([ready(llama, layers, dtype, quantization) for layers in (first, second)])
    pipeline.open(1, 2)
    pipeline.logits((2, 0, random_tokens(50, seed=22)))
    pipeline.logits((1, 0, TOKENS[:position]))
    survivor, dead = pipeline.stages
    survivor.keep((second,), nothing, lambda _: False)
    free, used = survivor.kv_free_bytes(), survivor.kv_used()
    for start in range(0, copied, 96):
        survivor.write_kv(1, LIMIT, dead.read_kv(1, second, start, min(copied, start + 96)))
    num_bytes = 288 * sum(survivor.manifest.kv_bytes_per_token[4:])
    assert survivor.kv_copy_bytes() == free - survivor.kv_free_bytes() == num_bytes
    assert survivor.kv_used() == used
    expected = pipeline.logits((1, position, TOKENS[position:]))[0]
    survivor.prepare(LayerRange(0, 8), (), 8, nothing)
    survivor.activate(LayerRange(0, 8))
    assert survivor.kv_copy_bytes() == 0
    rest = Pipeline.batch((1, position, TOKENS[position:]))
    assert not torch.equal(survivor.logits(rest), expected)  # control: what no copy held matters
    survivor.logits(Pipeline.batch((1, copied, TOKENS[copied:position])))
    assert torch.equal(survivor.logits(rest), expected)


def test_a_spare_worker_takes_over(llama: Path) -> None:
    """A worker without a part holds copies of layers that it may not have loaded yet."""
    old = Pipeline([ready(llama, WHOLE, "bfloat16")])
    old.open(1)
    old.logits((1, 0, TOKENS[:256]))
    spare = TorchExecutor(str(llama), dtype="bfloat16", memory_limit=1 << 30)
    free = spare.kv_free_bytes()
    spare.write_kv(1, LIMIT, old.stages[0].read_kv(1, WHOLE, 0, 256))
    assert free - spare.kv_free_bytes() == spare.kv_copy_bytes() == 256 * sum(spare.manifest.kv_bytes_per_token)
    spare.prepare(WHOLE, (), 8, nothing)
    spare.activate(WHOLE)
    assert spare.kv_used() == 256
    rest = Pipeline.batch((1, 256, TOKENS[256:]))
    assert torch.equal(spare.logits(rest), old.stages[0].logits(rest))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
        ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
        ("falcon", {"multi_query": False, "new_decoder_architecture": False, "num_kv_heads": None}),
        ("gpt_bigcode", {"multi_query": True}),
    ],
)
def test_key_heads_are_known_before_layers_are_loaded(save: Any, kind: str, changes: dict[str, Any]) -> None:
    """From the configuration, whatever it calls them."""
    folder, whole = save(named_config(kind, num_key_value_heads=None, **changes)), LayerRange(0, 6)
    old = Pipeline([ready(folder, whole, "float32")])
    old.open(1)
    old.logits((1, 0, [token % 251 for token in TOKENS[:64]]))
    spare = TorchExecutor(str(folder), dtype="float32", memory_limit=1 << 30)
    spare.write_kv(1, LIMIT, old.stages[0].read_kv(1, whole, 0, 64))
    spare.prepare(whole, (), 8, nothing)
    spare.activate(whole)
    rest = Pipeline.batch((1, 64, [5, 6, 7]))
    assert torch.equal(spare.logits(rest), old.stages[0].logits(rest))


def test_a_spare_worker_reports_the_bits_that_a_stage_reports(llama: Path) -> None:
    """With the layers that it keeps warm: only then copies between them count."""
    for dtype in ("float32", "bfloat16"):
        stage, spare = (TorchExecutor(str(llama), dtype=dtype, memory_limit=1 << 30) for _ in range(2))
        bits = stage.prepare(LayerRange(0, 4), (), 8, nothing).bits
        spare.keep((LayerRange(0, 2),), nothing, lambda _: False)
        assert spare.loaded_bits() == bits != ""


def test_what_is_no_copy_is_refused(llama: Path) -> None:
    """Of another dtype or size, of layers that are none, of positions that are not held or not reserved."""
    executor = ready(llama, LayerRange(0, 4), "bfloat16")
    executor.open(1, 64)
    executor.forward(Pipeline.batch((1, 0, TOKENS[:40])), never, nothing)
    data = executor.read_kv(1, LayerRange(0, 2), 0, 32)
    assert executor.fits_kv(data)
    for wrong in (
        KvData(LayerRange(0, 2), 0, 32, "float16", data.numbers),
        KvData(LayerRange(0, 2), 0, 31, "bfloat16", data.numbers),
        KvData(LayerRange(0, 3), 0, 32, "bfloat16", data.numbers),
        KvData(LayerRange(7, 9), 0, 32, "bfloat16", data.numbers),
        KvData(LayerRange(2, 2), 0, 32, "bfloat16", data.numbers[:0]),
        KvData(LayerRange(0, 2), 32, 0, "bfloat16", data.numbers),
    ):
        assert not executor.fits_kv(wrong)
        with pytest.raises(IllegalMove, match="are no keys and values of"):
            executor.write_kv(1, 64, wrong)
    with pytest.raises(IllegalMove, match="32 to 96 don't fit"):
        executor.write_kv(1, 64, KvData(LayerRange(4, 5), 32, 96, "bfloat16", data.numbers))
    for sequence, layers, stop in ((2, LayerRange(0, 2), 32), (1, LayerRange(3, 5), 32), (1, LayerRange(0, 2), 96)):
        with pytest.raises(IllegalMove):
            executor.read_kv(sequence, layers, 0, stop)
    assert np.array_equal(executor.read_kv(1, LayerRange(0, 2), 0, 32).numbers, data.numbers)
