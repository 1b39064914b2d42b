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
from swarm.wire.addresses import host_of, is_loopback, local_address_for
from swarm.wire.codec import DATA
from swarm.wire.messages import Edge
from swarm.wire.pull import PullChannel
from swarm.wire.push import DATA_QUEUE, PushChannel
from swarm.wire.tcp_info import TcpInfo
from swarm.wire.tensors import Bytes
from swarm.wire.transport.keys import AuthPolicy, KeyPair, address_and_key, public_key_in, with_host, with_key

if TYPE_CHECKING:
    from swarm.config import Settings
    from swarm.config.worker import WorkerSettings

RETRY_S: Final = 0.005  # until a retry: a new connection takes a moment
# timeout of the connection; on a network that is no slower, the message is on its way by then
SEND_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 2.0  # how long queued bytes may still leave after the connection is closed

log = get_logger(__name__)


@dataclass(slots=True)
class PeerConnector:
    """Opens connections to other processes."""

    pair: KeyPair  # key pair for new connections; the control loop may replace it
    broker_host: str  # address that stands for the broker in endpoints without a host

    def open(self, endpoint: str, queue: int = DATA_QUEUE) -> PushChannel:
        return PushChannel(self.resolve(endpoint), queue, pair=self.pair)

    def resolve(self, endpoint: str) -> str:
        """Return the endpoint as it is reached from here."""
        return with_host(endpoint, self.broker_host) if endpoint else ""


@dataclass(slots=True)
class StepListener:
    """Listener for steps, or for copies of keys and values.

    At loopback, it accepts connections that present the token in its address; elsewhere, those whose keys the plan
    names.
    """

    pull: PullChannel
    endpoint: str  # as reported to other workers
    host: str
    ticket: str = field(default_factory=partial(secrets.token_hex, 16))  # by which a relay identifies this listener
    _allowed: set[str] = field(default_factory=set)  # accepted keys

    @classmethod
    def open(cls, settings: Settings, pair: KeyPair, frame_limit_bytes: int = DATA.frame_limit_bytes) -> StepListener:
        """Bind the listener. Raises ConfigError if this machine has no such address, or no free port."""
        own = settings.worker
        host = own.host if own.host != "auto" else local_address_for(settings.client.url)
        allowed: set[str] = set()
        # A rejected peer gets no explicit answer: the plan that names it may be on its way, so it should try again.
        lock = None if is_loopback(host) else AuthPolicy(pair, allowed.__contains__, reject_explicitly=False)
        pull = PullChannel(host, frame_limit_bytes, _port_range(own), auth=lock, unix_socket=True)
        if pull.unix_socket_error:
            log.info("no_back_door", reason=pull.unix_socket_error)  # workers on this host connect by tcp, too
        endpoint = failpoints.advertised_endpoint("advertise", _advertise(pull.endpoint, own.advertise))
        return cls(pull, endpoint, host, _allowed=allowed)

    def new_address(self, settings: Settings) -> str:
        """Return the address that now reaches the broker, if it differs from this listener's.

        Empty: it is the same, there is no route, or the address is set by hand.
        """
        with contextlib.suppress(ConfigError):
            now = local_address_for(settings.client.url)
            if settings.worker.host == "auto" and now != self.host:
                return now
        return ""

    def set_allowed(self, keys: frozenset[str], relay: str) -> None:
        """Accept only these keys from now on, directly or through this relay (if not empty)."""
        self.pull.use_relay(relay)
        self._allowed.clear()
        self._allowed.update(keys)
        self.pull.drop_unauthorized()


def broker_host(settings: Settings) -> str:
    return host_of(settings.client.url)


def _advertise(endpoint: str, host: str) -> str:
    if not host:
        return endpoint
    address, key = address_and_key(endpoint)
    port = address.rpartition(":")[2]
    return with_key(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", key)


def _port_range(own: WorkerSettings) -> range:
    low, _, high = own.data_ports.partition("-")
    return range(int(low), int(high) + 1)


def tcp_figures(tcp_info: TcpInfo | None) -> dict[str, float]:
    """Return the TCP figures of the connection to the next stage, for the broker."""
    if tcp_info is None:
        return {}
    rate = {"next.bytes_per_s": tcp_info.bytes_per_s, "next.is_least": float(tcp_info.is_lower_bound)}
    return {"next.round_trip_s": tcp_info.round_trip_s, **rate}


def edge_key(edge: Edge) -> str | None:
    """Return the public key of the edge's listener, if it checks keys."""
    return public_key_in(address_and_key(edge.endpoint)[1])


class RecheckConnection:
    """Connection for a single message to another stage: a recheck.

    The message may be slow or lost: the broker has a deadline for its result. One message at a time; a later one
    replaces one that could not be sent yet.
    """

    def __init__(self, connector: PeerConnector) -> None:
        self._connector = connector
        self._channel: PushChannel | None = None
        self._key: str | None = None
        self._frames: Sequence[Bytes] = ()
        self._give_up_at = 0.0

    @property
    def is_full(self) -> bool:
        return self._channel is not None

    def send(self, edge: Edge, frames: Sequence[Bytes], now: float) -> None:
        self.close()
        self._channel, self._key = self._connector.open(edge.endpoint), edge_key(edge)
        self._frames, self._give_up_at = frames, now + SEND_TIMEOUT_S
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

    def disconnect_key(self, key: str) -> None:
        """Send nothing more to the peer whose listener has this key."""
        if key == self._key:
            self.close()

    def close(self, linger_s: float = 0.0) -> None:
        if self._channel is not None:
            self._channel.close(linger_s)
        self._channel, self._frames = None, ()
