"""Attention of a pass through our own kernel: keys and values are written and read where they lie in the arena."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarm.stage import native
from swarm.stage.attention import layouts
from swarm.stage.attention.passes import Pass
from swarm.stage.native import cores

if TYPE_CHECKING:
    from swarm.stage.attention.arena import Rack, Slab

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class _Span(ctypes.Structure):
    """``SwarmSpan`` of kernels.h, as the others below."""

    _fields_ = [(name, _count) for name in ("offset", "count", "start", "place")]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("keys", _pointer),
        ("values", _pointer),
        *((name, _count) for name in ("key_place", "key_head", "value_place", "value_head")),
        *((name, _count) for name in ("key_size", "value_size", "heads", "kind")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("query", "key", "value", "out")),
        *((name, _count) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, _count) for name in ("value_token", "value_head", "query_heads")),
    ]


class _How(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", _count), ("sinks", _pointer)]


@dataclass(frozen=True, slots=True)
class Together:
    """The rows of a pass whose keys and values lie in one rack."""

    rack: Rack
    spans: ctypes.Array[_Span]


def serves(key: torch.Tensor) -> bool:
    """Can the kernel attend to such keys?"""
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
    """``[tokens, heads, size]`` each; the answer too. Tokens of no sequence get zeros. Writes keys and values."""
    library = native.library()
    assert library is not None, "serves() said so"
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"queries, keys and values of {query.dtype}, {key.dtype}, {value.dtype} are not of one kind")
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    batch_tokens = sum(span.count for span in this.spans)
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
    out[batch_tokens:] = 0
    sinks = None if sinks is None else sinks.float().contiguous()
    how = _How(scale, softcap or 0.0, window or 0, None if sinks is None else sinks.data_ptr())
    batch = _Batch(
        *(part.data_ptr() for part in (query, key, value, out)),
        *(stride for part in (query, key, value) for stride in part.stride()[:2]),
        query.shape[1],
    )
    for together in _racks(this):
        slab = this.arena.slab(together.rack, layer, key[:1].transpose(0, 1), value[:1].transpose(0, 1))
        spans = together.spans
        status = library.swarm_attend(
            spans, len(spans), _cache(slab), ctypes.byref(batch), ctypes.byref(how), cores.threads()
        )
        native.checked(status)
    this.arena.wrote(tuple(span.sequence for span in this.spans), layer)
    return out


def _cache(slab: Slab) -> object:
    keys, values = slab.keys, slab.values
    return ctypes.byref(
        _Cache(
            keys.data_ptr(),
            values.data_ptr(),
            *(stride for part in (keys, values) for stride in part.stride()[:2]),
            *slab.sizes,
            keys.shape[1],
            native.KINDS[keys.dtype],
        )
    )


def _racks(this: Pass) -> tuple[Together, ...]:
    """Who lies in which rack: made once in a pass."""
    if this.racks:
        this.tally.mask_hits += 1
    else:
        this.tally.mask_misses += 1
        this.racks = tuple(_gathered(this))
    return this.racks


def _gathered(this: Pass) -> Iterator[Together]:
    by_rack: dict[int, tuple[Rack, list[_Span]]] = {}
    for span in this.spans:
        rack, place = this.arena.place(span.sequence)
        _, spans = by_rack.setdefault(id(rack), (rack, []))
        spans.append(_Span(span.offset, span.count, span.start, place))
    for rack, spans in by_rack.values():
        yield Together(rack, (_Span * len(spans))(*spans))
