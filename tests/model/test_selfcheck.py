"""What is tried with a tiny model before one is served: each test breaks one thing, which must be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarm.errors import ModelError, OutOfMemory
from swarm.stage import native
from swarm.stage.attention import tiles
from swarm.stage.engine import forward, kernel_report, selfcheck
from swarm.stage.matmul import linears
from swarm.stage.matmul.linears import PackedLinear
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.modules import fused
from tests.model.models import named_config

LLAMA = named_config("llama")


@pytest.fixture(autouse=True)
def _verdicts() -> Iterator[None]:
    """None is known before a test, nor kept after it."""
    verdicts = selfcheck._difference, selfcheck._same_bits
    for each in verdicts:
        each.cache_clear()
    yield
    for each in verdicts:
        each.cache_clear()


@pytest.fixture
def without_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_refusals", ["to see torch's"])


def test_what_goes_wrong_far_into_a_prompt(without_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys from the third cell on are left out: a prompt that ends before it shows nothing, the tiny model's does."""
    ends = tiles.keys_end
    selfcheck.check_cut(LLAMA)
    selfcheck._difference.cache_clear()
    monkeypatch.setattr(tiles, "keys_end", lambda tile: min(256, ends(tile)) if tile.cell < 256 else tile.cell + 32)
    with pytest.raises(ModelError, match=r"LlamaConfig.*can't be served"):
        selfcheck.check_cut(LLAMA)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_this_machine_computes_wrongly(
    dtype: str, without_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is refused, by a message that says what to do, and could be served in another dtype."""
    selfcheck.check_kernels(LLAMA, dtype)
    selfcheck._difference.cache_clear()
    wrong = getattr(torch, dtype)
    norm = fused.RmsNorm.forward

    def garbage(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return norm(self, rows).flip(-1) if rows.dtype == wrong else norm(self, rows)

    monkeypatch.setattr(fused.RmsNorm, "forward", garbage)
    selfcheck.check_cut(LLAMA)
    with pytest.raises(ModelError, match=rf"LlamaConfig.*in {dtype}.*try worker\.dtype = float32"):
        selfcheck.check_kernels(LLAMA, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_that_depend_on_the_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose bits depend on how it is cut is served, and not called exact."""
    assert selfcheck.same_bits(LLAMA, dtype)
    selfcheck._same_bits.cache_clear()
    to_wire = forward.copy_to_array
    monkeypatch.setattr(selfcheck, "copy_to_array", lambda hidden: to_wire(hidden) * 1.01)
    assert not selfcheck.same_bits(LLAMA, dtype)
    skeleton = ModelSkeleton(LLAMA, torch.device("cpu"), torch.float32)
    assert "inexact" in kernel_report.describe_kernels(skeleton, (), same_bits_when_cut=False)


def test_our_own_kernels_are_given_up_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model is right with torch's kernels only, these serve it."""
    monkeypatch.setattr(native, "_refusals", [])
    difference = selfcheck._difference
    monkeypatch.setattr(
        selfcheck, "_difference", lambda text, dtype, own, *how: 1.0 if own else difference(text, dtype, own, *how)
    )
    if native.library() is None:
        pytest.skip(f"no native kernels: {native.unavailable_reason()}")
    selfcheck.check_cut(LLAMA)
    assert "compute LlamaConfig otherwise" in native.unavailable_reason()
    assert linears.choose_kernel(torch.device("cpu"), torch.float32) is PackedLinear
    monkeypatch.setattr(selfcheck, "_difference", lambda *_: 1.0)
    with pytest.raises(ModelError, match="whole"):
        selfcheck.check_cut(LLAMA)


def test_a_lack_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the other programs: the model is not called unserved, and our own kernels stay."""
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes."

    def lack(*_: object) -> float:
        raise RuntimeError(text)

    monkeypatch.setattr(native, "_refusals", [])
    monkeypatch.setattr(selfcheck, "_difference", lack)
    for check in (selfcheck.check_cut, lambda config: selfcheck.check_kernels(config, "float32")):
        with pytest.raises(OutOfMemory, match="too little memory to check the model"):
            check(LLAMA)
    assert native._refusals == []
