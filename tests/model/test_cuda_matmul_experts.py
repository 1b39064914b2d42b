"""Mixtures of experts and products by head in Triton: as the plain path computes them, without waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from swarm.stage.matmul import experts, probe
from swarm.stage.matmul.triton_products import TritonLinear, packed_matrix
from swarm.stage.modules.latents import TorchHeadProducts, TritonHeadProducts
from swarm.stage.quantization.gguf_formats import FORMATS
from tests.model.kernels_in_triton import DEVICE, HAS_CUDA, MARKS
from tests.model.kernels_in_triton import experts as kernels
from tests.model.quantized import random_tensor, weight_of

pytestmark = MARKS
NUM, HIDDEN, INNER, CHOICES = 6, 64, 48, 3


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonLinear, "supports", staticmethod(lambda *_: True))
    if not HAS_CUDA:  # the interpreter is slow, and its products have one order of summation
        monkeypatch.setattr(probe, "_MAX_ROWS", 1)
        monkeypatch.setattr(probe, "_NUM_COMPARED", 1)


def fill(module: Any, dtype: torch.dtype) -> Any:
    chance = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=chance) * 0.2).to(DEVICE, dtype)
    return module.requires_grad_(False)


def qwen(dtype: torch.dtype = torch.float32) -> Any:
    config = SimpleNamespace(
        num_experts=NUM, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu", _experts_implementation="x"
    )
    return fill(Qwen3MoeExperts(config), dtype)


def gpt_oss(dtype: torch.dtype = torch.float32) -> Any:
    config = SimpleNamespace(
        num_local_experts=NUM, hidden_size=HIDDEN, intermediate_size=INNER, swiglu_alpha=1.7, swiglu_limit=7.0
    )
    return fill(GptOssExperts(config), dtype)


def step(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, the experts that they chose, and weights."""
    chance = torch.Generator().manual_seed(5)
    chosen = torch.rand(num_rows, NUM, generator=chance).topk(CHOICES).indices
    weights = torch.rand(num_rows, CHOICES, generator=chance)
    rows = torch.randn(num_rows, HIDDEN, generator=chance).to(dtype)
    return rows.to(DEVICE), chosen.to(DEVICE), weights.to(DEVICE)


def plain_mixture(module: Any, *args: torch.Tensor) -> torch.Tensor:
    """What torch computes expert by expert, in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonLinear, "supports", staticmethod(lambda *_: False))
        return experts.mix_experts(module, *args)


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_mixtures_are_those_of_the_plain_path(make: Callable[[], Any], num_rows: int) -> None:
    """With gates side by side and in turns, with biases, with choices that are left out, and with unused experts."""
    module, (rows, chosen, weights) = make(), step(num_rows)
    chosen[0, 1] = -1
    found, expected = experts.mix_experts(module, rows, chosen, weights), plain_mixture(module, rows, chosen, weights)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert experts.is_exact(module)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """Whichever experts the other rows chose, and however many tiles there are."""
    module, args = qwen(torch.bfloat16), step(70, torch.bfloat16)
    together = experts.mix_experts(module, *args)
    for row in (0, 1, 33, 69):
        assert torch.equal(experts.mix_experts(module, *(each[row : row + 1] for each in args))[0], together[row])
    backwards = experts.mix_experts(module, *(each.flip(0) for each in args))
    assert torch.equal(backwards.flip(0), together)


class _NoWaiting(TorchDispatchMode):
    """Raise for operations that read the device's memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ("_local_scalar_dense", "nonzero", "unique2", "_unique2", "bincount", "masked_select"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_from_the_device() -> None:
    """A layer with experts does not wait for the device; the plain path does."""
    module, args = qwen(), step(5)
    experts.mix_experts(module, *args)  # the probe, once
    with _NoWaiting():
        experts.mix_experts(module, *args)
    with pytest.raises(AssertionError, match="waits for the device"), _NoWaiting():
        plain_mixture(module, *args)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_quantized_experts(name: str) -> None:
    """Packed matrices take the place of parameters, and give what the decoded ones give."""
    module, decoded, args = qwen(), qwen(), step(20)
    for at, leaf in enumerate(("gate_up_proj", "down_proj")):
        shape = getattr(module, leaf).shape
        tensor = random_tensor(FORMATS[name], *shape, seed=at)
        experts.keep_packed(module, leaf, packed_matrix(weight_of(tensor), DEVICE), torch.float32)
        getattr(decoded, leaf).data = tensor.dequantize(torch.float32).to(DEVICE)
    assert sum(parameter.numel() for parameter in module.parameters()) == 0
    expected = experts.mix_experts(decoded, *args)
    assert (experts.mix_experts(module, *args) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_tiles_cover_every_choice_once() -> None:
    """Each tile has rows of one expert; tiles beyond the last one are empty."""
    chosen = torch.tensor([[0, 4], [4, 2], [-1, 4], [4, 5], [4, 4]], device=DEVICE)
    choices = kernels.sort_choices(chosen, NUM)
    tiles = kernels.make_tiles(choices, 2)
    ranges = [range(*pair) for pair in zip(tiles.starts.tolist(), tiles.stops.tolist(), strict=True)]
    assert [row for part in ranges for row in part] == list(range(9))  # the tenth is of no expert
    sorted_experts = chosen.flatten()[choices.order].tolist()
    for part, expert in zip(ranges, tiles.experts.tolist(), strict=True):
        assert {sorted_experts[row] for row in part} <= {expert}
        assert len(part) <= 2


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_products_by_head(num_tokens: int) -> None:
    """All heads in one call give what torch gives for each."""
    weights = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = torch.randn(num_tokens, 3, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ours, torchs = TritonHeadProducts(weights), TorchHeadProducts(weights, TritonLinear)
    assert ours.exact
    assert (ours(rows, 30) - torchs(rows, 30)).abs().max() < 1e-5
    assert ours(rows, 30).shape == (num_tokens, 3, 30)
    assert len(kernels.equal_tiles(3, num_tokens, 16, DEVICE).experts) == 3 * -(-num_tokens // 16)
