"""Account of the positions that several sequences share. The broker and every stage keep one, with equal numbers.

A sequence that starts from another one's first positions shares them in whole *chunks*. A chunk counts once, from its
first holder's start to its last holder's end. The number of positions that a fork shares depends only on the source's
own origin, never on other forks, since stages open sequences in another order than the broker admits them.

The chunks that a sequence was the first to compute form its *run*. A sequence holds its own run, and the beginnings of
the runs that it inherited. Each run is one mapping in a stage, so their number is limited per sequence (``MAX_RUNS``);
further positions are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Runs of one sequence. A conversation that grows by turns adds one with each.
MAX_RUNS = 8


@dataclass(slots=True, eq=False)
class SharedRun:
    """Chunks from position ``start`` on that one sequence computed and others share."""

    start: int
    unit: int  # positions of a chunk
    holders: list[int] = field(default_factory=list)  # number of sequences that hold each chunk
    retired: list[int] = field(default_factory=list)  # number of retired ones among them

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
    # positions of retired sequences that their departure would not free, because others hold them
    retired_kept: int = 0
    _retired: set[int] = field(default_factory=set)
    _holders: dict[int, _Holder] = field(default_factory=dict)

    def stop(self, sequence: int) -> int:
        """Return the position up to which the sequence holds chunks."""
        holder = self._holders.get(sequence)
        return 0 if holder is None else holder.stop

    def inherited(self, sequence: int) -> tuple[HeldRun, ...]:
        """Return the runs that the sequence shares since its fork."""
        holder = self._holders.get(sequence)
        return () if holder is None else holder.inherited

    def common_stop(self, sequence: int, other: int) -> int:
        """Return the position up to which two sequences hold the same chunks."""
        stop = 0
        for (run, end), (other_run, other_end) in zip(self.runs(sequence), self.runs(other), strict=False):
            if run is not other_run:
                break
            stop = min(end, other_end)
        return stop

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
            self._extend_run(holder, stop, is_retired=source in self._retired)
        inherited = tuple((run, min(end, stop)) for run, end in holder.runs if run.start < stop)
        self._holders[sequence] = fork = _Holder(inherited)
        for run, chunk in _chunks(fork):
            if run.retired[chunk] == run.holders[chunk]:  # the fork keeps what the last of them would have freed
                self.retired_kept += self.unit
            run.holders[chunk] += 1
        self.saved += stop
        self.num_mappings += fork.num_mappings
        return stop

    def _extend_run(self, holder: _Holder, stop: int, *, is_retired: bool) -> None:
        """Extend the sequence's own run, which nothing else holds yet: the number of saved positions stays."""
        self.num_mappings -= holder.num_mappings
        if holder.own is None:
            holder.own = SharedRun(holder.inherited_stop, self.unit)
        count = (stop - holder.own.stop) // self.unit
        holder.own.holders.extend([1] * count)
        holder.own.retired.extend([int(is_retired)] * count)
        self.num_mappings += holder.num_mappings

    def retire(self, sequence: int) -> None:
        """Count a sequence among the retired ones, which may depart at any time, until its release."""
        self._retired.add(sequence)
        holder = self._holders.get(sequence)
        for run, chunk in _chunks(holder) if holder is not None else ():
            run.retired[chunk] += 1
            self.retired_kept += self.unit if run.retired[chunk] < run.holders[chunk] else 0

    def release(self, sequence: int) -> int:
        """Remove a sequence, or count all of its positions as its own from now on. Return the number of its positions
        that others still hold. An unknown sequence is no error."""
        holder = self._holders.pop(sequence, None)
        is_retired = sequence in self._retired
        self._retired.discard(sequence)
        if holder is None:
            return 0
        num_kept = 0
        for run, chunk in _chunks(holder):
            self.retired_kept -= self._kept_of_retired(run, chunk)
            run.holders[chunk] -= 1
            run.retired[chunk] -= is_retired
            self.retired_kept += self._kept_of_retired(run, chunk)
            num_kept += self.unit if run.holders[chunk] else 0
        self.saved -= num_kept
        self.num_mappings -= holder.num_mappings
        return num_kept

    def _kept_of_retired(self, run: SharedRun, chunk: int) -> int:
        """Return what the chunk adds to ``retired_kept``: if all holders are retired, the last one would free it."""
        num_retired = run.retired[chunk]
        return self.unit * (num_retired - (0 < num_retired == run.holders[chunk]))

    def clear(self, unit: int) -> None:
        """Count all positions of all sequences as their own, and share by this unit from now on."""
        self.unit, self.saved, self.num_mappings, self.retired_kept = unit, 0, 0, 0
        self._retired.clear()
        self._holders.clear()


@dataclass(slots=True)
class Departures:
    """Forecast of the positions that several sequences would free together."""

    shared: SharedPositions
    _with_retired: bool = False  # all retired sequences depart, too
    # run and chunk -> departures among its holders, in addition to the retired ones, of which some may stay
    _gone: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_retired(self, staying: Iterable[int]) -> int:
        """Let all retired sequences but ``staying`` ones depart, before any other. Return the number of their positions
        that sequences which stay still hold. Takes time for the staying ones only."""
        self._with_retired = True
        num_kept = self.shared.retired_kept
        for sequence in staying:
            holder = self.shared._holders.get(sequence)
            for run, chunk in _chunks(holder) if holder is not None else ():
                num_kept -= self.shared.unit if run.holders[chunk] > self._num_gone(run, chunk) else 0
                self._gone[id(run), chunk] = self._gone.get((id(run), chunk), 0) - 1
        return num_kept

    def add(self, sequence: int) -> int:
        """Let one more sequence depart. Return the number of its positions that sequences which stay still hold."""
        holder = self.shared._holders.get(sequence)
        num_kept = 0
        for run, chunk in _chunks(holder) if holder is not None else ():
            self._gone[id(run), chunk] = self._gone.get((id(run), chunk), 0) + 1
            num_kept += self.shared.unit if run.holders[chunk] > self._num_gone(run, chunk) else 0
        return num_kept

    def _num_gone(self, run: SharedRun, chunk: int) -> int:
        return self._gone.get((id(run), chunk), 0) + (run.retired[chunk] if self._with_retired else 0)


def _chunks(holder: _Holder) -> Iterator[tuple[SharedRun, int]]:
    for run, end in holder.runs:
        for chunk in range((end - run.start) // run.unit):
            yield run, chunk
