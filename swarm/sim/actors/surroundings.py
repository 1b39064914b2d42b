"""Interface of the cluster for its simulated processes: it carries their messages and records their starts and ends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from swarm.sim.actors.ways import Ways
from swarm.sim.checks import guard
from swarm.sim.checks.audit import Audit
from swarm.sim.checks.blame import Blame
from swarm.sim.checks.neighbours import Neighbours
from swarm.sim.checks.promises import Promises
from swarm.sim.checks.watch import Watch
from swarm.sim.roles import Client, Reader, Scene, Worker
from swarm.sim.schedules.schedule import Machines
from swarm.wire.messages import (
    Activate,
    Beat,
    ClientMessage,
    Manifest,
    Order,
    ServerMessage,
    Step,
    StepDone,
    WorkerMessage,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Surroundings(Scene, Protocol):
    """Cluster as its processes see it."""

    audit: Audit
    blame: Blame
    promises: Promises
    watch: Watch
    manifest: Manifest
    machines: Machines
    log_bytes: int
    put_off_every: int
    recalls: bool
    uses_keys: bool
    neighbours: Neighbours
    ways: Ways
    struck: Counter[str]

    # --- coming and going

    def worker_gone(self, node: Worker) -> None: ...

    def worker_exits(self, node: Worker) -> None: ...

    def client_gone(self, node: Client) -> None: ...

    def client_back(self, node: Client) -> None: ...

    def reader_came(self, reader: Reader) -> None: ...

    def broker_gone(self, *, power: bool) -> None: ...

    def broker_back(self) -> None: ...

    def journal_changed(self) -> None: ...

    def springs(self, node: Worker, when: str, kind: str) -> bool: ...

    # --- messages

    def to_client(self, client: bytes, message: ServerMessage) -> None: ...

    def to_worker(self, peer: bytes, order: Order) -> None: ...

    def to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32] | None, sender: str) -> None: ...

    def to_stage_garbled(self, endpoint: str, step: Step, hidden: NDArray[np.float32]) -> None: ...

    def to_broker(self, node: Worker, message: WorkerMessage, life: int) -> None: ...

    def to_broker_beat(self, beat: Beat, key: str | None) -> None: ...

    def to_broker_done(self, done: StepDone, sender: str) -> None: ...

    def to_broker_from_client(self, node: Client, message: ClientMessage, life: int) -> None: ...

    # --- the checks

    def after_broker(self, guarded: guard.Before | None) -> None: ...

    def after_stage(self, node: Worker, held: tuple[Activate, guard.Lengths] | None) -> None: ...
