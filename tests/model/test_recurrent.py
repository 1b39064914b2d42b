"""Layers with a state between positions: right, and with bits that no chunk and no stranger changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from swarm.stage import native
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.engine import selfcheck
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.tiny import tiny_config
from swarm.stage.executor import Batch
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.modules.recurrence import Segments, convolve, recur, scan
from swarm.stage.modules.recurrent import has_attention, state_bytes
from swarm.wire.messages import STATE_STRIDE, LayerRange, Row
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
}
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
