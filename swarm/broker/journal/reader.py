"""Threads that read the journal while the broker runs. One reads requests that are no longer in memory, for clients
that wait for them; another reads lists and traces, which may take long.

Each thread has its own connection, so the writer never waits for it, and sees everything written before it was asked.
When the journal is replaced, it gets a connection to the new one. The thread for reports uses a limited share of the
time: it rests after each answer, and identical queries that arrive meanwhile share the next one.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.broker.actions import ReadList, ReadRequest
from swarm.broker.events import ListRead, RequestRead
from swarm.broker.journal.database import DamagedJournal, is_damage
from swarm.broker.journal.store import MAX_LISTED, Moment, Store
from swarm.broker.journal.values import Damaged
from swarm.broker.reports.ended import row_of
from swarm.broker.state.archive import may_see
from swarm.clock import Clock, SystemClock
from swarm.errors import JournalError, whatever_ends_it
from swarm.log import get_logger

MAX_WAITING = 1 << 13  # queued reads; the core asks for fewer; with more, clients are asked to retry
MAX_REPORTS = 64  # queued reports
REST = 3.0  # duration of the rest after a report, as a multiple of the time it took
MAX_TOGETHER = 4  # queries answered by one read; sending a thousand rows takes the loop some milliseconds
LISTED = 20  # rows without --all: as many as one person reads
STOP_S = 5.0

log = get_logger(__name__)

Ask = ReadRequest | ReadList
Found = RequestRead | ListRead


@dataclass(slots=True)
class JournalReader:
    """A thread that reads the journal. The thread calls ``on_facts`` with answers, ``on_error`` if it ends by a bug,
    and ``on_damage`` with the reason if the file is damaged."""

    store: Store
    told: Callable[[list[Found]], None]
    failed: Callable[[BaseException], None]
    doubts: Callable[[str], None] = lambda reason: None
    max_waiting: int = MAX_WAITING
    rest: float = 0.0  # duration of the rest after an answer, as a multiple of the time it took
    clock: Clock = field(default_factory=SystemClock)
    _asked: deque[Ask] = field(default_factory=deque)
    _work: threading.Condition = field(default_factory=threading.Condition)
    _next_store: Store | None = None  # a replacement of ``store``, used before the next answer
    _stopping: bool = False
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal-reader", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask) -> Found | None:
        """Queue a read, or return a negative answer immediately if the queue is full."""
        with self._work:
            if len(self._asked) >= self.max_waiting:
                return _without(ask, "too much is being read from the journal: try again in a moment")
            self._asked.append(ask)
            self._work.notify()
        return None

    def turn_to(self, store: Store) -> None:
        """Switch to another store before the next answer."""
        with self._work:
            if self._next_store is not None:
                self._next_store.close()
            self._next_store = store
            self._work.notify()

    def close(self) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join(STOP_S)
        self.store.close()
        if self._next_store is not None:
            self._next_store.close()

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with whatever_ends_it(self._died):
            while asks := self._next():
                began = self.clock.now()
                found = self._answer(asks[0])
                self.told([found, *(_for(ask, found) for ask in asks[1:])])
                self._rest(self.rest * (self.clock.now() - began))

    def _died(self, error: BaseException) -> None:
        log.exception("journal_reader_died")
        self.failed(error)

    def _next(self) -> list[Ask]:
        """Wait for the next read; return it with some identical ones. An empty list means that the thread must stop."""
        with self._work:
            while not self._asked and not self._stopping:
                self._turn()
                self._work.wait()
            self._turn()
            if self._stopping:
                return []
            first = self._asked.popleft()
            same = [ask for ask in self._asked if isinstance(first, ReadList) and _is_same(first, ask)]
            for ask in (chosen := same[: MAX_TOGETHER - 1]):
                self._asked.remove(ask)
            return [first, *chosen]

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            with self._work:
                self._work.wait_for(lambda: self._stopping, seconds)

    def _turn(self) -> None:
        if self._next_store is not None:
            self.store.close()
            self.store, self._next_store = self._next_store, None

    def _answer(self, ask: Ask) -> Found:
        try:
            if isinstance(ask, ReadRequest):
                return RequestRead(ask.request_id, self.store.request(ask.request_id, Moment.now()))
            if ask.query.what == "trace":
                return self._trace(ask)
            now, limit = Moment.now(), MAX_LISTED if ask.query.all else LISTED
            rows = tuple(map(row_of, self.store.ended(now, limit, ask.account)))
            return ListRead(ask.client, ask.query, rows, account=ask.account)
        except (JournalError, Damaged, sqlite3.Error) as error:
            log.error("journal_not_read", reason=str(error))
            if _is_damage(error) and self._next_store is None:
                self.doubts(str(error))
            return _without(ask, f"the journal can't be read: {error}")

    def _trace(self, ask: ReadList) -> ListRead:
        """Return the ended request with this id, or with an id that begins like this; "" is the last one."""
        now, asked = Moment.now(), ask.query.request_id
        exact = self.store.request(asked, now)
        if exact is not None and exact.ended and may_see(ask.account, exact.tenant):
            return ListRead(ask.client, ask.query, (row_of(exact),), account=ask.account)
        found = self.store.beginning(asked, now, 2 if asked else 1, ask.account)
        return ListRead(ask.client, ask.query, tuple(map(row_of, found)), account=ask.account)


def _is_same(first: ReadList, ask: Ask) -> bool:
    return isinstance(ask, ReadList) and (ask.query, ask.account) == (first.query, first.account)


def _for(ask: Ask, found: Found) -> Found:
    """Address the same answer to another client."""
    assert isinstance(ask, ReadList)
    assert isinstance(found, ListRead)
    return replace(found, client=ask.client)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, Damaged | DamagedJournal) or (isinstance(error, sqlite3.Error) and is_damage(error))


def _without(ask: Ask, problem: str) -> Found:
    if isinstance(ask, ReadRequest):
        return RequestRead(ask.request_id, None, problem)
    return ListRead(ask.client, ask.query, (), problem, ask.account)
