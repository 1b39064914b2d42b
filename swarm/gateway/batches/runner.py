"""Runner of batches: which lines run next, what is written, and when a batch ends. Pure: events and the time come in,
actions go out.

Lines of all batches share ``max_in_flight`` places; the owner with the fewest lines in flight is next. A line keeps
its place until its answer is on the disk, so a slow disk bounds what waits in memory. One write is in flight at a time
and takes everything that waits.

A refused line runs again after its own time, behind the others of its batch, so that lines for a model that is away do
not hold up the rest. When a whole round is refused, every line that was in flight, the batch pauses.

A batch that is cancelled or expires starts no more lines and aborts those in flight; answers that come meanwhile count.
The write that ends it also gives every line without an answer an error.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.gateway.batches.objects import Answer, BatchStatus, LineError

MAX_ATTEMPTS = 3  # runs of a line that the gateway or the swarm fails; waiting for a free swarm has no limit
FIRST_RETRY_S = 1.0  # seconds after which a failed write is tried again; doubles up to MAX_RETRY_S
MAX_RETRY_S = 30.0

# --- events


@dataclass(frozen=True, slots=True)
class BatchAdded:
    """A batch was created, or loaded at the start. ``pending``: numbers of the lines without an answer."""

    id: str
    owner: str
    status: BatchStatus
    expires_at: float
    pending: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchChecked:
    """The lines of a batch were read. ``errors``: why it fails; empty if its lines may run."""

    id: str
    pending: tuple[int, ...]
    errors: tuple[LineError, ...] = ()


@dataclass(frozen=True, slots=True)
class LineAnswered:
    """A line has its answer."""

    id: str
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class LineNotRun:
    """The swarm took no line now, or its run failed: it must run again after ``after_s``. ``answer``: the error that
    counts if this was the last attempt; None if the number of attempts has no limit."""

    id: str
    number: int
    after_s: float
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class LineAborted:
    """A line has ended without an answer, because it was aborted."""

    id: str
    number: int


@dataclass(frozen=True, slots=True)
class CancelOrdered:
    """A client has cancelled a batch, which the store has recorded."""

    id: str


@dataclass(frozen=True, slots=True)
class Written:
    """The write in flight is on the disk."""


@dataclass(frozen=True, slots=True)
class NotWritten:
    """The write in flight has failed; nothing of it is certain."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time that ``next_due`` returned has come."""


Event = (
    BatchAdded
    | BatchChecked
    | LineAnswered
    | LineNotRun
    | LineAborted
    | CancelOrdered
    | Written
    | NotWritten
    | TimePassed
)

# --- actions


@dataclass(frozen=True, slots=True)
class CheckBatch:
    """Read and check the lines of a batch."""

    id: str


@dataclass(frozen=True, slots=True)
class RunLine:
    """Submit a line."""

    id: str
    number: int


@dataclass(frozen=True, slots=True)
class AbortLine:
    """Cancel a line in flight. Its end is still reported."""

    id: str
    number: int


@dataclass(frozen=True, slots=True)
class Move:
    """A batch enters a status."""

    id: str
    status: BatchStatus
    errors: tuple[LineError, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """Write answers and moves in one transaction. Both may have been written before."""

    answers: tuple[tuple[str, int, Answer], ...] = ()
    moves: tuple[Move, ...] = ()


Action = CheckBatch | RunLine | AbortLine | Write


@dataclass(slots=True)
class _Batch:
    """An unfinished batch."""

    id: str
    owner: str
    expires_at: float
    place: int  # in the order of arrival
    pending: deque[int]
    is_checked: bool
    closing: BatchStatus | None = None  # the status in which it ends early
    in_flight: set[int] = field(default_factory=set)
    unwritten: dict[int, Answer] = field(default_factory=dict)
    move: Move | None = None  # a status that must be written
    attempts: Counter[int] = field(default_factory=Counter)
    refused: list[tuple[float, int]] = field(default_factory=list)  # heap: when a line runs again, and its number
    num_refused: int = 0  # refusals since the last answer or pause
    paused_until: float = 0.0  # no line starts before; 0 if the batch does not pause

    @property
    def num_places(self) -> int:
        return len(self.in_flight) + len(self.unwritten)

    def wake(self, now: float) -> None:
        """End the pause, and take up the refused lines, whose time has come."""
        if self.paused_until <= now:
            self.paused_until = 0.0
        while self.refused and self.refused[0][0] <= now:
            self.pending.append(heapq.heappop(self.refused)[1])

    def due_times(self) -> Iterator[float]:
        """Yield the times for which it waits."""
        if self.closing is not None:
            return
        if self.move is None:
            yield self.expires_at
        if self.paused_until:
            yield self.paused_until
        elif self.refused:
            yield self.refused[0][0]

    @property
    def can_start(self) -> bool:
        return bool(self.pending) and self.is_checked and self.closing is None and not self.paused_until


class BatchRunner:
    """Runner of one gateway."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._batches: dict[str, _Batch] = {}
        self._num_added = 0
        self._writing: Write | None = None
        self._write_at = 0.0  # time of the next attempt after a failed write
        self._num_failed_writes = 0
        self._is_stopped = False

    @property
    def num_active(self) -> int:
        return len(self._batches)

    def stop(self) -> None:
        """Start no further lines: the gateway ends."""
        self._is_stopped = True

    def next_due(self) -> float | None:
        """Return when ``TimePassed`` is due; None if nothing waits for a time. It may have passed since the last
        event."""
        times = [due for batch in self._batches.values() for due in batch.due_times()]
        if self._num_failed_writes and self._writing is None:
            times.append(self._write_at)
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = list(self._apply(event, now))
        for batch in list(self._batches.values()):
            batch.wake(now)
            actions += self._settle(batch, now)
        actions += self._start_lines()
        actions += self._start_write(now)
        return actions

    # --- events

    def _apply(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case BatchAdded():
                yield from self._add(event)
            case Written():
                self._on_written()
            case NotWritten():
                self._writing = None
                self._num_failed_writes += 1
                self._write_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** (self._num_failed_writes - 1))
            case TimePassed():
                pass
            case _ if (batch := self._batches.get(event.id)) is not None:
                yield from self._apply_to(batch, event, now)

    def _add(self, event: BatchAdded) -> Iterator[Action]:
        if event.id in self._batches:
            return
        self._num_added += 1
        batch = _Batch(
            event.id,
            event.owner,
            event.expires_at,
            self._num_added,
            deque(event.pending),
            is_checked=event.status is not BatchStatus.validating,
        )
        self._batches[event.id] = batch
        if event.status is BatchStatus.cancelling:
            batch.closing = BatchStatus.cancelled
        elif not batch.is_checked:
            yield CheckBatch(event.id)

    def _apply_to(
        self,
        batch: _Batch,
        event: BatchChecked | LineAnswered | LineNotRun | LineAborted | CancelOrdered,
        now: float,
    ) -> Iterator[Action]:
        match event:
            case BatchChecked():
                batch.is_checked, batch.pending = True, deque(event.pending)
                if event.errors:
                    batch.move = Move(batch.id, BatchStatus.failed, event.errors)
                elif batch.closing is None:
                    batch.move = Move(batch.id, BatchStatus.in_progress)
            case CancelOrdered():
                yield from self._close(batch, BatchStatus.cancelled)
            case LineAnswered() if event.number in batch.in_flight:
                batch.in_flight.remove(event.number)
                batch.unwritten[event.number] = event.answer
                batch.num_refused = 0
            case LineNotRun() if event.number in batch.in_flight:
                batch.in_flight.remove(event.number)
                self._retry(batch, event, now)
            case LineAborted() if event.number in batch.in_flight:
                batch.in_flight.remove(event.number)
                batch.pending.appendleft(event.number)

    def _retry(self, batch: _Batch, event: LineNotRun, now: float) -> None:
        if event.answer is not None:
            batch.attempts[event.number] += 1
            if batch.attempts[event.number] >= MAX_ATTEMPTS:
                batch.unwritten[event.number] = event.answer
                return
        retry_at = now + event.after_s
        heapq.heappush(batch.refused, (retry_at, event.number))
        batch.num_refused += 1
        if batch.num_refused > len(batch.in_flight):
            batch.num_refused, batch.paused_until = 0, max(batch.paused_until, retry_at)

    def _close(self, batch: _Batch, status: BatchStatus) -> Iterator[Action]:
        if batch.closing is None:
            batch.closing = status
            for number in sorted(batch.in_flight):
                yield AbortLine(batch.id, number)

    def _on_written(self) -> None:
        write, self._writing = self._writing, None
        assert write is not None  # one write is in flight
        self._num_failed_writes = 0
        for batch_id, number, _ in write.answers:
            batch = self._batches[batch_id]
            del batch.unwritten[number]
            batch.attempts.pop(number, None)
        for move in write.moves:
            if move.status.is_final:
                del self._batches[move.id]
            elif self._batches[move.id].move is move:
                self._batches[move.id].move = None

    # --- what follows

    def _settle(self, batch: _Batch, now: float) -> Iterator[Action]:
        """Close an expired batch, and end one that has nothing left to do."""
        is_failing = batch.move is not None and batch.move.status.is_final
        if now >= batch.expires_at and not is_failing:
            yield from self._close(batch, BatchStatus.expired)
        if batch.in_flight or is_failing or not batch.is_checked:
            return
        if batch.closing is not None:
            batch.move = Move(batch.id, batch.closing)
        elif not batch.pending and not batch.refused:
            batch.move = Move(batch.id, BatchStatus.completed)

    def _start_lines(self) -> Iterator[Action]:
        if self._is_stopped or self._num_failed_writes:
            return
        num_free = self._max_in_flight - sum(batch.num_places for batch in self._batches.values())
        if num_free <= 0:
            return
        places: Counter[str] = Counter()  # by owner
        for batch in self._batches.values():
            places[batch.owner] += batch.num_places
        ready = [batch for batch in self._batches.values() if batch.can_start]
        while num_free > 0 and ready:
            batch = min(ready, key=lambda b: (places[b.owner], b.num_places, b.place))
            number = batch.pending.popleft()
            batch.in_flight.add(number)
            places[batch.owner] += 1
            num_free -= 1
            if not batch.pending:
                ready.remove(batch)
            yield RunLine(batch.id, number)

    def _start_write(self, now: float) -> Iterator[Action]:
        if self._writing is not None or (self._num_failed_writes and now < self._write_at):
            return
        batches = self._batches.values()
        answers = tuple((b.id, number, answer) for b in batches for number, answer in b.unwritten.items())
        moves = tuple(b.move for b in batches if b.move is not None)
        if answers or moves:
            self._writing = Write(answers, moves)
            yield self._writing
