"""Vectors of the last stage, for requests that ask for one instead of tokens.

A mean adds the outputs of a sequence's positions one by one, in their order and in float64, so that its bits do not
depend on how the prompt was cut into rows. The sum between two rows is kept here. It begins with position 0; the broker
never lets such a sequence resume elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.errors import IllegalMove
from swarm.stage.executor import Batch, VectorJob
from swarm.wire.messages import Failure, SequenceVector


@dataclass(slots=True)
class _Sum:
    position: int  # positions added so far
    total: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchVectors:
    """Vectors of one step."""

    vectors: tuple[SequenceVector, ...] = ()
    failed: tuple[Failure, ...] = ()  # sequences with numbers that are not finite


@dataclass(slots=True)
class VectorPool:
    """Computes a step's vectors, and keeps the sums of unfinished means by sequence."""

    sums: dict[int, _Sum] = field(default_factory=dict)

    def compute(
        self, batch: Batch, scores: torch.Tensor | None, pooled: Sequence[torch.Tensor], dtype: str
    ) -> BatchVectors:
        """Compute the jobs of a batch. ``scores``: the head's result for the jobs that need it, in their order;
        ``pooled``: the normed rows of the other jobs."""
        outputs = torch.cat(list(pooled)).to("cpu", torch.float32).numpy() if pooled else np.empty((0, 0), np.float32)
        heads = None if scores is None else scores.to("cpu", torch.float32).numpy()
        vectors: list[SequenceVector] = []
        failed: list[Failure] = []
        num_pooled = num_scores = 0
        for job in batch.vectors:
            row = batch.rows[job.row]
            vector: NDArray[np.float32] | None = None
            if job.kind == "mean":
                vector = self._add(job, batch, outputs[num_pooled : num_pooled + row.count])
                num_pooled += row.count
            elif job.is_end and job.kind == "last":
                vector = outputs[num_pooled]
                num_pooled += 1
            elif job.is_end:
                assert heads is not None, "the stage returns a row for each job"
                vector = heads[num_scores]
                num_scores += 1
            if vector is None:
                continue
            if np.isfinite(vector).all():
                position = row.start + row.count
                vectors.append(SequenceVector(row.sequence, position, vector.astype("<f4").tobytes()))
            else:
                reason = f"the model gave a vector with numbers that are not finite; its weights, or {dtype}, are unfit"
                failed.append(Failure(row.sequence, reason))
        return BatchVectors(tuple(vectors), tuple(failed))

    def _add(self, job: VectorJob, batch: Batch, outputs: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Add a row to its sequence's sum; return the mean after the last row."""
        row = batch.rows[job.row]
        if row.start == 0:
            self.sums[row.sequence] = _Sum(0, np.zeros(outputs.shape[1], np.float64))
        held = self.sums.get(row.sequence)
        if held is None or held.position != row.start:
            raise IllegalMove(f"sequence {row.sequence} goes on at {row.start}, but its sum is not there")
        for output in outputs:
            held.total += output
        held.position += row.count
        if not job.is_end:
            return None
        mean: NDArray[np.float32] = (held.total / held.position).astype(np.float32)
        del self.sums[row.sequence]
        return mean

    def drop(self, sequence: int) -> None:
        """Drop a sequence's sum; one that is not kept is no error."""
        self.sums.pop(sequence, None)
