"""Division of a worker's memory between weights, and keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from swarm.errors import ModelError
from swarm.stage.attention.grid import GRID
from swarm.wire.messages import LayerRange, Manifest, count_reserved, layers_of, to_ranges

_MAX_KV_BYTES: Final = 64 << 30  # upper bound of keys and values
_MAX_POSITIONS: Final = 1 << 40  # limit of layers that keep nothing of a position


@dataclass(slots=True)
class MemoryPlan:
    """Memory of a worker, in the manifest's bytes. ``kv_share``: share of what the weights leave that keys and values
    may take."""

    manifest: Manifest
    memory_bytes: int
    kv_share: float
    max_sequences: int = 0  # for whose states memory is reserved, if there is enough

    def standby_bytes(self, standby: Iterable[int]) -> int:
        """Return the bytes of the weights of standby layers."""
        return sum(map(self.manifest.weight_bytes, to_ranges(standby)))

    def kv_budget(self, layers: LayerRange | None, standby: frozenset[int]) -> int:
        """Return the bytes that keys and values may take in a stage. ``layers``: None for a worker without a stage."""
        weights = 0
        if layers is not None:
            weights, standby = self.manifest.fixed_bytes(layers), standby - layers_of((layers,))
        free_bytes = max(0, self.memory_bytes - weights - self.standby_bytes(standby))
        return min(_MAX_KV_BYTES, int(free_bytes * self.kv_share))

    def kv_positions(self, layers: LayerRange, standby: frozenset[int]) -> int:
        """Return the positions that fit into a stage, beside the states of its sequences."""
        per_token = sum(self.manifest.kv_bytes_per_token[layers.first : layers.stop])
        positions = (
            max(0, self.kv_budget(layers, standby) - self.reserved_bytes(layers, standby)) // per_token
            if per_token
            else _MAX_POSITIONS
        )
        return positions // GRID * GRID

    def num_sequences(self, layers: LayerRange, standby: frozenset[int]) -> int:
        """Return how many sequences a stage can hold."""
        state_bytes = self.manifest.working_state_bytes(layers)
        return count_reserved(state_bytes, self.kv_budget(layers, standby), self.max_sequences)

    def reserved_bytes(self, layers: LayerRange, standby: frozenset[int]) -> int:
        """Return the bytes that a stage reserves for the states of its sequences."""
        return self.num_sequences(layers, standby) * self.manifest.working_state_bytes(layers)

    def check_kept(
        self, layers: LayerRange, standby: frozenset[int], *, kv_positions: int, reserved_bytes: int
    ) -> None:
        """Raise ``ModelError`` unless a plan that holds this number of positions still fits beside its weights and
        the states of its sequences."""
        per_token = sum(self.manifest.kv_bytes_per_token[layers.first : layers.stop])
        weights = self.manifest.fixed_bytes(layers) + self.standby_bytes(standby - layers_of((layers,)))
        if (lacks := weights + reserved_bytes + kv_positions * per_token - self.memory_bytes) > 0:
            raise ModelError(
                f"this worker lacks {lacks / (1 << 20):.1f} MiB beside its layers, keys and values; drop another "
                "adapter, or raise its memory limit"
            )

    def check_weights(self, ranges: tuple[LayerRange, ...]) -> None:
        """Raise ``ModelError`` if the weights of these layers do not fit."""
        needed = sum(map(self.manifest.weight_bytes, ranges))
        if needed > self.memory_bytes:
            raise ModelError(
                f"layers {', '.join(map(str, ranges))} need {needed >> 20} MiB, but this worker may use "
                f"{self.memory_bytes >> 20} MiB; raise its memory limit or add a worker"
            )
