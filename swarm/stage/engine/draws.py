"""The last stage's tokens of a step: drawn from its logits, one for every row that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from swarm.stage.engine import own_draws as kernel
from swarm.stage.engine.grammars import Grammars
from swarm.stage.engine.sampling import Drawn, draw
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, Manifest, Sampled

if TYPE_CHECKING:
    from swarm.stage.engine.sampling import Mask

MAX_REASON = 1000  # characters


def draw_all(
    batch: Batch,
    logits: torch.Tensor,
    manifest: Manifest,
    threads: int,
    grammars: Grammars,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
    """Draw for every row that asks; name those whose logits are unfit, or whose grammar can't be followed. Up to so
    many threads share the rows."""
    rows = logits[: len(batch.samples)].cpu()
    masks, refused = _masks(batch, grammars, rows.shape[-1], progressed)
    if kernel.serves(rows):
        found = kernel.draw_rows(rows, batch.samples, manifest.eos_token_ids, threads, masks)
    else:
        found = draw_plainly(rows, batch.samples, manifest.eos_token_ids, masks)
    sampled, failed = [], []
    for place, (job, drawn) in enumerate(zip(batch.samples, found, strict=True)):
        sequence, position = batch.rows[job.row].sequence, len(job.history)
        if drawn is None:
            failed.append(Failure(sequence, _unfit(position, manifest.dtype)))
        elif place in refused:
            failed.append(Failure(sequence, refused[place][:MAX_REASON]))
        else:
            sampled.append(Sampled(sequence, position, drawn.token, drawn.logprobs))
    return tuple(sampled), tuple(failed)


def _masks(
    batch: Batch, grammars: Grammars, words: int, progressed: Callable[[], None]
) -> tuple[list[Mask | None], dict[int, str]]:
    """What each row's grammar allows, None where there is no grammar; and which rows' grammars can't be followed."""
    if all(job.params.grammar is None for job in batch.samples):
        return [], {}
    masks: list[Mask | None] = [None] * len(batch.samples)
    refused: dict[int, str] = {}
    for place, job in enumerate(batch.samples):
        if job.params.grammar is None:
            continue
        answer = grammars.mask(batch.rows[job.row].sequence, job, words, progressed)
        if isinstance(answer, str):
            refused[place] = answer
        else:
            masks[place] = answer
    return masks, refused


def draw_plainly(
    rows: torch.Tensor, jobs: Sequence[SampleJob], eos_token_ids: Sequence[int], masks: Sequence[Mask | None] = ()
) -> list[Drawn | None]:
    """Draw without the kernel: the same tokens, later. None where a logit is no finite number. ``masks``: the tokens
    that are allowed in each row; without any, in all rows all are."""
    return [
        draw(
            row,
            job.params,
            history=job.history,
            num_prompt=job.num_prompt,
            seed=job.seed,
            eos_token_ids=eos_token_ids,
            allowed=masks[place] if masks else None,
        )
        for place, (row, job) in enumerate(zip(rows.float().numpy(), jobs, strict=True))
    ]


def _unfit(position: int, dtype: str) -> str:
    return (
        f"the model gave logits that are not finite numbers for position {position}; "
        f"its weights, or the dtype {dtype} for them, are unfit"
    )
