"""A stage with a disk: its core, the compute thread's share, and the disk's thread, which works when a test says so."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.stage import actions as act
from swarm.stage.events import ChunkLost, Event, KvTurn, OrderArrived, SpilledRead, SpilledStored, StepArrived
from swarm.stage.shell.kv_traffic import KvTraffic
from swarm.stage.shell.spill_files import SpillFiles
from swarm.stage.shell.spill_thread import SpillThread
from swarm.testing import ManualClock
from swarm.wire.messages import KvRestored, Open, RestoreKv, Row, SpillKv, Step
from tests.unit.stage.bench import StageBench, hidden_of, opened, step_of

BITS = "portable bits"
TOKENS = tuple(10 + position for position in range(2000))  # as ``step_of`` computes them
LIMIT = 64 << 20
DISK = (act.SpillChunk, act.ReadSpilled, act.StoreSpilled, act.StopReadingSpilled)


class NoChannels:
    """No other worker is to hold copies."""

    blocked: frozenset[str] = frozenset()

    def flush(self) -> bool:
        return False


@dataclass(slots=True)
class SpillBench:
    """See the module. ``reports``: what the broker is told of restored sequences."""

    stage: StageBench
    folder: Path
    limit_bytes: int = LIMIT
    files: SpillFiles = field(init=False)
    disk: SpillThread = field(init=False)
    traffic: KvTraffic = field(init=False)
    reports: list[KvRestored] = field(default_factory=list)
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))

    def __post_init__(self) -> None:
        executor, nobody = self.stage.executor, NoChannels()
        self.files = SpillFiles(self.folder, self.limit_bytes)
        self.disk = SpillThread(
            self.files,
            executor.manifest,
            self.clock,
            identity=executor.kv_identity,
            fits=executor.fits_kv,
            on_read=lambda: None,
            on_crash=lambda error: None,
        )
        channels: Any = nobody
        self.traffic = KvTraffic(channels, None, executor, self.clock, self.disk)

    def feed(self, event: Event) -> list[act.Action]:
        """What the core does, with what follows at once of the actions for the disk."""
        events, done = deque([event]), []
        while events:
            actions = self.stage.feed(events.popleft())
            done += actions
            for action in actions:
                if isinstance(action, DISK):
                    events.extendleft(self.traffic.perform(action))
                if isinstance(action, act.StoreSpilled) and (stored := self.store()) is not None:
                    events.appendleft(stored)
                if isinstance(action, act.SendToBroker) and isinstance(action.message, KvRestored):
                    self.reports.append(action.message)
        return done

    def begin_storing(self) -> None:
        """The core receives what was read next, and the compute thread is to store it."""
        event = self.disk.take()
        assert isinstance(event, SpilledRead)
        (store,) = (action for action in self.stage.feed(event) if isinstance(action, act.StoreSpilled))
        assert self.traffic.perform(store) == ()

    def store(self) -> SpilledStored | None:
        """Let the compute thread store, turn after turn, until all of a chunk is stored."""
        moves, stored = self.traffic._disk, None
        assert moves is not None
        while moves.is_storing and (stored := moves.next_event()) is None:
            pass
        assert stored is None or isinstance(stored, SpilledStored)
        return stored

    def order_spilling(self, num_positions: int = 512, epoch: int = 1, **fields: Any) -> None:
        self.stage.order(SpillKv(epoch=epoch, num_positions=num_positions, bits=BITS, **fields))

    def turn(self, *, is_idle: bool = True) -> list[act.SpillChunk]:
        """Give the core a turn; the chunk that it has written."""
        turn = KvTurn(is_idle, may_spill=self.disk.accepts_chunk)
        is_wanted = self.stage.core.wants_kv_turn(turn, self.stage.now)
        chunks = [action for action in self.feed(turn) if isinstance(action, act.SpillChunk)]
        assert is_wanted == bool(chunks)
        return chunks

    def write_all(self) -> list[act.SpillChunk]:
        """Give turns, and let the disk work, until nothing is left to be written."""
        chunks = []
        while more := self.turn():
            chunks += more
            while self.disk.work():
                pass
            self.take_all()
        return chunks

    def restore(
        self, sequence: int, start: int = 0, stop: int = 2000, *, ticket: int = 7, within_s: float = 1.0
    ) -> None:
        order = RestoreKv(epoch=1, sequence=sequence, ticket=ticket, start=start, stop=stop, within_s=within_s)
        self.feed(OrderArrived(order))

    def take_all(self) -> list[SpilledRead | ChunkLost]:
        """What the disk has done reaches the core."""
        taken = []
        while (event := self.disk.take()) is not None:
            taken.append(event)
            self.feed(event)
        return taken

    def read_all(self) -> None:
        """Let the disk read, and the core store, until nothing is left."""
        while self.disk.work():
            self.take_all()

    # --- steps

    @property
    def next_step(self) -> int:
        return self.stage.core.steps.next_step

    def fork(self, sequence: int, *, source: int, shared: int, **fields: Any) -> None:
        """Open a sequence that begins with positions of another one."""
        params = opened(sequence).params
        item = Open(sequence, params, 5, 3, 2048, TOKENS, source=source, shared=shared)
        self.stage.run(step_of(self.next_step, open=(item,), **fields))

    def open(self, sequence: int, *, tokens: tuple[int, ...] = TOKENS, **fields: Any) -> Open:
        """A sequence is opened without a row."""
        item = opened(sequence, tokens=tokens, num_prompt=len(tokens), limit=2048)
        self.stage.run(step_of(self.next_step, open=(item,), **fields))
        return item

    def compute(self, sequence: int, start: int, stop: int, **fields: Any) -> None:
        """Positions of a sequence are computed, as in a prompt."""
        self.feed_step(step_of(self.next_step, Row(sequence, start, stop - start, False), **fields))
        self.stage.compute()

    def feed_step(self, step: Step) -> None:
        self.feed(StepArrived(step, hidden_of(len(step.tokens)) if self.stage.first and step.rows else None, 7))

    def chain(self, sequence: int) -> dict[int, list[int]]:
        """The states of a sequence, by layer."""
        return {layer: list(states) for layer, states in self.stage.executor.chains[sequence].items()}
