"""Processes that wait for a name which another process has, and workers that were refused, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.wire.messages import Hello, Json

MAX_CLAIMS = 64  # processes that wait for a name; a dropped process sends Hello again
MAX_REFUSALS = 16  # names
# seconds between two reports of one name (or of a name beyond ``MAX_REFUSALS``): a service manager may restart it
# forever
REPORT_INTERVAL_S = 60.0


@dataclass(slots=True)
class NameClaim:
    """A process that has sent Hello with a name which another process has."""

    peer: bytes  # routing id of the connection over which it asked last
    hello: Hello
    owner: str  # member whose key authenticated the process; empty on the broker's own machine, where no key is needed
    since: float  # time at which it first asked for the name
    not_at: str = ""  # why other workers may not connect to the address in ``hello``; empty if they may


@dataclass(frozen=True, slots=True)
class RefusedWorker:
    """A refused worker and the reason."""

    number: int  # increases with each report
    name: str
    host: str
    pid: int
    reason: str
    at: float  # time of the report
    num_times: int  # how often this worker was refused until ``at``


@dataclass(slots=True)
class Newcomers:
    """Name claims and refused workers (see the module)."""

    claims: dict[str, NameClaim] = field(default_factory=dict)  # by incarnation, in the order of arrival
    refused: dict[str, RefusedWorker] = field(default_factory=dict)  # by name
    num_unreported: dict[str, int] = field(default_factory=dict)  # name -> refusals since the last report
    num_reported: int = 0  # number of reports so far

    def add_claim(self, claim: NameClaim) -> None:
        """Add a claim. A repeated claim keeps its first time and takes the newest connection."""
        former = self.claims.get(claim.hello.incarnation)
        if former is not None:
            claim.since = former.since
        elif len(self.claims) >= MAX_CLAIMS:
            del self.claims[next(iter(self.claims))]
        self.claims[claim.hello.incarnation] = claim

    def drop_claim(self, incarnation: str) -> None:
        """Drop the claim of a process that has been answered."""
        self.claims.pop(incarnation, None)

    def drop_connection(self, peer: bytes) -> None:
        """Drop the claims of a connection that has closed. A process that still runs asks again over its next one."""
        self.claims = {i: claim for i, claim in self.claims.items() if claim.peer != peer}

    def record_refusal(self, hello: Hello, reason: str, now: float) -> None:
        """Record a refused worker. Repeated refusals are reported only at intervals."""
        former = self.refused.get(hello.name)
        oldest = min(self.refused.values(), key=lambda each: each.at, default=None)
        before = former or (oldest if len(self.refused) >= MAX_REFUSALS else None)
        if before is not None and now - before.at < REPORT_INTERVAL_S:
            if former is not None:
                self.num_unreported[hello.name] = self.num_unreported.get(hello.name, 0) + 1
            return
        if before is not None:
            del self.refused[before.name]
        times = (0 if former is None else former.num_times) + self.num_unreported.pop(hello.name, 0) + 1
        self.num_reported += 1
        self.refused[hello.name] = RefusedWorker(
            self.num_reported, hello.name, hello.host, hello.pid, reason, now, times
        )
        self.num_unreported = {name: count for name, count in self.num_unreported.items() if name in self.refused}

    def shift_deadlines(self, pause_s: float) -> None:
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
                "times": each.num_times,
            }
            for each in self.refused.values()
        ]
