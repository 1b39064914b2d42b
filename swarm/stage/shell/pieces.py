"""Computing a batch in pieces, for a device with too little memory for the whole batch.

A row's result depends on nothing but its own sequence, and a prompt may be cut anywhere, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from swarm.stage.executor import Batch, Executor, ForwardResult
from swarm.wire.messages import Row

PIECE_POSITIONS = 32  # positions: one cell of the arena


def forward_in_pieces(
    executor: Executor, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]
) -> ForwardResult:
    """Compute a batch piece by piece, and join the results."""
    results = [executor.forward(piece, fenced, progressed) for piece in split_batch(batch)]
    hidden = [result.hidden for result in results if result.hidden is not None]
    return ForwardResult(
        hidden=np.concatenate(hidden) if hidden else None,
        sampled=tuple(item for result in results for item in result.sampled),
        failed=tuple(item for result in results for item in result.failed),
        compute_s=sum(result.compute_s for result in results),
        sample_s=sum(result.sample_s for result in results),
        head_s=sum(result.head_s for result in results),
        copy_s=sum(result.copy_s for result in results),
        late=tuple(item for result in results for item in result.late),
        certain=tuple(item for result in results for item in result.certain),
        forced=tuple(item for result in results for item in result.forced),
        vectors=tuple(item for result in results for item in result.vectors),
        prompt_logprobs=tuple(item for result in results for item in result.prompt_logprobs),
    )


def split_batch(batch: Batch) -> Iterator[Batch]:
    """Cut a batch, in order, into pieces of one row and at most ``PIECE_POSITIONS`` positions.

    Parts of images come first, in a piece without rows. The token after a row is drawn with the row's last piece.
    Positions after which a token may be drawn share that piece, however many proposals there are.
    """
    if batch.image_parts:
        empty = batch.tokens[:0]
        yield replace(batch, rows=(), tokens=empty, hidden=None, samples=(), vectors=(), prompts=(), is_piece=True)
    at = 0
    for number, row in enumerate(batch.rows):
        num_proposed = batch.proposed.get(number, 0)
        num_drawn = 1 + num_proposed
        first = 0
        while first < row.count:
            rest = row.count - first
            count = rest if rest <= max(PIECE_POSITIONS, num_drawn) else min(PIECE_POSITIONS, rest - num_drawn)
            is_last = count == rest
            yield replace(
                batch,
                rows=(Row(row.sequence, row.start + first, count, row.sample and is_last),),
                tokens=batch.tokens[at : at + count],
                hidden=None if batch.hidden is None else batch.hidden[at : at + count],
                samples=tuple(replace(job, row=0) for job in batch.samples if is_last and job.row == number),
                proposed={0: num_proposed} if is_last and num_proposed else {},
                adapters=batch.adapters[number : number + 1],
                images=batch.images[number : number + 1],
                image_parts=(),
                is_piece=True,
                vectors=tuple(
                    replace(job, row=0, is_end=job.is_end and is_last) for job in batch.vectors if job.row == number
                ),
                prompts=tuple(
                    replace(job, row=0, following=job.following[first : first + count])
                    for job in batch.prompts
                    if job.row == number and first < len(job.following)
                ),
            )
            at, first = at + count, first + count
