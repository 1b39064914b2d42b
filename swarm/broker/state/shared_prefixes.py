"""Prefixes that sequences share over a change of plan (``recovery.kept_sequences``, ``recovery.rebuild``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swarm.broker.state.sequences import Sequence
from swarm.wire.messages import SharedPrefix
from swarm.wire.shared_positions import SharedPositions


@dataclass(slots=True)
class PlanPrefixes:
    """Prefixes that sequences of the active plan share since it began, and the account of the plan before."""

    before: SharedPositions = field(default_factory=SharedPositions)  # until the next plan is activated
    links: dict[int, SharedPrefix] = field(default_factory=dict)  # by sequence; sources come first
    # Sequences that lack their prefix in some layers, until these are rebuilt. Each waits for its source, of which the
    # residency is noted.
    lacking: dict[int, tuple[Sequence, int]] = field(default_factory=dict)

    def start_plan(self) -> SharedPositions:
        """Forget the links of the last plan. Return its account, once."""
        before, self.before = self.before, SharedPositions()
        self.links.clear()
        self.lacking.clear()
        return before

    def add(self, link: SharedPrefix) -> None:
        """Record a prefix that a sequence shares from the beginning of the plan."""
        self.links[link.sequence] = link

    def position(self, sequence: int) -> int:
        """Return how many positions the sequence shares since the beginning of the plan."""
        link = self.links.get(sequence)
        return 0 if link is None else link.position

    def await_source(self, sequence: Sequence, source: Sequence) -> None:
        """Record that a sequence lacks its prefix in some layers, until the source's are rebuilt."""
        self.lacking[sequence.id] = source, source.residency

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for its source."""
        source, residency = self.lacking.get(sequence.id, (None, 0))
        return source is not None and source.residency == residency and bool(source.rebuilds)

    def sources(self) -> Iterator[tuple[int, Sequence, int]]:
        """Yield each sequence that lacks its prefix, with the source and its residency."""
        for sequence, (source, residency) in list(self.lacking.items()):
            yield sequence, source, residency

    def drop(self, sequence: int) -> Sequence | None:
        """Record that a sequence lacks nothing any more. Return the source that it waited for, if it did."""
        return self.lacking.pop(sequence, (None, 0))[0]


def estimate_links(account: SharedPositions, sequences: Iterable[Sequence]) -> dict[int, int]:
    """Return how many positions each of these sequences can share with one before it over a change of plan, if there
    are any. A sequence that has computed nothing behind them starts from them again."""
    linked: dict[int, int] = {}
    others: list[int] = []
    for sequence in sequences:
        if not account.stop(sequence.id):
            continue
        stop = max((account.common_stop(sequence.id, other) for other in others), default=0)
        if 0 < stop < sequence.kv:
            linked[sequence.id] = stop
        others.append(sequence.id)
    return linked
