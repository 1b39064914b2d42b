"""What simulated processes, and the checks, see of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from swarm.broker.core import BrokerCore
from swarm.sim.doors import Door
from swarm.sim.journal import Disk, Journal
from swarm.sim.network import Network
from swarm.sim.world import World
from swarm.stage.core import StageCore
from swarm.stage.events import Event
from swarm.testing import FakeExecutor

TICK_S = 0.05  # of the broker's shell
TRY_S = 3.5  # until the broker knows that it can't reach a door
BEAT_S = 0.1  # between two beats of a worker


class Worker(Protocol):
    """A worker's process."""

    name: str
    incarnation: str
    peer: bytes
    alive: bool
    key: str | None
    memory_bytes: int
    door: Door  # for steps
    ticket: str  # by which a relay knows that
    waits_at: str  # a relay, beside that
    core: StageCore
    executor: FakeExecutor

    def kill(self) -> None: ...

    def post(self, event: Event) -> None: ...


class Client(Protocol):
    """A client's process."""

    name: str

    @property
    def peer(self) -> bytes: ...


class Reader(Protocol):
    """A client that reads what another one has submitted."""

    @property
    def is_done(self) -> bool: ...

    def check_end(self) -> None: ...


class Broker(Protocol):
    """The broker's process, the living one or the last that lived."""

    core: BrokerCore
    disk: Disk
    journal: Journal
    alive: bool
    life: int
    started_at: float
    shut_doors: set[str]

    @property
    def has_journal(self) -> bool: ...

    @property
    def is_away(self) -> bool: ...

    @property
    def longest_sleep_s(self) -> float: ...

    def lets_in(self, door: str) -> bool: ...

    def hears(self, door: str, key: str | None) -> bool: ...

    def passes_on(self, ticket: str) -> bool: ...

    def stood_still_since(self, moment: float) -> bool: ...


class Scene(Protocol):
    """The world, its network and who lives in it: as much as the checks look at."""

    world: World
    network: Network

    @property
    def stride(self) -> int: ...

    @property
    def broker(self) -> Broker: ...

    @property
    def workers(self) -> Mapping[str, Worker]: ...
