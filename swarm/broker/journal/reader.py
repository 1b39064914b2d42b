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
from swarm.broker.journal.database import DamagedJournal, is_corruption
from swarm.broker.journal.store import MAX_LISTED, JournalStore, Timestamp
from swarm.broker.journal.values import DamagedValue
from swarm.broker.reports.ended_requests import build_row
from swarm.broker.state.ended_requests import can_see
from swarm.clock import Clock, SystemClock
from swarm.errors import JournalError, report_thread_errors
from swarm.log import get_logger

MAX_WAITING = 1 << 13  # queued reads; the core asks for fewer; with more, clients are asked to retry
MAX_REPORTS = 64  # queued reports
REST_FACTOR = 3.0  # duration of the rest after a report, as a multiple of the time it took
MAX_TOGETHER = 4  # queries answered by one read; sending a thousand rows takes the loop some milliseconds
DEFAULT_LISTED = 20  # rows without --all: as many as one person reads
STOP_S = 5.0

log = get_logger(__name__)

ReadAction = ReadRequest | ReadList
JournalAnswer = RequestRead | ListRead


@dataclass(slots=True)
class JournalReader:
    """A thread that reads the journal. The thread calls ``on_facts`` with answers, ``on_error`` if it ends by a bug,
    and ``on_damage`` with the reason if the file is damaged."""

    store: JournalStore
    on_facts: Callable[[list[JournalAnswer]], None]
    on_error: Callable[[BaseException], None]
    on_damage: Callable[[str], None] = lambda reason: None
    max_waiting: int = MAX_WAITING
    rest_factor: float = 0.0  # duration of the rest after an answer, as a multiple of the time it took
    clock: Clock = field(default_factory=SystemClock)
    _queued: deque[ReadAction] = field(default_factory=deque)
    _work: threading.Condition = field(default_factory=threading.Condition)
    _next_store: JournalStore | None = None  # a replacement of ``store``, used before the next answer
    _stopping: bool = False
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal-reader", daemon=True)
        self._thread.start()

    def submit(self, ask: ReadAction) -> JournalAnswer | None:
        """Queue a read, or return a negative answer immediately if the queue is full."""
        with self._work:
            if len(self._queued) >= self.max_waiting:
                return _negative_answer(ask, "too much is being read from the journal: try again in a moment")
            self._queued.append(ask)
            self._work.notify()
        return None

    def switch_store(self, store: JournalStore) -> None:
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
        with report_thread_errors(self._on_death):
            while asks := self._take_next():
                began = self.clock.now()
                answer = self._answer(asks[0])
                self.on_facts([answer, *(_readdress(ask, answer) for ask in asks[1:])])
                self._pause(self.rest_factor * (self.clock.now() - began))

    def _on_death(self, error: BaseException) -> None:
        log.exception("journal_reader_died")
        self.on_error(error)

    def _take_next(self) -> list[ReadAction]:
        """Wait for the next read; return it with some identical ones. An empty list means that the thread must stop."""
        with self._work:
            while not self._queued and not self._stopping:
                self._switch()
                self._work.wait()
            self._switch()
            if self._stopping:
                return []
            first = self._queued.popleft()
            same = [ask for ask in self._queued if isinstance(first, ReadList) and _is_same(first, ask)]
            for ask in (chosen := same[: MAX_TOGETHER - 1]):
                self._queued.remove(ask)
            return [first, *chosen]

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with self._work:
                self._work.wait_for(lambda: self._stopping, seconds)

    def _switch(self) -> None:
        if self._next_store is not None:
            self.store.close()
            self.store, self._next_store = self._next_store, None

    def _answer(self, ask: ReadAction) -> JournalAnswer:
        try:
            if isinstance(ask, ReadRequest):
                return RequestRead(ask.request_id, self.store.read_request(ask.request_id, Timestamp.now()))
            if ask.query.what == "trace":
                return self._trace(ask)
            now, limit = Timestamp.now(), MAX_LISTED if ask.query.all else DEFAULT_LISTED
            rows = tuple(map(build_row, self.store.list_ended(now, limit, ask.account)))
            return ListRead(ask.client, ask.query, rows, account=ask.account)
        except (JournalError, DamagedValue, sqlite3.Error) as error:
            log.error("journal_not_read", reason=str(error))
            if _is_damage(error) and self._next_store is None:
                self.on_damage(str(error))
            return _negative_answer(ask, f"the journal can't be read: {error}")

    def _trace(self, ask: ReadList) -> ListRead:
        """Return the ended request with this id, or with an id that begins like this; "" is the last one."""
        now, prefix = Timestamp.now(), ask.query.request_id
        exact = self.store.read_request(prefix, now)
        if exact is not None and exact.has_ended and can_see(ask.account, exact.tenant):
            return ListRead(ask.client, ask.query, (build_row(exact),), account=ask.account)
        records = self.store.find_by_prefix(prefix, now, 2 if prefix else 1, ask.account)
        return ListRead(ask.client, ask.query, tuple(map(build_row, records)), account=ask.account)


def _is_same(first: ReadList, ask: ReadAction) -> bool:
    return isinstance(ask, ReadList) and (ask.query, ask.account) == (first.query, first.account)


def _readdress(ask: ReadAction, answer: JournalAnswer) -> JournalAnswer:
    """Address the same answer to another client."""
    assert isinstance(ask, ReadList)
    assert isinstance(answer, ListRead)
    return replace(answer, client=ask.client)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, DamagedValue | DamagedJournal) or (
        isinstance(error, sqlite3.Error) and is_corruption(error)
    )


def _negative_answer(ask: ReadAction, problem: str) -> JournalAnswer:
    if isinstance(ask, ReadRequest):
        return RequestRead(ask.request_id, None, problem)
    return ListRead(ask.client, ask.query, (), problem, ask.account)
