"""Search for the quantized matrices of a checkpoint, from its configuration and headers. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.awq import find_awq
from swarm.stage.quantization.compressed import find_compressed
from swarm.stage.quantization.fp8 import find_fp8
from swarm.stage.quantization.gptq import find_gptq
from swarm.stage.quantization.mxfp4 import find_mxfp4
from swarm.stage.quantization.parts import TensorPool
from swarm.stage.quantization.settings import Settings, read_section, read_text
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.unsupported import check_leftovers, reject_method

Finder = Callable[[Settings, TensorPool], Iterator[StoredWeight]]

_KEYS = ("quantization_config", "compression_config")

# Files of older folders with settings that newer ones have in config.json, and their method.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}

FINDERS: dict[str, Finder] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed,
    "fp8": find_fp8,
    "fbgemm_fp8": find_fp8,
    "mxfp8": find_fp8,
    "mxfp4": find_mxfp4,
}


def find_quantized(
    settings: Settings, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredWeight], dict[str, StoredTensor]]:
    """Return the quantized matrices of a checkpoint by their plain names, and all other tensors.

    ``settings`` describe the quantized matrices; they are empty for a plain checkpoint. Raises ``ModelError`` if the
    tensors contradict them.
    """
    pool = TensorPool(tensors)
    weights = {weight.name: weight for weight in _find(settings, pool)}
    for name in weights.keys() & pool.rest.keys():
        raise ModelError(f"{pool.rest[name].path} has {name} a second time, not quantized; download it again")
    check_leftovers(pool.rest.values())
    if settings and not weights and read_text(settings, "format", "") != "dense":
        raise ModelError(
            f"config.json describes weights quantized with {read_text(settings, 'quant_method', '')}, but no tensor is "
            "quantized; download the model's files again"
        )
    return weights, pool.rest


def _find(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    return FINDERS[read_text(settings, "quant_method", "")](settings, pool) if settings else iter(())


def read_quantization(
    folder: Path, config: Mapping[str, Any], read_object: Callable[[Path], dict[str, Any]]
) -> tuple[Settings, Path | None]:
    """Return the settings that describe a checkpoint's quantized matrices, empty if it is plain.

    They are part of ``config``, the content of ``config.json``, or in a file of their own in older folders, which
    ``read_object`` reads and is returned, too. Raises ``ModelError`` if the format is not supported.
    """
    file = None
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    settings: Settings = next((read_section(place, key) for place in places for key in _KEYS if place.get(key)), {})
    if not settings:
        method, file = next(
            ((method, folder / name) for name, method in _FILES.items() if (folder / name).is_file()), ("", None)
        )
        settings = {} if file is None else {"quant_method": method, **read_object(file)}
    if settings and read_text(settings, "quant_method", "") not in FINDERS:
        raise reject_method(settings, config)
    return settings, file
