"""Sizes of a model's weights in memory, from headers and configuration only. Does not import torch.

All workers of a swarm must compute the same sizes, also those whose weight files are still on a hub. What a quantized
matrix takes depends on whether it stays quantized: matrices that one product or one tensor of the model is made of must
have one format.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.model.vision import is_tower
from swarm.stage.quantization.at_load import HEAD, LATENT_HEADS, LAYER
from swarm.stage.quantization.stored import StoredWeight

# Parts of Gemma 3n and 4 that run before the layers: tables and products for the layers' own inputs, and for streams.
_BEFORE_LAYERS = re.compile(r"\.(?:embed_tokens_per_layer|per_layer_\w+|altup_projections\.\d+)\.weight")
_GATE_OR_UP = re.compile(r"(?P<path>.*\.)(?P<part>gate|up)_proj\.weight")
# One matrix of each expert, or one tensor of all experts. Mixtral calls gate, up and down w1, w3 and w2.
_EXPERT = re.compile(
    r"(?P<path>.*\.experts\.)(?:\d+\.)?(?:(?P<inner>gate_proj|up_proj|gate_up_proj|w1|w3)|down_proj|w2)(?:\.weight)?"
)


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Bytes of a model's parts."""

    layers: tuple[int, ...]
    embed: int  # with the vision tower
    head: int
    shared: int  # bytes of both the embedding and the head that a stage with both holds once


@dataclass(frozen=True)
class MemorySizes:
    """Sizes of plain tensors and of quantized matrices, which ``is_dense`` dequantizes."""

    tensors: Mapping[str, StoredTensor]
    quantized: Mapping[str, StoredWeight]
    is_dense: bool
    vocab_size: int

    def of_parts(self, element_bytes: int, num_layers: int, folder: Path) -> PartSizes:
        """Return the sizes with this size of a plain weight. Raises ``ModelError`` if ``folder`` lacks a part."""
        layers = [0] * num_layers
        before = head = 0
        tables: list[tuple[bool, int]] = []  # whether it is the head, and its size
        tower = 0
        for name, shape, size in self.of_weights(element_bytes):
            if is_tower(name):
                tower += size
                continue
            match = LAYER.search(name)
            if match:
                index = int(match[1])
                if index >= num_layers:
                    raise ModelError(f"{folder} has {name}, but config.json has {num_layers} layers")
                layers[index] += size
            elif _BEFORE_LAYERS.search(name):
                before += size
            elif shape[:1] == (self.vocab_size,) and len(shape) == 2:
                tables.append((HEAD.search(name) is not None, size))
            else:
                head += size
        for index, size in enumerate(layers):
            if size == 0:
                raise ModelError(f"{folder} has no weights for layer {index}; download the missing files again")
        if not tables:
            raise ModelError(f"{folder} has no embedding of {self.vocab_size} tokens; is this a language model?")
        # A plain tied table is loaded twice even by a stage with both ends: once for lookups, and once packed for its
        # kernel. Lookups in a quantized one read what is packed for the kernel.
        tables.sort()
        shared = tables[0][1] if len(tables) == 1 and self._packs_table else 0
        return PartSizes(tuple(layers), before + tables[0][1] + tower, head + tables[-1][1], shared)

    def of_weights(self, element_bytes: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield the names, shapes and sizes in memory of all weights."""
        for tensor in filter(lambda tensor: tensor.is_float, self.tensors.values()):
            yield tensor.name, tensor.shape, tensor.num_elements * element_bytes
        for weight in self.quantized.values():
            is_dense = self.is_dense or self._is_unpacked(weight)
            size = math.prod(weight.shape) * element_bytes if is_dense else weight.packed_bytes
            yield weight.name, weight.shape, size

    @property
    def _packs_table(self) -> bool:
        """Whether a table of the vocabulary is quantized in memory."""
        weights = () if self.is_dense else self.quantized.values()
        return any(weight.shape[0] == self.vocab_size and not LAYER.search(weight.name) for weight in weights)

    def _is_unpacked(self, weight: StoredWeight) -> bool:
        """Whether a matrix is dequantized because it has heads of latents, or can't be packed with others: with the one
        that it is multiplied with in one pass, or with those of the other experts of its layer."""
        if LATENT_HEADS.search(weight.name):
            return True
        group = _expert_group(weight.name)
        if group is not None:
            return group in self._unpacked_experts
        match = _GATE_OR_UP.fullmatch(weight.name)
        if match is None:
            return False
        name = match["path"] + ("up" if match["part"] == "gate" else "gate") + "_proj.weight"
        other = self.quantized.get(name)
        return name in self.tensors or (other is not None and other.format != weight.format)

    @cached_property
    def _unpacked_experts(self) -> frozenset[tuple[str, bool]]:
        """The groups of experts' matrices that do not stay quantized: some are plain, or formats differ. Orders of
        inputs differ where the configuration scatters groups, since each expert has seen other inputs."""
        kinds: defaultdict[tuple[str, bool], set[object]] = defaultdict(set)
        for name in self.tensors:
            group = _expert_group(name)
            if group is not None:
                kinds[group].add(None)
        for weight in self.quantized.values():
            group = _expert_group(weight.name)
            if group is not None:
                kinds[group] |= {weight.format, *([weight.name] if weight.is_reordered else ())}
        return frozenset(group for group, formats in kinds.items() if len(formats) > 1)


def shared_sources(layer_types: Sequence[str], num_sharing: int) -> list[int]:
    """Return the layers whose keys and values the last ``num_sharing`` layers share: the last one of each type before
    those."""
    first = {kind: layer for layer, kind in enumerate(layer_types[: len(layer_types) - num_sharing])}
    return sorted(first.values()) if num_sharing else []


def _expert_group(name: str) -> tuple[str, bool] | None:
    """Return the layer's experts and whether this is of their first product; None if it is no expert's matrix."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match["path"], match["inner"] is not None)
