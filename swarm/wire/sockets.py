"""ZeroMQ sockets: every option with its reason, sending and receiving without waiting; listening ones; addresses."""

from __future__ import annotations

import errno
import random
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import zmq

from swarm.errors import ConfigError
from swarm.service import handed
from swarm.wire.door.keys import KeyPair, address_and_key, public_key_in
from swarm.wire.door.mechanisms import USERNAME
from swarm.wire.tensors import Bytes

Frames = list[memoryview]
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[Any]

_MONITOR_EVENT: Final = struct.Struct("=hi")
_WATCHED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # we were told that our key opens nothing
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # hung up on before the end of it
    | zmq.EVENT_CONNECT_RETRIED  # libzmq will connect again by itself
)
_BACKLOG: Final = 1024  # who knocks while nobody looks waits there

# Ports for data endpoints. A connect to a dead local port in the kernel's ephemeral range (32768 and up) can meet
# itself and then never recovers (libzmq #4588), so endpoints that die and come back stay below.
DATA_PORTS: Final = range(20000, 32768)


def set_options(made: Socket, limit_bytes: int, queue: int, linger_ms: int) -> None:
    """Set what every socket gets."""
    made.set(zmq.LINGER, linger_ms)  # never -1: that would hang context.term()
    made.set(zmq.SNDHWM, queue)
    made.set(zmq.RCVHWM, queue)
    made.set(zmq.MAXMSGSIZE, limit_bytes)  # per frame; whoever sends more is disconnected before it is allocated
    made.set(zmq.HANDSHAKE_IVL, 3000)  # a port scanner holds a connection this long, not for ever
    made.set(zmq.CONNECT_TIMEOUT, 3000)  # a host that swallows SYNs would cost minutes per attempt
    made.set(zmq.RECONNECT_IVL, 100)  # a peer that restarts is found again at once …
    made.set(zmq.RECONNECT_IVL_MAX, 500)  # … and one that stays away costs little: two SYNs a second
    # A peer whose machine vanished sends no FIN: keepalive finds it when we are silent, TCP_MAXRT when we are not.
    # TCP_MAXRT also cuts off a live peer that has not read for so long (its window is closed), with all that is queued;
    # hence minutes, and who is frozen is for the beats to say, within a second. ZMTP heartbeats stay off for the same
    # reason: at the high-water mark libzmq stops reading, misses the answer and drops a healthy connection.
    made.set(zmq.TCP_KEEPALIVE, 1)
    made.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    made.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    made.set(zmq.TCP_KEEPALIVE_CNT, 3)
    made.set(zmq.TCP_MAXRT, 120_000)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host`` (an IPv6 address with or without brackets). Port 0: any free one. If systemd
    has handed one over that listens there, it is that.

    Raises ConfigError when the port is in use or the address is not this machine's.
    """
    try:
        return handed.take(host, port) or _listening(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: is another broker running? choose another with --port"
            ) from None
        raise _cannot_listen(_endpoint(host, port), error) from None


def bind_free_port(host: str, ports: range = DATA_PORTS) -> socket.socket:
    """A socket that listens at any free port of ``ports``. Raises ConfigError when all are taken.

    Starts anywhere: workers that start together, or again after a crash, seldom try the same port.
    """
    start = random.SystemRandom().randrange(len(ports))
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        try:
            return _listening(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _cannot_listen(_endpoint(host, port), error) from None
    raise ConfigError(f"no free port on {host} between {ports[0]} and {ports[-1]}: close something or widen the range")


def _listening(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who was there before may still say goodbye
        made.bind((host.strip("[]"), port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def endpoint_of(listening: socket.socket) -> str:
    """Where it listens."""
    host, port = listening.getsockname()[:2]
    return _endpoint(host, port)


def _cannot_listen(endpoint: str, error: OSError) -> ConfigError:
    return ConfigError(f"can't listen on {endpoint} ({error.strerror}): give an address of this machine, say 127.0.0.1")


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host.strip('[]')}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def unlocked(made: Socket, endpoint: str, pair: KeyPair | None) -> str:
    """Set what the door in ``endpoint`` asks for: a word, or keys. Returns the address to connect to. Raises
    ConfigError for a door with a lock if we have no keys, and for a word that is none."""
    address, key = address_and_key(endpoint)
    try:
        if (door := public_key_in(key)) is None:
            if key:
                made.set(zmq.PLAIN_USERNAME, USERNAME)
                made.set(zmq.PLAIN_PASSWORD, key)
        elif pair is None:
            raise ConfigError(f"the door at {address} has a lock, and this machine has no key to it: join with --join")
        else:
            made.set(zmq.CURVE_SERVERKEY, bytes.fromhex(door))
            made.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
            made.set(zmq.CURVE_SECRETKEY, bytes.fromhex(pair.secret))
    except zmq.ZMQError as error:
        raise ConfigError(f"the key in an endpoint at {address} is none: {error.strerror}") from None
    return address


def connect(made: Socket, endpoint: str) -> None:
    """Connect, now or whenever the other end is there. Raises ConfigError when ``endpoint`` is none."""
    if "[" in endpoint:
        made.set(zmq.IPV6, 1)
    try:
        made.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700: {error.strerror}") from None


def send_now(made: Socket, frames: Sequence[Bytes]) -> bool:
    """Send without waiting. False: nobody to send to, or the queue is full; then nothing was sent at all."""
    try:
        # Not copied above 64 KB (pyzmq's threshold); below that, a copy is cheaper than the bookkeeping.
        made.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        # Between two looks at its events a socket may not have noticed that it is connected or has room again.
        return has(made, zmq.POLLOUT) and _send_again(made, frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def _send_again(made: Socket, frames: Sequence[Bytes]) -> bool:
    try:
        made.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    return True


def receive_now(made: Socket) -> list[zmq.Frame] | None:
    """Receive without waiting; None: nothing there. Frames are kept in place: their buffers are libzmq's."""
    try:
        return made.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None


def has(made: Socket, event: int) -> bool:
    """Is ``event`` (POLLIN, POLLOUT) true now? Asking also makes the socket notice what its I/O thread has done."""
    return bool(int(made.get(zmq.EVENTS)) & event)


def descriptor(made: Socket) -> int:
    """Return what an event loop watches on behalf of the socket."""
    return int(made.get(zmq.FD))


class Monitor:
    """Tells what happens to a socket's connections, in order. Must be closed before its socket: a forgotten one hangs
    ``context.term()``."""

    def __init__(self, context: Context, watched: Socket) -> None:
        self._watched = watched
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        self.socket = context.socket(zmq.PAIR)
        # No bound on purpose: at a bound the I/O thread would wait for us inside a lock that close() needs. A few short
        # events per connection can't pile up to much.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        try:
            watched.monitor(endpoint, _WATCHED)
            self.socket.connect(endpoint)
        except zmq.ZMQError:  # no descriptor for it
            self.socket.close()
            raise

    def events(self) -> Iterator[zmq.Event]:
        """Yield what has happened since the last call; does not wait."""
        if not has(self.socket, zmq.POLLIN):
            return
        receive = self.socket.recv
        while True:
            try:
                event = receive(zmq.DONTWAIT)
            except zmq.Again:
                return
            receive(zmq.DONTWAIT)  # the endpoint; both parts come together
            yield zmq.Event(_MONITOR_EVENT.unpack(event)[0])

    def close(self) -> None:
        self._watched.monitor(None, 0)
        self.socket.close()
