"""The journal of a simulated broker: a disk that outlives it, and the thread that writes.

As in ``broker.journal.writer``, what waits is written together; acceptances and epochs are synced before their facts
are told, the rest is not. What a death of the process loses is what waited in its memory. What a power cut loses is,
beside that, any number of the last transactions since the last sync: a half-written one is dropped by its checksum, so
nothing is ever missing in the middle. A full disk has room set aside for some epochs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from swarm.broker.actions import ReadList, ReadRequest, WriteAcceptance, WriteEpoch, WriteSteps
from swarm.broker.events import JournalBroke, JournalMended, ListRead, RequestRead
from swarm.broker.journal import Write, Written, written
from swarm.broker.journal.reader import LISTED
from swarm.broker.journal.records import Past, following
from swarm.broker.kept import row_of
from swarm.sim.ledger import Ledger
from swarm.wire.messages import NOBODYS, Lineage

if TYPE_CHECKING:
    from swarm.sim.network import Link
    from swarm.sim.world import World

RETRY_S = 1.0
RESERVE = 4  # epochs for which there is room on a full disk
MAX_TOGETHER = 64  # writes in one transaction: enough for any disk here, few enough that deaths fall between

Fact = Written | JournalBroke | JournalMended


class Disk:
    """What was written, in order. ``ledger``: what a reader finds there now; ``safe``: what a power cut leaves at
    least."""

    def __init__(self, world: World, number: int = 0) -> None:
        self._world = world
        self.ledger, self.safe = Ledger(), Ledger()
        self.is_full = False
        self.reserve = RESERVE
        self._unsafe: deque[tuple[float, Sequence[Write]]] = deque()
        self._safe_writes: list[tuple[float, Sequence[Write]]] = []
        self._openings: list[tuple[int, Lineage]] = [(0, NOBODYS)]  # how much there was, and whose life began
        self._chance = Random(f"journal {number}")

    def commit(self, writes: Sequence[Write]) -> None:
        """It is in the file, and perhaps only in the machine's memory."""
        self.ledger.write(writes, self._world.now)
        self._unsafe.append((self._world.now, writes))

    def sync(self) -> None:
        """All that was committed lasts."""
        while self._unsafe:
            at, writes = self._unsafe.popleft()
            self._safe_writes.append((at, writes))
            self.safe.write(writes, at)

    def lose_power(self) -> int:
        """Any number of the last transactions that were not synced are gone. How many."""
        keep = self._world.random.randint(0, len(self._unsafe))
        lost = len(self._unsafe) - keep
        self._unsafe = deque(islice(self._unsafe, keep))
        self.sync()
        self._read_again()
        return lost

    def put_back(self, share: float) -> None:
        """A backup takes its place, of when there was so much of what there is now."""
        self.sync()
        del self._safe_writes[round(share * len(self._safe_writes)) :]
        self._openings = [opening for opening in self._openings if opening[0] <= len(self._safe_writes)]
        self.safe = Ledger()
        for at, writes in self._safe_writes:
            self.safe.write(writes, at)
        self._read_again()

    def _read_again(self) -> None:
        self.ledger = Ledger()
        for at, writes in self._safe_writes:
            self.ledger.write(writes, at)

    def open(self, retained_s: float) -> Past:
        """What a broker finds; whatever it builds on that lasts from here on."""
        self.sync()
        return self.ledger.past(self._world.now, retained_s)

    def begin(self) -> Lineage:
        """The broker's life begins."""
        lineage = following(self._openings[-1][1], self._chance)
        self._openings.append((len(self._safe_writes), lineage))
        return lineage


class Journal:
    """The threads of one broker's process that write and read. ``news`` carries their facts to its loop, ``take`` is
    what happens to them there; ``reached`` is told how far a transaction has come, and may be the process's end."""

    def __init__(
        self, disk: Disk, news: Link, take: Callable[[Sequence[Fact]], None], reached: Callable[[str, str], bool]
    ) -> None:
        self._disk = disk
        self._world = disk._world
        self._news = news
        self._take = take
        self._reached = reached
        self._waiting: deque[Write] = deque()
        self._epochs: list[Write] = []  # those that must not wait behind what the disk refuses
        self._batch: list[Write] = []
        self._is_broken = False
        self.ever_broke = False
        self.alive = True

    def kill(self) -> None:
        self.alive = False
        self._news.break_off()

    def write(self, write: Write | WriteSteps) -> None:
        if isinstance(write, WriteSteps):
            return  # no promise: it may be lost at any time
        if self._is_broken and isinstance(write, WriteEpoch):
            self._epochs.append(write)
        else:
            self._waiting.append(write)
        if not self._batch and not self._is_broken:  # else the next attempt takes it along
            self._begin()

    def read(self, ask: ReadRequest | ReadList, take: Callable[[RequestRead | ListRead], None]) -> None:
        """As the file is when the reader's thread gets round to it."""

        def answer() -> None:
            if self.alive:
                found = self._find(ask)
                self._news.carry(lambda: take(found))

        self._world.at(self._world.draw(self._world.pace.journal), answer)

    def _find(self, ask: ReadRequest | ReadList) -> RequestRead | ListRead:
        ledger, now = self._disk.ledger, self._world.now
        if isinstance(ask, ReadRequest):
            return RequestRead(ask.request_id, ledger.request(ask.request_id, now))
        return ListRead(ask.client, ask.query, tuple(map(row_of, ledger.ended(now, LISTED))))

    def _begin(self) -> None:
        self._fill()
        if self._batch:
            self._world.at(self._world.draw(self._world.pace.journal) / 2, self._commit)

    def _fill(self) -> None:
        self._batch += self._epochs
        self._epochs.clear()
        while self._waiting and len(self._batch) < MAX_TOGETHER:
            self._batch.append(self._waiting.popleft())

    def _commit(self) -> None:
        if not self.alive or self._reached("before", "commit"):
            return
        if self._disk.is_full:
            self._refused()
            return
        self._disk.commit(tuple(self._batch))
        if not self._reached("after", "commit"):
            self._world.at(self._world.draw(self._world.pace.journal) / 2, self._done)

    def _refused(self) -> None:
        if not self._is_broken:
            self._is_broken = self.ever_broke = True
            self._epochs += [write for write in self._waiting if isinstance(write, WriteEpoch)]
            self._waiting = deque(write for write in self._waiting if not isinstance(write, WriteEpoch))
            self._tell([JournalBroke("the disk is full")])
        self._batch += self._epochs
        self._epochs.clear()
        self._commit_epochs()
        self._fill()
        self._world.at(RETRY_S, self._commit)

    def _commit_epochs(self) -> None:
        """Without the rest, into what was set aside for them."""
        epochs = [write for write in self._batch if isinstance(write, WriteEpoch)]
        if not epochs or not self._disk.reserve:
            return
        self._disk.reserve -= 1
        self._batch = [write for write in self._batch if not isinstance(write, WriteEpoch)]
        self._disk.commit(tuple(epochs))
        self._disk.sync()
        self._tell([written(epoch) for epoch in epochs])

    def _done(self) -> None:
        if not self.alive:
            return
        if any(isinstance(write, WriteAcceptance | WriteEpoch) for write in self._batch):
            self._disk.sync()
        if self._reached("after", "sync"):
            return
        facts: list[Fact] = [JournalMended()] if self._is_broken else []
        self._is_broken = False
        self._disk.reserve = RESERVE
        self._tell(facts + [written(write) for write in self._batch])
        self._batch.clear()
        self._begin()

    def _tell(self, facts: list[Fact]) -> None:
        self._news.carry(lambda: self._take(facts))
