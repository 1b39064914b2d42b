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
from swarm.wire.door.curve import asking
from swarm.wire.door.keys import Lock, keyed, new_key
from swarm.wire.door.listener import SWEEP_S, Listener
from swarm.wire.door.mechanisms import PULL, Mechanism, asks
from swarm.wire.door.nearby import BackDoor
from swarm.wire.door.nearby import listen as listen_nearby
from swarm.wire.door.peers import Arrived
from swarm.wire.door.relay.outreach import Outreach
from swarm.wire.door.strangers import GateClosed
from swarm.wire.door.watch import Poll, Wake
from swarm.wire.push import PushChannel
from swarm.wire.sockets import DATA_PORTS, Frames, bind_free_port, endpoint_of

_AT_ONCE = 64  # Messages and descriptor events that are handled before the clock is checked.


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
        lock: Lock | None = None,
        nearby: bool = False,
    ) -> None:
        """``unix_socket``: also listen on a Unix socket for senders on this host (``transport.unix_socket``);
        ``unix_socket_error`` has the reason if that is impossible."""
        word = new_key() if key is None else key
        bound = bind_free_port(host, ports)
        shown = word if lock is None else lock.pair.public.encode()
        self.endpoint = keyed(endpoint_of(bound), shown)
        self._poll = Poll()
        self._asks = asking(PULL, lock, word)
        self._outreach: Outreach | None = None
        doors: list[tuple[socket.socket, Callable[[], Mechanism]]] = [(bound, self._asks)]
        self._back, self.not_nearby = _back_door(shown, bound.getsockname()[1]) if nearby else (None, "")
        if self._back is not None:
            doors.append((self._back.listening, asks(PULL, shown)))
        opens = _anybody if lock is None else lock.opens
        self._listener = Listener(doors, limit_bytes, self._poll, _nothing, opens)
        self._message: Frames | None = None  # The next message, read but not yet received by the owner.
        self._sender = b""  # Peer that sent ``_message``.
        self.sender_key = ""  # Public key that authenticated the last received message; empty without authentication.
        self._swept_at = time.monotonic()
        self.num_shut = 0  # How often accepting was paused because there was no file descriptor.
        self._watch(None, ())

    @property
    def num_refused(self) -> int:
        """Number of connections that were closed for a wrong key, a missed deadline or an exceeded limit."""
        return self._listener.num_refused

    def reconsider(self) -> None:
        """Disconnect all peers whose keys are no longer authorized, and drop their unread messages."""
        self._listener.reconsider()
        self._message = None if self._sender and not self._listener.has(self._sender) else self._message

    def reach_out(self, relay: str) -> None:
        """Also accept senders through the relay at ``tcp://HOST:PORT/TICKET`` from now on; empty: no new ones through a
        relay.

        Existing connections stay. Does not block; raises ConfigError for an invalid address.
        """
        if self._outreach is None:
            if not relay:
                return
            self._outreach = Outreach()
            self._poll.add_reader(self._outreach.arrived.fileno(), self._welcome_joined, self._outreach)
        self._outreach.aim(relay)

    def _welcome_joined(self, outreach: Outreach) -> None:
        for connected in outreach.take():
            self._listener.welcome_outside(connected, self._asks)

    def receive(self) -> Frames | None:
        """Return the next message, or None if there is none now."""
        self._look()
        message, self._message = self._message, None
        return message

    def wait(
        self,
        timeout_s: float,
        *,
        wake: Wake | None = None,
        outgoing: Sequence[PushChannel] = (),
        incoming: bool = True,
    ) -> bool:
        """Wait until a message is there, ``wake`` is set or one of ``outgoing`` can send. Return False on timeout.

        Without ``incoming``, for a caller that would not receive now, a message does not end the wait: one is kept, and
        the rest stays in the kernel.
        """
        if wake is not self._wake or outgoing != self._outgoing:
            self._watch(wake, outgoing)
        give_up_at, left_s = time.monotonic() + timeout_s, timeout_s
        while not (incoming and self._has_message()):
            if outgoing and any(channel.asks_for_room() for channel in outgoing):
                return True
            poll = self._all if self._message is None else self._others
            found = poll.poll(ceil(max(0.0, left_s) * 1000))
            if any(each != self._own for each, _ in found) or (found and self._look() and incoming):
                return True
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return self._look() and incoming
        return True

    def _has_message(self) -> bool:
        """Whether the data read so far contains a message."""
        return self._message is not None or (self._listener.has_more and self._look())

    def _look(self) -> bool:
        """Read what is available until there is a whole message."""
        for _ in range(_AT_ONCE):
            if self._message is not None:
                break
            event = self._listener.take()
            if isinstance(event, Arrived):
                self._message, self._sender, self.sender_key = event.frames, event.peer, event.key
            elif isinstance(event, GateClosed):
                self.num_shut += 1
            elif event is None and not self._poll.turn():
                break
        if (now := time.monotonic()) - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._listener.sweep()
            self._listener.let_in()
        return self._message is not None

    def _watch(self, wake: Wake | None, outgoing: Sequence[PushChannel]) -> None:
        """Set what ends the waits from now on. The poll objects are kept because this rarely changes and every hop
        waits."""
        self._wake, self._outgoing = wake, outgoing
        self._own = self._poll.fileno()
        self._all, self._others = select.poll(), select.poll()
        self._all.register(self._own, select.POLLIN)
        others: list[PushChannel | Wake] = [*outgoing] if wake is None else [*outgoing, wake]
        for each in others:
            self._all.register(each, select.POLLIN)
            self._others.register(each, select.POLLIN)

    def close(self) -> None:
        if self._back is not None:
            self._back.remove()
        if self._outreach is not None:
            self._poll.remove_reader(self._outreach.arrived.fileno())
            self._outreach.close()
        self._listener.close()
        self._poll.close()


def _back_door(key: bytes, port: int) -> tuple[BackDoor | None, str]:
    """Return the Unix socket, or the reason why it can't be opened."""
    try:
        return listen_nearby(key, port), ""
    except ConfigError as error:
        return None, str(error)


def _anybody(_key: str) -> bool:
    return True


def _nothing() -> None:
    """Do nothing: the owner polls, so there is no loop to wake."""
