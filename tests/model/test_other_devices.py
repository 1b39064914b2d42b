"""The same model on other devices than a CPU: on a GPU where there is one, and always on the fake device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from swarm.errors import KvFull, ModelError
from swarm.stage.attention.pages import PagePool
from swarm.stage.engine import device_sampling, dry_runs, forward, selfcheck, shortages, torch_executor
from swarm.stage.engine.device import parse_device
from swarm.stage.engine.kernel_report import describe_kernels
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, KvData, is_device_lost, is_out_of_memory
from swarm.stage.matmul.tiled import TiledMatmul
from swarm.stage.shell.pieces import forward_in_pieces
from swarm.wire.messages import LayerRange, Row
from tests import fake_device
from tests.model.cutting import MANY, Pipeline, nothing, random_tokens

TOKENS = random_tokens(150, 9)
# Relative to the largest logit.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.02}
# Kinds whose modules are built in unlike ways: experts, latents, states, layer inputs, position biases.
KINDS = ("llama", "deepseek_v3", "mamba2")
MORE_KINDS = ("qwen3_moe", "lfm2", "gemma4_text", "bloom", "gpt_oss", "falcon_h1", "qwen3_next", "gpt2")


def find_device(name: str) -> torch.device:
    return fake_device.install() if name == "fake" else parse_device(name)


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    return name


def allocated(device: str) -> int:
    return fake_device.memory.used if device == "fake" else torch.cuda.memory_allocated()


def stages(folder: Path, device: str, dtype: str) -> Pipeline:
    found = []
    for layers in (LayerRange(0, 3), LayerRange(3, 8)):
        executor = TorchExecutor(str(folder), device=device, dtype=dtype, memory_limit=MANY)
        executor.prepare(layers, (), 8, nothing)
        executor.activate(layers)
        found.append(executor)
    return Pipeline(found)


def logits(pipeline: Pipeline, chunk: int) -> torch.Tensor:
    pipeline.open(1)
    parts = [pipeline.logits((1, at, TOKENS[at : at + chunk]))[0] for at in range(0, len(TOKENS), chunk)]
    return torch.cat(parts).float().cpu()


def test_the_fake_device_is_another_one() -> None:
    """Tensors of two devices can't be added, and the host can't read the device's memory."""
    device = fake_device.install()
    there, here = torch.ones(3, device=device), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(TypeError, match="copy the tensor to the host"):
        there.numpy()
    assert there.device.type == "fake"
    assert (there + here.to(device)).cpu().numpy().tolist() == [2.0, 2.0, 2.0]
    with fake_device.limited(100), pytest.raises(torch.OutOfMemoryError) as raised:
        torch.zeros(1000, device=device)
    assert is_out_of_memory(raised.value)


def test_layers_are_measured(llama: Path, device: str) -> None:
    """Each kind of step has a time, as on a CPU."""
    executor = TorchExecutor(str(llama), device=device, dtype="float32", memory_limit=MANY)
    costs = executor.measure()
    assert {cost.kind for cost in costs} == {"prefill", "decode", "stage", "head", "embed"}
    assert all(cost.seconds > 0 for cost in costs)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE_KINDS)])
def test_kinds_are_computed_as_on_a_cpu(kind: str, device: str) -> None:
    """The load check runs on the device that serves."""
    for dtype in ("float32", "bfloat16") if kind in MORE_KINDS or device == "cuda" else ("float32",):
        selfcheck.check_device(AutoConfig.for_model(kind), dtype, find_device(device))


def test_a_device_that_computes_otherwise_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the load check, with what to do."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    monkeypatch.setattr(fake_device, "break_operation", "silu")
    selfcheck._difference.cache_clear()
    with pytest.raises(ModelError, match=r"on device fake:0.*worker\.device = cpu"):
        TorchExecutor(str(llama), device="fake", dtype="float32", memory_limit=MANY)
    selfcheck._difference.cache_clear()


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(each, marks=pytest.mark.long) for each in ("bfloat16", "float16"))]
)
def test_logits_are_those_of_a_cpu(llama: Path, device: str, dtype: str) -> None:
    """Over two stages, as one chunk and in many."""
    expected = logits(stages(llama, "cpu", "float32"), 150)
    pipeline = stages(llama, device, dtype)
    for chunk in (150, 32, 1) if device == "cuda" else (150, 60):
        difference = (logits(pipeline, chunk) - expected).abs().max() / expected.abs().max()
        assert float(difference) < TOLERANCES[dtype], chunk


def test_forks_and_cuts(llama: Path, device: str) -> None:
    """A sequence that begins as another one, and one that is cut, go on as the first did."""
    pipeline = stages(llama, device, "float32")
    expected = logits(pipeline, 150)
    for stage in pipeline.stages:
        stage.fork(2, 1, 96, 512)
    forked = pipeline.logits((2, 96, TOKENS[96:]))[0].float().cpu()
    pipeline.truncate(1, 50)
    cut = pipeline.logits((1, 50, TOKENS[50:]))[0].float().cpu()
    for found, start in ((forked, 96), (cut, 50)):
        assert torch.allclose(found, expected[start:], atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE_KINDS)])
def test_no_kind_needs_float64_on_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mps has none. The check at load compares with the CPU."""
    monkeypatch.setattr(fake_device, "has_float64", False)
    selfcheck._difference.cache_clear()
    selfcheck.check_device(AutoConfig.for_model(kind), "float32", fake_device.install())
    selfcheck._difference.cache_clear()


def test_a_device_without_float64_leaves_draws_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the CPU's either way."""
    monkeypatch.setattr(fake_device, "has_float64", False)
    device_sampling.is_exact.cache_clear()
    assert not device_sampling.supports(torch.ones(1, 100).to(fake_device.install()))
    device_sampling.is_exact.cache_clear()


def test_what_is_promised_there(llama: Path, device: str) -> None:
    """Products are proven on the device. No test holds its norms to the bits, so a stage is named inexact."""
    executor = stages(llama, device, "float32").stages[0]
    text = describe_kernels(executor._skeleton, executor._active_stage().modules.values())
    assert text.endswith("float32, inexact (products are exact)"), text


def test_a_product_that_depends_on_its_batch_is_not_called_exact(device: str) -> None:
    """The probe multiplies on the device that serves, and its verdict is kept for that device."""
    place = find_device(device)
    right = TiledMatmul("right", lambda rows: rows * 3, (8, 8), torch.float32, device=place)
    wrong = TiledMatmul("wrong", lambda rows: rows + rows.sum(), (8, 8), torch.float32, device=place)
    assert right.proof.exact
    assert not wrong.proof.exact
    assert not TiledMatmul("wrong", lambda rows: rows, (8, 8), torch.float32, device=place).proof.exact
    assert TiledMatmul("wrong", lambda rows: rows, (8, 8), torch.float32).proof.exact  # a CPU's


def test_keys_and_values_take_what_is_counted(llama: Path, device: str) -> None:
    """By the GPU's own count; and all is free again at the end."""
    pipeline = stages(llama, device, "float32")
    logits(pipeline, 32)
    pipeline.release(1)
    before = allocated(device)
    logits(pipeline, 32)
    counted = sum(stage._arena.allocated_bytes for stage in pipeline.stages)
    assert counted <= allocated(device) - before <= counted * 1.05 + (1 << 20)
    pipeline.release(1)
    assert allocated(device) - before <= 1 << 20


def test_keys_and_values_move_between_devices(llama: Path, device: str) -> None:
    """What a CPU's stage stored goes on there, and back."""
    there, here = stages(llama, device, "float32"), stages(llama, "cpu", "float32")
    expected = logits(here, 150)
    for source, target in ((here, there), (there, here)):
        for pipeline in (source, target):
            pipeline.release(1)
        source.open(1)
        source.logits((1, 0, TOKENS[:100]))
        for one, other in zip(source.stages, target.stages, strict=True):
            layers = one._active_stage().layers
            data = one.read_kv(1, layers, 0, 100)
            assert isinstance(data, KvData)
            assert isinstance(data.numbers, np.ndarray)
            other.write_kv(1, 512, data)
        rest = target.logits((1, 100, TOKENS[100:]))[0].float().cpu()
        assert torch.allclose(rest, expected[100:], atol=1e-3 * float(expected.abs().max()))


def test_a_piece_without_memory_gives_the_cache_less(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step is computed again in pieces. If one of these lacks memory, whichever it is, no request is to
    blame."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    executor = stages(llama, "fake", "float32").stages[0]
    executor.open(1, 512)
    batch = Batch((Row(1, 0, len(TOKENS), False),), np.asarray(TOKENS), None, ())
    before = executor.kv_capacity()
    for _ in range(2):
        with fake_device.limited(10_000), pytest.raises(torch.OutOfMemoryError):
            executor.forward(batch, lambda: False, lambda: None)
    layers = itertools.count(1)

    def take_memory() -> None:
        if next(layers) == 4:  # in the second piece
            fake_device.memory.limit = fake_device.memory.used

    with fake_device.limited(1 << 40), pytest.raises(KvFull, match="keys and values get 19% of what the weights leave"):
        forward_in_pieces(executor, batch, lambda: False, take_memory)
    executor.prepare(LayerRange(0, 3), (), 8, nothing)
    executor.activate(LayerRange(0, 3))
    assert 0.7 * before < executor.kv_capacity() < 0.8 * before
    assert executor.kv_share == 0.75 * 0.25


def test_a_sequence_without_memory_is_not_open(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork copies its beginning: without memory for that, the step does not begin."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    pipeline = stages(llama, "fake", "float32")
    logits(pipeline, 150)
    stage = pipeline.stages[0]
    with fake_device.limited(1000), pytest.raises(KvFull, match="out of memory"):
        stage.fork(2, 1, 96, 512)
    assert 2 not in stage._arena
    monkeypatch.setattr(shortages, "release_cached", lambda _: setattr(fake_device.memory, "limit", None))
    with fake_device.limited(1000):
        stage.fork(2, 1, 96, 512)  # tried again with memory that torch kept for later


def test_a_device_lost_in_a_fork_is_not_taken_for_a_lack_of_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    pipeline = stages(llama, "fake", "float32")
    logits(pipeline, 150)
    stage = pipeline.stages[0]

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PagePool, "allocate", fail)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        stage.fork(2, 1, 96, 512)
    assert is_device_lost(raised.value)


def test_a_plan_without_memory_for_what_is_in_use(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is taken over whose copy is shorter than the sequence: memory for the rest is sought twice. The plan is
    in force, and the next one may keep the sequence."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    source, target = stages(llama, "fake", "float32"), stages(llama, "fake", "float32").stages[0]
    logits(source, 150)
    data = source.stages[1].read_kv(1, LayerRange(3, 4), 0, 64)
    own = source.stages[0].read_kv(1, LayerRange(0, 3), 0, 150)
    target.open(1, 512)
    target.write_kv(1, 512, own)
    target.write_kv(1, 512, data)
    target.prepare(LayerRange(0, 4), (), 8, nothing)
    with fake_device.limited(1000), pytest.raises(KvFull, match="out of memory"):
        target.activate(LayerRange(0, 4))
    monkeypatch.setattr(shortages, "release_cached", lambda _: setattr(fake_device.memory, "limit", None))
    with fake_device.limited(1000):
        target.activate(LayerRange(0, 4))
    assert np.array_equal(target.read_kv(1, LayerRange(3, 4), 0, 64).numbers, data.numbers)


def test_loading_without_memory_is_tried_twice(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch keeps for later is returned before the second attempt; then the plan is refused."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    executor = TorchExecutor(str(llama), device="fake", dtype="float32", memory_limit=MANY)
    released = []
    monkeypatch.setattr(shortages, "release_cached", released.append)
    with fake_device.limited(10_000), pytest.raises(RuntimeError) as raised:
        executor.prepare(LayerRange(0, 8), (), 8, nothing)
    assert is_out_of_memory(raised.value)
    assert released == [torch.device("fake", 0)]
    monkeypatch.setattr(shortages, "release_cached", lambda _: setattr(fake_device.memory, "limit", None))
    with fake_device.limited(10_000):
        executor.prepare(LayerRange(0, 8), (), 8, nothing)


def test_layers_are_warmed_up_beyond_a_split_of_attention(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There attention has more kernels, whose compilation in a request's step would look like a hang. A position behind
    the model's last one is not computed."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    starts = []

    def recorded(stage: Any, arena: Any, batch: Batch, **rest: Any) -> Any:
        starts.append(batch.rows[0].start)
        return forward.run_batch(stage, arena, batch, **rest)

    monkeypatch.setattr(dry_runs, "run_batch", recorded)
    executor = TorchExecutor(str(llama), device="fake", dtype="float32", memory_limit=MANY)
    executor.prepare(LayerRange(0, 1), (), 8, nothing)
    assert max(starts) == (512 if executor.manifest.context > 512 else 32)


def test_a_step_without_memory_leaves_the_others_unharmed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing; what was stored before stays right, and later steps succeed."""
    monkeypatch.setattr(torch_executor, "parse_device", find_device)
    pipeline = stages(llama, "fake", "float32")
    expected = logits(pipeline, 150)
    pipeline.release(1)
    pipeline.open(1, 2)
    pipeline.logits((1, 0, TOKENS[:100]))
    with fake_device.limited(10_000), pytest.raises(RuntimeError) as raised:
        pipeline.logits((2, 0, TOKENS))
    assert is_out_of_memory(raised.value)
    rest = pipeline.logits((1, 100, TOKENS[100:]))[0].float().cpu()
    assert torch.allclose(rest, expected[100:], atol=1e-3 * float(expected.abs().max()))
    other = pipeline.logits((2, 0, TOKENS))[0].float().cpu()
    assert torch.allclose(other, expected, atol=1e-3 * float(expected.abs().max()))
