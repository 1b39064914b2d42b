"""Planning problem as plain values: the model, the devices, the rules; and the result.

Seconds are those of one step of the load that is planned for (``load.PlannedLoad``); bytes are real bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import KV_SHARE, LayerRange, Manifest

NO_WORKER = "a worker: none is here"  # reported where there is no device at all

# Bytes for activations and the interpreter's own heap, besides weights and KV; a worker subtracts its log itself before
# it reports its memory.
OVERHEAD_BYTES = 64 << 20

TOLERANCE = 0.02  # plans within this fraction of the best are equally good: measurements are not more exact than that


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Network link from a device to the others: latency of one direction, and bandwidth."""

    latency_s: float = 0.0
    bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """Device that could hold a stage.

    ``layer_s``: time of a layer of weight 1. ``stage_s``: time of a step besides its layers. ``held``: layers loaded
    for its own part, ``kept``: for others. ``load_bytes_per_s``: speed of loading and warming up more. ``replay_s``:
    time of a layer of weight 1 for one position of a prompt. ``pinned``: exactly these layers, by an operator or the
    settings. ``max_layers``: the cap likewise. ``standby_bytes``: reserved for layers that it keeps for others.

    ``cant_reach``: names of the devices that it can't connect to; ``relayed_to``: of the devices that it reaches only
    through the broker's relay. ``is_shut``, ``is_relayed``: the same for the broker's route to it. ``is_mute``: it
    can't connect to the broker's data port, to which the last stage sends. ``broker_s``: latency of the link between
    the broker and it, as far as a step waits for it. ``kv_share``: fraction of the memory besides weights that it uses
    for keys and values.

    Where several steps are in flight: ``away_s``, latency of a step from or to the broker; ``rest_s``, how much longer
    its step takes after idling; ``use``, fraction of its machine's cores that it takes from other stages there while it
    computes.
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
    link: NetworkLink = field(default_factory=NetworkLink)
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
class ModelSizes:
    """Sizes of a model's parts. ``layer_weights``: a layer's time as a multiple of the measured one's.

    ``hop_bytes``: bytes that one step sends from stage to stage. Buffers: memory that computing a step needs besides
    weights and KV, on any stage, and more on the stage with the head.
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
        """Return the bytes that a stage with these layers loads, including the embedding on the first and the head on
        the last."""
        total = sum(self.layer_bytes[layers.first : layers.stop])
        total += self.embed_bytes if layers.first == 0 else 0
        return total + (self.head_bytes if layers.stop == self.num_layers else 0)

    def buffers(self, layers: LayerRange) -> int:
        return self.head_buffer_bytes if layers.stop == self.num_layers else self.buffer_bytes

    def needed_bytes(self, layers: LayerRange, kv_positions: int, kv_share: float = KV_SHARE) -> int:
        """Return the least memory for these layers, and for keys and values of ``kv_positions`` in them."""
        kv = kv_positions * sum(self.kv_bytes[layers.first : layers.stop])
        return self.weight_bytes(layers) + max(self.buffers(layers), int(kv / kv_share))

    def kv_positions(self, layers: LayerRange, memory_bytes: int, kv_share: float = KV_SHARE) -> int:
        """Return the positions that this much memory has capacity for in these layers, as the worker computes it
        itself."""
        per_position = sum(self.kv_bytes[layers.first : layers.stop])
        room = int(max(0, memory_bytes - self.weight_bytes(layers)) * kv_share)
        return room // per_position if per_position else 1 << 40  # layers without keys and values have no limit

    @classmethod
    def from_manifest(cls, manifest: Manifest, *, positions: int = 0, vocabulary_rows: int = 0) -> ModelSizes:
        """Build the sizes from a manifest. ``positions``: the largest step. ``vocabulary_rows``: the most positions
        that logits are computed for.

        The measured layer is the second, since a first layer is sometimes unlike the others. Other layers' times are
        scaled by their bytes.
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
class PlanningProblem:
    """Problem for the search. ``takes_turns``: one step in flight, so a step's time is the sum of its stages' times,
    else the slowest stage's.

    ``free_hops``: hops between workers of one host cost nothing. ``kv_positions``: KV capacity that every stage must
    have. ``tolerance``: plans within this fraction of the best are equally good; the one that moves least is taken.
    """

    model: ModelSizes
    devices: tuple[Device, ...]
    takes_turns: bool = False
    free_hops: bool = False
    kv_positions: int = 0
    tolerance: float = TOLERANCE

    def min_bytes(self, device: Device) -> int:
        """Return the memory that this device needs for even the smallest layer."""
        layers = (LayerRange(i, i + 1) for i in range(self.model.num_layers))
        least = min(self.model.needed_bytes(layer, self.kv_positions, device.kv_share) for layer in layers)
        return least + device.standby_bytes


@dataclass(frozen=True, slots=True)
class LayerShare:
    """One stage of a line."""

    device: int  # index into the problem's devices
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Shortage:
    """Reason why there is no plan: as text, and the number of bytes that are missing."""

    text: str
    missing_bytes: int


Line = tuple[LayerShare, ...]  # stages in pipeline order
