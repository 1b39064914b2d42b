"""What an executor has computed so far, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from swarm.stage.executor import Batch


@dataclass(slots=True)
class Counters:
    """Written by the thread that computes; whoever reads may be a step behind."""

    forwards: int = 0
    rows: int = 0
    tokens: int = 0
    samples: int = 0
    fenced: int = 0
    compute_s: float = 0.0
    sample_s: float = 0.0

    def computed(self, batch: Batch, compute_s: float, sample_s: float) -> None:
        self.forwards += 1
        self.rows += len(batch.rows)
        self.tokens += len(batch.tokens)
        self.samples += len(batch.samples)
        self.compute_s += compute_s
        self.sample_s += sample_s

    def values(self) -> dict[str, float]:
        return asdict(self)
