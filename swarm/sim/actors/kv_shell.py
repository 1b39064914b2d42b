"""A simulated worker's shell for copies of keys and values: links to the workers that receive them, a listener of its
own, and the turns in which its core may send a part.

Parts pass the production codec. A link carries them in order; they may be late, be lost with the connection, or arrive
after the death of their sender.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from swarm.errors import WireError
from swarm.sim.actors.environment import Environment
from swarm.sim.network import FakeListener, SimLink, garble_frames
from swarm.sim.schedules.schedule import KvConditions
from swarm.sim.views import WorkerView
from swarm.stage.actions import AllowKvSenders, ConnectKvTargets, SendKvPart, SendKvParts, StoreKv, apply_to_executor
from swarm.stage.events import Event, KvArrived, KvPartsTaken, KvStoreFailed, KvTurn
from swarm.stage.executor import KvData
from swarm.testing import FakeExecutor
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import BLOCK, DataMessage, Edge, KvPart
from swarm.wire.tensors import Bytes

CHANNEL_PARTS = 3  # parts that a connection takes before it accepts no more
READ_S = (0.0, 0.002)  # for reading a part in the compute thread
TURN_AFTER_STEP = 0.5  # share of steps after which the core may send a part

KvAction = StoreKv | ConnectKvTargets | AllowKvSenders | SendKvParts


class KvNode(WorkerView, Protocol):
    """View of a worker for its copies. ``has_free_turn``: its compute thread has nothing to do."""

    is_busy: bool

    @property
    def has_free_turn(self) -> bool: ...

    @property
    def is_stopped(self) -> bool: ...


class SimKvShell:
    """Links, listener and turns of one worker."""

    def __init__(self, cluster: Environment, node: KvNode, executor: FakeExecutor) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._chance = cluster.world.kv_random
        self._node = node
        self._executor = executor
        self._conditions: KvConditions = cluster.kv_conditions
        self.listener = FakeListener(uses_keys=cluster.uses_keys)
        self._links: dict[str, tuple[Edge, SimLink]] = {}  # by the target's incarnation
        self._is_ticking = False  # turns are scheduled
        self.num_garbled = 0  # parts still to be sent with a flipped bit
        self.num_lost_orders = self.num_lost_reports = 0  # SendKv and ReceiveKv, and KvHeld, still to be lost
        self.num_failing = 0  # parts that can't be stored
        self.lag_s = 0.0  # extra delay of every part
        self.is_short = False  # other users of the memory leave less than the copies take

    # --- actions of the core

    def perform(self, action: KvAction) -> tuple[KvStoreFailed, ...]:
        """Carry out an action. Return the core's next event if a part could not be stored."""
        match action:
            case StoreKv() if self.num_failing:
                self.num_failing -= 1
                return (KvStoreFailed(action.sequence, "MemoryError: no memory"),)
            case StoreKv():
                apply_to_executor(self._executor, action)
            case ConnectKvTargets(edges):
                self._connect(edges)
            case AllowKvSenders(keys):
                self.listener.set_allowed(keys)
            case SendKvParts():
                self._send(action)
        return ()

    def _connect(self, edges: tuple[Edge, ...]) -> None:
        wanted = {edge.to: edge for edge in edges}
        for target, (edge, link) in list(self._links.items()):
            if wanted.get(target) != edge:
                link.close()
                del self._links[target]
        for target, edge in wanted.items():
            if target not in self._links:
                link = self._cluster.routes.open_kv_link(self._node.name, edge.endpoint, self._node.key)
                self._links[target] = edge, link
        if self._links and not self._is_ticking:
            self._is_ticking = True
            self._schedule_turn()

    def _send(self, action: SendKvParts) -> None:
        """Read parts and send them, and report how long that took."""
        took_s = self._chance.uniform(*READ_S)
        num_bytes = sum(map(self._read_and_send, filter(self._can_read, action.parts)))
        taken = KvPartsTaken(action.to.to, num_bytes, took_s)
        self._world.schedule(took_s, lambda: self._node.post(taken))

    def _can_read(self, action: SendKvPart) -> bool:
        _, link = self._links.get(action.to.to, (None, None))
        return link is not None and not link.is_cut and action.sequence in self._executor.chains

    def _read_and_send(self, action: SendKvPart) -> int:
        _, link = self._links[action.to.to]
        stop = action.start + len(action.tokens)
        data = self._executor.read_kv(action.sequence, action.layers, action.start, stop)
        spec, payload = tensors.pack(data.numbers, data.dtype)
        part = KvPart(
            epoch=action.epoch,
            lineage=action.lineage,
            sequence=action.sequence,
            layers=action.layers,
            block=action.start // BLOCK,
            tokens=action.tokens,
            open=action.open,
            tensor=spec,
            sender=self._node.incarnation,
        )
        frames = DATA.encode(part, bytes(payload))
        is_garbled, self.num_garbled = self.num_garbled > 0, max(0, self.num_garbled - 1)
        deliver = partial(self._cluster.send_kv_part, action.to.endpoint, frames, self._node, is_garbled=is_garbled)
        link.send(deliver, extra_s=self._chance.uniform(0.0, self.lag_s))
        return len(payload)

    # --- turns

    def _schedule_turn(self) -> None:
        delay_s = self._chance.uniform(*self._conditions.turn_s) * self._cluster.stride
        self._world.schedule(delay_s, self._turn)

    def _turn(self) -> None:
        if not self._node.is_alive or not self._links:
            self._is_ticking = False
            return
        if not self._node.is_busy and not self._node.is_stopped:
            self._offer(self.make_turn(is_idle=self._node.has_free_turn))
        self._schedule_turn()

    def turn_after_step(self) -> KvTurn | None:
        """Return a turn between two steps, now and then."""
        if not self._links or self._chance.random() >= TURN_AFTER_STEP:
            return None
        turn = self.make_turn(is_idle=False)
        return turn if self._node.core.wants_kv_turn(turn, self._world.now) else None

    def _offer(self, turn: KvTurn) -> None:
        if self._node.core.wants_kv_turn(turn, self._world.now):
            self._node.post(turn)

    def make_turn(self, *, is_idle: bool) -> KvTurn:
        """Return the turn that the core could be offered now."""
        blocked = [t for t, (_, link) in self._links.items() if link.is_stuck or link.num_waiting >= CHANNEL_PARTS]
        return KvTurn(is_idle, frozenset(blocked))

    @property
    def free_bytes(self) -> int:
        """Memory that copies may still take."""
        free = min(self._executor.kv_free_bytes(), self._conditions.room_bytes - self._executor.kv_copy_bytes())
        if self.is_short:
            return min(free, 0) - self._chance.randint(0, max(1, self._executor.kv_copy_bytes()))
        return free

    # --- arrivals

    def receive(self, frames: list[Bytes], key: str | None, *, is_garbled: bool) -> bool:
        """Deliver a part; return False if the codec refused it."""
        if is_garbled:
            message: DataMessage | str = garble_frames(frames, self._chance)
            payload: Bytes | None = None
        else:
            try:
                message, payload = DATA.decode(frames)
            except WireError as error:
                message = str(error)
        if not isinstance(message, KvPart):
            return False
        assert payload is not None
        self._node.post(self._arrival(message, payload, key))
        return True

    def _arrival(self, part: KvPart, payload: Bytes, key: str | None) -> Event:
        start = part.block * BLOCK
        numbers = tensors.view(part.tensor, payload)
        data = KvData(part.layers, start, start + len(part.tokens), part.tensor.dtype, numbers)
        return KvArrived(part, data, self.free_bytes, key or "")

    # --- faults

    def close(self) -> None:
        """Close all connections: the worker is dead. What it has sent may still arrive."""
        for _, link in self._links.values():
            link.close()
        self._links.clear()

    def disconnect_key(self, key: str) -> None:
        """Close the connections to the listener with this key."""
        for target, (edge, link) in list(self._links.items()):
            if key in edge.endpoint:
                link.close()
                del self._links[target]

    def drop_links(self, for_s: float) -> None:
        """Break all connections for a while; the last parts in flight are lost."""
        for _, link in self._links.values():
            link.drop(for_s, keeps=self._chance.random() < 0.5)

    def heal(self) -> None:
        self.num_garbled = self.num_lost_orders = self.num_lost_reports = self.num_failing = 0
        self.lag_s, self.is_short = 0.0, False
