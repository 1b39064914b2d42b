"""Upstream pool: chooses the server that takes a request. Pure: the time is passed in.

A request for a model that only other servers have is sent to those servers, in their order. A request for the swarm's
own model is sent to them when the swarm cannot answer: to servers with ``busy`` when the swarm is full or down, to
servers with ``down`` when it is down. A server that has just failed is tried last for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

AVOID_S = 5.0  # seconds after a failure

OverflowReason = Literal["busy", "down"]
Outcome = Literal["answered", "failed", "broke_off", "left"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class UpstreamServer:
    """Another server, with its key. ``models``: its names for the models, by the names that clients use."""

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
class UpstreamTarget:
    """A server, and the name of the model to request from it."""

    server: UpstreamServer
    model: str


@dataclass(slots=True)
class UpstreamPool:
    """The configured servers, and their recent failures."""

    servers: Sequence[UpstreamServer]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by server and outcome
    _failed_at: dict[str, float] = field(default_factory=dict)

    def targets_for(self, model: str, now: float) -> list[UpstreamTarget]:
        """Return the servers that have this model."""
        return self._order([UpstreamTarget(s, s.models[model]) for s in self.servers if model in s.models], now)

    def overflow_targets(self, own_model: str, reason: OverflowReason, now: float) -> list[UpstreamTarget]:
        """Return the servers that take a request for our model. ``own_model``: its name, or "" while it is unknown. A
        model name from a client is never sent to another server this way: it could be that of its most expensive model.
        """
        fit = ("busy", "down") if reason == "down" else ("busy",)
        targets = [UpstreamTarget(s, s.overflow_model or own_model) for s in self.servers if s.when in fit]
        return self._order([target for target in targets if target.model], now)

    def record_answered(self, server: UpstreamServer) -> None:
        self._count(server, "answered")
        self._failed_at.pop(server.name, None)

    def record_failed(self, server: UpstreamServer, now: float) -> None:
        self._count(server, "failed")
        self._failed_at[server.name] = now

    def record_broke_off(self, server: UpstreamServer, now: float) -> None:
        """Record that an answer broke off after it had begun, so that no other server could be tried."""
        self._count(server, "broke_off")
        self._failed_at[server.name] = now

    def record_client_left(self, server: UpstreamServer) -> None:
        """Record that the client disconnected before the server answered, which is no failure of the server."""
        self._count(server, "left")

    def _count(self, server: UpstreamServer, outcome: Outcome) -> None:
        self.counts[server.name, outcome] += 1

    def _order(self, targets: list[UpstreamTarget], now: float) -> list[UpstreamTarget]:
        """Put servers that failed recently last."""
        return sorted(targets, key=lambda target: now - self._failed_at.get(target.server.name, -AVOID_S) < AVOID_S)


def overflow_reason(status: int) -> OverflowReason | None:
    """Return the state of our swarm that a status of ours implies; None if it is neither full nor down."""
    return {429: "busy", 503: "down"}.get(status)  # type: ignore[return-value]


def is_failure(status: int) -> bool:
    """Whether a status means that this server cannot answer, rather than that the request is wrong. Its key and its
    model names are the gateway's configuration, not the client's."""
    return status in (401, 403, 404, 408, 429) or status >= 500
