"""Adapters of low rank (LoRA) in peft's folders: what they change, and their weights. The rest of peft is refused.

The tensors of ``adapter_model.safetensors`` say which modules are adapted, by their paths in the model behind
``base_model.model.``; ``adapter_config.json`` has ranks and scales. An adapter of a multimodal model has the paths of
that model; those in its text tower are translated to the paths of a plain causal model, as the checkpoint's are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor, read_header
from swarm.stage.model.adapter_files import (
    CONFIG,
    WEIGHTS,
    check_finite,
    check_names,
    locate_adapter,
    read_adapter_config,
)
from swarm.stage.model.text_tower import choose_names
from swarm.stage.native.adapters import LowRank
from swarm.stage.quantization.reading import read_tensor
from swarm.wire.messages import Asset

_MAX_RANK = 1024
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class _AdaptedModule:
    down: StoredTensor
    up: StoredTensor
    scale: float
    digest: str  # of all of this, with the weights

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterFolder:
    """An adapter's folder. Raises ``ModelError`` with the file and the problem if it can't be served."""

    def __init__(self, name: str, source: str) -> None:
        folder, self.source = locate_adapter(source)  # the same files for whoever reads it later, if it is on a hub
        self.name, self._folder = name, folder
        self.key = name  # what rows have whose product it changes
        self._modules = _read_modules(folder, read_adapter_config(folder))

    def asset(self) -> Asset:
        """Return what identifies the adapter: its name, and size and digest of what it changes."""
        modules = self._modules.values()
        digest = xxhash.xxh3_128("".join(module.digest for module in modules).encode())
        return Asset(self.name, sum(m.down.num_bytes + m.up.num_bytes for m in modules), digest.hexdigest())

    def check_model(self, model: nn.Module, layers: str) -> None:
        """Raise ``ModelError`` unless the adapter changes linear modules of this model's ``layers`` only."""
        if getattr(model.config, "model_type", None) == "mllama_text_model":
            raise ModelError(f"{self._described} counts layers for images, which are not loaded; serve merged weights")
        for module, adapted in self._modules.items():
            try:
                part = model.get_submodule(module) if module.startswith(f"{layers}.") else None
            except AttributeError:
                if _is_expert(module) and any(_is_expert(name) for name, _ in model.named_modules()):
                    raise ModelError(
                        f"{self._described} changes {module}, and experts can't be adapted; serve the merged weights"
                    ) from None
                raise ModelError(f"{self._described} changes {module}, which the model does not have") from None
            if not isinstance(part, nn.Linear):
                raise ModelError(
                    f"{self._described} changes {module}; only linear modules in {layers} can be adapted, so serve the "
                    "merged weights"
                )
            inputs, outputs = adapted.down.shape[1], adapted.up.shape[0]
            if (inputs, outputs) != (part.in_features, part.out_features):
                raise ModelError(
                    f"{self._described} is of another model: its {module} has {inputs} inputs and {outputs} outputs, "
                    f"the model's {part.in_features} and {part.out_features}"
                )

    def layer_bytes(self, layers: str, num_layers: int, element_bytes: int) -> list[int]:
        """Return the memory that the adapter takes in each layer."""
        sizes = [0] * num_layers
        for module, adapted in self._modules.items():
            index = int(module.removeprefix(f"{layers}.").partition(".")[0])
            sizes[index] += adapted.rank * (adapted.down.shape[1] + adapted.up.shape[0]) * element_bytes
        return sizes

    def read(self, prefix: str) -> dict[str, LowRank]:
        """Return the weights for the modules under ``prefix``, by their names in the model. Raises ``ModelError`` if
        the file was changed since the folder was opened: layers that are loaded later must have the same adapter."""
        found: dict[str, LowRank] = {}
        for module, adapted in self._modules.items():
            if module.startswith(prefix):
                down, up = read_tensor(adapted.down), read_tensor(adapted.up)
                if _digest(module, down, up, adapted.scale) != adapted.digest:
                    raise ModelError(
                        f"{self._described} has other weights for {module} now than when it was loaded: put the former "
                        "files back, and load new ones from another folder"
                    )
                found[module] = LowRank(down.float(), up.float(), adapted.scale)
        return found

    @property
    def _described(self) -> str:
        return f"the adapter {self.name} ({self._folder})"

    def unsupported(self, modules: Iterable[str]) -> ModelError:
        """Return the error for modules that this kind of model computes in a way that adapters can't change."""
        return ModelError(
            f"{self._described} changes {', '.join(sorted(modules))}, which can't be adapted in this kind of model; "
            "serve the merged weights"
        )


def _read_modules(folder: Path, config: Mapping[str, Any]) -> dict[str, _AdaptedModule]:
    """Return what the adapter changes, by module of the plain causal model."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for tensor in read_header(folder / WEIGHTS):
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or not tensor.is_float or len(tensor.shape) != 2:
            raise ModelError(
                f"{folder / WEIGHTS} has {tensor.name} ({tensor.dtype}), which is no part of a plain LoRA adapter; "
                "serve the merged weights"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise ModelError(f"{folder / WEIGHTS} has no tensors")
    paths = _plain_paths(folder, sides)
    return {plain: _read_module(folder, config, paths[plain], plain, sides[paths[plain]]) for plain in sorted(paths)}


def _plain_paths(folder: Path, modules: Collection[str]) -> dict[str, str]:
    """Return the stored paths of modules by those in a plain causal model. Modules of other towers keep theirs."""
    plain_name = choose_names([f"{module}.weight" for module in modules])
    paths: dict[str, str] = {}
    for module in modules:
        plain = (plain_name(f"{module}.weight") or module).removesuffix(".weight")
        if plain in paths:
            raise ModelError(f"{folder / WEIGHTS} has both {paths[plain]} and {module}, which are the same module")
        paths[plain] = module
    return paths


def _read_module(
    folder: Path, config: Mapping[str, Any], module: str, plain: str, tensors: Mapping[str, StoredTensor]
) -> _AdaptedModule:
    """Return what the adapter changes in one module. Patterns of the configuration match its path as it is stored."""
    if len(tensors) != 2 or tensors["A"].shape[0] != tensors["B"].shape[1]:
        raise ModelError(f"{folder / WEIGHTS} has no pair of lora_A and lora_B of one rank for {module}")
    rank = _pattern_value(config, "rank_pattern", "r", module)
    alpha = _pattern_value(config, "alpha_pattern", "lora_alpha", module)
    stored = tensors["A"].shape[0]
    if rank != stored or not 1 <= rank <= _MAX_RANK:
        raise ModelError(f"{folder / CONFIG} gives {module} rank {rank}, {WEIGHTS} has {stored}; at most {_MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelError(f"{folder / CONFIG} has no usable lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    down, up = read_tensor(tensors["A"]), read_tensor(tensors["B"])
    check_finite(tensors["A"], _stored_bytes(down))
    check_finite(tensors["B"], _stored_bytes(up))
    return _AdaptedModule(tensors["A"], tensors["B"], scale, _digest(plain, down, up, scale))


def _digest(module: str, down: torch.Tensor, up: torch.Tensor, scale: float) -> str:
    described = f"{module} {down.dtype} {[*down.shape]} {up.dtype} {[*up.shape]} {scale!r}"
    digest = xxhash.xxh3_128(described.encode())
    for tensor in (down, up):
        digest.update(_stored_bytes(tensor).tobytes())
    return digest.hexdigest()


def _is_expert(module: str) -> bool:
    """Whether this is a path into a mixture's experts, which the model computes as one module."""
    return "experts" in module.split(".")


def _stored_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()


def _pattern_value(config: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return the value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            raise ModelError(f"{CONFIG} has {pattern!r} in {patterns}, which is no regular expression") from None
    return config.get(default, 8)


def open_adapters(folders: Mapping[str, str], model: str) -> tuple[AdapterFolder, ...]:
    """Open adapters of the model of this name, in the order of their names: from folders, or names on a hub. Raises
    ``ModelError``."""
    check_names(folders, model)
    return tuple(AdapterFolder(name, folders[name]) for name in sorted(folders))
