"""Sampling of a step's tokens on the last stage: one draw from the logits for every row that requests it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarm.stage.engine import native_sampling as kernel
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.sampling import SampledToken, draw_token
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, Manifest, Sampled

if TYPE_CHECKING:
    from swarm.stage.engine.sampling import Mask

MAX_REASON_CHARS = 1000  # characters of a failure's reason that are sent


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """Sampled tokens of one step."""

    sampled: tuple[Sampled, ...] = ()
    failed: tuple[Failure, ...] = ()  # sequences that can't go on, with the reason
    delayed: tuple[int, ...] = ()  # sequences to be drawn in a later step, because their grammar is not compiled yet


def sample_batch(
    batch: Batch,
    logits: torch.Tensor,
    manifest: Manifest,
    threads: int,
    grammars: GrammarMasks,
) -> BatchSamples:
    """Draw a token for every row that requests one.

    Rows fail if their logits are not finite or their grammar can't be followed. Up to ``threads`` threads share the
    rows.
    """
    rows = logits[: len(batch.samples)].cpu()
    masks, refused, late = _grammar_masks(batch, grammars, rows.shape[-1])
    if kernel.supports(rows):
        tokens = kernel.sample_rows_native(rows, batch.samples, manifest.eos_token_ids, threads, masks)
    else:
        tokens = sample_rows(rows, batch.samples, manifest.eos_token_ids, masks)
    sampled, failed, delayed = [], [], []
    for place, (job, drawn) in enumerate(zip(batch.samples, tokens, strict=True)):
        sequence, position = batch.rows[job.row].sequence, len(job.history)
        if drawn is None:
            failed.append(Failure(sequence, _not_finite_error(position, manifest.dtype)))
        elif place in refused:
            failed.append(Failure(sequence, refused[place][:MAX_REASON_CHARS]))
        elif place in late:
            delayed.append(sequence)
        else:
            sampled.append(Sampled(sequence, position, drawn.token, drawn.logprobs))
    return BatchSamples(tuple(sampled), tuple(failed), tuple(delayed))


def _grammar_masks(
    batch: Batch, grammars: GrammarMasks, words: int
) -> tuple[list[Mask | None], dict[int, str], set[int]]:
    """Return the tokens that each row's grammar allows (None without a grammar), the reasons of rows whose grammar
    can't be followed, and the rows whose grammar is not compiled yet."""
    if all(job.params.grammar is None for job in batch.samples):
        return [], {}, set()
    masks: list[Mask | None] = [None] * len(batch.samples)
    refused, late = dict[int, str](), set[int]()
    grammars.begin_step()
    for place, job in enumerate(batch.samples):
        if job.params.grammar is None:
            continue
        answer = grammars.mask(batch.rows[job.row].sequence, job, words)
        if answer is None:
            late.add(place)
        elif isinstance(answer, str):
            refused[place] = answer
        else:
            masks[place] = answer
    if len(late) == len(batch.samples):
        grammars.wait_for_compilation()  # no row can be drawn: a short wait delays only this step
    return masks, refused, late


def sample_rows(
    rows: torch.Tensor, jobs: Sequence[SampleJob], eos_token_ids: Sequence[int], masks: Sequence[Mask | None] = ()
) -> list[SampledToken | None]:
    """Draw a token for each row in Python, without the native kernel: the same tokens, more slowly. The result is None
    for a row whose logits are not all finite.

    ``masks`` holds the tokens that are allowed in each row; without it, all tokens are allowed.
    """
    return [
        draw_token(
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


def _not_finite_error(position: int, dtype: str) -> str:
    return (
        f"the model gave logits that are not finite numbers for position {position}; "
        f"its weights, or the dtype {dtype} for them, are unfit"
    )
