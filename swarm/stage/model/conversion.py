"""Reading of stored tensors, converted to the names and shapes of the model's modules by transformers' own table.

Some models store separately what their modules hold as one tensor: one matrix per expert on disk, one of all experts in
the module. A tensor of the model is made of one or several stored tensors, and only those are read.
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


class WeightSource(Protocol):
    """Source of weights."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the tensor. ``shape`` is the shape that the model expects; the caller checks it."""


class FolderSource:
    """Source that reads tensors of a folder into their own memory."""

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
    """Source of a model's tensors that are stored under other names or in pieces."""

    def __init__(self, model: Any, names: Iterable[str], stored: WeightSource) -> None:
        self._config = model.config
        self._stored = stored
        self._pieces: dict[str, list[tuple[str, str | None]]] = {}  # stored names, with patterns, by the model's name
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
        """Return the names of the stored tensors that this tensor is made of; empty if the source does not have it."""
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
        converted: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return converted
