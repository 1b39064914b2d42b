"""Adapters that are loaded and dropped at run time, as the broker orders.

One load at a time; the latest order counts. An adapter that no order names any more is dropped when no stored sequence
has it: until then, steps and replays that are under way may need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.stage.actions import Action, DropAdapters, LoadAdapters, SendToBroker, WriteStageLog
from swarm.stage.events import AdaptersLoaded
from swarm.stage.sequences import StoredSequence
from swarm.wire.messages import AdapterEntry, AdaptersSet, SetAdapters


@dataclass(slots=True)
class StageAdapters:
    """The adapters that are loaded, and the broker's latest order. Appends its actions to ``actions``."""

    incarnation: str
    sequences: Mapping[int, StoredSequence]
    actions: list[Action]
    loaded: dict[str, AdapterEntry] = field(default_factory=dict)  # by key
    _order: SetAdapters | None = None  # the latest one
    _found: tuple[AdapterEntry, ...] | None = None  # what it names, with digests; None until that is loaded
    _problem: str = ""  # of the latest load; each is logged once
    _loading: SetAdapters | None = None  # the order whose adapters are loading now

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        """The loaded adapters, for Hello."""
        return tuple(self.loaded.values())

    def follow(self, order: SetAdapters) -> None:
        """Follow an order, or a repetition of it: its answer was lost, or it failed and may succeed now."""
        if self._is_overtaken(order):
            return
        if not self._is_latest(order):
            self._order, self._found = order, None
        if self._loading is None:
            self._start(order)

    def on_loaded(self, event: AdaptersLoaded) -> bool:
        """Handle the end of a load; return whether all of the latest order's adapters are loaded."""
        order, self._loading = self._loading, None
        assert order is not None, "there is one load at a time"
        assert self._order is not None
        loaded = {entry.name: entry for entry in event.adapters}
        self.loaded |= {entry.key: entry for entry in event.adapters}
        if not self._is_latest(order):
            self._start(self._order)
            return False
        if event.problem:
            if self._problem != event.problem:
                self.actions.append(WriteStageLog("adapters_not_loaded", "error", {"reason": event.problem}))
            self._problem = event.problem
            self._report(order, (), event.problem)
            return False
        self._found, self._problem = tuple(loaded.get(entry.name, entry) for entry in order.adapters), ""
        self._report(order, self._found)
        return True

    def drop_unused(self) -> None:
        """Drop what the latest order does not name, unless a stored sequence has it. A retired one is not computed."""
        if self._order is None or self._loading is not None:
            return
        wanted = {entry.key for entry in self._found or self._order.adapters}
        if not (extra := self.loaded.keys() - wanted):
            return
        used = {stored.open.params.adapter for stored in self.sequences.values() if not stored.is_retired}
        if dropped := tuple(sorted(extra - used)):
            self.loaded = {key: entry for key, entry in self.loaded.items() if key not in dropped}
            self.actions.append(DropAdapters(dropped))

    def _start(self, order: SetAdapters) -> None:
        """Load what is missing. An adapter of unknown content is read, once for an order."""
        if self._found is None:
            missing = tuple(entry for entry in order.adapters if not entry.digest or entry.key not in self.loaded)
            if missing:
                self._loading = order
                self.actions.append(LoadAdapters(missing))
                return
            self._found = tuple(self.loaded[entry.key] for entry in order.adapters)
        self._report(order, self._found)

    def _is_latest(self, order: SetAdapters) -> bool:
        """Whether this is the latest order. Numbers alone do not show that: they begin again with each broker."""
        latest = self._order
        return latest is not None and (latest.lineage, latest.number, latest.adapters) == (
            order.lineage,
            order.number,
            order.adapters,
        )

    def _is_overtaken(self, order: SetAdapters) -> bool:
        """Whether a later order of the same broker came first. An order to a worker that has not joined yet has the
        number of that to members, and may lack the adapter that these are to load."""
        latest = self._order
        if latest is None or latest.lineage != order.lineage:
            return False
        names, later = ({entry.name for entry in each.adapters} for each in (order, latest))
        return order.number < latest.number or (order.number == latest.number and names < later)

    def _report(self, order: SetAdapters, adapters: tuple[AdapterEntry, ...], problem: str = "") -> None:
        message = AdaptersSet(
            incarnation=self.incarnation, number=order.number, adapters=adapters, problem=problem[:4000]
        )
        self.actions.append(SendToBroker(message))
