"""The last stage's tokens of a step: drawn from its logits, one for every row that asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.stage.engine import own_draws as kernel
from swarm.stage.engine.sampling import Drawn, draw
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, Manifest, Sampled


def draw_all(
    batch: Batch, logits: torch.Tensor, manifest: Manifest, threads: int
) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
    """Draw for every row that asks; name those whose logits are unfit. Up to so many threads share the rows."""
    rows = logits[: len(batch.samples)].cpu()
    if kernel.serves(rows):
        found = kernel.draw_rows(rows, batch.samples, manifest.eos_token_ids, threads)
    else:
        found = draw_plainly(rows, batch.samples, manifest.eos_token_ids)
    sampled, failed = [], []
    for job, drawn in zip(batch.samples, found, strict=True):
        sequence, position = batch.rows[job.row].sequence, len(job.history)
        if drawn is None:
            failed.append(Failure(sequence, _unfit(position, manifest.dtype)))
        else:
            sampled.append(Sampled(sequence, position, drawn.token, drawn.logprobs))
    return tuple(sampled), tuple(failed)


def draw_plainly(rows: torch.Tensor, jobs: Sequence[SampleJob], eos_token_ids: Sequence[int]) -> list[Drawn | None]:
    """Draw without the kernel: the same tokens, later. None where a logit is no finite number."""
    return [
        draw(
            row,
            job.params,
            history=job.history,
            num_prompt=job.num_prompt,
            seed=job.seed,
            eos_token_ids=eos_token_ids,
        )
        for row, job in zip(rows.float().numpy(), jobs, strict=True)
    ]


def _unfit(position: int, dtype: str) -> str:
    return (
        f"the model gave logits that are not finite numbers for position {position}; "
        f"its weights, or the dtype {dtype} for them, are unfit"
    )
