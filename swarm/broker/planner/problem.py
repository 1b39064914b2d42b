"""The problem to be planned, as plain values: the model, the devices, the rules; and what comes out.

Seconds are those of one step of the load that is planned for (``load.Load``); bytes are real bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import KV_SHARE, LayerRange, Manifest

NOBODY = "a worker: none is here"  # what is waited for where there is no device at all

# A stage's memory must also hold activations and the interpreter's own heap; a worker takes its log off by itself
# before it says how much memory it has.
OVERHEAD_BYTES = 64 << 20

TOLERANCE = 0.02  # plans within this part of the best are equally good: what was measured is not more exact than that


@dataclass(frozen=True, slots=True)
class Link:
    """A device's way to the others: one way, and how many bytes pass in a second."""

    latency_s: float = 0.0
    bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """A device that could hold a stage.

    ``layer_s``: a layer of weight 1. ``stage_s``: what a step takes beside its layers. ``held``: what it has loaded for
    its own part, ``kept``: for others. ``load_bytes_per_s``: how quickly more is loaded and warmed. ``replay_s``: a
    layer of weight 1 computes one position of a prompt. ``pinned``: exactly these layers, by hand. ``max_layers``: no
    more than so many, by hand. ``standby_bytes``: promised to layers that it keeps for others.
    ``cant_reach``: names of those whose doors it can't reach; ``relayed_to``: of those that it reaches through the
    broker's relay only. ``is_shut``, ``is_relayed``: the same of the broker's way to its own.
    ``is_mute``: it can't reach the broker's door for what the last stage sends. ``broker_s``: what the way between the
    broker and it takes, as far as a step waits for it. ``kv_share``: the part of what weights leave that it gives to
    keys and values. Where several steps are in flight: ``away_s``, what a step's way from or to the broker takes;
    ``rest_s``, how much longer its step takes if it has rested; ``use``, the part of its machine's cores that it takes
    from other stages there while it computes.
    """

    name: str
    memory_bytes: int
    layer_s: float = 0.001
    stage_s: float = 0.0
    embed_s: float = 0.0
    head_s: float = 0.0
    host: str = ""
    kind: str = "cpu"
    cores: int = 1
    link: Link = field(default_factory=Link)
    held: LayerRange | None = None
    kept: tuple[LayerRange, ...] = ()
    load_bytes_per_s: float = 1e9
    replay_s: float = 0.0
    pinned: LayerRange | None = None
    max_layers: int | None = None
    standby_bytes: int = 0
    cant_reach: frozenset[str] = frozenset()
    relayed_to: frozenset[str] = frozenset()
    is_shut: bool = False
    is_relayed: bool = False
    is_mute: bool = False
    broker_s: float = 0.0
    kv_share: float = KV_SHARE
    away_s: float = 0.0
    rest_s: float = 0.0
    use: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model, by what its parts weigh. ``layer_weights``: a layer's time as a multiple of the measured one's.

    ``hop_bytes``: what one step sends from stage to stage. Buffers: what computing a step needs beside weights and KV,
    on any stage, and more on the one with the head.
    """

    name: str
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    head_bytes: int
    kv_bytes: tuple[int, ...]
    layer_weights: tuple[float, ...]
    hop_bytes: int = 0
    buffer_bytes: int = OVERHEAD_BYTES
    head_buffer_bytes: int = OVERHEAD_BYTES

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.num_layers)

    def weight_bytes(self, layers: LayerRange) -> int:
        """Count what a stage with these layers loads, embedding on the first and head on the last counted."""
        total = sum(self.layer_bytes[layers.first : layers.stop])
        total += self.embed_bytes if layers.first == 0 else 0
        return total + (self.head_bytes if layers.stop == self.num_layers else 0)

    def buffers(self, layers: LayerRange) -> int:
        return self.head_buffer_bytes if layers.stop == self.num_layers else self.buffer_bytes

    def needed_bytes(self, layers: LayerRange, kv_positions: int, kv_share: float = KV_SHARE) -> int:
        """Count the least memory for these layers, and for keys and values of so many positions in them."""
        kv = kv_positions * sum(self.kv_bytes[layers.first : layers.stop])
        return self.weight_bytes(layers) + max(self.buffers(layers), int(kv / kv_share))

    def kv_positions(self, layers: LayerRange, memory_bytes: int, kv_share: float = KV_SHARE) -> int:
        """Count the positions that this much memory has room for in these layers, as the worker reckons itself."""
        per_position = sum(self.kv_bytes[layers.first : layers.stop])
        room = int(max(0, memory_bytes - self.weight_bytes(layers)) * kv_share)
        return room // per_position if per_position else 1 << 40

    @classmethod
    def of(cls, manifest: Manifest, *, positions: int = 0, vocabulary_rows: int = 0) -> Model:
        """``positions``: the largest step. ``vocabulary_rows``: the most positions that logits are computed for.

        The layer that is measured is the second, since a first layer is now and then unlike the others. How long
        another one takes is told by its bytes.
        """
        measured = manifest.layer_bytes[min(1, manifest.num_layers - 1)] or 1
        buffers = positions * manifest.hidden_size * 4 * 8
        logits = vocabulary_rows * manifest.vocab_size * 4 * 2
        return cls(
            name=manifest.name,
            layer_bytes=manifest.layer_bytes,
            embed_bytes=manifest.embed_bytes,
            head_bytes=manifest.head_bytes,
            kv_bytes=manifest.kv_bytes_per_token,
            layer_weights=tuple(size / measured if size else 1.0 for size in manifest.layer_bytes),
            hop_bytes=0,
            buffer_bytes=max(OVERHEAD_BYTES, buffers),
            head_buffer_bytes=max(OVERHEAD_BYTES, buffers + logits),
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """``takes_turns``: one step in flight, so a step's time is the sum of its stages' times, else the slowest stage's.

    ``free_hops``: hops between workers of one host don't count. ``kv_positions``: room that every stage must have.
    ``tolerance``: plans within this part of the best are equally good; the one that moves least is taken.
    """

    model: Model
    devices: tuple[Device, ...]
    takes_turns: bool = False
    free_hops: bool = False
    kv_positions: int = 0
    tolerance: float = TOLERANCE

    def least_bytes(self, device: Device) -> int:
        """Count the memory that this device needs for even the smallest layer."""
        layers = (LayerRange(i, i + 1) for i in range(self.model.num_layers))
        least = min(self.model.needed_bytes(each, self.kv_positions, device.kv_share) for each in layers)
        return least + device.standby_bytes


@dataclass(frozen=True, slots=True)
class Share:
    device: int  # index into the problem's devices
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Shortage:
    """Says that the model does not fit: in words, and how many bytes are missing."""

    text: str
    missing_bytes: int


Line = tuple[Share, ...]
