"""Search for the quantized matrices of a checkpoint, from its configuration and headers. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.fp8 import find_fp8, is_unsupported
from swarm.stage.quantization.gptq import find_gptq
from swarm.stage.quantization.parts import TensorPool
from swarm.stage.quantization.settings import Settings, read_section, read_text
from swarm.stage.quantization.stored import StoredWeight

Finder = Callable[[Settings, TensorPool], Iterator[StoredWeight]]

_KEYS = ("quantization_config", "compression_config")
_OLDER_GPTQ = "quantize_config.json"

FINDERS: dict[str, Finder] = {
    "gptq": find_gptq,
    "fp8": find_fp8,
}


def find_quantized(
    settings: Settings, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredWeight], dict[str, StoredTensor]]:
    """Return the quantized matrices of a checkpoint by their plain names, and all other tensors.

    ``settings`` describe the quantized matrices; they are empty for a plain checkpoint. Raises ``ModelError`` if the
    tensors contradict them.
    """
    if not settings:
        return {}, dict(tensors)
    pool = TensorPool(tensors)
    weights = {weight.name: weight for weight in _finder(settings)(settings, pool)}
    for name in weights.keys() & pool.rest.keys():
        raise ModelError(f"{pool.rest[name].path} has {name} a second time, not quantized; download it again")
    for tensor in filter(is_unsupported, pool.rest.values()):
        raise ModelError(
            f"{tensor.path} stores {tensor.name} as {tensor.dtype}, which is not supported; use files in E4M3"
        )
    return weights, pool.rest


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Settings:
    """Return the settings that describe a checkpoint's quantized matrices; empty if it is plain.

    They are part of ``config``, the content of ``config.json``, or in a file of their own in older folders. Raises
    ``ModelError`` if the format is not supported.
    """
    settings = next((read_section(config, key) for key in _KEYS if config.get(key)), {})
    text = config.get("text_config")
    if not settings and isinstance(text, dict):
        settings = next((read_section(text, key) for key in _KEYS if text.get(key)), {})
    if not settings and (folder / _OLDER_GPTQ).is_file():
        settings = {"quant_method": "gptq", **_read_object(folder / _OLDER_GPTQ)}
    if settings:
        _finder(settings)
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return content


def _finder(settings: Settings) -> Finder:
    method = read_text(settings, "quant_method", "")
    if method in FINDERS:
        return FINDERS[method]
    raise ModelError(f"{method} is not supported; use its float32 or bfloat16 original")
