"""Files of an adapter in peft's format: where they are, and what ``adapter_config.json`` excludes. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm.errors import ModelError
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


def locate_adapter(source: str) -> tuple[Path, str]:
    """Return an adapter's folder: a local one, or that of a name in the hub's cache, which is filled first; and the
    source, of a name on the hub with the commit."""
    path, name = Path(source).expanduser(), parse_name(source)
    if path.is_dir() or name is None or name.has_choice:
        return path, source
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


def check_number(num_adapters: int) -> None:
    """Raise ``ModelError`` if a swarm can't have this number of adapters."""
    if num_adapters > MAX_ADAPTERS:
        raise ModelError(f"a swarm has at most {MAX_ADAPTERS} adapters, not {num_adapters}")
