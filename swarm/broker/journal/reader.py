"""The threads that read the journal while the broker runs: one for requests that it no longer keeps in memory, which
whoever submits waits for; one for lists and traces, which may take long and are for people.

Each has a connection of its own, so that nobody who writes waits for it. It sees what was written before it was asked.
When the journal was begun anew, it is given a connection to that. The thread for reports takes no more than a part of
the time, however much is asked: after each answer it rests, and whoever asks the same meanwhile shares the next one.
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

MAX_WAITING = 1 << 13  # the core asks for fewer; whoever comes when so many wait is told to come back
MAX_REPORTS = 64  # that wait
REST = 3.0  # so many times as long as a report took, the thread for them rests
MAX_TOGETHER = 4  # that one reading answers: sending a thousand rows takes the loop some milliseconds
LISTED = 20  # without --all: as many as one looks at
STOP_S = 5.0

log = get_logger(__name__)

Ask = ReadRequest | ReadList
Found = RequestRead | ListRead


@dataclass(slots=True)
class JournalReader:
    """``told`` is called from the thread, and ``failed``, if that ends by a bug; and ``doubts``, with the reason, if
    the file is found to be damaged. ``rest``: how long it rests after an answer, as a multiple of what that took."""

    store: Store
    told: Callable[[list[Found]], None]
    failed: Callable[[BaseException], None]
    doubts: Callable[[str], None] = lambda reason: None
    max_waiting: int = MAX_WAITING
    rest: float = 0.0
    clock: Clock = field(default_factory=SystemClock)
    _asked: deque[Ask] = field(default_factory=deque)
    _work: threading.Condition = field(default_factory=threading.Condition)
    _next_store: Store | None = None
    _stopping: bool = False
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal-reader", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask) -> Found | None:
        """Ask the thread, which tells the answer; or return, at once, that there is none now."""
        with self._work:
            if len(self._asked) >= self.max_waiting:
                return _without(ask, "too much is being read from the journal: try again in a moment")
            self._asked.append(ask)
            self._work.notify()
        return None

    def turn_to(self, store: Store) -> None:
        """Read this one from now on; what it has before the next answer."""
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
        """Wait for what was asked first, and take along some of those that ask for the same; nothing at the end."""
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
        """Tell all that is known of the request that has ended and has this id, or begins so; "" is the last one."""
        now, asked = Moment.now(), ask.query.request_id
        exact = self.store.request(asked, now)
        if exact is not None and exact.ended and may_see(ask.account, exact.tenant):
            return ListRead(ask.client, ask.query, (row_of(exact),), account=ask.account)
        found = self.store.beginning(asked, now, 2 if asked else 1, ask.account)
        return ListRead(ask.client, ask.query, tuple(map(row_of, found)), account=ask.account)


def _is_same(first: ReadList, ask: Ask) -> bool:
    return isinstance(ask, ReadList) and (ask.query, ask.account) == (first.query, first.account)


def _for(ask: Ask, found: Found) -> Found:
    """Give the same answer to another client."""
    assert isinstance(ask, ReadList)
    assert isinstance(found, ListRead)
    return replace(found, client=ask.client)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, Damaged | DamagedJournal) or (isinstance(error, sqlite3.Error) and is_damage(error))


def _without(ask: Ask, problem: str) -> Found:
    if isinstance(ask, ReadRequest):
        return RequestRead(ask.request_id, None, problem)
    return ListRead(ask.client, ask.query, (), problem, ask.account)
