"""Constraints that an operator sets on plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.wire.messages import LayerRange


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """Plan constraints set by an operator. They take precedence over the settings for as long as the broker process
    lives, and refer to workers by name, so that they also hold for a restarted worker."""

    # workers that keep the layers they served when cordoned (None: no layers) and get nothing new
    cordoned: Mapping[str, LayerRange | None] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()  # workers that serve nothing
    # ``pins``, ``caps``, ``exclude`` and ``objective`` have the same meaning as in the settings
    pins: Mapping[str, LayerRange] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    objective: str = ""
    margin: float | None = None  # how much quicker the next plan must be (a fraction); None: as the settings define

    def cordon(self, name: str, layers: LayerRange | None) -> PlanConstraints:
        """Restrict a worker to these layers (None: it has none)."""
        return replace(self, cordoned={**self.cordoned, name: layers})

    def drain(self, name: str) -> PlanConstraints:
        """Cordon a worker and remove all layers from it."""
        return replace(self.cordon(name, None), drained=self.drained | {name})

    def uncordon(self, name: str) -> PlanConstraints:
        """Allow a worker to get layers again."""
        rest = {other: layers for other, layers in self.cordoned.items() if other != name}
        return replace(self, cordoned=rest, drained=self.drained - {name})

    def restriction(self, name: str) -> str:
        """Return ``drained``, ``cordoned``, or an empty string for a worker that may get layers."""
        if name not in self.cordoned:
            return ""
        return "drained" if name in self.drained else "cordoned"

    def clear_margin(self) -> PlanConstraints:
        """Return to the margin of the settings, once the requested plan is active."""
        return self if self.margin is None else replace(self, margin=None)

    @property
    def has_overrides(self) -> bool:
        """Whether an operator has set constraints for plans, beyond cordoned workers."""
        return bool(self.pins or self.caps or self.exclude or self.objective)

    def without_overrides(self) -> PlanConstraints:
        """Return a copy without the operator's constraints on plans; cordoned workers stay cordoned."""
        return PlanConstraints(cordoned=self.cordoned, drained=self.drained)

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Cache key: equal where the same plan would be made."""
        parts = (self.cordoned, self.pins, self.caps)
        named = tuple(tuple(sorted(part.items(), key=lambda item: item[0])) for part in parts)
        return (*named, self.drained, self.exclude, self.objective, self.margin)
