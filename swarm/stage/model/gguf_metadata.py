"""Typed access to a GGUF file's metadata, which keeps record of the keys that were used. Does not import torch."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TypeVar, cast

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel, Value
from swarm.wire.messages.common import MAX_LAYERS

T = TypeVar("T")

_MAX_SIZE = (1 << 31) - 1

# Keys below an architecture's name that change nothing in what is computed.
_WITHOUT_EFFECT = {
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
}


class GgufMetadata:
    """The metadata of a model. Keys without a first part are below the architecture's name.

    Raises ``ModelError`` for a value of another type or without sense.
    """

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self._values = model.metadata
        self.architecture = self.text("general.architecture")
        self._used: set[str] = set()

    @property
    def path(self) -> Path:
        return self.model.files[0].path

    def raw(self, key: str) -> Value | None:
        """Return the value of a key below the architecture's name; None if the file does not have it."""
        self._used.add(key)
        return self._values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MAX_SIZE) -> int:
        value = self.raw(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one value for each layer
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self._unusable(f"{self.architecture}.{key}", value)
        return value

    @property
    def num_layers(self) -> int:
        return self.integer("block_count", most=MAX_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self._unusable(f"{self.architecture}.{key}", value)
        return _shortest(value)  # type: ignore[arg-type]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; the key is a full one."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._unusable(key, value)
        return value

    def token(self, name: str, vocab_size: int) -> int | None:
        """Return the number of a special token such as ``bos``; None if the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._values.get(key)
        if value is None or (type(value) is int and value in (-1, (1 << 32) - 1)):
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self._unusable(key, value)
        return value

    def value(self, key: str) -> Value | None:
        """Return the value of a full key; None if the file does not have it."""
        return self._values.get(key)

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; the key is a full one. Empty if the file does not have it."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        return self._list(key, int)

    def numbers(self, key: str) -> list[float]:
        return self._list(key, float)

    def _list(self, key: str, kind: type[T]) -> list[T]:
        value = self._values.get(key, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self._unusable(key, value)
        return cast(list[T], value)

    def flag(self, key: str) -> bool | None:
        """Return a truth value; the key is a full one."""
        value = self._values.get(key)
        if value is not None and type(value) is not bool:
            raise self._unusable(key, value)
        return value

    def require(self, key: str, *allowed: Value) -> None:
        """Raise ``ModelError`` if a key is there and has none of these values."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} = {str(value)[:40]} is not supported for this architecture; "
                "use the model's safetensors files"
            )

    def check_all_used(self) -> None:
        """Raise ``ModelError`` if the file has a setting of the model that nothing has asked for."""
        prefix = f"{self.architecture}."
        for key in self._values:
            rest = key.removeprefix(prefix)
            if key.startswith(prefix) and rest not in self._used | _WITHOUT_EFFECT:
                raise ModelError(
                    f"{self.path}: the setting {key} is not supported for this architecture; use the model's "
                    "safetensors files"
                )

    def _unusable(self, key: str, value: Value | None) -> ModelError:
        described = "no" if value is None else f"an unusable value ({str(value)[:40]}) of"
        return ModelError(f"{self.path} has {described} {key}; download it again, or use another file of the model")


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32: 1e-05 and not 9.999999747378752e-06.

    The file holds float32; the original configuration had decimal numbers, and some models compute in float64 with
    them.
    """
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _float32(short) == _float32(value):
            return short
    return value


def _float32(value: float) -> bytes:
    return struct.pack("<f", value)
