"""Triton's attention over pages: what torch computes, and the same bits whatever else is in the batch.

Without a GPU, Triton interprets the kernels. Its products are numpy's, whose order of summing depends on a row's place,
so here they are exact sums that are rounded once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from swarm.stage.attention import function, paged
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.options import AttentionOptions, Latents
from swarm.stage.attention.paged import plan_pages
from swarm.stage.attention.pages import PAGE, PagePool
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.wire.messages import LayerRange, Row

pytest.importorskip("triton", reason="Triton is not installed")
from swarm.stage.attention import page_kernels as kernels

IS_COMPILED = torch.cuda.is_available()
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTH = 560
Piece = tuple[int, int, int]  # sequence, start, count


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if (request.param == "cuda") != IS_COMPILED:
        pytest.skip("a GPU is here: kernels are compiled" if IS_COMPILED else "no CUDA device here")
    if not IS_COMPILED:
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_exactly)
    return torch.device("cuda" if IS_COMPILED else "cpu")


def multiply_exactly(_: Any, left: Any, right: Any, total: Any, *__: Any) -> Any:
    """Triton's ``dot`` in the interpreter, with sums in float64. Its bfloat16 is kept as whole numbers."""
    from triton.runtime import interpreter

    def widen(part: Any) -> Any:
        if not part.dtype.is_bf16():
            return part.data.astype(np.float64)
        return (part.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    product = np.matmul(widen(left), widen(right)).astype(total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


@dataclass(frozen=True)
class Heads:
    """A layer's heads and their sizes. ``values``: 0 for latents, whose value has 512 numbers."""

    queries: int
    keys: int
    size: int
    values: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def value_size(self) -> int:
        return self.values or 512

    def random(self, device: torch.device) -> list[list[torch.Tensor]]:
        """Return three sequences' queries, keys and values ``[positions, heads, size]``."""
        chance = torch.Generator().manual_seed(7)
        shapes = (self.queries, self.size), (self.keys, self.size), (self.keys, self.values)
        return [
            [torch.randn(LENGTH, *shape, generator=chance).to(self.dtype).to(device) for shape in shapes]
            for _ in range(3)
        ]


def make_options(heads: Heads, device: torch.device, **given: Any) -> AttentionOptions:
    chance = torch.Generator().manual_seed(8)
    defaults = {"window": None, "softcap": None, "sinks": None}
    if given.pop("with_sinks", False):
        given["sinks"] = torch.randn(heads.queries, generator=chance).to(device)
    if given.pop("with_slopes", False):
        given["slopes"] = torch.rand(heads.queries, generator=chance).to(device) / 8
    if not heads.values:
        given["latents"] = Latents(heads.value_size)
    return AttentionOptions(heads.size**-0.5, **(defaults | given))


class Stored:
    """Keys and values of three sequences in pages, and attention to them."""

    def __init__(self, heads: Heads, options: AttentionOptions, device: torch.device) -> None:
        self.heads, self.options, self.device = heads, options, device
        self.data = heads.random(device)

    def attend(self, pieces: Sequence[Piece], *, by_split: bool | None = False) -> dict[Piece, torch.Tensor]:
        """Return each piece's result by the kernel; ``by_split=None``: by torch. Positions behind a piece are NaN."""
        arena = KvArena(self.device)
        arena._memory = PagePool()
        rows = [Row(*piece, False) for piece in pieces]
        for row in rows:
            arena.open(row.sequence, LENGTH)
            arena.mark_used(row)
            self.fill(arena, row)
        this = ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans(rows)))
        plan = plan_pages(this, self.device)
        _, key, value = self.data[0]
        store = paged._ensure_layer(this, plan, 0, (key, value), self.options)
        query = torch.cat([self.data[row.sequence][0][row.start : row.start + row.count] for row in rows])
        size = self.heads.value_size
        if by_split is None:
            out = paged._attend(plan, store, query, self.options, value_size=size, selection=None)
        else:
            out = kernels.attend_pages(plan, store, query, self.options, value_size=size, by_split=by_split)
        return dict(zip(pieces, torch.split(out, [row.count for row in rows]), strict=True))

    def fill(self, arena: KvArena, row: Row) -> None:
        _, key, value = self.data[row.sequence]
        stop, whole = row.start + row.count, -(-(row.start + row.count) // PAGE) * PAGE
        parts = [part.transpose(0, 1)[:, :whole] for part in (key, value)]
        parts = [torch.nn.functional.pad(part, (0, 0, 0, whole - part.shape[1])) for part in parts]
        for part in parts:
            part[:, stop:] = torch.nan
        arena.ensure_region(row.sequence, 0, *parts).write(0, *parts)


F16, F32 = torch.float16, torch.float32
CASES = {
    "plain": (Heads(4, 1, 64, 64), {}),
    "window": (Heads(1, 1, 128, 128), {"window": 70}),
    "chunk": (Heads(16, 1, 64, 64, F16), {"chunk": 96}),
    "softcap": (Heads(4, 1, 80, 80), {"softcap": 2.0}),
    "sinks": (Heads(6, 2, 64, 64, F16), {"with_sinks": True}),
    "slopes": (Heads(2, 2, 64, 64), {"with_slopes": True}),
    "float32": (Heads(3, 1, 64, 64, F32), {"window": 520, "with_sinks": True}),
    "wide": (Heads(2, 1, 256, 256), {}),
    "unlike": (Heads(2, 1, 192, 128), {}),
    "latents": (Heads(16, 1, 576, 0), {}),
    "many latents": (Heads(40, 1, 576, 0), {}),
}
WHOLE_SPLITS = ("plain", "float32")  # the others have shorter ones: interpreting takes its time


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_what_torch_computes_and_has_its_bits_in_every_batch(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a crowd, as one chunk and in several, by splits at the same time or one after the other."""
    heads, given = CASES[name]
    if name not in WHOLE_SPLITS:
        monkeypatch.setattr(kernels, "SPLIT", 128)
    stored = Stored(heads, make_options(heads, device, **given), device)
    start = kernels.SPLIT - 3
    whole = (0, start, 6)
    expected = stored.attend([whole], by_split=None)[whole]
    found = stored.attend([whole])[whole]
    assert torch.isfinite(found).all()
    assert float((found.float() - expected.float()).abs().max()) <= TOLERANCES[heads.dtype] * 2
    crowd = stored.attend([(1, 40, 3), whole, (2, 20, 1)], by_split=True)
    assert torch.equal(crowd[whole], found)
    first, last = (0, start, 2), (0, start + 2, 4)
    for by_split, cut in ((True, first), (False, last)):
        part = stored.attend([cut], by_split=by_split)[cut]
        assert torch.equal(part, found[cut[1] - start :][: cut[2]])
    short = stored.attend([(1, 40, 3)])[1, 40, 3]
    assert torch.equal(crowd[1, 40, 3], short)


def test_scores_in_float16_do_not_overflow(device: torch.device) -> None:
    """The product of a query and a key is beyond the largest number of float16; the score is not."""
    heads = Heads(2, 1, 64, 64, torch.float16)
    stored = Stored(heads, make_options(heads, device), device)
    for query, key, _ in stored.data:
        query.mul_(8).add_(40)
        key.mul_(8).add_(40)
    piece = (0, 60, 3)
    found, expected = stored.attend([piece])[piece], stored.attend([piece], by_split=None)[piece]
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, atol=5e-3)


def test_splits_are_computed_at_the_same_time_if_the_device_is_idle_and_has_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_num_processors", lambda _: 100)
    device, most = torch.device("cuda"), 1 << 28
    assert kernels._should_split(2, 199, most, device)
    assert not kernels._should_split(1, 1, 1, device)
    assert not kernels._should_split(2, 200, most, device)
    assert not kernels._should_split(250, 1, most + 1, device)


@pytest.mark.parametrize("head", [None, 1], ids=["heads", "one of several latents"])
def test_steps_write_and_attend(head: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks and decodes of several sequences, as layers call it: with keys that are not adjacent in memory,
    and a row of padding."""
    heads = Heads(4, 2, 48, 32, torch.float32) if head is None else Heads(4, 1, 48, 0, torch.float32)
    options = make_options(heads, device)
    if head is not None:
        options = AttentionOptions(options.scale, None, None, None, latents=Latents(32, head, 2))
    steps: list[list[Piece]] = [[(0, 0, 6), (1, 0, 3)], [(1, 3, 1), (0, 6, 2)]]
    results = []
    for module in (None, kernels):
        monkeypatch.setattr(paged, "find_kernels", lambda _, module=module: module)
        arena = KvArena(device)
        arena._memory = PagePool()
        arena.open(0, 8)
        arena.open(1, 8)
        outputs = []
        for step in steps:
            rows = [Row(*piece, False) for piece in step]
            for row in rows:
                arena.mark_used(row)
            parts = []
            for part in zip(*heads.random(device), strict=True):
                tokens = [part[row.sequence][row.start : row.start + row.count] for row in rows]
                padded = torch.nn.functional.pad(torch.cat(tokens), (0, 0, 0, 0, 0, 1))
                parts.append(padded.transpose(0, 1).contiguous().transpose(0, 1))
            if head is not None:
                parts[2] = parts[1][..., :32]
            with use_pass(ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans(rows)))):
                query, key, value = parts
                outputs.append(function.attend_rows(0, query, key, value, options))
        assert all(not output[-1].any() for output in outputs)
        regions = [arena.region(sequence, 0) for sequence in (0, 1)]
        stored = [part for region in regions if region is not None for part in region.read(0, 4)]
        results.append((torch.cat(outputs), torch.cat([part.flatten() for part in stored])))
    (expected, stored), (found, written) = results
    assert torch.equal(stored, written)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.long
def test_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, without the device; and their tiles fit into shared memory."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.model.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
