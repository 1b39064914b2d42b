"""Connections between the nodes, and their faults.

A connection carries messages in order, with delays, as TCP does. Possible faults:

* It is closed: the last messages in flight are lost.
* It is interrupted and re-established while both ends run: the last messages in flight are lost, and messages sent
  meanwhile wait or are lost, depending on whether the sender keeps unsent messages.
* Its route is blocked, in one direction or in both: nothing arrives until the route is free again, then everything
  does.
* The other end's listener does not accept the sender (any more): messages in flight are lost, and the rest stays with
  the sender, which retries until it is accepted.
* Bad weather: messages are late, arrive twice or (between stages, which may be connected by a proxy) overtake each
  other.
* A step, or a part of keys and values, is garbled: the production codec must reject it.

Connections for copies of keys and values draw from random numbers of their own, so that the rest of a story depends
only on what copies do. Nothing overtakes on them, and nothing arrives twice.

Each process life has its own key, and a listener that checks keys has an allow-list.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

from swarm.errors import WireError
from swarm.sim.world import World
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import DataMessage, Step
from swarm.wire.tensors import Bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# delay of heartbeats: a worker with regular heartbeats is declared silent when they are later than that
LATE_HEARTBEAT_S = 0.25
Kind = Literal["data", "control", "beats", "client", "kv"]
ORDERLY: frozenset[Kind] = frozenset(("client", "beats", "kv"))  # kinds on which bad weather only delays messages
ANY_NODE = "*"
OVERTAKEN = 4  # number of messages that may overtake a late one
RETRY_S = 0.1
DUPLICATE_DELAY_S = (0.0, 0.4)  # delay of the second arrival


@dataclass(frozen=True, slots=True)
class Weather:
    """Fraction of messages (0 to 1) that suffer each network fault."""

    late: float = 0.0
    jitter_s: float = 0.0  # longest delay of a late message
    twice: float = 0.0
    overtaken: float = 0.0


CALM = Weather()


class Network:
    """All connections. Nodes are identified by their machines' names."""

    def __init__(self, world: World, weather: Weather = CALM) -> None:
        self.world = world
        self.weather = weather
        self._blocked: list[tuple[str, str]] = []
        self._waiting: dict[SimLink, None] = {}  # links on which messages wait for a free route

    def link(
        self,
        source: str,
        target: str,
        kind: Kind,
        delay: tuple[float, float],
        opens: Callable[[], bool] | None = None,
        *,
        via: str = "",
    ) -> SimLink:
        """Return a new link.

        ``opens``: whether the other end's listener accepts this sender now; None: it accepts every sender. ``via``: a
        machine that relays the messages.
        """
        return SimLink(self, source, target, kind, delay, opens=opens, via=via)

    def block(self, source: str, target: str) -> None:
        """Block the route from one node to another; ``ANY_NODE`` stands for every node."""
        self._blocked.append((source, target))

    def unblock(self, source: str, target: str) -> None:
        if (source, target) in self._blocked:
            self._blocked.remove((source, target))
        self._resume_links()

    def heal(self) -> None:
        """Free all routes and end bad weather."""
        self.weather = CALM
        self._blocked.clear()
        self._resume_links()

    def is_blocked(self, source: str, target: str) -> bool:
        return any(s in (source, ANY_NODE) and t in (target, ANY_NODE) for s, t in self._blocked)

    def wait_for(self, link: SimLink) -> None:
        self._waiting[link] = None

    def _resume_links(self) -> None:
        for link in list(self._waiting):
            if not link.is_blocked:
                del self._waiting[link]
                link.resume()


class SimLink:
    """One direction of one connection, until it is closed."""

    __slots__ = ("_chance", "_delay", "_is_down", "_is_in", "_kind", "_knocks", "_last", "_network", "_opens", "_queue",
                 "_stalled", "_via", "_world", "connected", "is_cut", "source", "target")  # fmt: skip

    def __init__(
        self,
        network: Network,
        source: str,
        target: str,
        kind: Kind,
        delay: tuple[float, float],
        *,
        opens: Callable[[], bool] | None = None,
        via: str = "",
    ) -> None:
        self.source, self.target, self._via = source, target, via
        self.is_cut = False
        self._network = network
        # the TCP connection is established; from then on a blocked route is not noticed
        self.connected = not self.is_blocked
        self._world = network.world
        self._kind = kind
        self._chance = network.world.kv_random if kind == "kv" else network.world.random
        self._delay = delay
        self._last = 0.0
        self._queue: deque[Callable[[], None]] = deque()
        self._stalled = 0  # messages that would have arrived by now
        self._is_down = False  # the other end is gone
        self._opens = opens
        self._is_in = self._knocks = False  # accepted by the listener; retrying after a refusal

    @property
    def is_blocked(self) -> bool:
        blocks = self._network.is_blocked
        if self._via:
            return blocks(self.source, self._via) or blocks(self._via, self.target)
        return blocks(self.source, self.target)

    @property
    def is_stuck(self) -> bool:
        """Whether the sender sees that it can't send."""
        if not self._queue:
            return False
        is_refused = self._is_down or self._knocks
        return is_refused or (not self.connected and self.is_blocked)

    @property
    def num_waiting(self) -> int:
        """Number of messages that have not arrived."""
        return len(self._queue)

    def send(self, deliver: Callable[[], None], *, extra_s: float = 0.0) -> None:
        """Deliver something at the other end, after everything sent before, at least ``extra_s`` later than usual."""
        if self.is_cut:
            return
        world, weather, chance = self._world, self._network.weather, self._chance
        arrival = world.now + chance.uniform(*self._delay) + extra_s
        if weather.late and chance.random() < weather.late:
            latest_s = min(weather.jitter_s, LATE_HEARTBEAT_S) if self._kind == "beats" else weather.jitter_s
            arrival += chance.uniform(0.0, latest_s)
        arrival = max(arrival, self._last)
        self._last = arrival
        self._queue.append(deliver)
        world.schedule(arrival - world.now, self._arrive)

    def close(self) -> None:
        """Close the link: a random number of the last messages in flight are lost."""
        self._lose_last()
        if self._is_down or self._knocks or self.is_blocked:
            self._queue.clear()
        self.is_cut = True

    def drop(self, for_s: float, *, keeps: bool) -> None:
        """Break the connection between two living ends for a while. ``keeps``: the sender keeps messages meanwhile."""
        self._lose_last()
        if not keeps:
            self.is_cut = True
        self._is_down = True
        self._world.schedule(for_s, self.restore)

    def kill(self) -> None:
        """Drop everything: an end died with all that it had not read or sent. Nothing arrives before ``reconnect``."""
        self._queue.clear()
        self._stalled = 0
        self.is_cut, self._is_down = True, False

    def reconnect(self) -> None:
        self.is_cut = False
        self.connected = not self.is_blocked

    def go_down(self) -> None:
        """Mark the other end as dead; the sender keeps its messages until ``restore``."""
        self._lose_last()
        self._is_down = True

    def resume(self) -> None:
        """Deliver the waiting messages one after the other: the route is free."""
        self.connected = True
        num, self._stalled = self._stalled, 0
        for _ in range(num):
            self._world.schedule(self._chance.uniform(*self._delay), self._arrive)

    def restore(self) -> None:
        """Restore the connection; waiting messages arrive."""
        self.is_cut = self._is_down = False
        if not self.is_blocked:
            self.resume()

    def _lose_last(self) -> None:
        for _ in range(self._chance.randint(0, len(self._queue))):
            self._queue.pop()

    def _arrive(self) -> None:
        queue, network = self._queue, self._network
        if not queue:
            return  # the message was lost
        if self._is_down:
            self._stalled += 1
        elif network._blocked and self.is_blocked:
            self._stalled += 1
            network.wait_for(self)
        elif self._opens is not None and not self._is_accepted(self._opens):
            self._stalled += 1
        elif network.weather is CALM or self._kind in ORDERLY:
            queue.popleft()()
        else:
            self._arrive_in_bad_weather(network.weather)

    def _is_accepted(self, opens: Callable[[], bool]) -> bool:
        """Return whether the listener accepts the sender.

        A sender that was accepted and is no more loses a part of its messages in flight, and keeps the unsent ones.
        """
        if not self._knocks and opens():
            self._is_in = True
            return True
        if not self._knocks:
            chance = self._chance if self._kind == "kv" else self._world.listener_random
            for _ in range(chance.randint(0, len(self._queue)) if self._is_in else 0):
                self._queue.popleft()
            self._is_in, self._knocks = False, True
            self._world.schedule(RETRY_S, lambda: self._retry(opens))
        if self.is_cut:
            self._queue.clear()  # the sender is gone and can't repeat the message
        return False

    def _retry(self, opens: Callable[[], bool]) -> None:
        if self._queue and not opens():
            self._world.schedule(RETRY_S, lambda: self._retry(opens))
            return
        self._knocks = False
        if not (self._is_down or self.is_blocked):
            self.resume()

    def _arrive_in_bad_weather(self, weather: Weather) -> None:
        chance, queue = self._world.random, self._queue
        if self._kind == "data" and chance.random() < weather.overtaken:
            queue.rotate(-chance.randrange(min(len(queue), OVERTAKEN)))
        deliver = queue.popleft()
        if chance.random() < weather.twice:
            queue.append(deliver)
            self._world.schedule(self._world.draw(DUPLICATE_DELAY_S), self._arrive)
        deliver()


class BrokerLinks:
    """Links from the broker to each of its peers, and those of the former broker process, on which messages may still
    arrive."""

    def __init__(self, network: Network, world: World) -> None:
        self._network, self._world = network, world
        self._open: dict[bytes, SimLink] = {}
        self._former: list[SimLink] = []

    def get_or_open(self, peer: bytes, name: str, kind: Literal["client", "control"]) -> SimLink:
        link = self._open.get(peer)
        if link is None:
            link = self._open[peer] = self._network.link("broker", name, kind, self._world.pace.control)
        return link

    def get(self, peer: bytes) -> SimLink | None:
        return self._open.get(peer)

    def close(self, peer: bytes) -> None:
        link = self._open.pop(peer, None)
        if link is not None:
            link.close()

    def on_broker_gone(self) -> None:
        for link in self._open.values():
            link.close()
        self._former += self._open.values()
        self._open.clear()

    def on_broker_back(self) -> None:
        for link in self._former:
            link.kill()
        self._former.clear()


def garble_step(step: Step, hidden: NDArray[np.float32], chance: Random) -> Step | str:
    """Return the step as decoded after a bit of its tensor flipped or its end was lost, or the refusal's reason."""
    spec, data = tensors.pack(hidden)
    arrived = garble_frames(DATA.encode(msgspec.structs.replace(step, tensor=spec), data), chance)
    return arrived if isinstance(arrived, str | Step) else "no step"


def garble_frames(frames: list[Bytes], chance: Random) -> DataMessage | str:
    """Return the message as decoded after a bit of its tensor flipped or its end was lost, or the refusal's reason."""
    header, payload = frames
    damaged = bytearray(payload)
    if chance.random() < 0.2:
        del damaged[-chance.randint(1, len(damaged)) :]
    else:
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    try:
        message, _ = DATA.decode([header, damaged])
    except WireError as error:
        return str(error)
    return message


def fake_public_key(incarnation: str) -> str:
    """Return the public key of a process, unique to its incarnation."""
    return hashlib.sha256(incarnation.encode()).hexdigest()


class FakeListener:
    """Allow-list of a listener.

    With ``uses_keys``, no key is accepted until the first list arrives; without, every sender is accepted.
    """

    __slots__ = ("_keys",)

    def __init__(self, *, uses_keys: bool) -> None:
        self._keys: frozenset[str] | None = frozenset() if uses_keys else None

    def set_allowed(self, keys: frozenset[str]) -> None:
        assert self._keys is not None, "no keys are in use, and a door is told of some"
        self._keys = keys

    def accepts(self, key: str | None) -> bool:
        return self._keys is None or key in self._keys
