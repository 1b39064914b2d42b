"""Sampling of a step's tokens on the last stage: the draws from the logits for every row that requests a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarm.stage.engine import device_sampling
from swarm.stage.engine import native_sampling as kernel
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.sampling import SampledToken, draw_token
from swarm.stage.engine.verification import Draw, Verification
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, ForcedTokens, Manifest, Sampled, SequencePosition

if TYPE_CHECKING:
    from swarm.stage.engine.sampling import Mask

MAX_REASON_CHARS = 1000  # characters of a failure's reason that are sent


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """Sampled tokens of one step."""

    sampled: tuple[Sampled, ...] = ()
    failed: tuple[Failure, ...] = ()  # sequences that can't go on, with the reason
    delayed: tuple[int, ...] = ()  # sequences to be drawn in a later step, because their grammar is not compiled yet
    certain: tuple[SequencePosition, ...] = ()  # rows with accepted proposals: where their certain tokens end
    forced: tuple[ForcedTokens, ...] = ()  # tokens that are certain to follow by the grammar or the end of thinking


def sample_batch(
    batch: Batch,
    logits: torch.Tensor,
    manifest: Manifest,
    threads: int,
    grammars: GrammarMasks,
) -> BatchSamples:
    """Draw a token for every row that requests one, and verify the rows' proposals.

    ``logits`` has a row for each draw of each job: ``1 + num_proposed`` rows per job. A sequence fails if a draw that
    is reached has logits that are not finite, or a grammar that can't be followed. Up to ``threads`` threads share the
    draws.
    """
    if not batch.samples:
        return BatchSamples()
    if all(not job.num_proposed and not job.params.has_rules for job in batch.samples):
        return _sample_plainly(batch, logits, manifest, threads)
    verifications: list[Verification] = []
    num_rows = 0
    for job in batch.samples:
        sequence = batch.rows[job.row].sequence
        verifications.append(Verification(job, sequence, num_rows, manifest.eos_token_ids))
        num_rows += 1 + job.num_proposed
    rows = _move_to_draw(logits[:num_rows])
    if any(job.params.grammar is not None for job in batch.samples):
        grammars.begin_step()
    draws = [draw for verification in verifications for draw in verification.next_draws()]
    while draws:
        _compute_draws(draws, rows, manifest, threads, grammars)
        draws = [draw for verification in verifications for draw in verification.next_draws()]
    if verifications and all(verification.is_late for verification in verifications):
        grammars.wait_for_compilation()  # no row can be drawn: a short wait delays only this step
    return _collect(verifications, grammars)


def _sample_plainly(batch: Batch, logits: torch.Tensor, manifest: Manifest, threads: int) -> BatchSamples:
    """Draw one token for each job, without proposals and rules: the same as with them, in half of the time."""
    tokens = draw_rows(logits[: len(batch.samples)], batch.samples, manifest, threads)
    sampled: list[Sampled] = []
    failed: list[Failure] = []
    for job, token in zip(batch.samples, tokens, strict=True):
        sequence, position = batch.rows[job.row].sequence, len(job.history)
        if token is None:
            failed.append(Failure(sequence, not_finite_error(position, manifest.dtype)))
        else:
            sampled.append(Sampled(sequence, position, token.token, token.logprobs))
    return BatchSamples(tuple(sampled), tuple(failed))


def _move_to_draw(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows where tokens are drawn from them: on their device if it draws as a CPU does, else on the host."""
    return rows if device_sampling.supports(rows) else rows.cpu()


def draw_rows(
    rows: torch.Tensor, jobs: Sequence[SampleJob], manifest: Manifest, threads: int, masks: Sequence[Mask | None] = ()
) -> list[SampledToken | None]:
    """Draw the token after each job's history: on the rows' device if it draws as a CPU does, else by the native kernel
    if it is there."""
    rows = _move_to_draw(rows)
    if rows.device.type != "cpu":
        return device_sampling.sample_rows_on_device(rows, jobs, manifest.eos_token_ids, masks)
    if kernel.supports(rows):
        return kernel.sample_rows_native(rows, jobs, manifest.eos_token_ids, threads, masks)
    return sample_rows(rows, jobs, manifest.eos_token_ids, masks)


def _compute_draws(
    draws: Sequence[Draw], rows: torch.Tensor, manifest: Manifest, threads: int, grammars: GrammarMasks
) -> None:
    """Draw the tokens, and record each in its job."""
    masks, refused, late = _grammar_masks(draws, grammars, rows.shape[-1])
    if len(draws) < len(rows):
        rows = rows[[draw.row for draw in draws]]
    tokens = draw_rows(rows, [draw.job for draw in draws], manifest, threads, masks)
    for place, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
        verification = draw.verification
        if verification.is_closed:
            continue  # an earlier draw differs from its proposal: this one is not reached
        if token is None:
            verification.fail(not_finite_error(verification.position, manifest.dtype))
        elif place in refused:
            verification.fail(refused[place])
        elif place in late:
            verification.delay()
        else:
            verification.add(token)


def _collect(verifications: Sequence[Verification], grammars: GrammarMasks) -> BatchSamples:
    """Return the results of all jobs, in their order."""
    sampled: list[Sampled] = []
    failed: list[Failure] = []
    certain: list[SequencePosition] = []
    forced: list[ForcedTokens] = []
    for each in verifications:
        sequence, position = each.sequence, each.job.num_certain
        sampled += [Sampled(sequence, position + n, drawn.token, drawn.logprobs) for n, drawn in enumerate(each.tokens)]
        if each.num_accepted:
            certain.append(SequencePosition(sequence, position + each.num_accepted))
        if each.failure:
            failed.append(Failure(sequence, each.failure[:MAX_REASON_CHARS]))
        elif each.job.params.has_rules and each.tokens:
            tokens = grammars.forced_tokens(sequence, each.job.params, each.tokens[-1].token)
            if tokens:
                forced.append(ForcedTokens(sequence, tokens))
    delayed = tuple(each.sequence for each in verifications if each.is_late)
    return BatchSamples(tuple(sampled), tuple(failed), delayed, tuple(certain), tuple(forced))


def _grammar_masks(
    draws: Sequence[Draw], grammars: GrammarMasks, words: int
) -> tuple[list[Mask | None], dict[int, str], set[int]]:
    """Return the tokens that each draw's thinking and grammar allow (None if all), the reasons of draws whose grammar
    can't be followed, and the draws whose grammar is not compiled yet."""
    if not any(draw.job.params.has_rules for draw in draws):
        return [], {}, set()
    masks: list[Mask | None] = [None] * len(draws)
    refused, late = dict[int, str](), set[int]()
    for place, draw in enumerate(draws):
        sequence, job, start = draw.verification.sequence, draw.job, 0
        if job.params.thinking is not None:
            reader = grammars.read_thinking(sequence, job)
            if isinstance(reader, str):
                refused[place] = reader
                continue
            if reader.start is None:
                masks[place] = grammars.thinking_mask(job, words, reader.forced)
                continue
            start = reader.start
        if job.params.grammar is None:
            continue
        answer = grammars.mask(sequence, job, words, start)
        if answer is None:
            late.add(place)
        elif isinstance(answer, str):
            refused[place] = answer
        else:
            masks[place] = answer
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


def not_finite_error(position: int, dtype: str) -> str:
    return (
        f"the model gave logits that are not finite numbers for position {position}; "
        f"its weights, or the dtype {dtype} for them, are unfit"
    )
