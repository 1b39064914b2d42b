"""A worker's data connections: its listener for steps, and connections to the listeners of other workers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from swarm import failpoints
from swarm.errors import ConfigError
from swarm.log import get_logger
from swarm.wire.addresses import host_of, is_loopback, reaching
from swarm.wire.codec import DATA
from swarm.wire.door.keys import KeyPair, Lock, address_and_key, keyed, public_key_in, reached
from swarm.wire.messages import Edge
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.seen import Seen
from swarm.wire.tensors import Bytes

if TYPE_CHECKING:
    from swarm.config import Settings
    from swarm.config.worker import WorkerSettings

RETRY_S: Final = 0.005  # until a retry: a new connection takes a moment
PATIENCE_S: Final = 5.0  # timeout of the connection; on a network that is no slower, the message is on its way by then
LINGER_S: Final = 2.0  # how long queued bytes may still leave after the connection is closed

log = get_logger(__name__)


@dataclass(slots=True)
class Way:
    """Opens connections to other processes."""

    pair: KeyPair  # key pair for new connections; the control loop may replace it
    broker_host: str  # address that stands for the broker in endpoints without a host

    def open(self, endpoint: str) -> PushChannel:
        return PushChannel(self.reached(endpoint), pair=self.pair)

    def reached(self, endpoint: str) -> str:
        """Return the endpoint as it is reached from here."""
        return reached(endpoint, self.broker_host) if endpoint else ""


@dataclass(slots=True)
class StepDoor:
    """Listener for steps.

    At loopback, it accepts connections that present the token in its address; elsewhere, those whose keys the plan
    names.
    """

    pull: PullChannel
    endpoint: str  # as reported to other workers
    host: str
    ticket: str = field(default_factory=partial(secrets.token_hex, 16))  # by which a relay identifies this listener
    _heard: set[str] = field(default_factory=set)  # accepted keys

    @classmethod
    def open(cls, settings: Settings, pair: KeyPair) -> StepDoor:
        """Bind the listener. Raises ConfigError if this machine has no such address, or no free port."""
        own = settings.worker
        host = own.host if own.host != "auto" else reaching(settings.client.url)
        heard: set[str] = set()
        # A rejected peer gets no explicit answer: the plan that names it may be on its way, so it should try again.
        lock = None if is_loopback(host) else Lock(pair, heard.__contains__, says_no=False)
        pull = PullChannel(host, DATA.frame_limit_bytes, _ports(own), lock=lock, nearby=True)
        if pull.not_nearby:
            log.info("no_back_door", reason=pull.not_nearby)  # workers on this host connect by tcp, too
        endpoint = failpoints.retold("advertise", _advertised(pull.endpoint, own.advertise))
        return cls(pull, endpoint, host, _heard=heard)

    def moved_to(self, settings: Settings) -> str:
        """Return the address that now reaches the broker, if it differs from this listener's.

        Empty: it is the same, there is no route, or the address is set by hand.
        """
        with contextlib.suppress(ConfigError):
            now = reaching(settings.client.url)
            if settings.worker.host == "auto" and now != self.host:
                return now
        return ""

    def admit(self, keys: frozenset[str], relay: str) -> None:
        """Accept only these keys from now on, directly or through this relay (if not empty)."""
        self.pull.reach_out(relay)
        self._heard.clear()
        self._heard.update(keys)
        self.pull.reconsider()


def broker_host(settings: Settings) -> str:
    return host_of(settings.client.url)


def _advertised(endpoint: str, host: str) -> str:
    if not host:
        return endpoint
    address, key = address_and_key(endpoint)
    port = address.rpartition(":")[2]
    return keyed(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", key)


def _ports(own: WorkerSettings) -> range:
    low, _, high = own.data_ports.partition("-")
    return range(int(low), int(high) + 1)


def figures_of(seen: Seen | None) -> dict[str, float]:
    """Return the TCP figures of the connection to the next stage, for the broker."""
    if seen is None:
        return {}
    rate = {"next.bytes_per_s": seen.bytes_per_s, "next.is_least": float(seen.is_least)}
    return {"next.round_trip_s": seen.round_trip_s, **rate}


def key_in(edge: Edge) -> str | None:
    """Return the public key of the edge's listener, if it checks keys."""
    return public_key_in(address_and_key(edge.endpoint)[1])


class AsideEdge:
    """Connection for a single message to another stage: a recheck.

    The message may be slow or lost: the broker has a deadline for its result. One message at a time; a later one
    replaces one that could not be sent yet.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._channel: PushChannel | None = None
        self._key: str | None = None
        self._frames: Sequence[Bytes] = ()
        self._give_up_at = 0.0

    @property
    def is_full(self) -> bool:
        return self._channel is not None

    def send(self, edge: Edge, frames: Sequence[Bytes], now: float) -> None:
        self.close()
        self._channel, self._key = self._way.open(edge.endpoint), key_in(edge)
        self._frames, self._give_up_at = frames, now + PATIENCE_S
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send the message if possible; give up after a timeout."""
        if self._channel is None:
            return
        if self._channel.send(self._frames):
            self.close(LINGER_S)
        elif now >= self._give_up_at:
            log.warning("aside_not_sent", to=self._channel.endpoint)
            self.close()

    def cut_off(self, key: str) -> None:
        """Send nothing more to the peer whose listener has this key."""
        if key == self._key:
            self.close()

    def close(self, linger_s: float = 0.0) -> None:
        if self._channel is not None:
            self._channel.close(linger_s)
        self._channel, self._frames = None, ()
