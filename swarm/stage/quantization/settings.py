"""Reading of ``quantization_config``: values of the expected kind, or one clear error. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.errors import ModelError

Settings = Mapping[str, Any]

MAX_BLOCK = (1 << 31) - 1  # upper bound of the inputs or outputs that share a scale


def read_integer(settings: Settings, name: str, default: int | None = None) -> int:
    """Return an integer. Raises ``ModelError`` if it is missing without a default, or no integer."""
    value = settings.get(name)
    if value is None:
        value = default
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ModelError(f"quantization_config has {name} = {value!r} instead of an integer; download config.json again")


def read_flag(settings: Settings, name: str, *, default: bool) -> bool:
    """Return a boolean. Raises ``ModelError`` if it is none."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise ModelError(f"quantization_config has {name} = {value!r} instead of true or false; download config.json again")


def read_text(settings: Settings, name: str, default: str) -> str:
    """Return a text in lower case. Raises ``ModelError`` if it is none."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        return value.lower()
    raise ModelError(f"quantization_config has {name} = {value!r} instead of a text; download config.json again")


def read_section(settings: Settings, name: str) -> Settings:
    """Return an inner object; empty if there is none. Raises ``ModelError`` if it is something else."""
    value = settings.get(name)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise ModelError(f"quantization_config has a {name} that is not an object; download config.json again")


def read_group_size(settings: Settings, name: str = "group_size", default: int | None = None) -> int:
    """Return the inputs that share a scale; 0 means all of them, which files store as -1."""
    size = read_integer(settings, name, default)
    if size == -1 or 0 < size <= MAX_BLOCK:
        return max(size, 0)
    raise ModelError(f"quantization_config has {name} = {size}, which is not a number of inputs")


def read_texts(settings: Settings, name: str) -> list[str]:
    """Return a list of texts; empty if there is none. Raises ``ModelError`` if it is something else."""
    value = settings.get(name)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise ModelError(f"quantization_config has a {name} that is not a list of texts; download config.json again")


def read_block(settings: Settings, name: str, default: tuple[int, int]) -> tuple[int, int]:
    """Return the outputs and inputs of the blocks that share a scale. Raises ``ModelError``."""
    match settings.get(name):
        case None:
            return default
        case [int(outputs), int(inputs)] if 0 < outputs <= MAX_BLOCK and 0 < inputs <= MAX_BLOCK:
            if not isinstance(outputs, bool) and not isinstance(inputs, bool):
                return outputs, inputs
    raise ModelError(f"quantization_config has {name} = {settings[name]!r} instead of two positive integers")
