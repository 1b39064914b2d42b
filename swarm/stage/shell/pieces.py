"""Computing a batch in pieces, for a device with too little memory for the whole batch.

A row's result depends on nothing but its own sequence, and a prompt may be cut anywhere, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from swarm.stage.executor import Batch, Executor, Forwarded
from swarm.wire.messages import Row

PIECE = 32  # positions: one cell of the arena


def forward_in_pieces(
    executor: Executor, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]
) -> Forwarded:
    """Compute a batch piece by piece, and join the results."""
    done = [executor.forward(piece, fenced, progressed) for piece in pieces_of(batch)]
    hidden = [each.hidden for each in done if each.hidden is not None]
    return Forwarded(
        hidden=np.concatenate(hidden) if hidden else None,
        sampled=tuple(item for each in done for item in each.sampled),
        failed=tuple(item for each in done for item in each.failed),
        compute_s=sum(each.compute_s for each in done),
        sample_s=sum(each.sample_s for each in done),
        head_s=sum(each.head_s for each in done),
        copy_s=sum(each.copy_s for each in done),
        late=tuple(item for each in done for item in each.late),
    )


def pieces_of(batch: Batch) -> Iterator[Batch]:
    """Cut a batch, in order, into pieces of one row and at most ``PIECE_POSITIONS`` positions.

    The token after a row is drawn with the row's last piece.
    """
    at = 0
    for number, row in enumerate(batch.rows):
        for first in range(0, row.count, PIECE):
            count = min(PIECE, row.count - first)
            is_last = first + count == row.count
            yield replace(
                batch,
                rows=(Row(row.sequence, row.start + first, count, row.sample and is_last),),
                tokens=batch.tokens[at : at + count],
                hidden=None if batch.hidden is None else batch.hidden[at : at + count],
                samples=tuple(replace(job, row=0) for job in batch.samples if is_last and job.row == number),
            )
            at += count
