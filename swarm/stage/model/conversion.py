"""Reads stored tensors, and makes of their names and shapes those of the model's modules, by transformers' own table.

Some models keep on disk what their modules hold joined: a matrix per expert here, one of all experts there. A tensor of
the model is made of one or several stored ones; only those are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint, StoredTensor

_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source(Protocol):
    """Where weights come from."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """The tensor; ``shape`` is what the model expects, which the caller checks."""


class FolderSource:
    """Reads tensors of a folder into memory of their own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        stored = self._tensors[name]
        if stored.dtype not in _STORED:
            raise ModelError(
                f"{stored.path} stores {name} as {stored.dtype}, which is not supported; "
                "use a float32, bfloat16 or float16 checkpoint"
            )
        tensor = torch.empty(stored.shape, dtype=_STORED[stored.dtype])
        _read_into(stored, memoryview(tensor.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return tensor


def _read_into(stored: StoredTensor, target: memoryview) -> None:
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            while len(target):
                count = file.readinto(target)
                if not count:
                    raise ModelError(f"{stored.path} ends inside tensor {stored.name}; download it again")
                target = target[count:]
    except OSError as error:
        raise ModelError(f"{stored.path} can't be read ({error}) at tensor {stored.name}") from None


class ConvertedSource:
    """The tensors of a model, read from a source that has them under other names or in pieces."""

    def __init__(self, model: Any, names: Iterable[str], stored: Source) -> None:
        self._config = model.config
        self._stored = stored
        self._pieces: dict[str, list[tuple[str, str | None]]] = {}  # the model's name: stored names, with patterns
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        expected = model.state_dict()
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            if target not in expected and name in expected:
                target, pattern = name, None
            self._pieces.setdefault(target, []).append((name, pattern))

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def stored_names(self, name: str) -> list[str]:
        """Under which names the source has what this tensor is made of; none if it has no such tensor."""
        return [stored for stored, _ in self._pieces.get(name, ())]

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        pieces = self._pieces[name]
        if pieces[0][1] is None:
            return self._stored.read(pieces[0][0], shape)
        converter = copy.deepcopy(self._by_pattern[pieces[0][1]])
        for stored, pattern in pieces:
            converter.add_tensor(name, stored, pattern, lambda stored=stored: self._stored.read(stored, shape))
        try:
            result = converter.convert(name, config=self._config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{name} can't be made of {len(pieces)} stored tensors ({error})") from None
        tensor = result[name]
        made: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return made
