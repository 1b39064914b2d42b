"""Reading of stored tensors, converted to the names and shapes of the model's modules by transformers' own table.

Some models store separately what their modules hold as one tensor: one matrix per expert on disk, one of all experts in
the module. A tensor of the model is made of one or several stored tensors, and only those are read. Quantized matrices
stay quantized where all pieces of a tensor have the same format; else they are dequantized first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.native.quantizing import quantize
from swarm.stage.quantization.decoding import open_stored, read_stored
from swarm.stage.quantization.formats import WeightFormat
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.tensors import QuantizedWeight, can_join, join_rows, stack_experts


class WeightSource(Protocol):
    """Source of weights."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the tensor, dequantized to float32 if it is quantized. ``shape`` is the shape that the model expects;
        the caller checks it."""

    def weight_format(self, name: str) -> WeightFormat | None:
        """Return the format of a quantized matrix, without reading anything; None if the tensor is plain."""

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return a quantized matrix; None if the tensor is plain.

        Its shape is ``[outputs, inputs]`` or ``[experts, outputs, inputs]``, also where the model transposes it.
        """


class ModelSource(WeightSource, Protocol):
    """Source that has the tensors under the names of the model's modules."""

    def stored_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors that this tensor is made of; empty if the source does not have it."""

    def shape(self, name: str) -> torch.Size | None:
        """Return the shape of what ``read`` returns, without reading anything; None if only ``read`` can tell."""


class StoredSource(WeightSource, Protocol):
    """Source of tensors as they are stored."""

    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor without contents, of the shape that ``read`` returns."""


class FolderSource:
    """Source that reads tensors of a folder into their own memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors, self._quantized = checkpoint.tensors, checkpoint.quantized

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._quantized

    def weight_format(self, name: str) -> WeightFormat | None:
        stored = self._quantized.get(name)
        return None if stored is None else stored.format

    def quantized(self, name: str) -> QuantizedWeight | None:
        stored = self._quantized.get(name)
        return None if stored is None else open_stored(stored, self._checkpoint.digest_files(stored), quantize)

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name in self._quantized:
            return read_stored(self._quantized[name], quantize).dequantize(torch.float32)
        stored = self._tensors[name]
        if not stored.is_float:
            raise ModelError(
                f"{stored.path} stores {name} as {stored.dtype}, which is not supported; "
                "use a float32, bfloat16 or float16 checkpoint"
            )
        return read_tensor(stored)

    def outline(self, name: str) -> torch.Tensor:
        stored = self._quantized[name] if name in self._quantized else self._tensors[name]
        return torch.empty(stored.shape, dtype=torch.float32, device="meta")


class ConvertedSource:
    """Source of a model's tensors that are stored under other names or in pieces.

    ``whole``: the kind of the multimodal model whose text tower it is, if any.
    """

    def __init__(self, model: Any, names: Iterable[str], stored: StoredSource, whole: str | None = None) -> None:
        self._model = model
        self._stored = stored
        self._pieces: dict[str, list[tuple[str, str | None]]] = {}  # stored names, with patterns, by the model's name
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        if not converters and whole is not None:
            table = get_checkpoint_conversion_mapping(whole) or []
            converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        expected = model.state_dict()
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            if target not in expected and name in expected:
                target, pattern = name, None
            self._pieces.setdefault(target, []).append((name, pattern))
        self._transposed = frozenset(transposed_names(model))

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def stored_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors that this tensor is made of; empty if the source does not have it."""
        return [stored for stored, _ in self._pieces.get(name, ())]

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        return self._convert(name, lambda stored: self._stored.read(stored, shape))

    def shape(self, name: str) -> torch.Size | None:
        try:
            return self._convert(name, self._stored.outline).shape
        except ModelError:  # what some conversions do needs the numbers
            return None

    def _convert(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return what is made of the tensors that ``read`` returns by their stored names."""
        pieces = self._pieces[name]
        if pieces[0][1] is None:
            tensor = read(pieces[0][0])
            is_turned = name in self._transposed and self._stored.weight_format(pieces[0][0]) is not None
            return tensor.transpose(1, 2) if is_turned else tensor
        converter = copy.deepcopy(self._by_pattern[pieces[0][1]])
        for stored, pattern in pieces:
            converter.add_tensor(name, stored, pattern, lambda stored=stored: read(stored))
        try:
            result = converter.convert(name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{name} can't be made of {len(pieces)} stored tensors ({error})") from None
        tensor = result[name]
        converted: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return converted

    def weight_format(self, name: str) -> WeightFormat | None:
        pieces = self._pieces.get(name, ())
        formats = {self._stored.weight_format(stored) for stored, _ in pieces}
        return formats.pop() if len(formats) == 1 and self._can_stay_quantized(name) else None

    def quantized(self, name: str) -> QuantizedWeight | None:
        if self.weight_format(name) is None:
            return None
        pieces = [(pattern, self._stored.quantized(stored)) for stored, pattern in self._pieces[name]]
        weights: dict[str | None, list[QuantizedWeight]] = {}
        for pattern, weight in pieces:
            assert weight is not None, "it has a format"
            weights.setdefault(pattern, []).append(weight)
        if None in weights:
            return weights[None][0]
        return _join_pieces(self._by_pattern[str(pieces[0][0])], weights)

    def _can_stay_quantized(self, name: str) -> bool:
        pattern = self._pieces[name][0][1]
        return pattern is None or _joins_outputs(self._by_pattern[pattern])


def transposed_names(model: Any) -> Iterator[str]:
    """Yield the names of the experts' weights that the model holds as ``[experts, inputs, outputs]``."""
    for path, module in model.named_modules():
        if getattr(module, "is_transposed", False):
            yield from (f"{path}.{leaf}" for leaf, part in module.named_parameters(recurse=False) if part.ndim == 3)


def _joins_outputs(converter: WeightConverter) -> bool:
    """Whether the converter only stacks the matrices of experts and joins their outputs."""
    return (
        all(
            (type(operation) is MergeModulelist and operation.dim == 0)
            or (type(operation) is Concatenate and operation.dim == 1)
            for operation in converter.operations
        )
        and type(converter.operations[0]) is MergeModulelist
    )


def _join_pieces(
    converter: WeightConverter, weights: dict[str | None, list[QuantizedWeight]]
) -> QuantizedWeight | None:
    """Return what a converter that :func:`_joins_outputs` makes of these matrices; None if they have unlike orders of
    their inputs."""
    if not can_join([weight for group in weights.values() for weight in group]):
        return None
    return join_rows([stack_experts(weights[pattern]) for pattern in converter.source_patterns if pattern in weights])
