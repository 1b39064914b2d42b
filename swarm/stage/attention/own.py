"""Attention of a pass by our own kernel, which writes and reads keys and values in place in the arena."""

from __future__ import annotations

import ctypes

import torch

from swarm.stage import native
from swarm.stage.attention import layouts
from swarm.stage.attention.calls import Batch, How, Together, cache_of, gathered
from swarm.stage.attention.passes import Pass
from swarm.stage.native import cores


def serves(key: torch.Tensor) -> bool:
    """Whether the kernel supports keys of this dtype and device."""
    return layouts.attends(key.device, key.dtype)


def attend(
    this: Pass,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write keys and values, and attend. All tensors are ``[tokens, heads, size]``. Tokens of no sequence get zeros."""
    library = native.library()
    assert library is not None, "the caller has checked supports()"
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"queries, keys and values of {query.dtype}, {key.dtype}, {value.dtype} are not of one kind")
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    batch_tokens = sum(span.count for span in this.spans)
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
    out[batch_tokens:] = 0
    sinks = None if sinks is None else sinks.float().contiguous()
    how = How(scale, softcap or 0.0, window or 0, None if sinks is None else sinks.data_ptr())
    batch = Batch(
        *(part.data_ptr() for part in (query, key, value, out)),
        *(stride for part in (query, key, value) for stride in part.stride()[:2]),
        query.shape[1],
    )
    for together in racks_of(this):
        slab = this.arena.slab(together.rack, layer, key[:1].transpose(0, 1), value[:1].transpose(0, 1))
        spans = together.spans
        status = library.swarm_attend(
            spans, len(spans), ctypes.byref(cache_of(slab)), ctypes.byref(batch), ctypes.byref(how), cores.threads()
        )
        native.checked(status)
    this.arena.wrote(tuple(span.sequence for span in this.spans), layer)
    return out


def racks_of(this: Pass) -> tuple[Together, ...]:
    """Return the pass's rows grouped by rack; computed once in a pass."""
    if this.racks:
        this.tally.mask_hits += 1
    else:
        this.tally.mask_misses += 1
        this.racks = tuple(gathered(this.arena, this.spans))
    return this.racks
