"""Adapters in peft's folders, and what a model computes whose weights they were merged into."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    targets: Sequence[str] = LLAMA,
    layers: Sequence[int] | None = None,
    size: float = 0.1,
    **settings: Any,
) -> Path:
    """Write an adapter with random weights for the ``targets`` of a model's layers, as peft does."""
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | settings
    ranks, tensors, generator = config.get("rank_pattern", {}), {}, torch.Generator().manual_seed(seed)
    for name, (outputs, inputs) in sorted(_linear_shapes(model).items()):
        module = name.removesuffix(".weight")
        leaf, layer = module.rpartition(".")[2], int(module.partition("layers.")[2].partition(".")[0] or -1)
        if leaf not in targets or (layers is not None and layer not in layers):
            continue
        rank = ranks.get(leaf, config["r"])
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensor = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(targets)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_weights(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The model's weights with the adapter's changes, in float64."""
    import torch
    from safetensors.torch import load_file

    weights = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    config, tensors = json.loads((adapter / "adapter_config.json").read_text()), load_file(_weights_of(adapter))
    for name, down in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up, rank = tensors[name.replace("lora_A", "lora_B")], len(down)
            alpha = _by_leaf(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            weights[f"{module}.weight"] += scale * (up.double() @ down.double()).to(torch.float64)
    return weights


def merged_logits(model: Path, adapter: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token, in float64, of the model with the adapter merged into its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    if adapter is not None:
        whole.load_state_dict(merged_weights(model, adapter), strict=False)
    with torch.inference_mode():
        return whole(torch.tensor([list(tokens)])).logits[0]


def _weights_of(adapter: Path) -> Path:
    return adapter / "adapter_model.safetensors"


def _by_leaf(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return patterns.get(module.rpartition(".")[2], default)


def _linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    from safetensors.torch import load_file

    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name}
