"""Log probabilities of a prompt's tokens, from the last stage's logits after the positions before them.

They are the model's own, with the bits that a drawn token's have (see ``sampling``): a greedy draw from the same logits
reports the most likely token's, and every other token's differs from it by the two logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.params import SamplingParams
from swarm.stage.engine.batch_sampling import draw_rows, not_finite_error
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, Manifest, PromptLogprobs, TokenLogprob
from swarm.wire.prompt_logprobs import pack_logprobs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BatchPromptLogprobs:
    """Log probabilities of one step's prompts."""

    items: tuple[PromptLogprobs, ...] = ()
    failed: tuple[Failure, ...] = ()  # sequences with logits that are not finite


def compute_prompt_logprobs(
    batch: Batch, logits: torch.Tensor, manifest: Manifest, threads: int
) -> BatchPromptLogprobs:
    """Compute the prompts' jobs of a batch. ``logits`` has a row for each token that follows, in the jobs' order."""
    rows = logits.cpu()
    items: list[PromptLogprobs] = []
    failed: list[Failure] = []
    begin = 0
    for job in batch.prompts:
        row, stop = batch.rows[job.row], begin + len(job.following)
        entries: list[tuple[TokenLogprob, ...]] = []
        draw = SampleJob(job.row, SamplingParams(logprobs=job.alternatives), 0, (), 0)
        drawn = draw_rows(rows[begin:stop], [draw] * len(job.following), manifest, threads)
        for number, (token, best) in enumerate(zip(job.following, drawn, strict=True)):
            if best is None:
                failed.append(Failure(row.sequence, not_finite_error(row.start + number + 1, manifest.dtype)))
                break
            own, others = best.logprobs[0], best.logprobs[1:]
            distance = float(rows[begin + number, token]) - float(rows[begin + number, own.token])
            entries.append((TokenLogprob(token, distance + own.logprob), *others))
        items.append(PromptLogprobs(row.sequence, row.start + 1, pack_logprobs(entries)))
        begin = stop
    return BatchPromptLogprobs(tuple(items), tuple(failed))
