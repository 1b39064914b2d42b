"""Prefixes that sequences go on sharing over a change of plan, as ``Activate`` names them.

What the stage has mapped stays mapped. In layers that are new here, a sequence gets its prefix from the source as soon
as that has it in all layers of the stage: at once if they were copied, otherwise before its own first replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swarm.stage.actions import Action, SharePrefix
from swarm.wire.messages import LayerRange
from swarm.wire.messages import SharedPrefix as Link


class Holder(Protocol):
    """A stored sequence (``sequences.StoredSequence``)."""

    history: list[int]

    def min_position(self, layers: LayerRange) -> int: ...

    def advance(self, layers: LayerRange, position: int) -> None: ...


@dataclass(slots=True)
class SharedPrefixes:
    """Links of the plan in force. Appends changes of the executor's memory to ``actions``."""

    actions: list[Action]
    stored: Mapping[int, Holder]
    links: dict[int, Link] = field(default_factory=dict)  # by sequence; sources come first

    def start_plan(self, links: tuple[Link, ...], layers: LayerRange) -> None:
        """Share the prefixes of the sequences that are open."""
        self.links = {link.sequence: link for link in links}
        for sequence in self.links:
            self.apply(sequence, layers)

    def position(self, sequence: int) -> int:
        """Return how many positions the sequence shares since the beginning of the plan."""
        link = self.links.get(sequence)
        return 0 if link is None else link.position

    def apply(self, sequence: int, layers: LayerRange) -> None:
        """Share a sequence's prefix if both sequences are open. Where the source has it in all layers, so has the
        sequence from now on."""
        link = self.links.get(sequence)
        held, source = self.stored.get(sequence), self.stored.get(-1 if link is None else link.source)
        if link is None or held is None or source is None:
            return
        is_mapped = source.min_position(layers) >= link.position
        self.actions.append(SharePrefix(sequence, link.source, link.position, is_mapped))
        if is_mapped:
            held.history.extend(source.history[len(held.history) : link.position])
            held.advance(layers, link.position)
