"""Pending requests for more workers: answered when the workers have joined, or clearly never will."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

JOIN_TIMEOUT_S = 100.0  # slightly shorter than the requester's own limit

JoinOutcome = tuple[int, tuple[str, ...], str]  # ticket, workers that have joined, the errors of the others


@dataclass(slots=True)
class _JoinRequest:
    ticket: int
    names: tuple[str, ...]
    due: float  # time at which it is answered in any case
    waiting: set[str]  # workers that have neither joined nor failed
    failed: dict[str, str] = field(default_factory=dict)  # reason by name

    def fail(self, name: str, reason: str) -> None:
        if name in self.waiting:
            self.waiting.discard(name)
            self.failed[name] = reason

    def outcome(self) -> JoinOutcome:
        joined = tuple(name for name in self.names if name not in self.failed)
        return self.ticket, joined, "; ".join(f"{name} {reason}" for name, reason in self.failed.items())


class JoinRequests:
    """All pending requests. Every method returns the answers that have become due, each once."""

    def __init__(self) -> None:
        self._pending: dict[int, _JoinRequest] = {}

    def add(self, ticket: int, names: tuple[str, ...], now: float) -> None:
        self._pending[ticket] = _JoinRequest(ticket, names, now + JOIN_TIMEOUT_S, set(names))

    def record_joined(self, names: Iterable[str]) -> Iterator[JoinOutcome]:
        """Record that these workers have joined."""
        for pending in self._pending.values():
            pending.waiting.difference_update(names)
        yield from self._pop_settled()

    def record_gone(self, name: str, reason: str) -> Iterator[JoinOutcome]:
        """Record that this worker ended and will not be restarted."""
        for pending in self._pending.values():
            pending.fail(name, reason)
        yield from self._pop_settled()

    def next_due(self) -> float | None:
        return min((pending.due for pending in self._pending.values()), default=None)

    def tick(self, now: float) -> Iterator[JoinOutcome]:
        for pending in self._pending.values():
            for name in pending.names if now >= pending.due else ():
                pending.fail(name, "has not joined yet: see its log")
        yield from self._pop_settled()

    def stop(self) -> Iterator[JoinOutcome]:
        """Answer all requests: no more workers will join."""
        for pending in self._pending.values():
            for name in pending.names:
                pending.fail(name, "is being stopped: this swarm up is stopping")
        yield from self._pop_settled()

    def _pop_settled(self) -> Iterator[JoinOutcome]:
        for ticket in [t for t, pending in self._pending.items() if not pending.waiting]:
            yield self._pending.pop(ticket).outcome()
