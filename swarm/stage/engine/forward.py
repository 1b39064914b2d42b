"""Run of a batch through a stage: arrays to tensors, through the layers, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import Span, layout_spans
from swarm.stage.attention.passes import CacheStats, ForwardPass
from swarm.stage.engine.images import rotary_positions
from swarm.stage.executor import Batch, VectorJob
from swarm.stage.model.build import Stage
from swarm.stage.model.vision_tower import ImageRows
from swarm.stage.native.adapters import RowAdapters, using_adapters
from swarm.stage.native.cores import computing

if TYPE_CHECKING:
    from numpy.typing import NDArray


def run_batch(
    stage: Stage,
    arena: KvArena,
    batch: Batch,
    *,
    is_fenced: Callable[[], bool] = lambda: False,
    on_progress: Callable[[], None] = lambda: None,
    head_rows: Sequence[int] | None = None,
    threads: int | None = None,
    cache_stats: CacheStats | None = None,
    on_layers_done: Callable[[], None] = lambda: None,
    on_pooled: Callable[[torch.Tensor], None] = lambda _: None,
    by_modules: bool = False,
    images: ImageRows | None = None,
) -> torch.Tensor | None:
    """Return hidden states ``[tokens, hidden]``; from the stage with the head, logits ``[rows, vocabulary]`` or None:
    those of all samples, then of the prompts' jobs, then the scores of vector jobs.

    ``head_rows`` selects the tokens of the batch whose logits are returned, instead of the ones in ``batch.samples``.
    ``threads`` is the number of threads that may compute (default: torch's number). Cache statistics are added to
    ``cache_stats``. ``on_layers_done`` is called between the last layer and the norm and head after it, ``on_pooled``
    with the normed rows that vector jobs need, in their order. With ``by_modules``, the stage's program is not used.
    ``images``: the tokens of images, for a stage that embeds.
    """
    num_tokens = len(batch.tokens)
    spans = tuple(layout_spans(batch.rows, batch.proposed))
    forward_pass = ForwardPass(
        arena, stage.layers, spans, is_fenced=is_fenced, on_progress=on_progress, on_layers_done=on_layers_done
    )
    forward_pass.by_modules, forward_pass.images = by_modules, images
    forward_pass.length = max(span.start + span.count for span in spans)
    forward_pass.cache_stats = forward_pass.cache_stats if cache_stats is None else cache_stats
    adapters = RowAdapters.of(batch.adapters, [row.count for row in batch.rows]) if batch.adapters else None
    threads = threads or torch.get_num_threads()
    with computing(threads, num_tokens), using_adapters(adapters), torch.inference_mode():
        result = _run_stage(stage, forward_pass, batch, num_tokens, head_rows)
        if forward_pass.num_pooled:
            assert forward_pass.normed is not None, "the stage with the head norms the kept rows"
            on_pooled(forward_pass.normed[-forward_pass.num_pooled :])
        return result


def _run_stage(
    stage: Stage, forward_pass: ForwardPass, batch: Batch, num_tokens: int, head_rows: Sequence[int] | None
) -> torch.Tensor | None:
    spans, ids = forward_pass.spans, None
    if stage.has_embedding:
        ids = torch.from_numpy(batch.tokens).unsqueeze(0).to(stage.device)
    else:
        forward_pass.hidden = _input_hidden(stage, batch).unsqueeze(0)
    if not stage.has_head:
        hidden = stage.run(forward_pass, ids, _positions(batch, spans, num_tokens).to(stage.device))
        return None if hidden is None else hidden[0]
    if head_rows is None:
        head_rows = [row for job in batch.samples for row in _drawn_rows(spans[job.row], job.num_proposed)]
        for job in batch.prompts:
            offset = spans[job.row].offset
            head_rows += range(offset, offset + len(job.following))
        head_rows += [_drawn_rows(spans[job.row], 0)[0] for job in batch.vectors if job.kind == "scores" and job.is_end]
        pooled = [row for job in batch.vectors for row in _pooled_rows(spans[job.row], job)]
        head_rows, forward_pass.num_pooled = head_rows + pooled, len(pooled)
    forward_pass.keep_rows = torch.tensor(head_rows, dtype=torch.long).to(stage.device)
    return stage.run(forward_pass, ids, _positions(batch, spans, num_tokens).to(stage.device))


def _drawn_rows(span: Span, num_proposed: int) -> range:
    """Return the tokens of the batch after which a job draws: the last certain one and the proposals."""
    stop = span.offset + span.count
    return range(stop - 1 - num_proposed, stop)


def _pooled_rows(span: Span, job: VectorJob) -> range:
    """Return the tokens of the batch whose outputs a vector job needs without the head."""
    stop = span.offset + span.count
    if job.kind == "mean":
        return range(span.offset, stop)
    return range(stop - 1, stop) if job.kind == "last" and job.is_end else range(0)


def _input_hidden(stage: Stage, batch: Batch) -> torch.Tensor:
    if batch.hidden is None:
        raise IllegalMove(f"the stage of layers {stage.layers} got a batch without hidden states")
    # The array may use a message's own read-only bytes, which torch does not accept: this copies it then.
    host = torch.from_numpy(np.require(batch.hidden, np.float32, "W"))
    if stage.device.type == "cuda":  # from locked memory the copy needs no waiting; torch keeps it until it is done
        return host.pin_memory().to(stage.device, non_blocking=True).to(stage.dtype)
    return host.to(stage.device, stage.dtype)


def _positions(batch: Batch, spans: Sequence[Span], num_tokens: int) -> torch.Tensor:
    """Return the tokens' rotary positions: one for each, or three if some sequence has images."""
    if any(batch.images):
        each = zip(batch.images, spans, strict=True)
        parts = [rotary_positions(images, span.start, span.count) for images, span in each]
        return torch.from_numpy(np.concatenate(parts, axis=1)).unsqueeze(1)
    positions = np.zeros((1, num_tokens), np.int64)
    for span in spans:
        positions[0, span.offset : span.offset + span.count] = np.arange(span.start, span.start + span.count)
    return torch.from_numpy(positions)


def copy_to_array(hidden: torch.Tensor) -> NDArray[np.float32]:
    """Return an array that owns its memory, because it is kept in a log and sent on a socket."""
    if hidden.device.type == "cuda":
        locked = torch.empty(hidden.shape, dtype=torch.float32, pin_memory=True)
        locked.copy_(hidden, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()
        return np.array(locked.numpy())  # the log keeps it, and locked memory is scarce
    wide: NDArray[np.float32] = hidden.to("cpu", torch.float32, copy=True).contiguous().numpy()
    return wide
