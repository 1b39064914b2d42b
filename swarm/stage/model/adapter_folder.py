"""Adapters of low rank (LoRA) in peft's folders: what they change, and their weights. The rest of peft is refused.

The tensors of ``adapter_model.safetensors`` say which modules are adapted, by their paths in the model behind
``base_model.model.``; ``adapter_config.json`` has ranks and scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor, read_header
from swarm.hub.names import parse_name
from swarm.stage.model.folder_files import read_json
from swarm.stage.native.adapters import LowRank
from swarm.stage.quantization.reading import read_tensor
from swarm.version import with_extra
from swarm.wire.messages import MAX_ADAPTERS, Asset

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_RANK = 1024
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# What else peft can do with its LoRA, by the setting: all of these change the computation.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "transposed weights",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "target_parameters": "adapted parameters (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}


@dataclass(frozen=True, slots=True)
class _AdaptedModule:
    down: StoredTensor
    up: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterFolder:
    """An adapter's folder. Raises ``ModelError`` with the file and the problem if it can't be served."""

    def __init__(self, name: str, source: str) -> None:
        folder = _locate(source)
        self.name, self._folder = name, folder
        self.key = name  # what rows have whose product it changes
        config = read_json(folder / CONFIG, "an adapter is a folder in peft's format")
        _check_config(folder, config)
        self._modules = _read_modules(folder, config)

    def asset(self) -> Asset:
        """Return what identifies the adapter: its name, and size and digest of its files."""
        paths = [self._folder / CONFIG, self._folder / WEIGHTS]
        digest = xxhash.xxh3_128()
        for path in paths:
            digest.update(path.read_bytes())
        return Asset(self.name, sum(path.stat().st_size for path in paths), digest.hexdigest())

    def check_model(self, model: nn.Module, layers: str) -> None:
        """Raise ``ModelError`` unless the adapter changes linear modules of this model's ``layers`` only."""
        for module, adapted in self._modules.items():
            try:
                part = model.get_submodule(module)
            except AttributeError:
                raise ModelError(f"{self._described} changes {module}, which the model does not have") from None
            if not module.startswith(f"{layers}.") or not isinstance(part, nn.Linear):
                raise ModelError(f"{self._described} changes {module}; only linear modules of layers can be adapted")
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
        """Return the weights for the modules under ``prefix``, by their names in the model."""
        return {
            module: LowRank(read_tensor(adapted.down).float(), read_tensor(adapted.up).float(), adapted.scale)
            for module, adapted in self._modules.items()
            if module.startswith(prefix)
        }

    @property
    def _described(self) -> str:
        return f"the adapter {self.name} ({self._folder})"

    def unsupported(self, modules: Iterable[str]) -> ModelError:
        """Return the error for modules that this kind of model computes in a way that adapters can't change."""
        return ModelError(
            f"{self._described} changes {', '.join(sorted(modules))}, which can't be adapted in this kind of model; "
            "serve the merged weights"
        )


def _locate(source: str) -> Path:
    """Return an adapter's folder: a local one, or that of a name in the hub's cache, which is filled first."""
    path, name = Path(source).expanduser(), parse_name(source)
    if path.is_dir() or name is None or name.has_choice:
        return path
    try:
        from swarm.hub.adapter_lookup import look_up_adapter  # noqa: PLC0415 (slow to load, and seldom needed)
    except ImportError:
        raise ModelError(
            f"there is no directory {source}; to fetch it from a hub, install {with_extra('worker')}"
        ) from None
    return look_up_adapter(name)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is an adapter of type {config.get('peft_type')}; only LORA is served")
    for setting, what in _UNSUPPORTED.items():
        if config.get(setting):
            raise ModelError(f"{folder} is an adapter with {what}, which is not supported; serve the merged weights")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{folder} is an adapter with biases (bias = {config['bias']}), which are not supported")
    for setting in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(setting) or {}, dict):
            raise ModelError(f"{folder / CONFIG} has a {setting} that is no object")


def _read_modules(folder: Path, config: Mapping[str, Any]) -> dict[str, _AdaptedModule]:
    """Return what the adapter changes, by module of the model."""
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}; only safetensors are read")
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
    return {module: _read_module(folder, config, module, tensors) for module, tensors in sorted(sides.items())}


def _read_module(
    folder: Path, config: Mapping[str, Any], module: str, tensors: Mapping[str, StoredTensor]
) -> _AdaptedModule:
    if len(tensors) != 2 or tensors["A"].shape[0] != tensors["B"].shape[1]:
        raise ModelError(f"{folder / WEIGHTS} has no pair of lora_A and lora_B of one rank for {module}")
    rank = _pattern_value(config, "rank_pattern", "r", module)
    alpha = _pattern_value(config, "alpha_pattern", "lora_alpha", module)
    stored = tensors["A"].shape[0]
    if rank != stored or not 1 <= rank <= _MAX_RANK:
        raise ModelError(f"{folder / CONFIG} gives {module} rank {rank}, {WEIGHTS} has {stored}; at most {_MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelError(f"{folder / CONFIG} has no usable lora_alpha")
    return _AdaptedModule(tensors["A"], tensors["B"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _pattern_value(config: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return the value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            raise ModelError(f"{CONFIG} has {pattern!r} in {patterns}, which is no regular expression") from None
    return config.get(default, 8)


def open_adapters(folders: Mapping[str, str]) -> tuple[AdapterFolder, ...]:
    """Open adapters by name, in the order of their names: from folders, or names on a hub. Raises ``ModelError``."""
    if len(folders) > MAX_ADAPTERS:
        raise ModelError(f"a swarm has at most {MAX_ADAPTERS} adapters, not {len(folders)}")
    return tuple(AdapterFolder(name, folders[name]) for name in sorted(folders))
