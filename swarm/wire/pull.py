"""Receiving end of data edges, in one plain thread; ``push`` is the sending end::

wake = WakeupFd()                                # any thread may call wake.set()
pull = PullChannel(host, DATA.frame_limit_bytes)
push = PushChannel(endpoint)                     # one per directed edge and epoch
pull.wait(timeout_s, wake=wake, outgoing=[push]) # returns when any of them is ready; incoming=False: except pull
frames = pull.receive()                          # None: no message
push.send(frames)                                # False: can't be sent now, keep it
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from math import ceil

from swarm.errors import ConfigError
from swarm.wire.push import PushChannel
from swarm.wire.sockets import DATA_PORTS, Frames, bind_free_port, endpoint_of
from swarm.wire.transport.accept import AcceptPaused
from swarm.wire.transport.curve import server_mechanism_for
from swarm.wire.transport.io_loop import PollLoop, WakeupFd
from swarm.wire.transport.keys import AuthPolicy, new_token, with_key
from swarm.wire.transport.listener import SWEEP_S, Listener
from swarm.wire.transport.peers import MessageReceived
from swarm.wire.transport.relay.receiver import RelayReceiver
from swarm.wire.transport.server_handshake import PULL, Mechanism, server_mechanism
from swarm.wire.transport.unix_socket import UnixListener
from swarm.wire.transport.unix_socket import listen as listen_nearby

_EVENTS_PER_TURN = 64  # Messages and descriptor events that are handled before the clock is checked.


class PullChannel:
    """Receiver of data edges, for one plain thread; accepts peers that present its token or key.

    Sockets are read only while that thread waits or receives. Otherwise data stays in kernel buffers, and full buffers
    stop the sender.
    """

    def __init__(
        self,
        host: str,
        limit_bytes: int,
        ports: range = DATA_PORTS,
        *,
        key: bytes | None = None,
        auth: AuthPolicy | None = None,
        unix_socket: bool = False,
    ) -> None:
        """``unix_socket``: also listen on a Unix socket for senders on this host (``transport.unix_socket``);
        ``unix_socket_error`` has the reason if that is impossible."""
        token = new_token() if key is None else key
        bound = bind_free_port(host, ports)
        shown = token if auth is None else auth.pair.public.encode()
        self.endpoint = with_key(endpoint_of(bound), shown)
        self._poll = PollLoop()
        self._new_mechanism = server_mechanism_for(PULL, auth, token)
        self._relay_receiver: RelayReceiver | None = None
        listening: list[tuple[socket.socket, Callable[[], Mechanism]]] = [(bound, self._new_mechanism)]
        self._unix_listener, self.unix_socket_error = (
            _open_unix_listener(shown, bound.getsockname()[1]) if unix_socket else (None, "")
        )
        if self._unix_listener is not None:
            listening.append((self._unix_listener.listening, server_mechanism(PULL, shown)))
        is_authorized = _accept_all if auth is None else auth.is_authorized
        self._listener = Listener(listening, limit_bytes, self._poll, _do_nothing, is_authorized)
        self._message: Frames | None = None  # The next message, read but not yet received by the owner.
        self._sender = b""  # Peer that sent ``_message``.
        self.sender_key = ""  # Public key that authenticated the last received message; empty without authentication.
        self._swept_at = time.monotonic()
        self.num_accept_paused = 0  # How often accepting was paused because there was no file descriptor.
        self._set_waits(None, ())

    @property
    def num_refused(self) -> int:
        """Number of connections that were closed for a wrong key, a missed deadline or an exceeded limit."""
        return self._listener.num_refused

    def drop_unauthorized(self) -> None:
        """Disconnect all peers whose keys are no longer authorized, and drop their unread messages."""
        self._listener.drop_unauthorized()
        self._message = None if self._sender and not self._listener.is_connected(self._sender) else self._message

    def use_relay(self, relay: str) -> None:
        """Also accept senders through the relay at ``tcp://HOST:PORT/TICKET`` from now on; empty: no new ones through a
        relay.

        Existing connections stay. Does not block; raises ConfigError for an invalid address.
        """
        if self._relay_receiver is None:
            if not relay:
                return
            self._relay_receiver = RelayReceiver()
            self._poll.add_reader(self._relay_receiver.ready.fileno(), self._add_joined, self._relay_receiver)
        self._relay_receiver.wait_at(relay)

    def _add_joined(self, outreach: RelayReceiver) -> None:
        for connected in outreach.take_joined():
            self._listener.add_outgoing(connected, self._new_mechanism)

    def receive(self) -> Frames | None:
        """Return the next message, or None if there is none now."""
        self._read_message()
        message, self._message = self._message, None
        return message

    def wait(
        self,
        timeout_s: float,
        *,
        wake: WakeupFd | None = None,
        outgoing: Sequence[PushChannel] = (),
        incoming: bool = True,
    ) -> bool:
        """Wait until a message is there, ``wake`` is set or one of ``outgoing`` can send. Return False on timeout.

        Without ``incoming``, for a caller that would not receive now, a message does not end the wait: one is kept, and
        the rest stays in the kernel.
        """
        if wake is not self._wake or outgoing != self._outgoing:
            self._set_waits(wake, outgoing)
        give_up_at, left_s = time.monotonic() + timeout_s, timeout_s
        while not (incoming and self._has_message()):
            if outgoing and any(channel.poll_writable() for channel in outgoing):
                return True
            poll = self._poll_everything if self._message is None else self._poll_others
            events = poll.poll(ceil(max(0.0, left_s) * 1000))
            if any(fd != self._poll_fd for fd, _ in events) or (events and self._read_message() and incoming):
                return True
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return self._read_message() and incoming
        return True

    def _has_message(self) -> bool:
        """Whether the data read so far contains a message."""
        return self._message is not None or (self._listener.has_more and self._read_message())

    def _read_message(self) -> bool:
        """Read what is available until there is a whole message."""
        for _ in range(_EVENTS_PER_TURN):
            if self._message is not None:
                break
            event = self._listener.next_event()
            if isinstance(event, MessageReceived):
                self._message, self._sender, self.sender_key = event.frames, event.peer, event.key
            elif isinstance(event, AcceptPaused):
                self.num_accept_paused += 1
            elif event is None and not self._poll.run_ready():
                break
        if (now := time.monotonic()) - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._listener.enforce_deadlines()
            self._listener.resume_accepting()
        return self._message is not None

    def _set_waits(self, wake: WakeupFd | None, outgoing: Sequence[PushChannel]) -> None:
        """Set what ends the waits from now on. The poll objects are kept because this rarely changes and every hop
        waits."""
        self._wake, self._outgoing = wake, outgoing
        self._poll_fd = self._poll.fileno()
        self._poll_everything, self._poll_others = select.poll(), select.poll()
        self._poll_everything.register(self._poll_fd, select.POLLIN)
        others: list[PushChannel | WakeupFd] = [*outgoing] if wake is None else [*outgoing, wake]
        for channel in others:
            self._poll_everything.register(channel, select.POLLIN)
            self._poll_others.register(channel, select.POLLIN)

    def close(self) -> None:
        if self._unix_listener is not None:
            self._unix_listener.remove()
        if self._relay_receiver is not None:
            self._poll.remove_reader(self._relay_receiver.ready.fileno())
            self._relay_receiver.close()
        self._listener.close()
        self._poll.close()


def _open_unix_listener(key: bytes, port: int) -> tuple[UnixListener | None, str]:
    """Return the Unix socket, or the reason why it can't be opened."""
    try:
        return listen_nearby(key, port), ""
    except ConfigError as error:
        return None, str(error)


def _accept_all(_key: str) -> bool:
    return True


def _do_nothing() -> None:
    """Do nothing: the owner polls, so there is no loop to wake."""
