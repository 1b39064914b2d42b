"""Sizes of a model's weights in memory, from headers and configuration only. Does not import torch.

All workers of a swarm must compute the same sizes, also those whose weight files are still on a hub. What a quantized
matrix takes depends on whether it stays quantized: matrices that one product or one tensor of the model is made of must
have one format.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.model.vision import is_tower
from swarm.stage.quantization.at_load import HEAD, LATENT_HEADS, LAYER
from swarm.stage.quantization.formats import gpu_bytes
from swarm.stage.quantization.stored import StoredWeight

# Parts of Gemma 3n and 4 that run before the layers: tables and products for the layers' own inputs, and for streams.
# Zaya scales embedded tokens.
_BEFORE_LAYERS = re.compile(
    r"\.(?:(?:embed_tokens_per_layer|per_layer_\w+|altup_projections\.\d+)\.weight|input_hidden_states_(?:scale|bias))"
)
_GATE_OR_UP = re.compile(r"(?P<path>.*\.)(?P<part>gate|up)_proj\.weight")
# One matrix of each expert, or one tensor of all experts. Mixtral calls gate, up and down w1, w3 and w2.
_EXPERT = re.compile(
    r"(?P<path>.*\.experts\.)(?:\d+\.)?(?:(?P<inner>gate_proj|up_proj|gate_up_proj|w1|w3)|down_proj|w2)(?:\.weight)?"
)

_ADAPTER = re.compile(r"_adapter_list\.(\d+)\.")  # of one use of a shared block


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Bytes of a model's parts."""

    layers: tuple[int, ...]
    embed: int  # with the vision tower
    head: int
    shared: int  # bytes of both the embedding and the head that a stage with both holds once


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks of Zamba that several layers use, in turn. Each layer holds a copy of its own, with its own adapter."""

    layers: tuple[int, ...]
    num_blocks: int

    def users(self, name: str, layer: int) -> tuple[int, ...]:
        """Return the layers that hold a tensor which is stored in ``layer``."""
        if "shared_transf" not in name:
            return (layer,)
        turn, adapter = self.layers.index(layer), _ADAPTER.search(name)
        if turn >= self.num_blocks:
            return ()  # a copy of one before it
        return self.layers[turn :: self.num_blocks] if adapter is None else (self.layers[int(adapter[1])],)


@dataclass(frozen=True)
class MemorySizes:
    """Sizes of plain tensors and of quantized matrices, which ``is_dense`` dequantizes."""

    tensors: Mapping[str, StoredTensor]
    quantized: Mapping[str, StoredWeight]
    is_dense: bool
    vocab_size: int
    blocks: SharedBlocks | None = None

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
                for user in (index,) if self.blocks is None else self.blocks.users(name, index):
                    layers[user] += size
            elif _BEFORE_LAYERS.search(name):
                before += size
            elif len(shape) == 2 and (shape[0] == self.vocab_size or name.endswith("embed_tokens.weight")):
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
        for name, tensor in self.tensors.items():
            if tensor.is_float:
                yield name, tensor.shape, tensor.num_elements * element_bytes
        for weight in self.quantized.values():
            is_dense = self.is_dense or self._is_unpacked(weight)
            size = math.prod(weight.shape) * element_bytes if is_dense else weight.packed_bytes
            yield weight.name, weight.shape, size

    def saved_on_gpu(self, element_bytes: int) -> int:
        """Return the bytes by which quantized matrices are smaller on a GPU than dequantized ones.

        Embeddings are dequantized there, and a table that serves as head, too, is packed beside that.
        """
        saved = 0
        has_head = any(HEAD.search(name) for name in (*self.tensors, *self.quantized))
        for weight in () if self.is_dense else self.quantized.values():
            dense = math.prod(weight.shape) * element_bytes
            size = math.prod(weight.shape[:-2]) * gpu_bytes(weight.format, *weight.shape[-2:])
            is_table = weight.shape[0] == self.vocab_size and not LAYER.search(weight.name)
            if is_table and not HEAD.search(weight.name):
                saved -= 0 if has_head else size
            elif not self._is_unpacked(weight):
                saved += dense - size
        return saved

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


def find_key_heads(setting: Callable[[str], Any], layer: int = 0) -> Any:
    """Return the number of a layer's key heads by a configuration; None if there are as many as heads."""
    if setting("model_type") == "jetmoe":
        return setting("num_attention_heads")  # keys are repeated for each expert
    if setting("multi_query") and not setting("new_decoder_architecture"):
        return 1  # Falcon, BigCode
    nested = setting("attn_config")  # DBRX
    in_attention = nested.get("kv_n_heads") if isinstance(nested, dict) else None
    heads: Any = setting("num_key_value_heads") or setting("num_kv_heads") or in_attention
    if setting("model_type") == "mimo_v2_flash" and setting("layer_types")[layer] == "sliding_attention":
        return 2 * heads
    return heads


def index_key_size(setting: Callable[[str], Any], layer: int) -> int:
    """Return how many numbers a layer stores of a position for its index, by a configuration; 0 without an index of its
    own."""
    size, kinds, sharing = setting("index_head_dim"), setting("layer_types"), setting("indexer_types")
    has_index = size and not (kinds and kinds[layer] != "indexed_attention")
    return int(size) if has_index and not (sharing and sharing[layer] == "shared") else 0


def find_head_sizes(setting: Callable[[str], Any], size: int) -> tuple[int, int]:
    """Return how many numbers a key and a value of a head of this size have by a configuration."""
    kind = setting("model_type")
    if kind == "mimo_v2_flash":
        return size, setting("v_head_dim")
    if kind == "diffllama":
        return size, 2 * size  # values of two heads
    return (size + 1, size) if kind == "doge" else (size, size)  # what a key adds to its score


def count_latents(setting: Callable[[str], Any]) -> int:
    """Return how many latents a layer stores of a position by a configuration that has latents."""
    return 2 if setting("model_type") == "longcat_flash" else 1


def shared_sources(layer_types: Sequence[str], num_sharing: int) -> list[int]:
    """Return the layers whose keys and values the last ``num_sharing`` layers share: the last one of each type before
    those."""
    first = {kind: layer for layer, kind in enumerate(layer_types[: len(layer_types) - num_sharing])}
    return sorted(first.values()) if num_sharing else []


def _expert_group(name: str) -> tuple[str, bool] | None:
    """Return the layer's experts and whether this is of their first product; None if it is no expert's matrix."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match["path"], match["inner"] is not None)
