"""Adapters in peft's folders, and what a model computes whose weights they were merged into."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"\.(?:layers|h)\.(?P<layer>\d+)\.")
Shape = tuple[int, int]  # outputs, inputs
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    targets: Sequence[str] = LLAMA,
    layers: Sequence[int] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter with random weights for the ``targets`` of a model's layers, as peft does."""
    chosen: dict[str, Shape] = {}
    for module, shape in _shapes(model).items():
        match = _LAYER.search(module)
        if module.rpartition(".")[2] in targets and match and (layers is None or int(match["layer"]) in layers):
            chosen[module] = shape
    return write_adapter(folder, chosen, seed=seed, **settings)


def write_adapter(folder: Path, shapes: Mapping[str, Shape], *, seed: int, size: float = 0.1, **settings: Any) -> Path:
    """Write an adapter with random weights for modules of these outputs and inputs."""
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | settings
    ranks, tensors, generator = config.get("rank_pattern", {}), {}, torch.Generator().manual_seed(seed)
    for module, (outputs, inputs) in sorted(shapes.items()):
        rank = _by_pattern(ranks, module, config["r"])
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensor = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def weight_changes(adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to the weights of modules, in float64."""
    from safetensors.torch import load_file

    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    changes = {}
    for name, down in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up, rank = tensors[name.replace("lora_A", "lora_B")], len(down)
            alpha = _by_pattern(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            changes[module] = scale * (up.double() @ down.double())
    return changes


def merged_logits(
    model: Path, adapter: Path | None, tokens: Sequence[int], rename: Callable[[str], str] = str, kind: Any = None
) -> torch.Tensor:
    """Logits after every token, in float64, of the model with the adapter merged into its weights. ``rename`` maps the
    adapter's paths of modules to those in the model, and ``kind`` is its class among transformers' automatic ones."""
    import torch
    from transformers import AutoModelForCausalLM

    loader = AutoModelForCausalLM if kind is None else kind
    whole = loader.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        for module, change in weight_changes(adapter).items() if adapter else ():
            part = whole.get_submodule(rename(module))
            part.weight = torch.nn.Parameter(part.weight + change)  # another layer may have the same weights
        logits: torch.Tensor = whole(torch.tensor([list(tokens)])).logits[0]
    return logits


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of a module by its whole path, or by the path's end."""
    return patterns.get(module, patterns.get(module.rpartition(".")[2], default))


def _shapes(model: Path) -> dict[str, Shape]:
    """The shapes of a checkpoint's matrices, by module."""
    from safetensors.torch import load_file

    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
