"""The last stage's tokens of a step: drawn from its logits, one for every row that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.stage.executor import Batch, SampleJob
from swarm.stage.sampling import draw, is_plain_greedy
from swarm.wire.messages import Failure, Manifest, Row, Sampled

if TYPE_CHECKING:
    from numpy.typing import NDArray


def draw_all(batch: Batch, logits: torch.Tensor, manifest: Manifest) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
    """What was drawn, and whose logits are unfit to draw from."""
    scores = logits[: len(batch.samples)].float().cpu()
    finite = torch.isfinite(scores).all(dim=-1).tolist()
    largest = torch.argmax(scores, dim=-1).tolist()  # the first of equals
    rows = scores.numpy()
    sampled, failed = [], []
    for index, job in enumerate(batch.samples):
        row = batch.rows[job.row]
        if finite[index]:
            sampled.append(_one(row, job, rows[index], largest[index], manifest))
        else:
            failed.append(Failure(row.sequence, _unfit(len(job.history), manifest.dtype)))
    return tuple(sampled), tuple(failed)


def _unfit(position: int, dtype: str) -> str:
    return (
        f"the model gave logits that are not finite numbers for position {position}; "
        f"its weights, or the dtype {dtype} for them, are unfit"
    )


def _one(row: Row, job: SampleJob, scores: NDArray[np.float32], largest: int, manifest: Manifest) -> Sampled:
    position = len(job.history)
    if is_plain_greedy(job.params, position - job.num_prompt):
        return Sampled(row.sequence, position, largest, ())
    drawn = draw(
        scores,
        job.params,
        history=job.history,
        num_prompt=job.num_prompt,
        seed=job.seed,
        eos_token_ids=manifest.eos_token_ids,
    )
    return Sampled(row.sequence, position, drawn.token, drawn.logprobs)
