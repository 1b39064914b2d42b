"""Layers with a state between positions: right, and with bits that no chunk and no stranger changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from swarm.errors import IllegalMove
from swarm.stage import native
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.engine import selfcheck
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.tiny import VOCABULARY, tiny_config
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.modules.recurrence import Segments, convolve, recur, scan
from swarm.stage.modules.recurrent import has_attention, state_bytes
from swarm.wire import tensors
from swarm.wire.messages import BLOCK, STATE_STRIDE, LayerRange, Row
from tests.model.cutting import LIMIT, MANY, Cutter, Pipeline, nothing, random_tokens, ready
from tests.model.models import random_model

HEADS, KEY_HEADS, KEYS, VALUES, CHANNELS, TAPS, NUMBERS = 6, 3, 20, 70, 100, 4, 5

# Each kind with layers of every type that it has, as small as its own checks admit.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "kimi_linear": {},
    "mamba2": {},
    "falcon_h1": {},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "hidden_size": 4096,
        "mamba_n_heads": 128,
    },
    "nemotron_h": {},
    "lfm2": {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "lfm3": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
    "minimax": {},
    "bailing_hybrid": {},
    "zamba": {},
    "zamba2": {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True},
    "recurrent_gemma": {},
    "rwkv": {"rescale_every": 2},
    "xlstm": {},
    "zaya": {},
}
SOME = ("qwen3_next", "falcon_h1", "lfm2", "rwkv")
Layer = Callable[[slice, Segments], torch.Tensor]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(kind: str, count: int, seed: int) -> tuple[Layer, int]:
    """Return a recurrence over ``count`` rows, and the size of its state."""
    x = random(count, CHANNELS, seed=seed)
    if kind.startswith("convolution"):
        weight, bias = random(TAPS, CHANNELS, seed=1), random(CHANNELS, seed=2)
        rows = x.bfloat16() if kind.endswith("bfloat16") else x
        return lambda at, segments: convolve(rows[at], weight, bias, "swish", segments), (TAPS - 1) * CHANNELS
    if kind == "scan":
        step, rate = random(count, CHANNELS, seed=seed + 1).abs(), -random(NUMBERS, CHANNELS, seed=3).abs()
        write, read = random(count, NUMBERS, seed=seed + 2), random(count, NUMBERS, seed=seed + 3)
        return lambda at, segments: scan(
            x[at], step[at], rate, write=write[at], read=read[at], segments=segments, state=0
        ), NUMBERS * CHANNELS
    query, key = (random(count, KEY_HEADS, KEYS, seed=seed + n) / KEYS**0.5 for n in (1, 2))
    value = random(count, HEADS, VALUES, seed=seed + 3)
    decays = KEYS if kind == "delta by channel" else 1
    decay, beta = (
        random(count, HEADS, decays, seed=seed + 4).sigmoid(),
        random(count, HEADS, seed=seed + 5).sigmoid(),
    )
    return lambda at, segments: recur(
        query[at],
        key[at],
        value[at],
        decay[at],
        beta=None if kind == "state space" else beta[at],
        segments=segments,
        state=0,
    ), HEADS * KEYS * VALUES


def run_pass(arena: KvArena, rows: Sequence[Row], layer: Layer, where: slice, numbers: int) -> torch.Tensor:
    with use_pass(ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans(rows)))):
        return layer(where, Segments(0, numbers))


def open_arena(stride: int = STATE_STRIDE) -> KvArena:
    arena = KvArena(torch.device("cpu"), stride)
    for sequence in (0, 1):
        arena.open(sequence, 64)
    return arena


def advance(layer: Layer, numbers: int, chunks: Sequence[int], stride: int = STATE_STRIDE) -> torch.Tensor:
    """Advance a sequence by these chunks, and return its outputs."""
    arena, at, pieces = open_arena(stride), 0, []
    for count in chunks:
        pieces.append(run_pass(arena, [Row(0, at, count, True)], layer, slice(at, at + count), numbers))
        at += count
    return torch.cat(pieces)


RECURRENCES = ("convolution", "convolution of bfloat16", "scan", "state space", "delta", "delta by channel")


@pytest.mark.parametrize("kind", RECURRENCES)
def test_chunks_do_not_change_bits(kind: str) -> None:
    layer, numbers = layer_of(kind, 40, 10)
    whole = advance(layer, numbers, [40])
    for chunks in ([1] * 40, [7, 1, 30, 2], [39, 1]):
        assert torch.equal(advance(layer, numbers, chunks), whole)
    assert torch.equal(advance(layer, numbers, [40], stride=3), whole)  # each segment needs the one before it


@pytest.mark.skipif(native.library() is None, reason="no native kernels")
@pytest.mark.parametrize("kind", RECURRENCES)
def test_kernels_compute_what_torch_computes(kind: str) -> None:
    layer, numbers = layer_of(kind, 40, 20)
    ours = advance(layer, numbers, [9, 31])
    with native.disabled("to compare"):
        theirs = advance(layer, numbers, [9, 31])
    tolerance = 1e-2 if "bfloat16" in kind else 1e-5
    assert torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_sequences_of_one_batch_have_the_bits_that_they_have_alone(kind: str) -> None:
    layer, numbers = layer_of(kind, 30, 30)
    rows = [Row(0, 0, 13, True), Row(1, 0, 17, True)]
    together = run_pass(open_arena(), rows, layer, slice(0, 30), numbers)
    for row, where in zip(rows, (slice(0, 13), slice(13, 30)), strict=True):
        assert torch.equal(run_pass(open_arena(), [row], layer, where, numbers), together[where])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_models_equal_transformers_and_keep_their_bits(kind: str, dtype: str) -> None:
    config, had_kernels = AutoConfig.for_model(kind, **KINDS[kind]), native.library() is not None
    selfcheck.check_cut(config)
    selfcheck.check_kernels(config, dtype)
    assert (native.library() is not None) is had_kernels, native.unavailable_reason()
    assert selfcheck.same_bits(config, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_what_is_stored(kind: str) -> None:
    """Five positions at once leave the states after four and five; the others hold keys and values."""
    config = tiny_config(AutoConfig.for_model(kind, **KINDS[kind]))
    skeleton = ModelSkeleton(config, torch.device("cpu"), torch.float32)
    layers = LayerRange(0, skeleton.num_layers)
    source = selfcheck.MemorySource(random_model(config).state_dict())
    stage, arena = Stage(skeleton, layers, {}, WeightLoader(skeleton, source, lambda _: None)), open_arena()
    run_batch(stage, arena, Batch((Row(0, 0, 5, True),), np.arange(5), None, ()), head_rows=[4])
    parts = skeleton.model.get_submodule(skeleton.parts.layers)
    sizes = state_bytes(parts)
    assert [bool(arena.states.positions(0, layer)) for layer in range(len(parts))] == [size > 0 for size in sizes]
    assert arena.states.num_bytes == 2 * sum(sizes)
    assert sorted(arena.shapes(0)) == [layer for layer, part in enumerate(parts) if has_attention(part)]


def test_layers_without_states_and_attention_have_empty_copies(save: Any) -> None:
    """Each layer is read and written alone, as messages may have it."""
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="M-*-", num_hidden_layers=4)
    folder = save(tiny_config(config))
    stage = ready(folder, LayerRange(0, 4), "bfloat16")
    spare, tokens = TorchExecutor(str(folder), dtype="bfloat16", memory_limit=MANY), random_tokens(50, 7, VOCABULARY)
    stage.open(1, LIMIT)
    stage.logits(Pipeline.batch((1, 0, tokens[:40])))
    for layer in range(4):
        data = stage.read_kv(1, LayerRange(layer, layer + 1), 0, 40)
        assert (data.numbers.nbytes == 0) is (layer in (1, 3))
        spec, packed = tensors.pack(data.numbers, data.dtype)
        assert tensors.view(spec, packed).nbytes == data.numbers.nbytes
        assert spare.fits_kv(data)
        spare.write_kv(1, LIMIT, data)
    spare.prepare(LayerRange(0, 4), (), 8, nothing)
    spare.activate(LayerRange(0, 4))
    rest = Pipeline.batch((1, 40, tokens[40:]))
    assert torch.equal(spare.logits(rest), stage.logits(rest))


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2"])
def test_a_stage_computes_behind_many_layers_of_others(kind: str, save: Any) -> None:
    """Whatever the layers of its kind return."""
    folder = save(tiny_config(AutoConfig.for_model(kind), fewest_layers=6))
    lines, parts = (0, 1, 5, 6), (1, 0, random_tokens(40, 6, VOCABULARY))
    made = [Cutter().cut(folder, cut) for cut in ((0, 6), lines)]
    for pipeline in made:
        pipeline.open(1)
    assert torch.equal(made[0].logits(parts)[0], made[1].logits(parts)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in SOME else pytest.mark.long) for kind in KINDS])
def test_another_worker_continues_from_copies(kind: str, dtype: str, save: Any) -> None:
    """It has neither loaded the layers nor computed anything. The copies come in two parts, a few layers at a time."""
    folder = save(tiny_config(AutoConfig.for_model(kind, **KINDS[kind])))
    spare = TorchExecutor(str(folder), dtype=dtype, memory_limit=MANY)
    whole, manifest = LayerRange(0, spare.manifest.num_layers), spare.manifest
    stage, tokens, free = ready(folder, whole, dtype), random_tokens(80, 5, VOCABULARY), spare.kv_free_bytes()
    stage.open(1, LIMIT)
    for start, stop in ((0, 40), (40, 70)):
        stage.logits(Pipeline.batch((1, start, tokens[start:stop])))
        for layers in (LayerRange(0, 1), LayerRange(1, whole.stop)):
            data = stage.read_kv(1, layers, start // BLOCK * BLOCK, stop)
            assert spare.fits_kv(data)
            spare.write_kv(1, LIMIT, data)
    states = sum(manifest.state_bytes)
    num_bytes = 96 * sum(map(manifest.kv_bytes, range(whole.stop))) + 2 * states
    assert free - spare.kv_free_bytes() == spare.kv_copy_bytes() == num_bytes
    with pytest.raises(IllegalMove, match="no state of sequence 1 at 69" if states else "not stored"):
        spare.read_kv(1, whole, 0, 69 if states else 200)
    spare.prepare(whole, (), 8, nothing)
    spare.activate(whole)
    spare.truncate(1, 70)
    assert spare.kv_copy_bytes() == 0
    rest = Pipeline.batch((1, 70, tokens[70:]))
    assert torch.equal(spare.logits(rest), stage.logits(rest))
