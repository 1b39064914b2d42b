"""Copies of keys and values, joined modules and tables give the bits that computing by the plain way gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import GRID
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.matmul.elementwise import AlignedActivation
from swarm.stage.matmul.linears import PackedLinear
from swarm.stage.model import program
from swarm.stage.model.portable_math import portable_math
from swarm.stage.model.rope import RopeTable
from swarm.stage.modules import fused
from swarm.stage.modules.reading import RowKind, WeightReader
from swarm.stage.native import cores
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import Cutter, Pipeline, nothing, random_tokens
from tests.model.models import llama_config

TOKENS = random_tokens(300, seed=11)
CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fed(pipeline: Pipeline, sequence: int, start: int, chunk: int = 64) -> torch.Tensor:
    pieces = [
        pipeline.logits((sequence, begin, TOKENS[begin : begin + chunk]))[0]
        for begin in range(start, len(TOKENS), chunk)
    ]
    return torch.cat(pieces)


@pytest.mark.parametrize("position", [1, 32, 100, 257])
def test_forked(cutter: Cutter, llama: Path, dtype: str, position: int) -> None:
    """A sequence that begins as a copy of another goes on with the bits it would have alone; its source is free to
    go on otherwise, or to leave."""
    pipeline = cutter.cut(llama, (0, 4, 8), dtype)
    pipeline.open(1)
    expected = fed(pipeline, 1, 0)
    for stage in pipeline.stages:
        stage.fork(2, 1, position, 512)
    pipeline.logits((1, position, random_tokens(40, seed=12)))
    pipeline.release(1)
    assert torch.equal(fed(pipeline, 2, position), expected[position:])


def test_forks_are_refused(cutter: Cutter, llama: Path) -> None:
    """From a sequence that isn't held, or not that far."""
    stage = cutter.cut(llama, (0, 8)).stages[0]
    with pytest.raises(IllegalMove, match="can't begin as 9"):
        stage.fork(2, 9, 1, 64)
    stage.open(1, 64)
    with pytest.raises(IllegalMove, match="not held up to 65"):
        stage.fork(2, 1, 65, 128)
    assert len(stage._arena) == 1


def test_shrunk(cutter: Cutter, llama: Path) -> None:
    """What is cut off is no longer counted, and refused; what is left is as before."""
    pipeline = cutter.cut(llama, (0, 8))
    pipeline.open(1)
    expected = fed(pipeline, 1, 0)
    stage = pipeline.stages[0]
    stage.shrink(1, 300)
    assert stage.kv_used() == 320
    assert torch.equal(fed(pipeline, 1, 150), expected[150:])
    with pytest.raises(IllegalMove, match="reserved 320"):
        stage._arena.check_reserved(Row(1, 320, 1, False))


def test_blocks_on_another_machine(cutter: Cutter, llama: Path, dtype: str) -> None:
    """Blocks taken out of one arena and put into another continue with the same bits, every block counted."""
    here, there = (Pipeline([Cutter().cut(llama, (0, 8), dtype).stages[0]]) for _ in range(2))
    here.open(1)
    expected = fed(here, 1, 0)
    there.open(5, 7)
    there.logits((5, 0, random_tokens(200, seed=13)))  # so that 7 lies elsewhere than 1 did
    position = 256
    source, target = here.stages[0]._arena, there.stages[0]._arena
    shapes = [source.shapes(1)[layer] for layer in range(8)]

    def move(layer: int, block: int, factor: float = 1.0) -> None:
        span, layers = (block * GRID, (block + 1) * GRID), LayerRange(layer, layer + 1)
        data = source.read_positions(1, layers, *span)
        assert len(data) == shapes[layer].numbers * GRID
        target.write_positions(7, layers, span, data * factor, shapes=[shapes[layer]], active=LayerRange(0, 8))

    for layer in range(8):
        for block in range(position // GRID):
            move(layer, block)
    assert torch.equal(fed(there, 7, position), expected[position:])
    move(3, 2, 0.0)
    assert not torch.equal(fed(there, 7, position), expected[position:])  # control: every block matters


def test_places_are_clean(cutter: Cutter, llama: Path, dtype: str) -> None:
    """A place that held numbers that are none gives the next sequence zeros, whoever sits beside it."""
    pipeline = cutter.cut(llama, (0, 8), dtype)
    pipeline.open(1, 2, 3)
    expected = fed(pipeline, 2, 0)
    pipeline.open(1, 2, 3)
    arena = pipeline.stages[0]._arena
    pipeline.logits((2, 0, TOKENS[:10]))
    for layer in range(8):
        region = arena.region(2, layer)
        assert region is not None
        region.keys.fill_(float("nan"))
        region.values.fill_(float("nan"))
    pipeline.release(2)
    pipeline.open(4)
    assert arena.slot(4)[1] == 1  # the very place
    assert torch.equal(fed(pipeline, 4, 0), expected)


def test_racks() -> None:
    """Sequences of like length lie side by side; long ones elsewhere; an empty rack is gone."""
    arena = KvArena(CPU)
    for sequence, limit in ((1, 100), (2, 128), (3, 129), (4, 90)):
        arena.open(sequence, limit)
    assert [arena.slot(each)[1] for each in (1, 2, 4)] == [0, 1, 2]
    assert arena.slot(1)[0] is arena.slot(4)[0] is not arena.slot(3)[0]
    arena.release(2)
    arena.open(5, 10)
    assert arena.slot(5)[1] == 1
    for sequence in (1, 3, 4, 5):
        arena.release(sequence)
    assert len(arena) == arena.used == 0
    assert not arena._memory.racks


# --- modules ---------------------------------------------------------------------------------------------------------


def _rows(size: int, dtype: torch.dtype, count: int = 20) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("torch_dtype", [torch.float32, torch.bfloat16])
def test_norm(torch_dtype: torch.dtype) -> None:
    """The norm has the bits of the model's own; a norm of another kind is not mistaken for it."""
    own = LlamaRMSNorm(176)
    own.weight.data = _rows(176, torch_dtype, 1)[0]
    rows = _rows(176, torch_dtype)
    with torch.inference_mode():
        assert torch.equal(fused.RmsNorm(own.weight.data, own.variance_epsilon)(rows), own(rows))
    assert fused.is_rms_norm(own)
    assert not fused.is_rms_norm(Olmo2RMSNorm(176))  # multiplies before it rounds


def test_gated() -> None:
    """Function and product inside the kernels come to what the model's own modules do; other functions stay outside."""
    own = LlamaMLP(llama_config(hidden_act="silu")).eval().requires_grad_(False)
    assert fused.is_gated(own)
    assert not fused.is_gated(LlamaMLP(llama_config(hidden_act="relu")))
    gate, up, down = (PackedLinear(part.weight, None) for part in (own.gate_proj, own.up_proj, own.down_proj))
    rows = _rows(64, torch.float32)
    with torch.inference_mode():
        assert torch.allclose(fused.GatedMlp(gate, up, down, AlignedActivation(own.act_fn))(rows), own(rows), atol=1e-6)


def test_joint_matrix() -> None:
    """Queries, keys and values of one input come out of one product, with or without bias; another input, or another
    order of asking, gives right answers too."""
    parts: Any = torch.nn.Module()
    parts.q_proj, parts.k_proj, parts.v_proj = (torch.nn.Linear(32, n, bias=n != 8) for n in (24, 8, 16))
    own = {name: part.requires_grad_(False) for name, part in parts.named_children()}
    assert fused.has_qkv(parts)
    reader = WeightReader(lambda _, like: like.clone(), RowKind(torch.float32))
    fused.join_qkv(parts, reader, lambda matrix, bias, _: PackedLinear(matrix, bias))
    one, two = _rows(32, torch.float32), _rows(32, torch.float32) * 2
    with torch.inference_mode():
        for name, rows in (("q_proj", one), ("k_proj", one), ("v_proj", one), ("v_proj", two), ("q_proj", two)):
            assert torch.allclose(getattr(parts, name)(rows), own[name](rows), atol=1e-5)


def test_rope_table(dtype: str) -> None:
    """Looked-up positions have the bits that the model's own module computes by our rule, also where the table had to
    grow."""
    inner = LlamaRotaryEmbedding(AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4))
    table, like = RopeTable(inner), torch.empty(1, dtype=getattr(torch, dtype))
    for positions in ([0, 5, 1023, 7], [3, 1500], [3, 1500], list(range(64))):
        this = ForwardPass(KvArena(CPU), LayerRange(0, 1), (), length=max(positions) + 1)
        ids = torch.tensor([positions])
        with use_pass(this):
            found = table(like, ids)
        with portable_math():
            expected = inner(like, ids)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert this.cache_stats.rope_hits + this.cache_stats.rope_misses == 1


def test_tables_are_counted(cutter: Cutter, llama: Path) -> None:
    """Masks are made once per step and used by every layer that computes module by module; rope tables once and used by
    every step."""
    pipeline = cutter.cut(llama, (0, 8))
    stage = pipeline.stages[0]
    pipeline.open(1)
    before = stage.stats()
    for position in range(3):
        batch = Pipeline.batch((1, position, TOKENS[position : position + 1]))
        with program.disabled("to see each layer use the mask"):
            stage.forward(batch, lambda: False, nothing)
    now = {name: value - before[name] for name, value in stage.stats().items()}
    assert (now["mask_misses"], now["mask_hits"]) == (3, 3 * 7)
    assert now["rope_hits"] + now["rope_misses"] == 3
    assert now["rope_misses"] <= 1


def test_threads(cutter: Cutter, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step alone in the pipe may use all cores, any other its share; afterwards the number is what it was."""
    stage = cutter.cut(llama, (0, 8)).stages[0]
    stage.open(1, 64)
    seen: list[int] = []
    enter = cores.computing.__enter__
    monkeypatch.setattr(cores.computing, "__enter__", lambda this: (seen.append(this._threads), enter(this))[1])
    monkeypatch.setattr(stage, "threads", 1)
    monkeypatch.setattr(stage, "threads_alone", 2)
    before = torch.get_num_threads()
    for alone in (True, False):
        stage.forward(Pipeline.batch((1, 0, TOKENS[:3]), alone=alone), lambda: False, nothing)
    assert seen == [2, 1]
    assert torch.get_num_threads() == before


def test_helpers_are_called_for_large_work_only() -> None:
    """In a step of few rows one thread computes, but for products that are worth waking the others."""
    with cores.computing(2, rows=4):
        assert torch.get_num_threads() == 1
        assert not cores.use_threads(1000)
        before = cores.use_threads(cores.MIN_PARALLEL_WORK)
        assert (before, torch.get_num_threads()) == (1, 2)
        cores.restore_threads(before)
        assert torch.get_num_threads() == 1
    with cores.computing(2, rows=500):
        assert torch.get_num_threads() == 2
        assert not cores.use_threads(cores.MIN_PARALLEL_WORK)  # all are at work anyhow
