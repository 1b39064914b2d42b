"""Copies of keys and values for a change of plan: which layers change hands, and until when the change waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.broker.state.kv_copies import CopyRoute


@dataclass(slots=True)
class MigrationState:
    """Progress of the copies for a change of plan; without ``routes`` there is nothing to copy."""

    routes: tuple[CopyRoute, ...] = ()  # from the present holders of moved layers to the next ones
    can_pause: bool = False  # the change waits for the steps in flight to end
    began_at: float = 0.0
    num_bytes: int = 0  # what has to be copied
    wait_until: float = 0.0  # time from which on the change waits no longer for copies
    # by receiver: how many positions each sequence was behind when it last reported
    behind: dict[str, dict[int, int]] = field(default_factory=dict)
    grown_at: dict[str, float] = field(default_factory=dict)  # by receiver: time at which its copies last grew
    stopped_at: float = 0.0  # time at which dispatching stopped
    drain_until: float = 0.0  # how long to wait for the steps that were in flight then
    tail: dict[int, int] = field(default_factory=dict)  # sequence -> exact position that its copies must reach
    incomplete: set[str] = field(default_factory=set)  # receivers whose copies have not reached it
    tail_until: float | None = None  # how long to wait for them; None: steps are still in flight

    @property
    def holders(self) -> list[str]:
        """Receivers of copies, each once."""
        return list(dict.fromkeys(route.holder for route in self.routes))

    def routes_to(self, holder: str) -> list[CopyRoute]:
        return [route for route in self.routes if route.holder == holder]

    def begin(self, routes: Iterable[CopyRoute], now: float, *, can_pause: bool) -> None:
        """Start copying these layers."""
        self.end()
        self.routes, self.can_pause, self.began_at = tuple(routes), can_pause, now
        self.behind, self.grown_at = {}, dict.fromkeys(self.holders, now)

    def set_wait(self, num_bytes: int, until: float) -> None:
        """Set how long the change waits for copies of this size."""
        self.num_bytes, self.wait_until = num_bytes, until

    def record_report(self, holder: str, behind: Mapping[int, int], *, has_grown: bool, now: float) -> None:
        """Record how far the copies of a receiver are."""
        self.behind[holder] = dict(behind)
        if has_grown:
            self.record_order(holder, now)

    def record_order(self, holder: str, now: float) -> None:
        """Restart the time for which copies may make no progress."""
        self.grown_at[holder] = now

    def drop_holder(self, holder: str) -> None:
        """Copy nothing to this worker any more."""
        self.routes = tuple(route for route in self.routes if route.holder != holder)
        self.incomplete.discard(holder)

    def stop_dispatching(self, now: float, drain_until: float) -> None:
        """Note that no step is dispatched any more, and how long to wait for those in flight."""
        self.stopped_at, self.drain_until = now, drain_until

    def await_tail(self, tail: Mapping[int, int], until: float) -> None:
        """Wait until all receivers hold these exact positions."""
        self.tail, self.tail_until = dict(tail), until
        self.incomplete = set(self.holders) if tail else set()

    def complete(self, holder: str) -> None:
        """Note that a receiver holds the exact positions."""
        self.incomplete.discard(holder)

    def end(self) -> None:
        """Stop copying."""
        self.routes, self.tail, self.tail_until = (), {}, None
        self.incomplete.clear()

    def shift_deadlines(self, pause_s: float) -> None:
        """Move the deadlines by a pause of the broker, during which no report was read."""
        self.began_at += pause_s
        self.wait_until += pause_s
        self.drain_until += pause_s
        self.grown_at = {holder: since + pause_s for holder, since in self.grown_at.items()}
        if self.tail_until is not None:
            self.tail_until += pause_s
