"""A journal's thread for tests, on a disk that does as the test says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.broker.events import JournalFigures
from swarm.broker.journal import JournalWrite
from swarm.broker.journal.database import FullDisk
from swarm.broker.journal.disk import PIECE_BYTES, RESERVE_BYTES, RESERVE_FILE
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.broker.journal.writer import JournalWriter
from swarm.clock import Clock, SystemClock
from swarm.errors import JournalError

WAIT_S = 10.0


class Disk(JournalStore):
    """A real journal on a disk that does as the test says. ``gate``: writes wait for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        self.room: int | None = None  # bytes that are free beside what is set aside; None: no lack
        self.untidy = threading.Semaphore(0)  # how often tidying has failed
        self.transactions: list[list[JournalWrite]] = []

    def write(self, writes: Any, now: Timestamp) -> set[int]:
        assert self.gate.wait(WAIT_S)
        if self.full:
            raise JournalError("the disk is full")
        if self.room is not None:
            self._take_room()
        open_still = super().write(writes, now)
        self.transactions.append(list(writes))
        return open_still

    def _take_room(self) -> None:
        """A transaction finds what is no longer set aside, or nothing."""
        given = RESERVE_BYTES - (self.path.parent / RESERVE_FILE).stat().st_size
        if self.room is None or self.room + given < PIECE_BYTES:
            raise FullDisk("the disk is full")
        self.room -= PIECE_BYTES

    def delete_old(self, now: Timestamp) -> int:
        if not self.full:
            return super().delete_old(now)
        self.untidy.release()
        raise JournalError("the disk is full")


class _Told:
    """A clock that says when it was asked three times: the thread has gone round."""

    def __init__(self, idle: threading.Event, clock: Clock) -> None:
        self._idle, self._clock, self._left = idle, clock, 3

    def now(self) -> float:
        self._left -= 1
        if self._left <= 0:
            self._idle.set()
        return self._clock.now()


class Thread:
    """A journal's thread with what it tells."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._told: queue.Queue[Any] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.figures: dict[str, float] = {}  # as they were told last
        self.start(disk)

    def start(self, store: JournalStore) -> None:
        self.writer = JournalWriter(store, SystemClock(), self._tell, self.failures.put)
        self.writer.start()

    def _tell(self, facts: list[Any]) -> None:
        for fact in facts:
            if isinstance(fact, JournalFigures):
                self.figures = fact.values
            else:
                self._told.put(fact)

    def nothing_told(self) -> bool:
        """Whatever the thread has had to do since, it has done."""
        idle = threading.Event()
        self.writer.clock = _Told(idle, self.writer.clock)
        assert idle.wait(WAIT_S)
        return self._told.empty()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """The thread waits for something to do, and goes on waiting meanwhile."""
        work = self.writer._work
        while True:
            with work:
                if work._waiters:  # type: ignore[attr-defined]
                    yield
                    return

    def until(self, holds: Callable[[], bool]) -> None:
        """Another thread makes it so; looked at whenever the journal's has gone round."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            self.nothing_told()

    def told(self, num: int) -> list[Any]:
        return [self._told.get(timeout=WAIT_S) for _ in range(num)]
