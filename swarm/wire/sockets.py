"""ZeroMQ and TCP sockets: every option with its reason, sending and receiving without blocking, listening,
endpoints."""

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
from swarm.systemd import socket_activation
from swarm.wire.tensors import Bytes
from swarm.wire.transport.keys import KeyPair, address_and_key, public_key_in
from swarm.wire.transport.server_handshake import USERNAME

Frames = list[memoryview]
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[Any]

_MONITOR_EVENT: Final = struct.Struct("=hi")
_MONITORED_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # The other end rejected our key.
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # The other end closed the connection before the handshake was complete.
    | zmq.EVENT_CONNECT_RETRIED  # libzmq will reconnect by itself.
)
_ACCEPT_BACKLOG: Final = 1024  # Connections that the kernel queues while this process does not accept.

# Ports for data endpoints. A connect to a dead local port in the kernel's ephemeral range (32768 and up) can meet
# itself and then never recovers (libzmq #4588), so endpoints that die and come back stay below.
DATA_PORTS: Final = range(20000, 32768)


def set_options(sock: Socket, limit_bytes: int, queue: int, linger_ms: int) -> None:
    """Set the options that every socket gets."""
    sock.set(zmq.LINGER, linger_ms)  # never -1: that would hang context.term()
    sock.set(zmq.SNDHWM, queue)
    sock.set(zmq.RCVHWM, queue)
    # Per frame; a peer that sends more is disconnected before memory is allocated.
    sock.set(zmq.MAXMSGSIZE, limit_bytes)
    sock.set(zmq.HANDSHAKE_IVL, 3000)  # A port scanner occupies a connection this long, not for ever.
    sock.set(zmq.CONNECT_TIMEOUT, 3000)  # A host that drops SYNs would cost minutes per attempt.
    sock.set(zmq.RECONNECT_IVL, 100)  # A restarted peer is found quickly …
    sock.set(zmq.RECONNECT_IVL_MAX, 500)  # … and an absent one costs little: two SYNs a second.
    # A peer whose machine vanished sends no FIN: keepalive detects it while we send nothing, TCP_MAXRT while we do.
    # TCP_MAXRT also disconnects a live peer that has not read for that long (its window is closed), together with
    # everything queued. That is why it is minutes: detecting frozen peers within a second is the job of the heartbeats.
    # ZMTP heartbeats stay off for the same reason: at the high-water mark libzmq stops reading, misses the answer and
    # drops a healthy connection.
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    sock.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    sock.set(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.set(zmq.TCP_MAXRT, 120_000)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` (an IPv6 address with or without brackets). Port 0: any free one.

    If systemd has passed a socket for this address, that one is returned. Raises ConfigError when the port is in use or
    the address is not this machine's.
    """
    try:
        return socket_activation.take_socket(host, port) or _open_listening(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: is another broker running? choose another with --port"
            ) from None
        raise _listen_error(_endpoint(host, port), error) from None


def bind_free_port(host: str, ports: range = DATA_PORTS) -> socket.socket:
    """Return a socket that listens at any free port of ``ports``. Raises ConfigError when all are taken.

    Starts at a random port: workers that start together, or restart after a crash, rarely try the same one.
    """
    start = random.SystemRandom().randrange(len(ports))
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        try:
            return _open_listening(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _listen_error(_endpoint(host, port), error) from None
    raise ConfigError(f"no free port on {host} between {ports[0]} and {ports[-1]}: close something or widen the range")


def _open_listening(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        # Connections of a previous process may still be in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
        sock.listen(_ACCEPT_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def endpoint_of(listening: socket.socket) -> str:
    """Return the endpoint of a listening socket."""
    host, port = listening.getsockname()[:2]
    return _endpoint(host, port)


def _listen_error(endpoint: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't listen on {endpoint} ({error.strerror}): give an address of this machine, for example 127.0.0.1"
    )


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host.strip('[]')}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def configure_auth(sock: Socket, endpoint: str, pair: KeyPair | None) -> str:
    """Configure authentication as the endpoint requires: a token (PLAIN) or key pairs (CURVE). Return the address to
    connect to.

    Raises ConfigError if the endpoint requires keys and this machine has none, and for an invalid token.
    """
    address, key = address_and_key(endpoint)
    try:
        if (server_key := public_key_in(key)) is None:
            if key:
                sock.set(zmq.PLAIN_USERNAME, USERNAME)
                sock.set(zmq.PLAIN_PASSWORD, key)
        elif pair is None:
            raise ConfigError(f"{address} requires a key, and this machine has none for it: join with --join")
        else:
            sock.set(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
            sock.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
            sock.set(zmq.CURVE_SECRETKEY, bytes.fromhex(pair.secret))
    except zmq.ZMQError as error:
        raise ConfigError(f"the key in an endpoint at {address} is invalid: {error.strerror}") from None
    return address


def connect(sock: Socket, endpoint: str) -> None:
    """Connect now, or as soon as the other end is there. Raises ConfigError for an invalid ``endpoint``."""
    if "[" in endpoint:
        sock.set(zmq.IPV6, 1)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700: {error.strerror}") from None


def send_now(sock: Socket, frames: Sequence[Bytes]) -> bool:
    """Send without blocking. Return False if no peer is connected or the queue is full; then nothing was sent at
    all."""
    try:
        # Frames above 64 KB (pyzmq's threshold) are not copied; below, a copy is cheaper than the bookkeeping.
        sock.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        # Until its events are queried, a socket may not notice that it is connected or has space again.
        return has_event(sock, zmq.POLLOUT) and _send_again(sock, frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def _send_again(sock: Socket, frames: Sequence[Bytes]) -> bool:
    try:
        sock.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    return True


def receive_now(sock: Socket) -> list[zmq.Frame] | None:
    """Receive without blocking; None if there is no message. Frames are not copied: their buffers belong to libzmq."""
    try:
        return sock.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None


def has_event(sock: Socket, event: int) -> bool:
    """Whether ``event`` (POLLIN, POLLOUT) is set now. The query also makes the socket process the work of its I/O
    thread."""
    return bool(int(sock.get(zmq.EVENTS)) & event)


def file_descriptor(sock: Socket) -> int:
    """Return the file descriptor that an event loop watches for this socket."""
    return int(sock.get(zmq.FD))


class Monitor:
    """Stream of connection events of a ZeroMQ socket, in order.

    Must be closed before its socket: an open one blocks ``context.term()`` for ever.
    """

    def __init__(self, context: Context, watched: Socket) -> None:
        self._watched = watched
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        self.socket = context.socket(zmq.PAIR)
        # Unbounded on purpose: at a limit the I/O thread would block inside a lock that close() needs. A few short
        # events per connection can't accumulate to much.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        try:
            watched.monitor(endpoint, _MONITORED_EVENTS)
            self.socket.connect(endpoint)
        except zmq.ZMQError:  # No free file descriptor.
            self.socket.close()
            raise

    def events(self) -> Iterator[zmq.Event]:
        """Yield the events since the last call; does not block."""
        if not has_event(self.socket, zmq.POLLIN):
            return
        receive = self.socket.recv
        while True:
            try:
                event = receive(zmq.DONTWAIT)
            except zmq.Again:
                return
            receive(zmq.DONTWAIT)  # The endpoint; both parts arrive together.
            yield zmq.Event(_MONITOR_EVENT.unpack(event)[0])

    def close(self) -> None:
        self._watched.monitor(None, 0)
        self.socket.close()
