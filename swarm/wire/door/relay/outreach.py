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
from swarm.wire.door.dialing import LONGEST_PAUSE_S, PAUSE_S, dialled, place_of, wait_for
from swarm.wire.door.keys import without_ticket
from swarm.wire.door.relay.passing import KEEPALIVE_S
from swarm.wire.door.relay.rendezvous import JOINED, Side, is_ticket, preamble
from swarm.wire.door.watch import Wake

_MOST_HANDED: Final = 8  # Joined connections that the listener has not taken yet; further ones are closed.
_CLOSE_S: Final = 1.0


class Outreach:
    """Receiver's client of a relay, for one owning thread, which calls ``take_joined`` when ``ready`` is set."""

    def __init__(self) -> None:
        self.arrived = Wake()
        self._wake = Wake()  # Wakes the background thread.
        self._handed: deque[socket.socket] = deque()  # Joined connections for the owner.
        self._wanted = ""  # Address of the relay with the ticket; empty: none.
        self._is_over = False
        self._thread: threading.Thread | None = None

    def aim(self, relay: str) -> None:
        """Wait at ``tcp://HOST:PORT/TICKET`` from now on; empty: stop. Raises ConfigError for an invalid address."""
        if relay:
            _parsed(relay)
        if relay == self._wanted:
            return
        self._wanted = relay
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outreach", daemon=True)
            self._thread.start()

    def take(self) -> list[socket.socket]:
        """Return the connections joined since the last call."""
        self.arrived.clear()
        taken = []
        while self._handed:
            taken.append(self._handed.popleft())
        return taken

    def close(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        for each in self.take():
            each.close()
        if self._thread is None or not self._thread.is_alive():
            self._wake.close()
            self.arrived.close()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._is_over:
            self._wake.clear()
            relay = self._wanted
            if self._is_over:
                return
            if not relay:
                wait_for(None, self._wake)
                continue
            try:
                self._hand_over(self._joined(relay))
                pause_s = PAUSE_S
            except OSError:
                if relay == self._wanted and not self._is_over:
                    wait_for(time.monotonic() + pause_s, self._wake)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _joined(self, relay: str) -> socket.socket:
        """Connect and wait until a sender is joined. Raises OSError."""
        place, ticket = _parsed(relay)
        made = dialled(place, self._await)
        try:
            if (option := getattr(socket, "TCP_KEEPIDLE", None)) is not None:
                made.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
            made.send(preamble(Side.WAITS, ticket))
            self._await(made, select.POLLIN, None)
            if made.recv(len(JOINED)) != JOINED:
                raise ConnectionResetError(errno.ECONNRESET, "disconnected")
        except OSError:
            made.close()
            raise
        return made

    def _await(self, made: socket.socket, event: int, give_up_at: float | None) -> None:
        news = wait_for(give_up_at, self._wake, (made, event))
        if made.fileno() not in news:
            raise TimeoutError(errno.ETIMEDOUT, "no answer, or cancelled")

    def _hand_over(self, joined: socket.socket) -> None:
        if len(self._handed) >= _MOST_HANDED:
            joined.close()
            raise BlockingIOError(errno.EAGAIN, "the listener does not take connections")
        self._handed.append(joined)
        self.arrived.set()


def _parsed(relay: str) -> tuple[tuple[str, int], str]:
    address, ticket = without_ticket(relay)
    if not is_ticket(ticket):
        raise ConfigError(
            f"{relay!r} is no relay's address like tcp://192.0.2.1:5704/TICKET, with 32 digits (0-9, a-f)"
        )
    return place_of(address), ticket
