"""Processes that wait for a name which another process has, and workers that were refused, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import Hello, Json

MAX_CLAIMS = 64  # processes that wait for a name; one that is dropped sends Hello again
MAX_REFUSALS = 16  # names
# seconds between two reports of one name (or of a name beyond ``MAX_REFUSALS``): a service manager may restart it
# forever
TELL_AGAIN_S = 60.0


@dataclass(slots=True)
class Claim:
    """A process that has sent Hello with a name which another process has."""

    peer: bytes  # routing id of the connection over which it asked last
    hello: Hello
    owner: str  # member whose key it used; see ``WorkerMessageReceived``
    since: float  # time at which it first asked for the name
    not_at: str = ""  # see ``WorkerMessageReceived``


@dataclass(frozen=True, slots=True)
class SentAway:
    """A refused worker and the reason."""

    number: int  # increases with each report
    name: str
    host: str
    pid: int
    reason: str
    at: float  # time of the report
    times: int  # how often this worker was refused until ``at``


@dataclass(slots=True)
class Newcomers:
    """Name claims and refused workers (see the module)."""

    claims: dict[str, Claim] = field(default_factory=dict)  # by incarnation, in the order of arrival
    refusals: dict[str, SentAway] = field(default_factory=dict)  # by name
    untold: dict[str, int] = field(default_factory=dict)  # name -> refusals since the last report
    num_told: int = 0  # number of reports so far

    def wait(self, claim: Claim) -> None:
        """Add a claim. A repeated claim keeps its first time and takes the newest connection."""
        known = self.claims.get(claim.hello.incarnation)
        if known is not None:
            claim.since = known.since
        elif len(self.claims) >= MAX_CLAIMS:
            del self.claims[next(iter(self.claims))]
        self.claims[claim.hello.incarnation] = claim

    def answered(self, incarnation: str) -> None:
        """Drop the claim of a process that has been answered."""
        self.claims.pop(incarnation, None)

    def gone(self, peer: bytes) -> None:
        """Drop the claims of a connection that has closed. A process that still runs asks again over its next one."""
        self.claims = {i: claim for i, claim in self.claims.items() if claim.peer != peer}

    def refuse(self, hello: Hello, reason: str, now: float) -> None:
        """Record a refused worker. It is reported at intervals, however often that happens."""
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
        """Give the current holders of the claimed names more time: their heartbeats were not received during a pause of
        the broker."""
        for claim in self.claims.values():
            claim.since += pause_s

    def report(self, now: float) -> list[Json]:
        """Return the refused workers, the latest last."""
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
