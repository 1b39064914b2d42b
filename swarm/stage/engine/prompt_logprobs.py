"""Log probabilities of a prompt's tokens, from the last stage's logits after the positions before them.

They are the model's own, with the bits that a drawn token's have (see ``sampling``): a greedy draw from the same logits
reports the most likely token's, and every other token's differs from it by the two logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.params import SamplingParams
from swarm.stage.engine.batch_sampling import draw_rows, not_finite_error
from swarm.stage.engine.sampling import SampledToken
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import Failure, Manifest, PromptLogprobs, TokenLogprob
from swarm.wire.prompt_logprobs import pack_logprobs


@dataclass(frozen=True, slots=True)
class BatchPromptLogprobs:
    """Log probabilities of one step's prompts."""

    items: tuple[PromptLogprobs, ...] = ()
    failed: tuple[Failure, ...] = ()  # sequences with logits that are not finite


def compute_prompt_logprobs(
    batch: Batch, logits: torch.Tensor, manifest: Manifest, threads: int
) -> BatchPromptLogprobs:
    """Compute the prompts' jobs of a batch. ``logits`` has a row for each token that follows, in the jobs' order."""
    items: list[PromptLogprobs] = []
    failed: list[Failure] = []
    begin = 0
    for job in batch.prompts:
        row, stop = batch.rows[job.row], begin + len(job.following)
        entries: list[tuple[TokenLogprob, ...]] = []
        draw = SampleJob(job.row, SamplingParams(logprobs=job.alternatives), 0, (), 0)
        drawn = draw_rows(logits[begin:stop], [draw] * len(job.following), manifest, threads)
        distances = _distances(logits[begin:stop], job.following, drawn)
        for number, (token, best) in enumerate(zip(job.following, drawn, strict=True)):
            if best is None:
                failed.append(Failure(row.sequence, not_finite_error(row.start + number + 1, manifest.dtype)))
                break
            own, others = best.logprobs[0], best.logprobs[1:]
            entries.append((TokenLogprob(token, distances[number] + own.logprob), *others))
        items.append(PromptLogprobs(row.sequence, row.start + 1, pack_logprobs(entries)))
        begin = stop
    return BatchPromptLogprobs(tuple(items), tuple(failed))


def _distances(logits: torch.Tensor, following: Sequence[int], drawn: Sequence[SampledToken | None]) -> list[float]:
    """Return each following token's logit minus that of the most likely token, which was drawn. Only these are copied
    to the host."""
    tokens = [(token, token if best is None else best.token) for token, best in zip(following, drawn, strict=True)]
    places = torch.tensor(tokens, dtype=torch.int64).to(logits.device)
    return [own - largest for own, largest in logits.gather(-1, places).tolist()]
