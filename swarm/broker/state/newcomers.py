"""Newcomers: who waits for a name that another process has, and who was sent away, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import Hello, Json

MAX_CLAIMS = 64  # processes that wait for a name; who is forgotten says Hello again
MAX_REFUSALS = 16  # names
TELL_AGAIN_S = 60.0  # of one name, or of one more than ``MAX_REFUSALS``: somebody may start it again and again


@dataclass(slots=True)
class Claim:
    """A process that has said Hello. ``since``: when it asked first for a name which another one has. ``owner``,
    ``not_at``: see ``WorkerSaid``."""

    peer: bytes
    hello: Hello
    owner: str
    since: float
    not_at: str = ""


@dataclass(frozen=True, slots=True)
class SentAway:
    """Who was sent away, and why. ``number`` grows with each one that is told; ``times``: how often it was so, until
    ``at``."""

    number: int
    name: str
    host: str
    pid: int
    reason: str
    at: float
    times: int


@dataclass(slots=True)
class Newcomers:
    """See the module's text."""

    claims: dict[str, Claim] = field(default_factory=dict)  # by incarnation, in the order in which they came
    refusals: dict[str, SentAway] = field(default_factory=dict)  # by name
    untold: dict[str, int] = field(default_factory=dict)  # by name: how often since that was told
    num_told: int = 0

    def wait(self, claim: Claim) -> None:
        """Let it wait: since it asked first, over the connection by which it asked last."""
        known = self.claims.get(claim.hello.incarnation)
        if known is not None:
            claim.since = known.since
        elif len(self.claims) >= MAX_CLAIMS:
            del self.claims[next(iter(self.claims))]
        self.claims[claim.hello.incarnation] = claim

    def answered(self, incarnation: str) -> None:
        """Forget the claim of a process that has been answered: it waits no longer."""
        self.claims.pop(incarnation, None)

    def gone(self, peer: bytes) -> None:
        """Forget claims over a connection that closed: who lives asks again over the next one."""
        self.claims = {i: claim for i, claim in self.claims.items() if claim.peer != peer}

    def refuse(self, hello: Hello, reason: str, now: float) -> None:
        """Note that it was sent away: to be told now and then, however often that happens."""
        known = self.refusals.get(hello.name)
        oldest = min(self.refusals.values(), key=lambda each: each.at, default=None)
        before = known or (oldest if len(self.refusals) >= MAX_REFUSALS else None)
        if before is not None and now - before.at < TELL_AGAIN_S:
            if known is not None:
                self.untold[hello.name] = self.untold.get(hello.name, 0) + 1
            return
        if before is not None:
            del self.refusals[before.name]
        times = (0 if known is None else known.times) + self.untold.pop(hello.name, 0) + 1
        self.num_told += 1
        self.refusals[hello.name] = SentAway(self.num_told, hello.name, hello.host, hello.pid, reason, now, times)
        self.untold = {name: count for name, count in self.untold.items() if name in self.refusals}

    def forgive(self, pause_s: float) -> None:
        """The broker stood still: whose beats were not heard meanwhile has so much more time."""
        for claim in self.claims.values():
            claim.since += pause_s

    def report(self, now: float) -> list[Json]:
        """Tell who was sent away, the latest last."""
        return [
            {
                "number": each.number,
                "name": each.name,
                "host": each.host,
                "pid": each.pid,
                "reason": each.reason,
                "ago_s": round(now - each.at, 1),
                "times": each.times,
            }
            for each in self.refusals.values()
        ]
