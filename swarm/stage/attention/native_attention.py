"""Attention of a pass by our own kernel, which writes and reads keys and values in place in the arena."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from swarm.stage import native
from swarm.stage.attention import layouts
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import Span
from swarm.stage.attention.kernel_args import NativeBatch, NativeSpan, RackBatch, native_cache, native_options
from swarm.stage.attention.passes import ForwardPass
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.native import cores

if TYPE_CHECKING:
    from swarm.stage.attention.options import AttentionOptions


def supports(key: torch.Tensor) -> bool:
    """Whether the kernel supports keys of this dtype and device."""
    return layouts.uses_native(key.device, key.dtype)


def attend_native(
    forward_pass: ForwardPass,
    layer: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: AttentionOptions,
    find_buffer: Callable[[Rack], LayerBuffer],
) -> torch.Tensor:
    """Write keys and values, and attend. ``parts`` are queries, keys and values ``[tokens, heads, size]``. Tokens of no
    sequence get zeros. ``find_buffer`` returns the layer's memory in a rack."""
    library = native.library()
    assert library is not None, "the caller has checked supports()"
    query, key, value = parts
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"queries, keys and values of {query.dtype}, {key.dtype}, {value.dtype} are not of one kind")
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in parts)
    batch_tokens = sum(span.count for span in forward_pass.spans)
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
    out[batch_tokens:] = 0
    options, _owners = native_options(how)
    batch = NativeBatch(
        *(part.data_ptr() for part in (query, key, value, out)),
        *(stride for part in (query, key, value) for stride in part.stride()[:2]),
        query.shape[1],
    )
    for rack_batch in rack_batches(forward_pass):
        cache, spans = native_cache(find_buffer(rack_batch.rack), value.shape[2]), rack_batch.spans
        status = library.swarm_attend(
            spans,
            len(spans),
            ctypes.byref(cache),
            ctypes.byref(batch),
            ctypes.byref(options),
            cores.num_threads(),
        )
        native.check_status(status)
    forward_pass.arena.mark_written(tuple(span.sequence for span in forward_pass.spans), layer)
    return out


def rack_batches(forward_pass: ForwardPass) -> tuple[RackBatch, ...]:
    """Return the pass's rows grouped by rack; computed once in a pass."""
    if forward_pass.rack_batches:
        forward_pass.cache_stats.mask_hits += 1
    else:
        forward_pass.cache_stats.mask_misses += 1
        forward_pass.rack_batches = tuple(_group_by_rack(forward_pass.arena, forward_pass.spans))
    return forward_pass.rack_batches


def _group_by_rack(arena: KvArena, spans: Iterable[Span]) -> Iterator[RackBatch]:
    """Group the rows by the rack that holds their keys and values."""
    by_rack: dict[int, tuple[Rack, list[NativeSpan]]] = {}
    for span in spans:
        rack, place = arena.slot(span.sequence)
        _, native_spans = by_rack.setdefault(id(rack), (rack, []))
        native_spans.append(NativeSpan(span.offset, span.count, span.start, place, span.num_proposed))
    for rack, native_spans in by_rack.values():
        yield RackBatch(rack, (NativeSpan * len(native_spans))(*native_spans))
