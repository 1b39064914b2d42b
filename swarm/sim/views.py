"""Views: what simulated processes, and the checks, see of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from swarm.broker.core import BrokerCore
from swarm.sim.journal import SimDisk, SimJournal
from swarm.sim.network import FakeListener, Network
from swarm.sim.world import World
from swarm.stage.core import StageCore
from swarm.stage.events import Event
from swarm.testing import FakeExecutor

TICK_S = 0.05  # interval of the broker's timer
CONNECT_TIMEOUT_S = 3.5  # until the broker gives up on a listener that it can't reach
HEARTBEAT_S = 0.1  # between two heartbeats of a worker


class WorkerView(Protocol):
    """View of a worker's process."""

    name: str
    incarnation: str
    peer: bytes
    is_alive: bool
    key: str | None
    memory_bytes: int
    listener: FakeListener  # its listener for steps
    kv_listener: FakeListener  # its listener for copies of keys and values
    spill_from: int  # length from which it writes sequences to disk; 0: none
    ticket: str  # by which a relay identifies that listener
    relay: str  # a relay at which steps arrive, too
    core: StageCore
    executor: FakeExecutor

    def kill(self) -> None: ...

    def post(self, event: Event) -> None: ...


class ClientView(Protocol):
    """View of a client's process."""

    name: str

    @property
    def peer(self) -> bytes: ...


class ReaderView(Protocol):
    """View of a client that reads another client's request."""

    @property
    def is_done(self) -> bool: ...

    def check_end(self) -> None: ...


class BrokerView(Protocol):
    """View of the broker's process: the current one, or the last one that lived."""

    core: BrokerCore
    disk: SimDisk
    journal: SimJournal
    is_alive: bool
    life: int
    started_at: float
    closed_listeners: set[str]

    @property
    def has_journal(self) -> bool: ...

    @property
    def is_away(self) -> bool: ...

    @property
    def longest_pause_s(self) -> float: ...

    def accepts_connections(self, door: str) -> bool: ...

    def accepts_key(self, door: str, key: str | None) -> bool: ...

    def relays(self, ticket: str) -> bool: ...

    def has_paused_since(self, moment: float) -> bool: ...


class SceneView(Protocol):
    """View of the world, its network and its processes, for the checks."""

    world: World
    network: Network

    @property
    def stride(self) -> int: ...

    @property
    def broker(self) -> BrokerView: ...

    @property
    def workers(self) -> Mapping[str, WorkerView]: ...
