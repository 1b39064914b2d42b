"""Account of the positions that several sequences share. The broker and every stage keep it, and must agree.

A sequence that starts from another one's first positions shares them in whole *chunks*. A chunk counts once, as long as
a sequence holds it, whichever sequences begin and end in between. The number of positions that a fork shares depends
only on the source's own origin, never on other forks, since stages open sequences in another order than the broker
admits them.

The chunks that a sequence was the first to compute form its *run*. A sequence holds its own run, and the beginnings of
the runs that it inherited. Each run is one mapping in a stage, so their number is limited per sequence (``MAX_RUNS``);
further positions are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# Runs of one sequence. A conversation that grows by turns adds one with each.
MAX_RUNS = 8


@dataclass(slots=True, eq=False)
class SharedRun:
    """Chunks from position ``start`` on that one sequence computed and others share."""

    start: int
    unit: int  # positions of a chunk
    holders: list[int] = field(default_factory=list)  # number of sequences that hold each chunk

    @property
    def stop(self) -> int:
        return self.start + self.unit * len(self.holders)


HeldRun = tuple[SharedRun, int]  # a run, and the position up to which a sequence holds it


@dataclass(slots=True)
class _Holder:
    """Runs of one sequence."""

    inherited: tuple[HeldRun, ...] = ()
    own: SharedRun | None = None

    @property
    def runs(self) -> tuple[HeldRun, ...]:
        return self.inherited if self.own is None else (*self.inherited, (self.own, self.own.stop))

    @property
    def inherited_stop(self) -> int:
        return self.inherited[-1][1] if self.inherited else 0

    @property
    def stop(self) -> int:
        return self.inherited_stop if self.own is None else self.own.stop

    @property
    def num_mappings(self) -> int:
        """Mappings of a stage's memory: the runs, and the rest of the sequence."""
        num_runs = len(self.inherited) + (self.own is not None)
        return num_runs + 1 if num_runs else 0


@dataclass(slots=True)
class SharedPositions:
    """Account of shared positions (see the module). ``unit``: positions of a chunk; 0: nothing is shared."""

    unit: int = 0
    saved: int = 0  # positions of all sequences that do not count, because they count for another sequence
    num_mappings: int = 0  # mappings of all sequences that share anything
    _holders: dict[int, _Holder] = field(default_factory=dict)

    def stop(self, sequence: int) -> int:
        """Return the position up to which the sequence holds chunks."""
        holder = self._holders.get(sequence)
        return 0 if holder is None else holder.stop

    def runs(self, sequence: int) -> tuple[HeldRun, ...]:
        """Return the runs of the sequence, in the order of their positions and without gaps."""
        holder = self._holders.get(sequence)
        return () if holder is None else holder.runs

    def fork_stop(self, source: int, position: int) -> int:
        """Return how many of the source's first ``position`` positions a fork would share."""
        target = position // self.unit * self.unit if self.unit else 0
        holder = self._holders.get(source, _Holder())
        return target if len(holder.inherited) < MAX_RUNS else min(target, holder.inherited_stop)

    def fork_mappings(self, source: int, position: int) -> int:
        """Return how many mappings a fork would add."""
        stop = self.fork_stop(source, position)
        holder = self._holders.get(source, _Holder())
        if not stop:
            return 0
        starts = [run.start for run, _ in holder.runs if run.start < stop]
        if stop <= holder.inherited_stop or holder.own is not None:
            return len(starts) + 1
        return len(starts) + 2 + (1 if starts else 2)  # of the fork, and of the source's new run

    def fork(self, sequence: int, source: int, position: int) -> int:
        """Count a new sequence that starts from the source's first ``position`` positions. Return how many of them it
        shares; the others are its own."""
        stop = self.fork_stop(source, position)
        if not stop:
            return 0
        holder = self._holders.setdefault(source, _Holder())
        if stop > holder.inherited_stop:
            self._extend_run(holder, stop)
        inherited = tuple((run, min(end, stop)) for run, end in holder.runs if run.start < stop)
        self._holders[sequence] = fork = _Holder(inherited)
        for run, end in inherited:
            for chunk in range((end - run.start) // self.unit):
                run.holders[chunk] += 1
        self.saved += stop
        self.num_mappings += fork.num_mappings
        return stop

    def _extend_run(self, holder: _Holder, stop: int) -> None:
        """Extend the sequence's own run, which nothing else holds yet: the number of saved positions stays."""
        self.num_mappings -= holder.num_mappings
        if holder.own is None:
            holder.own = SharedRun(holder.inherited_stop, self.unit)
        holder.own.holders.extend([1] * ((stop - holder.own.stop) // self.unit))
        self.num_mappings += holder.num_mappings

    def release(self, sequence: int) -> int:
        """Remove a sequence, or count all of its positions as its own from now on. Return the number of its positions
        that others still hold. An unknown sequence is no error."""
        holder = self._holders.pop(sequence, None)
        if holder is None:
            return 0
        num_kept = 0
        for run, chunk in _chunks(holder):
            run.holders[chunk] -= 1
            num_kept += self.unit if run.holders[chunk] else 0
        self.saved -= num_kept
        self.num_mappings -= holder.num_mappings
        return num_kept

    def clear(self, unit: int) -> None:
        """Count all positions of all sequences as their own, and share by this unit from now on."""
        self.unit, self.saved, self.num_mappings = unit, 0, 0
        self._holders.clear()


@dataclass(slots=True)
class Departures:
    """Forecast of the positions that several sequences would free together."""

    shared: SharedPositions
    _gone: dict[tuple[int, int], int] = field(default_factory=dict)  # run and chunk -> departures among its holders

    def add(self, sequence: int) -> int:
        """Let one more sequence depart. Return the number of its positions that sequences which stay still hold."""
        holder = self.shared._holders.get(sequence)
        num_kept = 0
        for run, chunk in _chunks(holder) if holder is not None else ():
            key = (id(run), chunk)
            self._gone[key] = self._gone.get(key, 0) + 1
            num_kept += self.shared.unit if run.holders[chunk] > self._gone[key] else 0
        return num_kept


def _chunks(holder: _Holder) -> Iterator[tuple[SharedRun, int]]:
    for run, end in holder.runs:
        for chunk in range((end - run.start) // run.unit):
            yield run, chunk
