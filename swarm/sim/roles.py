"""Views: what simulated processes, and the checks, see of each other."""

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

TICK_S = 0.05  # interval of the broker's timer
TRY_S = 3.5  # until the broker gives up on a listener that it can't reach
BEAT_S = 0.1  # between two heartbeats of a worker


class Worker(Protocol):
    """View of a worker's process."""

    name: str
    incarnation: str
    peer: bytes
    alive: bool
    key: str | None
    memory_bytes: int
    door: Door  # its listener for steps
    ticket: str  # by which a relay identifies that listener
    waits_at: str  # a relay at which steps arrive, too
    core: StageCore
    executor: FakeExecutor

    def kill(self) -> None: ...

    def post(self, event: Event) -> None: ...


class Client(Protocol):
    """View of a client's process."""

    name: str

    @property
    def peer(self) -> bytes: ...


class Reader(Protocol):
    """View of a client that reads another client's request."""

    @property
    def is_done(self) -> bool: ...

    def check_end(self) -> None: ...


class Broker(Protocol):
    """View of the broker's process: the current one, or the last one that lived."""

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
    """View of the world, its network and its processes, for the checks."""

    world: World
    network: Network

    @property
    def stride(self) -> int: ...

    @property
    def broker(self) -> Broker: ...

    @property
    def workers(self) -> Mapping[str, Worker]: ...
