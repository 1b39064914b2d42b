"""Attention of a pass by our own kernel, which writes and reads keys and values in place in the arena."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swarm.stage import native
from swarm.stage.attention import layouts
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import Span
from swarm.stage.attention.guesses import mark_guesses
from swarm.stage.attention.kernel_args import (
    NativeBatch,
    NativeCache,
    NativeSpan,
    RackBatch,
    native_cache,
    native_options,
)
from swarm.stage.attention.passes import ForwardPass
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.attention.selection import SelectedPositions, Selection, select_positions, stored_latents
from swarm.stage.native import cores

if TYPE_CHECKING:
    from swarm.stage.attention.options import AttentionOptions


_MOST_GATHERED = 1 << 25  # bytes of selected keys that are copied at once


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
    out = _attend(_in_memory(rack_batches(forward_pass), find_buffer, parts[2]), parts, how)
    out[sum(span.count for span in forward_pass.spans) :] = 0
    forward_pass.arena.mark_written(tuple(span.sequence for span in forward_pass.spans), layer)
    return out


def _in_memory(
    batches: Iterable[RackBatch], find_buffer: Callable[[Rack], LayerBuffer], value: torch.Tensor
) -> Iterator[tuple[ctypes.Array[NativeSpan], NativeCache]]:
    """Yield the spans of each rack with the layer's memory there, for values of this shape."""
    for batch in batches:
        yield batch.spans, native_cache(find_buffer(batch.rack), value.shape[2])


def _attend(
    batches: Iterable[tuple[ctypes.Array[NativeSpan], NativeCache]],
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: AttentionOptions,
) -> torch.Tensor:
    """Write and attend for each of these spans in its memory. Results of other tokens are undefined."""
    library = native.library()
    assert library is not None, "the caller has checked supports()"
    query, key, value = parts
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"queries, keys and values of {query.dtype}, {key.dtype}, {value.dtype} are not of one kind")
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in parts)
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
    options, _owners = native_options(how)
    batch = NativeBatch(
        *(part.data_ptr() for part in (query, key, value, out)),
        *(stride for part in (query, key, value) for stride in part.stride()[:2]),
        query.shape[1],
    )
    for spans, cache in batches:
        status = library.swarm_attend(
            spans,
            len(spans),
            ctypes.byref(cache),
            ctypes.byref(batch),
            ctypes.byref(options),
            cores.num_threads(),
        )
        native.check_status(status)
    return out


def attend_selected(
    forward_pass: ForwardPass,
    layer: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: AttentionOptions,
    find_buffer: Callable[[Rack], LayerBuffer],
    *,
    index: SelectedPositions,
) -> torch.Tensor:
    """Do the same with latents, where queries that see more positions than ``index.top_k`` attend to selected ones.

    These are copied, one after the other, to memory in which they are the only ones. Keys end with those of the index,
    if it is the layer's own.
    """
    (query, key, value), arena, spans = parts, forward_pass.arena, forward_pass.spans
    if all(span.start + span.count <= index.top_k for span in spans):
        query = select_positions(index, forward_pass, query, key, stored_latents(arena, find_buffer))
        return attend_native(forward_pass, layer, (query, key, value), how, find_buffer)
    guesses, spoiled = mark_guesses(spans, key.device), None
    if guesses is not None:
        key, spoiled = guesses.clean(key)
    wide = torch.nn.functional.pad(query, (0, key.shape[2] - query.shape[2]))
    begins = [
        replace(span, count=min(span.count, index.top_k - span.start), num_proposed=0)
        for span in spans
        if span.start < index.top_k
    ]
    out = _attend(_in_memory(_group_by_rack(arena, begins), find_buffer, value), (wide, key, value), how)
    out[sum(span.count for span in spans) :] = 0
    for span in spans:  # after the kernel, which clears the position behind what it writes
        rack, place = arena.slot(span.sequence)
        start = max(span.start, min(index.top_k, span.start + span.count))
        rows = key[span.offset + start - span.start : span.offset + span.count]
        find_buffer(rack).region(place).write(start, rows.transpose(0, 1), rows.transpose(0, 1)[..., :0])
    arena.mark_written(tuple(span.sequence for span in spans), layer)
    select_positions(index, forward_pass, query, key, stored_latents(arena, find_buffer))
    assert index.selection is not None, "a query sees more positions than it attends to"
    for span, some in _by_span(index.selection, spans):
        rack, place = arena.slot(span.sequence)
        stored = find_buffer(rack).region(place).keys[0]
        out[some.tokens] = _attend_gathered(query[some.tokens], value.shape[2], stored, some.positions, how)
    if spoiled is not None:
        out[: len(spoiled)].masked_fill_(spoiled[:, None, None], math.nan)
    return out


def _by_span(selection: Selection, spans: Iterable[Span]) -> Iterator[tuple[Span, Selection]]:
    """Yield the spans that have tokens in a selection, with these."""
    for span in spans:
        ends = torch.tensor([span.offset, span.offset + span.count])
        first, stop = torch.searchsorted(selection.tokens, ends).tolist()
        if first < stop:
            yield span, Selection(selection.tokens[first:stop], selection.positions[first:stop])


def _attend_gathered(
    query: torch.Tensor, value_size: int, stored: torch.Tensor, positions: torch.Tensor, how: AttentionOptions
) -> torch.Tensor:
    """Attend to latents at these positions ``[tokens, count]`` of ``stored``, a sequence's rows. The last one of each
    token is written once more by the kernel, as its own."""
    size, count = query.shape[2], positions.shape[1]
    width, num_rows = layouts.LATENT[0].numbers(size), count + count % 2
    most = max(1, _MOST_GATHERED // (num_rows * width * stored.element_size()))
    pieces = []
    for first in range(0, len(query), most):
        some = positions[first : first + most]
        gathered = stored.new_zeros(len(some), num_rows, width)
        gathered[:, :count, :size] = stored[:, :size].index_select(0, some.flatten()).view(len(some), count, size)
        cache = NativeCache(
            *(gathered.data_ptr(), None, num_rows * width, num_rows * width, 0, 0),
            *(size, value_size, 1, native.KINDS[stored.dtype]),
        )
        spans = (NativeSpan * len(some))(*(NativeSpan(n, 1, count - 1, n, 0) for n in range(len(some))))
        last = gathered[:, count - 1 : count, :size].clone()
        pieces.append(_attend([(spans, cache)], (query[first : first + most], last, last[..., :value_size]), how))
    return torch.cat(pieces)


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
