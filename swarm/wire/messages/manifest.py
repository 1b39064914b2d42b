"""Description of the model that all processes must agree on: sizes, stop tokens and file digests; and the transfer of
the files that clients need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from swarm.params import VectorKind
from swarm.wire.messages.common import (
    MAX_LAYERS,
    MAX_NAME,
    MAX_TOKENS,
    Digest,
    Message,
    Name,
    Record,
    TokenId,
    Whole,
)
from swarm.wire.messages.records import LayerRange, PayloadSpec


class Asset(Record, frozen=True):
    """A file that clients need (tokenizer, chat template): name, size and xxh3-128."""

    name: Name
    num_bytes: Whole
    digest: Digest


MAX_ADAPTERS = 256
PART_PATCHES: Final = 256  # of an image, in one layer of the vision tower
# tokens of images whose features the first stage keeps for later steps; or of one image, whatever its size
MAX_FEATURE_TOKENS: Final = 1024
STATE_STRIDE: Final = 512
WORKING_STATES: Final = 4  # states of a sequence in a layer beside those at multiples of the stride
AdapterName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]


class AdapterEntry(Record, frozen=True):
    """An adapter that is loaded at run time. ``source``: a folder that each worker has, or a name on a hub. ``digest``:
    of its weights; empty: any content will do. ``num_bytes``: their size. ``layer_bytes``: memory, by layer."""

    name: AdapterName
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    digest: Digest = ""
    num_bytes: Whole = 0
    layer_bytes: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()

    @property
    def key(self) -> str:
        """Return what requests have for its name once they are accepted: another content has another key."""
        return f"{self.name}@{self.digest[:16]}"


def add_layer_bytes(sizes: Iterable[int], more: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the bytes of each layer with what adapters add to them."""
    return tuple(map(sum, zip(sizes, *more, strict=True)))


AdapterEntries = Annotated[tuple[AdapterEntry, ...], msgspec.Meta(max_length=MAX_ADAPTERS)]

# Fields that depend on the weights' type.
_DTYPE_FIELDS = (
    "dtype",
    "layer_bytes",
    "embed_bytes",
    "head_bytes",
    "shared_bytes",
    "kv_bytes_per_token",
    "image_bytes",
)

_QUANTIZATION_FIELDS = ("weights", "activations")


def count_reserved(state_bytes: int, budget: int, max_sequences: int) -> int:
    """Return for how many sequences a stage reserves memory for states of this size: they may take half of the budget
    for keys and values, but there is memory for one."""
    return min(max_sequences, max(1, budget // 2 // state_bytes)) if state_bytes else max_sequences


class Pooling(Record, frozen=True):
    """How the model's folder makes an embedding: the pooling's name, and whether its result is scaled to length 1."""

    kind: Name
    normalizes: bool


class Vision(Record, frozen=True):
    """How the model sees images: ``merge`` × ``merge`` patches of ``patch`` × ``patch`` pixels become one token,
    ``token`` in the prompt. ``begin`` and ``end``: tokens around an image.

    An image is scaled to between ``least`` and ``most`` pixels, and each colour to ``(value / 255 - mean) / std``.
    ``num_layers``: the first layers, to whose outputs features of images are added: one stage has all of them.
    ``depth``: layers of the vision tower.

    The tower's work on an image is cut into parts, so that steps can share it. Tiles are runs of an image's tokens.
    First come the parts that embed each tile, then those of the first layer for each tile, and so on.
    """

    token: TokenId
    begin: TokenId
    end: TokenId
    patch: Annotated[int, msgspec.Meta(ge=1, le=256)]
    merge: Annotated[int, msgspec.Meta(ge=1, le=16)]
    least: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    most: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    mean: Annotated[tuple[float, ...], msgspec.Meta(min_length=3, max_length=3)]
    std: Annotated[tuple[float, ...], msgspec.Meta(min_length=3, max_length=3)]
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    depth: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]

    @property
    def token_bytes(self) -> int:
        """Bytes of the pixels of one token."""
        return 3 * (self.patch * self.merge) ** 2

    def tile_tokens(self, num_tokens: int) -> int:
        """Return the tokens of a tile of an image with this number of tokens; its last tile may have fewer."""
        num_tiles = -(-num_tokens * self.merge**2 // PART_PATCHES)
        return -(-num_tokens // num_tiles)

    def num_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tile_tokens(num_tokens))

    def num_parts(self, num_tokens: int) -> int:
        """Return the number of parts of the work on an image with this number of tokens."""
        return self.num_tiles(num_tokens) * (self.depth + 1)

    def part_patches(self, num_tokens: int) -> int:
        """Return the patches of a part, which are at most ``PART_PATCHES`` unless a token alone has more."""
        return self.tile_tokens(num_tokens) * self.merge**2


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about the model that all processes must agree on; the broker has no other information about it.

    ``weights``: how the weights are quantized; empty if they are plain. ``activations``: how the inputs of products are
    rounded; empty if they have the model's dtype. Other texts mean other numbers. ``shared_bytes``: what a stage with
    both the embedding and the head holds once for both. ``state_bytes``: size of each layer's recurrent state of a
    sequence; empty if no layer has one. ``state_stride``: states are kept at every multiple of this position; 0: there
    are none. ``kv_bytes_per_token`` includes a position's share of them. ``is_headless``: it has no head over the
    vocabulary, so it draws no tokens. ``num_labels``: scores of its classification head; 0: it has none. ``adapters``:
    those that requests may name; ``layer_bytes`` counts them. ``vision``: None if it reads text only. ``image_bytes``:
    what the first stage takes for its work on images. ``extra_width``: numbers per position that stages pass on beside
    a hidden state. ``pooling``: None if the folder does not state it.
    """

    name: Name
    architecture: Name
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    hidden_size: Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    context: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    eos_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)]
    dtype: Name
    layer_bytes: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    embed_bytes: Whole
    head_bytes: Whole
    kv_bytes_per_token: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    files: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=4096)]
    assets: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=64)]
    weights: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    activations: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    shared_bytes: Whole = 0
    is_headless: bool = False
    num_labels: Whole = 0
    adapters: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()
    state_bytes: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()
    state_stride: Whole = 0
    extra_width: Annotated[int, msgspec.Meta(ge=0, lt=2**24)] = 0
    vision: Vision | None = None
    image_bytes: Whole = 0
    pooling: Pooling | None = None

    @property
    def row_width(self) -> int:
        """Numbers per position that stages pass on."""
        return self.hidden_size + self.extra_width

    def floor_to_state(self, position: int) -> int:
        """Return the last position, not behind this one, from which every layer can go on whenever it has been there.

        Keys and values allow any position."""
        return position // self.state_stride * self.state_stride if self.state_stride else position

    def with_states(self, state_bytes: tuple[int, ...], attends: tuple[bool, ...]) -> Manifest:
        """Return the manifest of a model whose layers keep states of these sizes. ``attends``: which layers have keys
        and values beside them."""
        layers = zip(state_bytes, attends, self.kv_bytes_per_token, strict=True)
        per_token = tuple(kv * keeps_kv + math.ceil(state / STATE_STRIDE) for state, keeps_kv, kv in layers)
        return msgspec.structs.replace(
            self, state_bytes=state_bytes, state_stride=STATE_STRIDE, kv_bytes_per_token=per_token
        )

    def kv_bytes(self, layer: int) -> int:
        """Return the bytes of a position's keys and values in this layer, without its share of states."""
        state = self.state_bytes[layer] if self.state_bytes else 0
        return self.kv_bytes_per_token[layer] - (math.ceil(state / self.state_stride) if state else 0)

    def working_state_bytes(self, layers: LayerRange) -> int:
        """Return the bytes of a sequence's states in these layers that no position counts."""
        return WORKING_STATES * sum(self.state_bytes[layers.first : layers.stop])

    def weight_bytes(self, layers: LayerRange) -> int:
        """Return the bytes of weights for a stage with these layers, including the embedding (first layer) and the head
        (last)."""
        total = sum(self.layer_bytes[layers.first : layers.stop])
        if layers.first == 0:
            total += self.embed_bytes
        if layers.stop == self.num_layers:
            total += self.head_bytes - (self.shared_bytes if layers.first == 0 else 0)
        return total

    def fixed_bytes(self, layers: LayerRange) -> int:
        """Return the bytes that a stage with these layers takes beside states, keys and values: its weights, and on the
        first stage the work on images."""
        return self.weight_bytes(layers) + (self.image_bytes if layers.first == 0 else 0)

    def why_unable(self, vector: VectorKind | None) -> str | None:
        """Return why the model lacks the head for a vector of this kind, or for tokens (None); None if it has it."""
        if vector == "scores":
            missing = "has no classification head, so it gives no scores: serve a model for reranking"
            return None if self.num_labels else f"{self.name} {missing}"
        if self.num_labels and vector is not None:
            return f"{self.name} gives scores only, no embeddings: serve a model for embeddings"
        if self.is_headless and vector is None:
            return f"{self.name} has no head over the vocabulary, so it generates no text: serve another model"
        return None

    def adapter_error(self, name: str) -> str | None:
        """Return why requests can't name this adapter; None if they can, or name none."""
        names = [adapter.name for adapter in self.adapters]
        if not name or name in names:
            return None
        return f"there is no adapter {name!r}: {self.name} has {', '.join(names) or 'none'}"

    def vector_bytes(self, kind: VectorKind) -> int:
        """Return the size of a vector of this kind."""
        return 4 * (self.num_labels if kind == "scores" else self.hidden_size)

    def differs_only_in_dtype(self, other: Manifest) -> bool:
        """Whether it is the same model with another type of weights, and therefore with other sizes in memory."""
        sizes = {name: getattr(self, name) for name in _DTYPE_FIELDS}
        return self.dtype != other.dtype and self.difference(msgspec.structs.replace(other, **sizes)) is None

    def differs_only_in_weights(self, other: Manifest) -> bool:
        """Whether it is the same model with weights or activations that are quantized otherwise, perhaps also with
        another type of weights."""
        same = {name: getattr(self, name) for name in (*_DTYPE_FIELDS, *_QUANTIZATION_FIELDS)}
        quantization = [(each.weights, each.activations) for each in (self, other)]
        return quantization[0] != quantization[1] and self.difference(msgspec.structs.replace(other, **same)) is None

    def differs_in_images(self, other: Manifest) -> bool:
        """Whether it is the same model, of which one side alone has the vision tower."""
        return (self.vision is None) != (other.vision is None) and self.files == other.files

    def difference(self, other: Manifest) -> str | None:
        """Return the first field that differs, with both values; None if the two are the same.

        The name is not compared: users may name a model's folder freely. Nor is the pooling, which requests choose.
        """
        for name in ("adapters", *self.__struct_fields__[1:-1]):  # other adapters also have other sizes
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name in ("files", "assets", "adapters"):
                return f"{name}: {_describe_difference(mine, theirs)}"
            return f"{name}: {mine} here, {theirs} there"
        return None


def _describe_difference(mine: tuple[Asset, ...], theirs: tuple[Asset, ...]) -> str:
    """Return which files differ; or that they can't be compared, because the two sides use different kinds of
    digests."""
    mine_by, theirs_by = ({asset.name: asset for asset in side} for side in (mine, theirs))
    names = sorted(name for name in mine_by.keys() | theirs_by.keys() if mine_by.get(name) != theirs_by.get(name))
    if all(_have_different_digests(mine_by.get(name), theirs_by.get(name)) for name in names):
        return (
            f"{', '.join(names)} can't be compared: one side has them from a hub, the other as a plain copy; name the "
            "model in the same way for all workers"
        )
    return f"{', '.join(names)} differ in size or content"


def _have_different_digests(mine: Asset | None, theirs: Asset | None) -> bool:
    if mine is None or theirs is None:
        return False
    return mine.num_bytes == theirs.num_bytes and len(mine.digest) != len(theirs.digest)


class AssetPart(Message, frozen=True):
    """Bytes of an asset from ``offset`` on (from the broker; or from a worker, when the broker asks for its assets)."""

    name: Name
    offset: Whole
    total: Whole
    payload: PayloadSpec
