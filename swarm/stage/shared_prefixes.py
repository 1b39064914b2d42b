"""Prefixes that sequences go on sharing over a change of plan, as ``Activate`` names them.

What the stage has mapped stays mapped. In layers that are new here, a sequence gets its prefix from the source as soon
as that has it in all layers of the stage: at once if they were copied, otherwise once they are computed. That holds for
a sequence that has a copy of its prefix, too: the pages of the source replace it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    uncounted: set[int] = field(default_factory=set)  # sequences whose prefix does not count as shared yet
    unmapped: dict[int, Link] = field(default_factory=dict)  # links whose source lacks the prefix in some layers

    def start_plan(self, links: tuple[Link, ...], layers: LayerRange) -> None:
        """Share the prefixes of the sequences that are open."""
        self.links = {link.sequence: link for link in links}
        self.unmapped, self.uncounted = dict(self.links), set(self.links)
        self.apply_all(layers)

    def position(self, sequence: int) -> int:
        """Return how many positions the sequence shares since the beginning of the plan."""
        link = self.links.get(sequence)
        return 0 if link is None else link.position

    def forget(self, released: Iterable[int]) -> None:
        """Drop the links of sequences that the broker has released, and unmapped ones with these as their source."""
        gone = set(released) if self.links else set()
        self.links = {sequence: link for sequence, link in self.links.items() if sequence not in gone}
        self.unmapped = {s: link for s, link in self.unmapped.items() if s not in gone and link.source not in gone}
        self.uncounted &= self.unmapped.keys()

    def apply_all(self, layers: LayerRange) -> None:
        """Share each prefix that can be shared by now: a source may have got it meanwhile."""
        for sequence in list(self.unmapped):
            self.apply(sequence, layers)

    def apply(self, sequence: int, layers: LayerRange) -> None:
        """Share a sequence's prefix if both sequences are open and begin alike. Where the source has it in all layers,
        so has the sequence from now on. A source's own prefix counts first."""
        link = self.unmapped.get(sequence)
        held, source = self.stored.get(sequence), self.stored.get(-1 if link is None else link.source)
        if link is None or held is None or source is None or link.source in self.uncounted:
            return
        is_mapped = source.min_position(layers) >= link.position
        prefix = source.history[: link.position]
        is_alike = held.history[: link.position] == prefix[: len(held.history)]
        if not is_alike or (not is_mapped and sequence not in self.uncounted):
            return
        self.uncounted.discard(sequence)
        self.actions.append(SharePrefix(sequence, link.source, link.position, is_mapped))
        if is_mapped:
            del self.unmapped[sequence]
            held.history.extend(prefix[len(held.history) :])
            held.advance(layers, link.position)
