"""What an operator has said about the plan while it serves, beside the settings: who gets nothing, who gets what.

It lasts as long as this broker's process: a broker that starts again goes by its settings, and ``swarmctl`` says so
with every answer. Workers are meant by name, so a cordon holds for a worker that was started anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.wire.messages import LayerRange


@dataclass(frozen=True, slots=True)
class Steering:
    """``cordoned``: who keeps what it serves and gets nothing new, with the layers that it served then. ``drained``:
    who serves nothing. ``pins``, ``caps``, ``exclude``, ``objective``: as in the settings, and before them. ``margin``:
    by what part the next plan must be quicker, where that is not left to the settings."""

    cordoned: Mapping[str, LayerRange | None] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    pins: Mapping[str, LayerRange] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    objective: str = ""
    margin: float | None = None

    def cordon(self, name: str, layers: LayerRange | None) -> Steering:
        """It keeps these layers (None: it has none) and gets no others."""
        return replace(self, cordoned={**self.cordoned, name: layers})

    def drain(self, name: str) -> Steering:
        """It is cordoned, and serves nothing."""
        return replace(self.cordon(name, None), drained=self.drained | {name})

    def uncordon(self, name: str) -> Steering:
        """It may get layers again."""
        rest = {each: layers for each, layers in self.cordoned.items() if each != name}
        return replace(self, cordoned=rest, drained=self.drained - {name})

    def calm(self) -> Steering:
        """The plan that was asked for is there: from now on the settings say what is worth a change."""
        return self if self.margin is None else replace(self, margin=None)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the same plan would be made."""
        parts = (self.cordoned, self.pins, self.caps)
        named = tuple(tuple(sorted(part.items(), key=lambda item: item[0])) for part in parts)
        return (*named, self.drained, self.exclude, self.objective, self.margin)
