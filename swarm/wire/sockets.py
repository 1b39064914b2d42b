"""ZeroMQ sockets: every option with its reason, binding, sending and receiving without waiting, who is connected."""

from __future__ import annotations

import errno
import random
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import zmq

from swarm.errors import ConfigError
from swarm.wire.tensors import Bytes

Frames = list[memoryview]
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[Any]

_MONITOR_EVENT: Final = struct.Struct("=hi")
_MOST_EVENTS: Final = 20_000  # of a monitor, at one reading

# Ports for data endpoints. A connect to a dead local port in the kernel's ephemeral range (32768 and up) can meet
# itself and then never recovers (libzmq #4588), so endpoints that die and come back stay below.
DATA_PORTS: Final = range(20000, 32768)


def set_options(socket: Socket, limit_bytes: int, queue: int, linger_ms: int) -> None:
    """What every socket gets."""
    socket.set(zmq.LINGER, linger_ms)  # never -1: that would hang context.term()
    socket.set(zmq.SNDHWM, queue)
    socket.set(zmq.RCVHWM, queue)
    socket.set(zmq.MAXMSGSIZE, limit_bytes)  # per frame; whoever sends more is disconnected before it is allocated
    socket.set(zmq.HANDSHAKE_IVL, 3000)  # a port scanner holds a connection this long, not for ever
    socket.set(zmq.CONNECT_TIMEOUT, 3000)  # a host that swallows SYNs would cost minutes per attempt
    socket.set(zmq.RECONNECT_IVL, 100)  # a peer that restarts is found again at once …
    socket.set(zmq.RECONNECT_IVL_MAX, 500)  # … and one that stays away costs little: two SYNs a second
    # A peer whose machine vanished sends no FIN: keepalive finds it when we are silent, TCP_MAXRT when we are not.
    # TCP_MAXRT also cuts off a live peer that has not read for so long (its window is closed), with all that is queued;
    # hence minutes, and who is frozen is for the beats to say, within a second. ZMTP heartbeats stay off for the same
    # reason: at the high-water mark libzmq stops reading, misses the answer and drops a healthy connection.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.set(zmq.TCP_MAXRT, 120_000)


def bind(socket: Socket, host: str, port: int) -> str:
    """Bind to ``host`` (an IPv6 address with or without brackets) and return the endpoint.

    Raises ConfigError when the port is in use or the address is not this machine's.
    """
    endpoint = _endpoint(socket, host, port)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: is another broker running? choose another with --port"
            ) from None
        raise _cannot_listen(endpoint, error) from None
    return socket.get_string(zmq.LAST_ENDPOINT)


def bind_free_port(socket: Socket, host: str, ports: range = DATA_PORTS) -> str:
    """Bind to any free port of ``ports`` and return the endpoint. Raises ConfigError when all are taken.

    Starts anywhere: workers that start together, or again after a crash, seldom try the same port.
    """
    start = random.SystemRandom().randrange(len(ports))
    for offset in range(len(ports)):
        endpoint = _endpoint(socket, host, ports[(start + offset) % len(ports)])
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise _cannot_listen(endpoint, error) from None
        else:
            return socket.get_string(zmq.LAST_ENDPOINT)
    raise ConfigError(f"no free port on {host} between {ports[0]} and {ports[-1]}: close something or widen the range")


def _cannot_listen(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(f"can't listen on {endpoint} ({error.strerror}): give an address of this machine, say 127.0.0.1")


def _endpoint(socket: Socket, host: str, port: int) -> str:
    if ":" in host:
        socket.set(zmq.IPV6, 1)  # only where asked for: some machines have no IPv6 at all
        return f"tcp://[{host.strip('[]')}]:{port}"
    return f"tcp://{host}:{port}"


def connect(socket: Socket, endpoint: str) -> None:
    """Connect, now or whenever the other end is there. Raises ConfigError when ``endpoint`` is none."""
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700: {error.strerror}") from None


def send_now(socket: Socket, frames: Sequence[Bytes]) -> bool:
    """Send without waiting. False: nobody to send to, or the queue is full; then nothing was sent at all."""
    try:
        # Not copied above 64 KB (pyzmq's threshold); below that, a copy is cheaper than the bookkeeping.
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        # Between two looks at its events a socket may not have noticed that it is connected or has room again.
        return has(socket, zmq.POLLOUT) and _send_again(socket, frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def _send_again(socket: Socket, frames: Sequence[Bytes]) -> bool:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    return True


def receive_now(socket: Socket) -> list[zmq.Frame] | None:
    """Receive without waiting; None: nothing there. Frames are kept in place: their buffers are libzmq's."""
    try:
        return socket.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None


def has(socket: Socket, event: int) -> bool:
    """Is ``event`` (POLLIN, POLLOUT) true now? Asking also makes the socket notice what its I/O thread has done."""
    return bool(int(socket.get(zmq.EVENTS)) & event)


def descriptor(socket: Socket) -> int:
    """What an event loop watches on behalf of the socket."""
    return int(socket.get(zmq.FD))


class SocketEvent(NamedTuple):
    """One line of a socket's monitor. ``value``: the descriptor, for ACCEPTED, CONNECTED, DISCONNECTED and LISTENING;
    the error number, for ACCEPT_FAILED."""

    event: zmq.Event
    value: int


class Monitor:
    """What happens to a socket's connections, in order. Must be closed before its socket: a forgotten one hangs
    ``context.term()``."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    GATE_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPT_FAILED  # failures are told without end until a gate closes

    def __init__(self, context: Context, watched: Socket, events: int = EVENTS) -> None:
        self._watched = watched
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        self.socket = context.socket(zmq.PAIR)
        # No bound on purpose: at a bound the I/O thread would wait for us inside a lock that close() needs. Three short
        # events per TCP connection can't pile up to much.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        watched.monitor(endpoint, events)
        self.socket.connect(endpoint)

    def events(self) -> Iterator[SocketEvent]:
        """What has happened since the last call; does not wait. Not more than ``_MOST_EVENTS`` of it: while accepting
        fails, libzmq may tell so faster than we read. Failures that follow each other are told once."""
        if not has(self.socket, zmq.POLLIN):
            return
        receive, failed = self.socket.recv, b""
        for _ in range(_MOST_EVENTS):
            try:
                event = receive(zmq.DONTWAIT)
            except zmq.Again:
                return
            receive(zmq.DONTWAIT)  # the endpoint; both parts come together
            if event == failed:
                continue
            number, value = _MONITOR_EVENT.unpack(event)
            failed = event if number == zmq.EVENT_ACCEPT_FAILED else b""
            yield SocketEvent(zmq.Event(number), value)

    def close(self) -> None:
        self._watched.monitor(None, 0)
        self.socket.close()


class Connections:
    """Which peer is behind which connection, and who has none left.

    A descriptor is used again as soon as its connection is closed, and messages and monitor events have no common
    order. Two facts make it right all the same: a connection's ACCEPTED is there before its first message, so whoever
    takes a message and then reads the monitor knows all connections that the message can have come over; and a
    descriptor that another peer uses has left the one before.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._peers: dict[int, bytes] = {}
        self._current: dict[bytes, int] = {}

    def accepted(self, connection: int) -> None:
        self._open.add(connection)

    def closed(self, connection: int) -> bytes | None:
        """The peer whose connection this was, if it has no newer one."""
        self._open.discard(connection)
        return self._forget(connection)

    def used(self, connection: int, peer: bytes) -> bytes | None:
        """A message of ``peer`` came over ``connection``. The peer that is found to be gone by that, if any: the one
        that had this descriptor before, or ``peer`` itself when these were its last words."""
        if self._peers.get(connection) == peer:
            return None
        if connection not in self._open:
            return None if peer in self._current else peer
        gone = self._forget(connection)
        self._peers[connection] = peer
        self._current[peer] = connection
        return gone

    def has(self, peer: bytes) -> bool:
        return peer in self._current

    def _forget(self, connection: int) -> bytes | None:
        peer = self._peers.pop(connection, None)
        if peer is None or self._current.get(peer) != connection:
            return None
        del self._current[peer]
        return peer
