"""Receiver's client of a relay: opens connections to the relay and waits there until a sender is joined
(``rendezvous``). From then on they are handled like accepted connections.

A thread keeps one connection waiting at the relay.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections import deque
from typing import Final

from swarm.errors import ConfigError
from swarm.wire.transport.connect import LONGEST_PAUSE_S, PAUSE_S, connect_any, parse_endpoint, wait_for_any
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.keys import split_ticket
from swarm.wire.transport.relay.relay import KEEPALIVE_S
from swarm.wire.transport.relay.rendezvous import JOINED, Side, encode_preamble, is_ticket

_MAX_JOINED: Final = 8  # Joined connections that the listener has not taken yet; further ones are closed.
_CLOSE_S: Final = 1.0


class RelayReceiver:
    """Receiver's client of a relay, for one owning thread, which calls ``take_joined`` when ``ready`` is set."""

    def __init__(self) -> None:
        self.ready = WakeupFd()
        self._wake = WakeupFd()  # Wakes the background thread.
        self._joined_sockets: deque[socket.socket] = deque()  # Joined connections for the owner.
        self._relay = ""  # Address of the relay with the ticket; empty: none.
        self._is_over = False
        self._thread: threading.Thread | None = None

    def wait_at(self, relay: str) -> None:
        """Wait at ``tcp://HOST:PORT/TICKET`` from now on; empty: stop. Raises ConfigError for an invalid address."""
        if relay:
            _parse_relay(relay)
        if relay == self._relay:
            return
        self._relay = relay
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outreach", daemon=True)
            self._thread.start()

    def take_joined(self) -> list[socket.socket]:
        """Return the connections joined since the last call."""
        self.ready.clear()
        taken = []
        while self._joined_sockets:
            taken.append(self._joined_sockets.popleft())
        return taken

    def close(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        for each in self.take_joined():
            each.close()
        if self._thread is None or not self._thread.is_alive():
            self._wake.close()
            self.ready.close()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._is_over:
            self._wake.clear()
            relay = self._relay
            if self._is_over:
                return
            if not relay:
                wait_for_any(None, self._wake)
                continue
            try:
                self._hand_over(self._wait_for_sender(relay))
                pause_s = PAUSE_S
            except OSError:
                if relay == self._relay and not self._is_over:
                    wait_for_any(time.monotonic() + pause_s, self._wake)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _wait_for_sender(self, relay: str) -> socket.socket:
        """Connect and wait until a sender is joined. Raises OSError."""
        place, ticket = _parse_relay(relay)
        sock = connect_any(place, self._wait_for_event)
        try:
            if (option := getattr(socket, "TCP_KEEPIDLE", None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
            sock.send(encode_preamble(Side.RECEIVER, ticket))
            self._wait_for_event(sock, select.POLLIN, None)
            if sock.recv(len(JOINED)) != JOINED:
                raise ConnectionResetError(errno.ECONNRESET, "disconnected")
        except OSError:
            sock.close()
            raise
        return sock

    def _wait_for_event(self, sock: socket.socket, event: int, give_up_at: float | None) -> None:
        news = wait_for_any(give_up_at, self._wake, (sock, event))
        if sock.fileno() not in news:
            raise TimeoutError(errno.ETIMEDOUT, "no answer, or cancelled")

    def _hand_over(self, joined: socket.socket) -> None:
        if len(self._joined_sockets) >= _MAX_JOINED:
            joined.close()
            raise BlockingIOError(errno.EAGAIN, "the listener does not take connections")
        self._joined_sockets.append(joined)
        self.ready.set()


def _parse_relay(relay: str) -> tuple[tuple[str, int], str]:
    address, ticket = split_ticket(relay)
    if not is_ticket(ticket):
        raise ConfigError(
            f"{relay!r} is no relay's address like tcp://192.0.2.1:5704/TICKET, with 32 digits (0-9, a-f)"
        )
    return parse_endpoint(address), ticket
