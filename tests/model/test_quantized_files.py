"""Models of quantized safetensors files have the logits of the weights that the files hold, whole and cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model.checkpoint import Checkpoint
from swarm.wire.messages import LayerRange
from tests.model.cutting import Cutter
from tests.model.models import load_whole, named_config, random_model
from tests.quantized_files import (
    Tensors,
    awq_tensors,
    gptq_tensors,
    group_index,
    mxfp4_tensors,
    pack_words,
    random_codes,
)

GROUP = 32
TOKENS = torch.arange(60) * 7
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 16}

Quantizer = Callable[[str, tuple[int, ...], torch.Generator], tuple[Tensors, torch.Tensor]]


def integers(shape: tuple[int, ...], chance: torch.Generator, spread: int) -> tuple[torch.Tensor, ...]:
    """Return codes ``[outputs, inputs]``, scales and zero points ``[groups, outputs]``."""
    outputs, inputs = shape
    codes = random_codes(chance, 4, outputs, inputs)
    scales = (torch.rand(inputs // GROUP, outputs, generator=chance) * 0.03 + 0.01).half()
    zeros = 8 + torch.randint(-spread, spread + 1, (inputs // GROUP, outputs), generator=chance)
    return codes, scales, zeros


def weights_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, g_idx: torch.Tensor) -> torch.Tensor:
    return (scales.float()[g_idx.long()] * (codes.T - zeros[g_idx.long()])).T


def gptq(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers, g_idx = integers(shape, chance, 0), group_index(shape[1], GROUP)
    return gptq_tensors(module, *numbers, g_idx), weights_of(*numbers, g_idx)


def gptq_ordered(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Layers that multiply the same rows have the same order of inputs, as GPTQ derives it from the rows."""
    numbers = integers(shape, chance, 4)
    same_rows = 1 if "down" in module else 2 if "o_proj" in module else 3
    g_idx = group_index(shape[1], GROUP, torch.Generator().manual_seed(same_rows))
    return gptq_tensors(module, *numbers, g_idx, version=2), weights_of(*numbers, g_idx)


def gptq_unlike_orders(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Layers that multiply the same rows can't become one matrix."""
    numbers, g_idx = integers(shape, chance, 4), group_index(shape[1], GROUP, chance)
    return gptq_tensors(module, *numbers, g_idx), weights_of(*numbers, g_idx)


def awq(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = integers(shape, chance, 4)
    return awq_tensors(module, *numbers), weights_of(*numbers, group_index(shape[1], GROUP))


def packed(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = integers(shape, chance, 0)
    tensors = {"packed": pack_words(codes, 4), "scale": scales.T, "shape": torch.tensor(shape)}
    weights = weights_of(codes, scales, zeros, group_index(shape[1], GROUP))
    return {f"{module}.weight_{part}": tensor for part, tensor in tensors.items()}, weights


def int8(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(-128, 128, shape, generator=chance).to(torch.int8)
    scales = torch.rand(shape[0], 1, generator=chance) * 0.002 + 0.001
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}, codes * scales


def fp8(module: str, shape: tuple[int, ...], chance: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.randn(shape, generator=chance).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=chance) * 0.2 + 0.1
    whole = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return {f"{module}.weight": numbers, f"{module}.weight_scale_inv": scales}, numbers.float() * whole


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}},
}
INT8 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
FORMATS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq),
    "gptq in order of activations": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": False,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        gptq_ordered,
    ),
    "gptq in unlike orders": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
        gptq_unlike_orders,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed int4": (COMPRESSED, packed),
    "compressed int8": (COMPRESSED | {"config_groups": INT8}, int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
}


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a linear layer of a decoder layer that is no router."""
    return ".layers." in name and tensor.ndim == 2 and name.endswith(".weight") and ".gate.weight" not in name


def make(
    folder: Path, kind: str, settings: dict[str, Any], change: Callable[[str, torch.Tensor], tuple[Tensors, Tensors]]
) -> torch.Tensor:
    """Write a quantized checkpoint, and return the logits of a plain one with the same weights."""
    experts = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gpt_oss" else {}
    model = random_model(named_config(kind, **SIZES | experts | layers))
    plain = folder / "plain"
    model.save_pretrained(plain)
    quantized: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored, weights = change(name, tensor)
        quantized |= {each: part.contiguous() for each, part in stored.items()}
        dequantized |= {each: part.contiguous() for each, part in weights.items()}
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    ids = TOKENS.unsqueeze(0) % model.config.vocab_size
    with torch.inference_mode():
        return load_whole(plain)(ids).logits[0]


def check_logits(folder: Path, expected: torch.Tensor) -> TorchExecutor:
    """Compare the logits of the whole model and of two halves. Return the executor of the whole."""
    tokens = (TOKENS % expected.shape[1]).tolist()
    whole, halves = (Cutter().cut(folder, lines) for lines in ((0, 2), (0, 1, 2)))
    for pipeline in (whole, halves):
        pipeline.open(1)
    result = whole.logits((1, 0, tokens))[0]
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-4 * expected.abs().max().item())
    assert torch.equal(halves.logits((1, 0, tokens))[0], result)
    (executor,) = whole.stages
    return executor


def make_format(folder: Path, kind: str, format_: str) -> torch.Tensor:
    """Write a checkpoint with quantized matrices in one of ``FORMATS``, and return the logits of its weights."""
    settings, quantize = FORMATS[format_]
    chance = torch.Generator().manual_seed(1)

    def change(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors]:
        if not is_quantized(name, tensor):
            return {name: tensor}, {name: tensor}
        stored, weights = quantize(name.removesuffix(".weight"), tuple(tensor.shape), chance)
        return stored, {name: weights}

    return make(folder, kind, settings, change)


def make_gpt_oss(folder: Path) -> torch.Tensor:
    """Write a checkpoint with experts in MXFP4, and return the logits of its weights. The experts are stored as
    outputs × inputs; a plain checkpoint has them transposed."""
    chance = torch.Generator().manual_seed(1)

    def change(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}, {name: tensor}
        experts, inputs, outputs = tensor.shape
        codes = random_codes(chance, 4, experts, outputs, inputs)
        exponents = torch.randint(121, 124, (experts, outputs, inputs // 32), generator=chance)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        weights = values[codes] * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
        return mxfp4_tensors(name, codes, exponents), {name: weights.transpose(1, 2)}

    return make(folder, "gpt_oss", {"quant_method": "mxfp4"}, change)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_file_has_the_logits_of_its_weights(tmp_path: Path, kind: str, format_: str) -> None:
    expected = make_format(tmp_path, kind, format_)
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.quantized) == {"llama": 14, "qwen3_moe": 2 * (4 + 3 * 7)}[kind]
    executor = check_logits(tmp_path, expected)
    loaded, planned = executor.stats()["loaded_bytes"], executor.manifest.weight_bytes(LayerRange(0, 2))
    # experts have seen unlike inputs, so their orders count as unlike
    assert loaded <= planned if "order" in format_ else loaded == planned


def test_gpt_oss_with_experts_of_four_bits(tmp_path: Path) -> None:
    check_logits(tmp_path, make_gpt_oss(tmp_path))
    assert len(Checkpoint(tmp_path).quantized) == 4
