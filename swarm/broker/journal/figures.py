"""What writing the journal takes, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.series import Series


@dataclass(slots=True)
class Figures:
    """What the thread did. ``durable``: transactions that were synced; ``computed_s``: its
    processor time in all, without what it waited for the disk or for its turn."""

    transactions: Series = field(default_factory=Series)
    durable: Series = field(default_factory=Series)
    writes: int = 0
    failures: int = 0
    renewals: int = 0
    num_bytes: int = 0
    computed_s: float = 0.0

    def values(self) -> dict[str, float]:
        num = self.transactions.num + self.durable.num
        return {
            "transactions": num,
            "computed_us": round(self.computed_s / max(1, num) * 1e6, 1),
            "writes": self.writes,
            "transaction_us": round(self.transactions.average * 1e6, 1),
            "durable_us": round(self.durable.average * 1e6, 1),
            "longest_us": round(max(self.transactions.most, self.durable.most) * 1e6, 1),
            "failures": self.failures,
            "renewals": self.renewals,
            "bytes": self.num_bytes,
        }
