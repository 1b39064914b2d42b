"""Takeover of a lost stage's layers, chosen so that sequences run again as soon as possible.

Survivors keep what they have: their layers, and with them the keys and values of every sequence. For each gap that lost
stages left, all ways to fill it are compared: the stage before it grows to any layer, the stage behind it takes the
rest, and a worker without a part may take the middle, or everything. The cost is the time until sequences resume: the
longest load (nothing for layers that are warm), then the replay of the lost layers. If several ways take about equally
long, the one with the shortest step afterwards is chosen; a plan that is better in the long run is made later, while
this one serves.

Gaps are filled one after the other, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarm.broker.planner import tables
from swarm.broker.planner.lost_positions import LostSequence, pack_chunks, run_sums, sum_lacking
from swarm.broker.planner.pauses import predict_steps_s
from swarm.broker.planner.problem import LayerShare, Line, PlanningProblem
from swarm.broker.planner.search import ROUNDING
from swarm.broker.planner.tables import Table
from swarm.wire.messages import LayerRange

_Places = tuple[int | slice, int | slice]

MIN_LOAD_S = 0.025  # minimum time of any load: a file is opened, kernels are warmed up
# For the forecast alone; measured on serving swarms (tools/bench_recovery.py): the time of orders and their answers if
# nothing is loaded; the time of a chunk besides its computing: the broker's turn, the log, sockets; and the additional
# time of the first one, whose layers have new memory and cold caches.
ORDERS_S = 0.02
CHUNK_S = 0.002
FIRST_CHUNK_S = 0.01
NEAR = 0.1  # ways that differ by less than this fraction of the time, or this number of seconds, are equally soon
NEAR_S = 0.005


@dataclass(frozen=True, slots=True)
class Takeover:
    """Assignment of the lost layers. ``line``: all shares from now on. ``load_s``: time until all workers have loaded
    their layers. ``replay_s``: time until the keys and values of all sequences are complete again. ``taken``: the lost
    layers that each device takes."""

    line: Line
    load_s: float
    replay_s: float
    taken: tuple[LayerShare, ...]


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Amount of work that replays must compute again: ``positions`` of all sequences together, in ``chunks`` orders,
    with ``context`` positions before each chunk, on average. ``overlap``: fraction of the work that is computed beside
    steps of sequences that have already resumed. ``sequences``: number of sequences that become complete one after the
    other; those that share a step count once.

    ``lost``: all sequences, if there are copies of some, to be replayed in steps of ``chunk`` positions. Without it,
    every device lacks all positions.
    """

    positions: int
    chunks: int = 0
    context: int = 0
    overlap: float = 0.0
    sequences: int = 0
    lost: tuple[LostSequence, ...] = ()
    chunk: int = 0

    @classmethod
    def from_sequences(cls, sequences: Iterable[int | LostSequence], chunk: int) -> ReplayWork:
        """Add up the work of these sequences, each given by its number of positions, if there were no copies."""
        lost = tuple(each if isinstance(each, LostSequence) else LostSequence(each) for each in sequences)
        work = cls._from_positions([(each.length, each.own) for each in lost], chunk)
        return replace(work, lost=lost, chunk=chunk) if any(each.copies for each in lost) else work

    @classmethod
    def _from_positions(cls, parts: list[tuple[int, int]], chunk: int) -> ReplayWork:
        """Add up the work of sequences, each given by its length and the positions that are lacking at its end."""
        total = sum(lacking for _, lacking in parts)
        if not total:
            return cls(0)
        chunks = pack_chunks((lacking for _, lacking in parts if lacking), chunk)
        context = sum(lacking * (2 * length - lacking) for length, lacking in parts) // (2 * total)
        return cls(total, chunks.num, context, 1 - chunks.first / total, chunks.num_ends)

    def reduce_to(self, taken: Line, problem: PlanningProblem) -> ReplayWork:
        """Return the work that copies leave, if these lost layers are taken by these devices."""
        if not self.lost:
            return self
        holders = [(problem.devices[s.device].name, layer) for s in taken for layer in _layers(s)]
        parts = [(each.length, max((each.lacking(*place) for place in holders), default=0)) for each in self.lost]
        return replace(self._from_positions(parts, self.chunk), lost=self.lost, chunk=self.chunk)

    def count(self, device: str, weights: Sequence[float]) -> Table:
        """Return the positions, times the layers' weights, that a device replays if it takes the layers from the row's
        up to, not including, the column's."""
        if not self.lost:
            return self.positions * tables.range_sums(weights)
        return run_sums(weights, sum_lacking(self.lost, device, len(weights)))

    def predict_s(self, alone_s: float, step_s: float) -> float:
        """Return the duration of the replays if they take ``alone_s`` by themselves, and a step ``step_s``."""
        if not self.positions:
            return 0.0
        alone_s += FIRST_CHUNK_S + self.chunks * CHUNK_S
        return alone_s + predict_steps_s(step_s, self.sequences, self.overlap * alone_s, alone_s)


def find_takeover(problem: PlanningProblem, survivors: Line, replays: ReplayWork) -> Takeover | None:
    """Return the quickest takeover by prediction. ``survivors``: with the layers that they hold, in pipeline order.
    None if the lost layers don't fit in this way."""
    if not survivors:
        return None
    pipeline = _Pipeline(problem, survivors, replays)
    while (gap := pipeline.largest_gap()) is not None:
        if not pipeline.fill(gap):
            return None
    line = tuple(pipeline.shares)
    taken = pipeline.taken_shares(survivors)
    return Takeover(line, pipeline.load_s, predict_replay_s(problem, taken, replays), taken)


def predict_replay_s(problem: PlanningProblem, taken: Line, replays: ReplayWork) -> float:
    """Return the time to replay lost layers that these devices have taken. A layer must compute what any layer behind
    it in the same gap lacks, whichever device takes that."""
    weights, seconds = problem.model.layer_weights, 0.0
    needed, next_layer = 0, -1
    for share in sorted(taken, key=lambda share: share.layers.first, reverse=True):
        device = problem.devices[share.device]
        lacking = (
            sum_lacking(replays.lost, device.name, len(weights)) if replays.lost else [replays.positions] * len(weights)
        )
        for layer in reversed(_layers(share)):
            needed = max(lacking[layer], needed if layer + 1 == next_layer else 0)
            seconds += needed * weights[layer] * device.replay_s
            next_layer = layer
    return seconds


def _layers(share: LayerShare) -> range:
    return range(share.layers.first, share.layers.stop)


@dataclass(frozen=True, slots=True)
class _Gap:
    """Layers that no device of the plan holds. The gap precedes the share at index ``place``."""

    place: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class _Option:
    seconds: float
    step_s: float
    shares: Line  # in place of the neighbours' shares


class _Pipeline:
    def __init__(self, problem: PlanningProblem, survivors: Line, replays: ReplayWork) -> None:
        self._problem = problem
        self._own = [tables.range_seconds(problem.model, d, problem.kv_positions) for d in problem.devices]
        self._moved = [tables.moved_bytes(problem.model, d) for d in problem.devices]
        self._replay = [d.replay_s * replays.count(d.name, problem.model.layer_weights) for d in problem.devices]
        self.shares = list(survivors)
        self.load_s = 0.0

    def largest_gap(self) -> _Gap | None:
        return max(self._gaps(), key=lambda gap: len(gap.layers), default=None)

    def _gaps(self) -> Iterator[_Gap]:
        at = 0
        for place, share in enumerate(self.shares):
            if share.layers.first > at:
                yield _Gap(place, LayerRange(at, share.layers.first))
            at = share.layers.stop
        if at < self._problem.model.num_layers:
            yield _Gap(len(self.shares), LayerRange(at, self._problem.model.num_layers))

    def fill(self, gap: _Gap) -> bool:
        """Fill the gap in the soonest way; False if there is none."""
        used = {share.device for share in self.shares}
        spares = [None, *(i for i in range(len(self._problem.devices)) if i not in used)]
        options = [way for spare in spares for way in self._options(gap, spare)]
        if not options:
            return False
        limit = min(way.seconds for way in options) * (1 + NEAR) + NEAR_S
        best = min((way for way in options if way.seconds <= limit), key=lambda way: (way.step_s, way.seconds))
        before, behind = gap.place - (gap.place > 0), gap.place + (gap.place < len(self.shares))
        for share in best.shares:
            loads = self._load_s(share.device)
            self.load_s = max(self.load_s, float(loads[share.layers.first, share.layers.stop]))
        self.shares[before:behind] = best.shares
        return True

    def taken_shares(self, survivors: Line) -> tuple[LayerShare, ...]:
        """Return the layers that each device holds in addition to before."""
        before = {share.device: share.layers for share in survivors}
        taken = []
        for share in self.shares:
            held = before.get(share.device)
            if held is None:
                taken.append(share)
            else:
                parts = (LayerRange(share.layers.first, held.first), LayerRange(held.stop, share.layers.stop))
                taken += [LayerShare(share.device, part) for part in parts if len(part)]
        return tuple(taken)

    def _options(self, gap: _Gap, spare: int | None) -> Iterator[_Option]:
        """Yield the best cut of the gap between the devices that take it. Rows: where the part of the stage before it
        ends; columns: where that of the stage behind it begins."""
        a, b = gap.layers.first, gap.layers.stop
        up = self.shares[gap.place - 1] if gap.place else None
        down = self.shares[gap.place] if gap.place < len(self.shares) else None
        cuts, size = slice(a, b + 1), b - a + 1
        upper, middle, lower = _Part.absent(size, 0), _Part.absent_spare(size), _Part.absent(size, -1)
        if up is not None:
            upper = self._part(up.device, (up.layers.first, cuts), (a, cuts))
        if spare is not None:
            middle = self._part(spare, (cuts, cuts), (cuts, cuts))
        if down is not None:
            lower = self._part(down.device, (cuts, down.layers.stop), (cuts, b))
        best = upper.column().combine(middle, self._problem).combine(lower, self._problem).select_best()
        if best is None:
            return
        low, high = a + best[0], a + best[1]
        shares = [] if up is None else [LayerShare(up.device, LayerRange(up.layers.first, low))]
        shares += [] if spare is None else [LayerShare(spare, LayerRange(low, high))]
        shares += [] if down is None else [LayerShare(down.device, LayerRange(high, down.layers.stop))]
        yield _Option(best[2], best[3], tuple(shares))

    def _part(self, device: int, whole: _Places, taken: _Places) -> _Part:
        return _Part(self._load_s(device)[whole], self._replay[device][taken], self._own[device][whole])

    def _load_s(self, device: int) -> Table:
        moved = self._moved[device]
        seconds: Table = moved / self._problem.devices[device].load_bytes_per_s + np.where(moved > 0, MIN_LOAD_S, 0.0)
        return seconds


@dataclass(frozen=True, slots=True)
class _Part:
    """One device's part, for every cut; ``step_s`` is infinite where the device can't take it."""

    load_s: Table
    replay_s: Table
    step_s: Table

    @classmethod
    def absent(cls, size: int, place: int) -> _Part:
        """Return the part of an absent stage on this side: the cut must be at the end of the gap."""
        step = np.full(size, np.inf)
        step[place] = 0.0
        return cls(np.zeros(size), np.zeros(size), step)

    @classmethod
    def absent_spare(cls, size: int) -> _Part:
        """Return the part of a spare that takes nothing: the layers that one neighbour takes end where the other's
        begin."""
        none = np.zeros((size, size))
        return cls(none, none, np.where(np.eye(size, dtype=np.bool_), 0.0, np.inf))

    def column(self) -> _Part:
        return _Part(self.load_s[:, None], self.replay_s[:, None], self.step_s[:, None])

    def combine(self, other: _Part, problem: PlanningProblem) -> _Part:
        """Return the combined cost of two parts: they load in parallel, but their replays run one after the other."""
        step = np.add if problem.takes_turns else np.maximum
        return _Part(
            np.maximum(self.load_s, other.load_s),
            self.replay_s + other.replay_s,
            step(self.step_s, other.step_s),
        )

    def select_best(self) -> tuple[int, int, float, float] | None:
        """Return row, column, seconds and step of the cut with the quickest step among those that are about as soon as
        the soonest; of equal ones the middle one. None if nothing is possible."""
        seconds = np.where(np.isfinite(self.step_s), self.load_s + self.replay_s, np.inf)
        if not np.isfinite(seconds.min()):
            return None
        near = seconds <= seconds.min() * (1 + NEAR) + NEAR_S
        steps = np.where(near, self.step_s, np.inf)
        places = np.argwhere(steps <= steps.min() * (1 + ROUNDING))
        row, column = (int(each) for each in places[len(places) // 2])
        return row, column, float(seconds[row, column]), float(steps[row, column])
