"""Slots of an arena that share pages: which sequence maps which, and how many positions count for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from weakref import ref

from swarm.log import get_logger
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.attention.sharing import PageFile, SharedPages, chunk_positions, is_on_pages, max_ranges
from swarm.wire.shared_positions import SharedPositions

log = get_logger(__name__)


@dataclass(slots=True)
class SlotMappings:
    """Runs of pages that are mapped over one slot of a rack, from position 0 on without gaps."""

    rack: Rack
    slot: int
    runs: list[tuple[SharedPages, int]] = field(default_factory=list)  # with the position up to which it is mapped
    is_mapped: bool = False  # some pages of the slot may be a file's
    is_stuck: bool = False  # and they can't be replaced

    @property
    def stop(self) -> int:
        return self.runs[-1][1] if self.runs else 0

    @property
    def num_ranges(self) -> int:
        """Mappings of the slot's memory: those of the runs, and of the rest."""
        return sum(pages.num_ranges for pages, _ in (*self.runs, *self.runs[-1:]))

    def covers(self, position: int, layers: Iterable[int]) -> bool:
        """Whether pages are mapped over this position, or later ones, in some of these layers."""
        return position < self.stop and any(layer in self.runs[0][0].layers for layer in layers)

    def map_fork(
        self, source: SlotMappings, runs: list[tuple[int, int]], layers: Collection[int], unit: int, file: PageFile
    ) -> None:
        """Map runs of the source, each from its start to an end. If its last run does not reach that far, the source's
        positions move there."""
        buffers = {layer: source.rack.buffers[layer] for layer in layers}
        for number, (start, stop) in enumerate(runs):
            if number < len(source.runs):
                pages, end = source.runs[number]
            else:
                pages, end = SharedPages.reserve(file, start, unit, buffers), start
            if end < stop:
                source.is_mapped = True
                pages.extend(buffers, source.slot, stop)
                source.runs[number : number + 1] = [(pages, stop)]
            self.is_mapped = True
            pages.map(self.rack.buffers, self.slot, stop)
            self.runs.append((pages, stop))

    def has_runs(self, runs: list[tuple[int, int]], layers: Collection[int]) -> bool:
        """Whether pages are mapped over these runs, each from its start to an end, in all of these layers. The last one
        may have to be extended."""
        if len(self.runs) < len(runs):
            return False
        held = [(pages.start, end) for pages, end in self.runs[: len(runs)]]
        *earlier, (start, stop) = runs
        pages, end = self.runs[len(runs) - 1]
        reaches = end >= stop or (end == pages.stop and len(self.runs) == len(runs))
        is_whole = all(pages.layers.keys() >= set(layers) for pages, _ in self.runs[: len(runs)])
        return is_whole and held[:-1] == earlier and held[-1][0] == start and reaches

    def is_mapped_like(self, source: SlotMappings, runs: list[tuple[int, int]], layers: Collection[int]) -> bool:
        """Whether the source's pages are mapped over these runs of the slot, in all of these layers."""
        pairs = list(zip(self.runs, source.runs, runs, strict=False))
        return len(pairs) == len(runs) and all(
            mine[0] is other[0]
            and mine[0].start == start
            and min(mine[1], other[1]) >= stop
            and mine[0].layers.keys() >= set(layers)
            for mine, other, (start, stop) in pairs
        )

    def replace(
        self, source: SlotMappings, runs: list[tuple[int, int]], layers: Collection[int], unit: int, file: PageFile
    ) -> None:
        """Map runs of the source instead of those that are mapped; behind them, the slot has pages of its own."""
        if self.stop > runs[-1][1]:
            self.copy_out()
        before, self.runs = self.runs, []
        try:
            self.map_fork(source, runs, layers, unit, file)
        finally:
            for pages, stop in before:
                pages.leave(stop)

    def map_again(self, start: int, stop: int) -> None:
        """Map the runs again between these positions, where the same content was written over them."""
        for pages, end in self.runs:
            if start < end and pages.start < stop:
                pages.map_again(self.rack.buffers, self.slot, max(start, pages.start), min(stop, end))

    def copy_out(self) -> None:
        """Give the slot pages of its own. After an OSError, the runs not copied out are mapped as before."""
        while self.runs:
            pages, stop = self.runs[-1]
            pages.copy_out(self.rack.buffers, self.slot, stop)
            self.runs.pop()

    def forget(self) -> None:
        """Note that the slot has new pages, whose content is zero."""
        for pages, stop in self.runs:
            pages.leave(stop)
        self.runs.clear()
        self.is_mapped = False


class SharedSlots:
    """Account of the positions that an arena's sequences share, and the pages behind it."""

    def __init__(self) -> None:
        self.positions = SharedPositions()  # 0 as its unit: as the first fork needs it
        self.is_counted = (
            False  # the broker counts positions as shared: a copy would take memory that it does not count
        )
        self.is_refused = False  # the system refused to map pages: nothing more is shared, and the next plan counts so
        self.num_kept = 0  # how often a slot kept shared pages, because the system refused to map other ones
        self._file: ref[PageFile] | None = None  # it lives while pages of it are mapped

    def start(self, unit: int, slots: Iterable[SlotMappings]) -> None:
        """Count all sequences in full, and share by this unit from now on; 0: as suits the layers.

        Mapped pages stay, as far as their ranges leave room for as many new ones.
        """
        self.positions.clear(unit)
        self.is_counted = unit > 0
        mapped = sorted((each for each in slots if each.runs), key=lambda each: each.num_ranges)
        num_ranges = sum(each.num_ranges for each in mapped)
        while num_ranges > max_ranges():
            num_ranges -= mapped[-1].num_ranges
            self._copy_out(mapped.pop())

    def counted_stop(self, source: int, position: int) -> int:
        """Return how many of the source's first positions the broker counts as shared with a fork."""
        return self.positions.fork_stop(source, position) if self.is_counted else 0

    def fork(
        self, sequence: int, source: int, position: int, *, mine: SlotMappings, other: SlotMappings, layers: set[int]
    ) -> int:
        """Map the source's first positions over those of a sequence that has the same layers. Return their number."""
        buffers = [other.rack.buffers[layer] for layer in layers]
        if not buffers or not is_on_pages([*buffers, *(mine.rack.buffers[layer] for layer in layers)]):
            return 0
        if not self.positions.unit:
            self.positions.unit = _find_unit(buffers)
        ranges = 2 * sum(buffer.shape.heads for buffer in buffers)
        num_mappings = self.positions.num_mappings + self.positions.fork_mappings(source, position)
        if num_mappings * ranges > max_ranges():
            return 0
        try:
            if not self.positions.stop(source):
                other.copy_out()  # what it still has of an earlier plan
            stop = self.positions.fork(sequence, source, position)
            runs = [(run.start, end) for run, end in self.positions.runs(sequence)]
            mine.map_fork(other, runs, layers, self.positions.unit, self._open_file())
        except OSError as error:  # no file or no mapping is to be had
            log.warning("kv_not_shared", error=str(error))
            self.is_refused = True
            self.stop(sequence, mine)
            return 0
        return stop

    def link(
        self, sequence: int, source: int, position: int, *, mine: SlotMappings, other: SlotMappings, layers: set[int]
    ) -> int:
        """Count a sequence's first positions as shared with the source, unless they are. Map the source's over them in
        these layers. Return their number."""
        if not self.positions.inherited(sequence):
            num_mappings = self.positions.num_mappings + self.positions.fork_mappings(source, position)
            ranges = 2 * sum(other.rack.buffers[layer].shape.heads for layer in layers)
            if self.is_refused or num_mappings * ranges > max_ranges():
                return 0
            self.positions.fork(sequence, source, position)
        runs = [(run.start, end) for run, end in self.positions.inherited(sequence)]
        stop = runs[-1][1] if runs else 0
        if not layers or not stop or mine.is_mapped_like(other, runs, layers):
            return stop
        try:
            if not other.has_runs(runs, layers):
                other.copy_out()
            mine.replace(other, runs, layers, self.positions.unit, self._open_file())
        except OSError as error:
            self.keep_pages(mine, error)
            return 0
        return stop

    def stop(self, sequence: int, mine: SlotMappings) -> None:
        """Count all positions of a sequence as its own, and give it pages of its own."""
        self.positions.release(sequence)
        self._copy_out(mine)

    def _copy_out(self, mine: SlotMappings) -> None:
        """Give a slot pages of its own. If the system refuses, the shared ones stay mapped. They are private: what is
        written there shows in no other sequence, but takes memory in addition to them. Nothing more is shared then."""
        try:
            mine.copy_out()
        except OSError as error:
            self.keep_pages(mine, error)

    def keep_pages(self, mine: SlotMappings, error: OSError) -> None:
        """Note that the system refuses to map other pages over a slot, which no other sequence may get any more."""
        log.warning("kv_pages_kept", error=str(error))
        self.num_kept += 1
        self.is_refused = mine.is_stuck = True

    def _open_file(self) -> PageFile:
        file = None if self._file is None else self._file()
        if file is None:
            file = PageFile()
            self._file = ref(file)
        return file


def _find_unit(buffers: list[LayerBuffer]) -> int:
    return chunk_positions([each.shape for each in buffers], buffers[0].layouts, buffers[0].keys.itemsize)
