"""Planning problem as plain values: the model, the devices, the rules; and the result.

Times are for one step of the planned load (``load.PlannedLoad``), in seconds. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swarm.wire.messages import KV_SHARE, WORKING_STATES, LayerRange, Manifest, count_reserved

NO_WORKER = "a worker: none is here"  # reported where there is no device at all

# Bytes for activations and the interpreter's own heap, besides weights and KV; a worker subtracts its log itself before
# it reports its memory.
OVERHEAD_BYTES = 64 << 20

# plans within this fraction of the best one count as equally good, because measurements are not more exact
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Network link from a device to the others: latency of one direction, and bandwidth."""

    latency_s: float = 0.0
    bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """Worker that could compute a stage, as the planner sees it: measured speeds, memory, routes, and constraints."""

    name: str
    memory_bytes: int  # available for weights, KV cache, buffers, and standby layers
    layer_s: float = 0.001  # time of one step in a layer of weight 1
    stage_s: float = 0.0  # time of one step that does not depend on the number of layers
    embed_s: float = 0.0  # additional time on the first stage
    head_s: float = 0.0  # additional time on the last stage
    host: str = ""  # machine; devices with the same host share its cores, and with the same GPU as ``kind`` that GPU
    kind: str = "cpu"  # ``Hello.device``, for example "cpu" or "cuda:1"
    cores: int = 1  # cores of the machine
    link: NetworkLink = field(default_factory=NetworkLink)  # network link to the other devices
    held: LayerRange | None = None  # layers of its stage in the active plan, which are loaded
    kept: tuple[LayerRange, ...] = ()  # standby layers, which are loaded as well
    load_bytes_per_s: float = 1e9  # speed of loading further layers, including their warm-up
    replay_s: float = 0.0  # time for replaying one prompt position in a layer of weight 1
    pinned: LayerRange | None = None  # exactly these layers, set by an operator or the settings
    max_layers: int | None = None  # maximum number of layers, set by an operator or the settings
    standby_bytes: int = 0  # part of ``memory_bytes`` reserved for standby layers
    cant_reach: frozenset[str] = frozenset()  # names of the devices that it can't connect to
    # names of the devices that it can connect to only through the broker's relay
    relayed_to: frozenset[str] = frozenset()
    is_shut: bool = False  # the broker can't connect to it
    is_relayed: bool = False  # the broker can connect to it only through the relay
    is_mute: bool = False  # it can't connect to the broker's data port, to which the last stage sends results
    broker_s: float = 0.0  # latency of the link to the broker, as far as a step waits for it
    kv_share: float = KV_SHARE  # fraction of the memory besides weights that is used for KV blocks
    away_s: float = 0.0  # with several steps in flight: latency of a step from or to the broker
    rest_s: float = 0.0  # with several steps in flight: additional time of a step after the device has idled
    # with several steps in flight: fraction of the machine's cores, or of the GPU, that it takes from other stages
    # while it computes
    use: float = 0.0

    @property
    def place(self) -> tuple[str, str]:
        """What it shares with other devices: its machine's cores, or a GPU."""
        return self.host, self.kind


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model's parts, as the planner needs them."""

    name: str
    layer_bytes: tuple[int, ...]  # weights of each layer
    embed_bytes: int  # with what the first stage takes for its work on images
    head_bytes: int
    kv_bytes: tuple[int, ...]  # KV cache per position, of each layer
    layer_weights: tuple[float, ...]  # time of each layer, as a multiple of the measured layer's time
    hop_bytes: int = 0  # sent from stage to stage in one step
    buffer_bytes: int = OVERHEAD_BYTES  # needed on every stage for computing a step, besides weights and KV cache
    shared_bytes: int = 0  # of embedding and head, which a stage with both holds once
    head_buffer_bytes: int = OVERHEAD_BYTES  # needed instead of ``buffer_bytes`` on the stage with the head
    first_layers: int = 1  # the first stage has at least these layers
    state_bytes: tuple[int, ...] = ()  # of each layer's states of a sequence that no position counts
    max_sequences: int = 0  # that stages reserve memory for states of, if there is enough

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
        total += self.head_bytes if layers.stop == self.num_layers else 0
        return total - (self.shared_bytes if layers == self.all_layers else 0)

    def buffers(self, layers: LayerRange) -> int:
        return self.head_buffer_bytes if layers.stop == self.num_layers else self.buffer_bytes

    def needed_bytes(self, layers: LayerRange, kv_positions: int, kv_share: float = KV_SHARE) -> int:
        """Return the least memory for these layers, and for keys and values of ``kv_positions`` in them."""
        return self.weight_bytes(layers) + max(
            self.buffers(layers), int(self.needed_kv(layers, kv_positions) / kv_share)
        )

    def needed_kv(self, layers: LayerRange, kv_positions: int) -> int:
        """Return the least bytes for keys, values and states of these layers with which a stage holds that many
        positions."""
        kv = kv_positions * sum(self.kv_bytes[layers.first : layers.stop])
        return int(self.add_states(kv, sum(self.state_bytes[layers.first : layers.stop])))

    def add_states(self, kv: ArrayLike, states: ArrayLike) -> NDArray[np.float64]:
        """Add to bytes of positions what a stage reserves for states that have this size for each sequence: all, or as
        much as the positions, but at least those of one sequence (``count_reserved``)."""
        kv, states = np.asarray(kv, np.float64), np.asarray(states, np.float64)
        total: NDArray[np.float64] = np.minimum(kv + self.max_sequences * states, np.maximum(kv + states, 2 * kv))
        return total

    def kv_positions(self, layers: LayerRange, memory_bytes: int, kv_share: float = KV_SHARE) -> int:
        """Return the positions that this much memory has capacity for in these layers, as the worker computes it
        itself."""
        per_position = sum(self.kv_bytes[layers.first : layers.stop])
        room = int(max(0, memory_bytes - self.weight_bytes(layers)) * kv_share)
        state_bytes = sum(self.state_bytes[layers.first : layers.stop])
        room = max(0, room - state_bytes * count_reserved(state_bytes, room, self.max_sequences))
        return room // per_position if per_position else 1 << 40  # layers without keys and values have no limit

    @classmethod
    def from_manifest(
        cls, manifest: Manifest, *, positions: int = 0, vocabulary_rows: int = 0, max_sequences: int = 0
    ) -> ModelSizes:
        """Build the sizes from a manifest. ``positions``: the largest step. ``vocabulary_rows``: the most positions
        that logits are computed for. ``max_sequences``: the most that a stage may hold.

        The measured layer is the second, since a first layer is sometimes unlike the others. Other layers' times are
        scaled by their bytes.
        """
        measured = manifest.layer_bytes[min(1, manifest.num_layers - 1)] or 1
        buffers = positions * manifest.row_width * 4 * 8
        logits = vocabulary_rows * manifest.vocab_size * 4 * 2
        return cls(
            name=manifest.name,
            layer_bytes=manifest.layer_bytes,
            embed_bytes=manifest.embed_bytes + manifest.image_bytes,
            head_bytes=manifest.head_bytes,
            shared_bytes=manifest.shared_bytes,
            kv_bytes=manifest.kv_bytes_per_token,
            state_bytes=tuple(WORKING_STATES * size for size in manifest.state_bytes),
            max_sequences=max_sequences,
            layer_weights=tuple(size / measured if size else 1.0 for size in manifest.layer_bytes),
            hop_bytes=0,
            buffer_bytes=max(OVERHEAD_BYTES, buffers),
            head_buffer_bytes=max(OVERHEAD_BYTES, buffers + logits),
            first_layers=1 if manifest.vision is None else min(manifest.vision.num_layers, manifest.num_layers),
        )


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """Input of the plan search.

    ``takes_turns``: one step in flight, so a step's time is the sum of its stages' times; else it is the slowest
    stage's time. ``free_hops``: hops between workers of one host cost nothing. ``kv_positions``: KV capacity that every
    stage must have. ``tolerance``: plans within this fraction of the best are equally good; the plan that loads the
    fewest bytes is taken.
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
