"""What a client knows of the broker at its address: whether it is there, and when it was last heard. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import Unavailable

QUIET_S = 5.0  # a broker with work for us that says nothing for this long is asked for a sign of life
# How long a request waits that the broker has not answered yet, at most. Its caller can still go elsewhere, while one
# that was answered is in the broker's hands.
UNANSWERED_S = 30.0


@dataclass(slots=True)
class Contact:
    """One client's contact with one broker. ``reconnect_timeout_s``: how long an answered request waits for a broker
    that is gone or silent. ``url`` is only for the texts of errors."""

    url: str
    connect_timeout_s: float
    reconnect_timeout_s: float
    connected: bool = False
    _ever_heard: bool = False
    _reached: bool = False  # somebody listens there
    _unheard: bool = False  # who listens there hung up while we knocked, last
    _stranger: str = ""  # why the broker that is there can't be talked to
    _lost_at: float | None = None  # since when the connection is gone; None before the first one
    _heard_at: float = 0.0  # the last word of the broker, or when we began to wait for one
    _probed_at: float = 0.0
    _is_mute: bool = False  # it owed us a word for too long; its answers will come when it goes on

    def heard(self, now: float) -> None:
        """Note a word of the broker, whatever it says."""
        self._heard_at, self._ever_heard, self._is_mute = now, True, False

    def wake(self, now: float) -> None:
        """Measure silence from here on: that of an idle connection says nothing about the broker. A broker that is mute
        stays so until it says something."""
        if not self._is_mute:
            self._heard_at = self._probed_at = now

    def reach(self) -> None:
        self._reached, self._unheard = True, False

    def hang_up(self) -> None:
        self._unheard = True

    def connect(self, now: float) -> None:
        self.connected, self._heard_at, self._probed_at, self._is_mute = True, now, now, False

    def estrange(self, reason: str) -> Unavailable:
        """Talk to this broker no more. It stays so until the connection breaks: then there may be another one."""
        self._stranger = f"the broker at {self.url} can't be talked to: {reason}"
        return Unavailable(self._stranger)

    def refuse_strangers(self) -> None:
        """Raise Unavailable if the broker that is there can't be talked to."""
        if self._stranger:
            raise Unavailable(self._stranger)

    def disconnect(self, now: float) -> None:
        self._reached, self._stranger = False, ""
        if self.connected:
            self.connected, self._lost_at = False, now

    def forgive(self, pause_s: float, now: float) -> None:
        """Let what is measured begin later by a pause of this process."""
        self._heard_at = min(now, self._heard_at + pause_s)
        if self._lost_at is not None:
            self._lost_at = min(now, self._lost_at + pause_s)

    def _patience_s(self, *, is_answered: bool) -> float:
        """Return how long a request waits for a broker that was there."""
        return self.reconnect_timeout_s if is_answered else min(self.reconnect_timeout_s, UNANSWERED_S)

    def silent_too_long(self, now: float, *, is_answered: bool) -> Unavailable | None:
        """Return the error for what waits, if a connected broker has said nothing for too long."""
        limit_s = self._patience_s(is_answered=is_answered) if self._ever_heard else self.connect_timeout_s
        if now < self._heard_at + limit_s:
            return None
        self._is_mute = True
        if self._ever_heard:
            return Unavailable(f"the broker at {self.url} has said nothing for {limit_s:g} s")
        return Unavailable(f"something listens at {self.url}, but it does not answer like a broker")

    def is_silent(self, now: float) -> bool:
        """Whether the broker was asked for a sign of life and gave none. It answers all it gets when it goes on."""
        return now >= self._heard_at + 2 * QUIET_S

    def probes(self, now: float) -> bool:
        """Whether it is time to ask the broker for a sign of life. Counts as asked then. Each time without an answer
        doubles the wait for the next one."""
        limit_s = self._patience_s(is_answered=False) if self._ever_heard else self.connect_timeout_s
        wait_s = max(min(QUIET_S, limit_s / 2), self._probed_at - self._heard_at)
        if now < max(self._heard_at, self._probed_at) + wait_s:
            return False
        self._probed_at = now
        return True

    def waited_enough(self, started: float, now: float, *, is_answered: bool) -> bool:
        """Has this waited enough? Until the connection is back if there was one at its start, else for a first one."""
        if self._lost_at is not None and started <= self._lost_at:
            return now >= self._lost_at + self._patience_s(is_answered=is_answered)
        return now >= started + self.connect_timeout_s

    @property
    def absence(self) -> Unavailable:
        """Say why there is no connection."""
        if self._unheard:
            return Unavailable(
                f"who listens at {self.url} hangs up while this machine knocks: it may have another key by now than is "
                "known here, then ask there for an invitation (swarmctl invite), and give it with --join; or it is no "
                "broker (a gateway, say)"
            )
        if self._lost_at is not None:
            return Unavailable(f"the broker at {self.url} went away and has not come back")
        if self._reached:
            return Unavailable(f"something listens at {self.url}, but it does not answer like a broker")
        return Unavailable(f"no broker answers at {self.url}: is `swarm up` running there?")
