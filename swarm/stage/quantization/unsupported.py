"""Formats of quantized checkpoints that are not supported, and what to use instead. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from swarm.errors import ModelError, UnservedModel
from swarm.hub.headers import ELEMENT_BITS, StoredTensor
from swarm.stage.quantization.settings import Settings, read_text

_INSTEAD = (
    'use the original files with worker.weights = "int8" or "int4", or files in GGUF, GPTQ, AWQ, compressed-tensors or '
    "FP8"
)

# Names for people, by ``quant_method``.
_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fouroversix": "Four over Six",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "metal": "Metal",
    "modelopt": "NVIDIA ModelOpt",
    "nvfp4": "NVFP4",
    "quanto": "quanto",
    "quark": "AMD Quark",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}

# Endings of tensors that only quantized checkpoints have.
_ENDINGS = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv")


def reject_method(settings: Settings, config: Mapping[str, Any]) -> ModelError:
    """Return the error for a ``quantization_config`` in a format that is not supported."""
    method = read_text(settings, "quant_method", "")
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if not method and "quantization" in config:
        name = "MLX"
    elif not method:
        return ModelError(f"quantization_config has no quant_method, so its format is unknown; {_INSTEAD}")
    else:
        name = _NAMES.get(method, method)
    return UnservedModel(f"checkpoints quantized with {name} are not supported; {_INSTEAD}")


def check_leftovers(tensors: Collection[StoredTensor]) -> None:
    """Raise ``ModelError`` for a tensor that belongs to a quantized matrix, among those that do not."""
    for tensor in tensors:
        if tensor.dtype.startswith(("F4", "F6", "F8")) or tensor.dtype not in ELEMENT_BITS:
            raise ModelError(
                f"{tensor.path} stores {tensor.name} as {tensor.dtype}, which is not supported; {_INSTEAD}"
            )
    for tensor in tensors:
        is_matrix = len(tensor.shape) > 1 and tensor.name.endswith((".weight", "_blocks"))
        if tensor.name.endswith(_ENDINGS) or (is_matrix and not tensor.is_float):
            raise ModelError(
                f"{tensor.path} has {tensor.name} of a quantized matrix, which config.json does not describe; download "
                "the model's files again"
            )
