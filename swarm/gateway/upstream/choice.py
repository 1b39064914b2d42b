"""Which other server takes a request. Pure: the time goes in.

A model that only they have goes to those that have it, in their order. What is meant for ours goes to them when we
can't: ``busy`` takes it when the swarm is full or down, ``down`` when it is down. One that has just failed is
not asked again for a while, unless nobody else is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

AVOID_S = 5.0  # after a failure

Trouble = Literal["busy", "down"]
Outcome = Literal["answered", "failed", "broke_off", "left"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Server:
    """Another server, with its key. ``models``: what it calls those that clients name."""

    name: str
    url: str
    key: str
    models: dict[str, str]
    overflow_model: str
    when: Literal["never", "busy", "down"]
    connect_timeout_s: float = 5.0
    timeout_s: float = 600.0
    quiet_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the model to ask it for."""

    server: Server
    model: str


@dataclass(slots=True)
class Board:
    """Who there is, and how they have done."""

    servers: Sequence[Server]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by server and Outcome
    _failed_at: dict[str, float] = field(default_factory=dict)

    def named(self, model: str, now: float) -> list[Target]:
        """Who has this model."""
        return self._order([Target(s, s.models[model]) for s in self.servers if model in s.models], now)

    def for_ours(self, own: str, trouble: Trouble, now: float) -> list[Target]:
        """Return the servers that take a request for our model, ``own`` by name; "" while the name is unknown. No name
        that a client wrote reaches another server this way: it could be that of its most expensive model."""
        fit = ("busy", "down") if trouble == "down" else ("busy",)
        targets = [Target(s, s.overflow_model or own) for s in self.servers if s.when in fit]
        return self._order([target for target in targets if target.model], now)

    def answered(self, server: Server) -> None:
        self._count(server, "answered")
        self._failed_at.pop(server.name, None)

    def failed(self, server: Server, now: float) -> None:
        self._count(server, "failed")
        self._failed_at[server.name] = now

    def broke_off(self, server: Server, now: float) -> None:
        """Its answer had begun, so nobody else could be asked."""
        self._count(server, "broke_off")
        self._failed_at[server.name] = now

    def left(self, server: Server) -> None:
        """Whoever asked hung up before it had answered, which says nothing of it."""
        self._count(server, "left")

    def _count(self, server: Server, outcome: Outcome) -> None:
        self.counts[server.name, outcome] += 1

    def _order(self, targets: list[Target], now: float) -> list[Target]:
        """Those that failed lately come last."""
        return sorted(targets, key=lambda target: now - self._failed_at.get(target.server.name, -AVOID_S) < AVOID_S)


def trouble_of(status: int) -> Trouble | None:
    """What an answer of ours says about the swarm."""
    return {429: "busy", 503: "down"}.get(status)  # type: ignore[return-value]


def is_failure(status: int) -> bool:
    """Does an answer say that this server can't, rather than that the request is wrong? Its key and its name for the
    model are ours to get right, not the client's."""
    return status in (401, 403, 404, 408, 429) or status >= 500
