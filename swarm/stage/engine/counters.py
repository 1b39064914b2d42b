"""Totals of an executor's work since it started."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from swarm.stage.executor import Batch


@dataclass(slots=True)
class ExecutorCounters:
    """Totals of an executor's work. The compute thread writes them; a reader on another thread may lag by one step."""

    forwards: int = 0  # passes that were completed
    rows: int = 0
    tokens: int = 0
    samples: int = 0  # draws that were requested, one per row
    fenced: int = 0  # passes that a newer epoch stopped
    compute_s: float = 0.0  # including copies to the host
    sample_s: float = 0.0

    def add_pass(self, batch: Batch, compute_s: float, sample_s: float) -> None:
        self.forwards += 1
        self.rows += len(batch.rows)
        self.tokens += len(batch.tokens)
        self.samples += len(batch.samples)
        self.compute_s += compute_s
        self.sample_s += sample_s

    def values(self) -> dict[str, float]:
        return asdict(self)
