"""Files of an adapter in peft's format: where they are, and what ``adapter_config.json`` excludes. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor, read_header
from swarm.hub.names import HubName, parse_name
from swarm.stage.model.folder_files import read_json
from swarm.version import with_extra
from swarm.wire.messages import MAX_ADAPTERS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
# The exponent's bits of a float, all of which are set if it is NaN or infinite; numpy has no bfloat16.
_EXPONENT_BITS = {"F32": ("u4", 0x7F800000), "F16": ("u2", 0x7C00), "BF16": ("u2", 0x7F80)}


def locate_adapter(source: str) -> tuple[Path, str]:
    """Return an adapter's folder: a local one, or that of a name in the hub's cache, which is filled first; and the
    source, of a name on the hub with the commit. Raises ``ModelError``."""
    path, name = Path(source).expanduser(), parse_name(source)
    if path.is_dir():
        return path, source
    if name is None or name.has_choice:
        raise ModelError(
            f"there is no directory {source}; an adapter is a folder in peft's format, or owner/name on the hub"
        )
    try:
        from swarm.hub.adapter_lookup import look_up_adapter  # noqa: PLC0415 (slow to load, and seldom needed)
    except ImportError:
        raise ModelError(
            f"there is no directory {source}; to fetch it from a hub, install {with_extra('worker')}"
        ) from None
    folder = look_up_adapter(name)
    return folder, str(HubName(name.repository, folder.name))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. Raises ``ModelError`` if the adapter can't be served by what it
    says, or if there are no weights."""
    config = read_json(folder / CONFIG, "an adapter is a folder in peft's format")
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
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}; only safetensors are read")
    return config


def check_values(folder: Path) -> None:
    """Raise ``ModelError`` if a tensor in an adapter's folder has NaN or infinite values."""
    for tensor in read_header(folder / WEIGHTS):
        if tensor.is_float:
            try:
                stored = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
            except OSError as error:
                raise ModelError(f"{tensor.path} can't be read ({error}) at tensor {tensor.name}") from None
            check_finite(tensor, stored)


def check_finite(tensor: StoredTensor, stored: npt.NDArray[np.uint8]) -> None:
    """Raise ``ModelError`` if the stored bytes of this tensor of floats have NaN or infinite values. Rows with the
    adapter would have no results, for which workers would be blamed."""
    dtype = tensor.dtype
    if dtype == "F64":
        with np.errstate(over="ignore"):
            dtype, stored = "F32", stored.view(np.float64).astype(np.float32).view(np.uint8)  # as it is computed with
    integer, exponent = _EXPONENT_BITS[dtype]
    if np.any(stored.view(integer) & exponent == exponent):
        raise ModelError(
            f"{tensor.path} has NaN or infinite values in {tensor.name}; load another checkpoint of this adapter, or "
            "train it again"
        )


def check_names(names: Collection[str], model: str) -> None:
    """Raise ``ModelError`` if a swarm of this model can't have adapters of these names."""
    if len(names) > MAX_ADAPTERS:
        raise ModelError(f"a swarm has at most {MAX_ADAPTERS} adapters, not {len(names)}")
    if model in names:
        raise ModelError(
            f"an adapter is called {model}, as the model is, so that no request could select it: rename the adapter"
        )
