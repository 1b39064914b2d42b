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
from swarm.stage.executor import Batch
from swarm.wire.messages import Failure, Row, SequenceVector


@dataclass(frozen=True, slots=True)
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
        sums: dict[int, _Sum] = {}  # kept only at the end: a step that lacked memory is computed again
        num_pooled = num_scores = 0
        for job in batch.vectors:
            row = batch.rows[job.row]
            vector: NDArray[np.float32] | None = None
            if job.kind == "mean":
                total = sums[row.sequence] = self._add(row, outputs[num_pooled : num_pooled + row.count])
                vector = (total.total / total.position).astype(np.float32) if job.is_end else None
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
        result = BatchVectors(tuple(vectors), tuple(failed))
        self.sums.update(sums)
        for job in batch.vectors:
            if job.is_end:
                self.sums.pop(batch.rows[job.row].sequence, None)
        return result

    def _add(self, row: Row, outputs: NDArray[np.float32]) -> _Sum:
        """Return a sequence's sum with the outputs of its next row."""
        held = self.sums.get(row.sequence) if row.start else _Sum(0, np.zeros(outputs.shape[1], np.float64))
        if held is None or held.position != row.start:
            raise IllegalMove(f"sequence {row.sequence} goes on at {row.start}, but its sum is not there")
        total = held.total.copy()
        for output in outputs:
            total += output
        return _Sum(row.start + row.count, total)

    def drop(self, sequence: int) -> None:
        """Drop a sequence's sum; one that is not kept is no error."""
        self.sums.pop(sequence, None)
