"""Connection state of a client's broker: whether it is connected, and when its last message came.

Plain state without I/O. The session reports connection events and messages; it asks whether a request or question has
waited too long, and for the error that says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import Unavailable

QUIET_S = 5.0  # seconds without a message after which a broker that owes us an answer is probed
# Longest wait of a request that the broker has not answered yet. Its caller can still go to another server, whereas the
# broker is responsible for an answered request.
UNANSWERED_S = 30.0


@dataclass(slots=True)
class ConnectionState:
    """Connection state of one client's broker.

    ``reconnect_timeout_s``: how long an answered request waits for a broker that is disconnected or silent. ``url`` is
    used only in error messages.
    """

    url: str
    connect_timeout_s: float
    reconnect_timeout_s: float
    is_connected: bool = False  # greeting complete, connection up
    _has_ever_received: bool = False  # a broker has sent at least one message to this client
    _is_tcp_connected: bool = False  # a TCP connection was accepted there
    _has_handshake_failed: bool = False  # the last attempt was closed during the security handshake
    _incompatibility: str = ""  # why the connected broker is incompatible; "" if it is not
    _lost_at: float | None = None  # time at which the connection was lost; None before the first one
    _last_message_at: float = 0.0  # time of the broker's last message, or when waiting for one began
    _probed_at: float = 0.0  # time of the last probe
    _is_overdue: bool = False  # exceeded its time limit; late answers may still come when it continues

    def on_message(self, now: float) -> None:
        """Record that a message of any kind came from the broker."""
        self._last_message_at, self._has_ever_received, self._is_overdue = now, True, False

    def start_waiting(self, now: float) -> None:
        """Measure silence from now on: an idle connection's silence means nothing. A broker that has exceeded its time
        limit stays marked until its next message."""
        if not self._is_overdue:
            self._last_message_at = self._probed_at = now

    def on_tcp_connected(self) -> None:
        self._is_tcp_connected, self._has_handshake_failed = True, False

    def on_handshake_failed(self) -> None:
        self._has_handshake_failed = True

    def on_connected(self, now: float) -> None:
        self.is_connected, self._last_message_at, self._probed_at, self._is_overdue = True, now, now, False

    def mark_incompatible(self, reason: str) -> Unavailable:
        """Mark the connected broker as incompatible and return the error. The mark stays until the connection breaks,
        since another broker may answer then."""
        self._incompatibility = f"the broker at {self.url} can't be used: {reason}"
        return Unavailable(self._incompatibility)

    def check_compatible(self) -> None:
        """Raise Unavailable if the connected broker is incompatible."""
        if self._incompatibility:
            raise Unavailable(self._incompatibility)

    def on_disconnected(self, now: float) -> None:
        self._is_tcp_connected, self._incompatibility = False, ""
        if self.is_connected:
            self.is_connected, self._lost_at = False, now

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Shift the start of all measured waits by a pause of this process."""
        self._last_message_at = min(now, self._last_message_at + pause_s)
        if self._lost_at is not None:
            self._lost_at = min(now, self._lost_at + pause_s)

    def _reconnect_limit_s(self, *, is_answered: bool) -> float:
        """Return how long a request waits for a broker that was connected before."""
        return self.reconnect_timeout_s if is_answered else min(self.reconnect_timeout_s, UNANSWERED_S)

    def silence_error(self, now: float, *, is_answered: bool) -> Unavailable | None:
        """Return the error for waiting requests if a connected broker has been silent for too long; None otherwise."""
        limit_s = (
            self._reconnect_limit_s(is_answered=is_answered) if self._has_ever_received else self.connect_timeout_s
        )
        if now < self._last_message_at + limit_s:
            return None
        self._is_overdue = True
        if self._has_ever_received:
            return Unavailable(f"the broker at {self.url} has sent nothing for {limit_s:g} s")
        return Unavailable(f"something listens at {self.url}, but it does not answer like a broker")

    def is_silent(self, now: float) -> bool:
        """Whether the broker has left a probe unanswered. It will answer everything it received when it continues."""
        return now >= self._last_message_at + 2 * QUIET_S

    def probe_if_due(self, now: float) -> bool:
        """Return whether it is time to probe the broker, and if so record the probe. Each unanswered probe doubles the
        wait for the next one."""
        limit_s = self._reconnect_limit_s(is_answered=False) if self._has_ever_received else self.connect_timeout_s
        wait_s = max(min(QUIET_S, limit_s / 2), self._probed_at - self._last_message_at)
        if now < max(self._last_message_at, self._probed_at) + wait_s:
            return False
        self._probed_at = now
        return True

    def has_waited_enough(self, started: float, now: float, *, is_answered: bool) -> bool:
        """Whether a wait that began at ``started`` has reached its limit. A wait that began before the connection was
        lost lasts until the reconnect limit, any other until the limit of a first connection."""
        if self._lost_at is not None and started <= self._lost_at:
            return now >= self._lost_at + self._reconnect_limit_s(is_answered=is_answered)
        return now >= started + self.connect_timeout_s

    @property
    def absence_error(self) -> Unavailable:
        """The error that explains why there is no connection."""
        if self._has_handshake_failed:
            return Unavailable(
                f"the server at {self.url} closes the connection during the security handshake: if its key has changed "
                "since this machine joined, ask there for an invitation (swarmctl invite), and pass it with --join; or "
                "it is not a broker (but a gateway, for example)"
            )
        if self._lost_at is not None:
            return Unavailable(f"the broker at {self.url} went away and has not come back")
        if self._is_tcp_connected:
            return Unavailable(f"something listens at {self.url}, but it does not answer like a broker")
        return Unavailable(f"no broker answers at {self.url}: is `swarm up` running there?")
