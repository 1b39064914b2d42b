"""Copies of keys and values that workers hold for each other: which positions they have, and what was ordered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.wire.messages import HeldSequence, KvSource, KvTarget, LayerRange, RangePosition, SequencePosition

RATE_WINDOW_S = 10.0  # over which the rate of positions is averaged


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """Layers whose keys and values are copied from the worker that computes them to another worker. Both are
    incarnations."""

    source: str
    holder: str
    layers: LayerRange


@dataclass(slots=True)
class HeldCopies:
    """Copies that one worker holds, as it reported them last."""

    sequences: dict[int, tuple[RangePosition, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    free_bytes: int | None = None  # memory for further copies; None: not reported yet

    @classmethod
    def from_report(cls, held: Iterable[HeldSequence], num_bytes: int = 0, free_bytes: int | None = None) -> HeldCopies:
        return cls({each.sequence: each.kv for each in held}, num_bytes, free_bytes)

    def position(self, sequence: int, layers: LayerRange) -> int:
        """Return the position up to which all these layers hold the sequence."""
        least, next_layer = 0, layers.first
        for part in self.sequences.get(sequence, ()):
            if part.layers.first <= next_layer < part.layers.stop:
                least = part.position if next_layer == layers.first else min(least, part.position)
                next_layer = part.layers.stop
                if next_layer >= layers.stop:
                    return least
        return 0

    def positions(self, sequence: int, num_layers: int) -> list[int]:
        """Return the position up to which each layer of the model holds the sequence."""
        positions = [0] * num_layers
        for part in self.sequences.get(sequence, ()):
            positions[part.layers.first : part.layers.stop] = [part.position] * len(part.layers)
        return positions


@dataclass(slots=True)
class CopyProgress:
    """Progress of one route: positions held of each running sequence, and when one of them last rose."""

    positions: dict[int, int] = field(default_factory=dict)
    risen_at: float = 0.0
    num_reorders: int = 0  # orders that were repeated since then


@dataclass(slots=True)
class KvCopyState:
    """All copies under the current plan. Orders are remembered to send only those that changed."""

    replicas: tuple[CopyRoute, ...] = ()  # their routes, without those of a migration
    held: dict[str, HeldCopies] = field(default_factory=dict)  # by holder
    progress: dict[CopyRoute, CopyProgress] = field(default_factory=dict)
    # by holder without memory for more copies: time at which it is tried again
    paused_until: dict[str, float] = field(default_factory=dict)
    checked_at: float = 0.0  # time at which the progress was last compared
    positions_per_s: float = 0.0  # recent rate at which steps compute positions, of all sequences together
    counted_positions: float = 0.0  # positions that steps had computed at ``checked_at``
    dropped_at: float = 0.0  # time at which copies of ended sequences were last looked for
    targets: dict[str, tuple[KvTarget, ...]] = field(
        default_factory=dict
    )  # by sender: its last order, without ``held``
    # by holder: its last order
    sources: dict[str, tuple[tuple[KvSource, ...], tuple[SequencePosition, ...]]] = field(default_factory=dict)
    # layers times positions that stages took over from copies, by stage, with the plan that is being activated
    adopted: dict[str, int] = field(default_factory=dict)

    def position(self, holder: str, sequence: int, layers: LayerRange) -> int:
        """Return the position up to which a worker holds copies of the sequence in all these layers."""
        held = self.held.get(holder)
        return 0 if held is None else held.position(sequence, layers)

    def measure_rate(self, num_positions: float, now: float) -> None:
        """Measure the rate of positions. ``num_positions``: all that steps have computed by now."""
        elapsed_s = now - self.checked_at
        weight = min(1.0, elapsed_s / RATE_WINDOW_S)
        rate = max(0.0, num_positions - self.counted_positions) / elapsed_s
        self.positions_per_s += weight * (rate - self.positions_per_s)
        self.counted_positions, self.checked_at = num_positions, now

    def forget_orders(self) -> None:
        """Drop the record of all orders: they end with their plan."""
        self.replicas = ()
        self.progress.clear()
        self.paused_until.clear()
        self.targets.clear()
        self.sources.clear()
        self.adopted.clear()
