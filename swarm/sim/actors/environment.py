"""Interface of the cluster for its simulated processes: it carries their messages and records their starts and ends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from swarm.sim.actors.routes import SimRoutes
from swarm.sim.actors.spill_shell import SimSpillDisk
from swarm.sim.checks import effects
from swarm.sim.checks.adapter_check import AdapterCheck
from swarm.sim.checks.audit import Audit
from swarm.sim.checks.blame import BlameCheck
from swarm.sim.checks.image_check import ImageCheck
from swarm.sim.checks.kv_check import KvCheck
from swarm.sim.checks.promises import PromiseCheck
from swarm.sim.checks.sender_check import SenderCheck
from swarm.sim.checks.speculation_check import SpeculationCheck
from swarm.sim.checks.spill_check import SpillCheck
from swarm.sim.checks.verdict_check import VerdictCheck
from swarm.sim.schedules.schedule import KvConditions, Machines, SpeculationConditions
from swarm.sim.views import ClientView, ReaderView, SceneView, WorkerView
from swarm.wire.messages import (
    Activate,
    ClientMessage,
    Heartbeat,
    Manifest,
    Order,
    ServerMessage,
    Step,
    StepDone,
    WorkerMessage,
)
from swarm.wire.tensors import Bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Environment(SceneView, Protocol):
    """Interface of the cluster for the processes that it simulates."""

    adapter_check: AdapterCheck
    audit: Audit
    blame_check: BlameCheck
    image_check: ImageCheck
    image_room: int
    promise_check: PromiseCheck
    verdict_check: VerdictCheck
    manifest: Manifest
    machines: Machines
    kv_check: KvCheck
    kv_conditions: KvConditions
    spill_check: SpillCheck
    spill_disk: SimSpillDisk | None
    log_bytes: int
    put_off_every: int
    recalls: bool
    speculation: SpeculationConditions | None
    speculation_check: SpeculationCheck
    uses_keys: bool
    sender_check: SenderCheck
    routes: SimRoutes
    fault_counts: Counter[str]

    # --- coming and going

    def on_worker_gone(self, node: WorkerView) -> None: ...

    def on_worker_exit(self, node: WorkerView) -> None: ...

    def on_client_gone(self, node: ClientView) -> None: ...

    def on_client_back(self, node: ClientView) -> None: ...

    def add_reader(self, reader: ReaderView) -> None: ...

    def on_broker_gone(self, *, power: bool) -> None: ...

    def on_broker_back(self) -> None: ...

    def on_journal_changed(self) -> None: ...

    def spring_trap(self, node: WorkerView, when: str, kind: str) -> bool: ...

    # --- messages

    def send_to_client(self, client: bytes, message: ServerMessage) -> None: ...

    def send_to_worker(self, peer: bytes, order: Order) -> None: ...

    def send_to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32] | None, sender: str) -> None: ...

    def send_garbled_to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32]) -> None: ...

    def send_kv_part(self, endpoint: str, frames: list[Bytes], sender: WorkerView, *, is_garbled: bool) -> None: ...

    def send_to_broker(self, node: WorkerView, message: WorkerMessage, life: int) -> None: ...

    def send_heartbeat(self, beat: Heartbeat, key: str | None) -> None: ...

    def send_step_done(self, done: StepDone, sender: str) -> None: ...

    def send_from_client(self, node: ClientView, message: ClientMessage, life: int) -> None: ...

    # --- the checks

    def check_after_broker(self, snapshot: effects.BrokerSnapshot | None) -> None: ...

    def check_after_stage(self, node: WorkerView, snapshot: tuple[Activate, effects.LayerPositions] | None) -> None: ...
