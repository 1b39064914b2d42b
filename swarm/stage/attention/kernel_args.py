"""Arguments of our attention kernel: the structures of kernels.h, and the rows of a pass grouped by rack."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.stage import native

if TYPE_CHECKING:
    import torch

    from swarm.stage.attention.options import AttentionOptions
    from swarm.stage.attention.racks import LayerBuffer, Rack
    from swarm.wire.messages import LayerRange

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class NativeSpan(ctypes.Structure):
    """``SwarmSpan`` of kernels.h. The structures below mirror kernels.h, too."""

    _fields_ = [(name, _count) for name in ("offset", "count", "start", "place", "guessed")]


class NativeCache(ctypes.Structure):
    """Addresses, strides and sizes of one layer's keys and values (``SwarmCache``)."""

    _fields_ = [
        ("keys", _pointer),
        ("values", _pointer),
        *((name, _count) for name in ("key_place", "key_head", "value_place", "value_head")),
        *((name, _count) for name in ("key_size", "value_size", "heads", "kind")),
    ]


class NativeBatch(ctypes.Structure):
    """Addresses and strides of a batch's queries, keys, values and results (``SwarmBatch``)."""

    _fields_ = [
        *((name, _pointer) for name in ("query", "key", "value", "out")),
        *((name, _count) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, _count) for name in ("value_token", "value_head", "query_heads")),
    ]


class NativeOptions(ctypes.Structure):
    """Parameters of attention: what scores go through before they become weights."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *(("window", _count), ("sinks", _pointer), ("chunk", _count), ("slopes", _pointer)),
        ("rounded", ctypes.c_float),
    ]


def native_options(options: AttentionOptions) -> tuple[NativeOptions, tuple[torch.Tensor | None, ...]]:
    """Return the parameters as the kernel reads them, and the owners of the memory that they point to."""
    tensors = tuple(None if each is None else each.float().contiguous() for each in (options.sinks, options.slopes))
    sinks, slopes = (None if each is None else each.data_ptr() for each in tensors)
    limits = options.window or 0, sinks, options.chunk or 0
    return NativeOptions(options.scale, options.softcap or 0.0, *limits, slopes, options.rounded or 0.0), tensors


@dataclass(frozen=True, slots=True)
class RackBatch:
    """Rows of a pass whose keys and values are in one rack."""

    rack: Rack
    spans: ctypes.Array[NativeSpan]


def native_cache(slab: LayerBuffer, value_size: int) -> NativeCache:
    """Return a layer's addresses. ``value_size``: of a value, also where it is the beginning of a key."""
    keys, values = slab.keys, slab.values
    return NativeCache(
        keys.data_ptr(),
        values.data_ptr() if slab.sizes[1] else None,
        *(stride for part in (keys, values) for stride in part.stride()[:2]),
        slab.sizes[0],
        value_size,
        keys.shape[1],
        native.KINDS[keys.dtype],
    )


def cache_table(rack: Rack, layers: LayerRange) -> ctypes.Array[NativeCache]:
    """Return a table of a rack's keys and values in these layers, which exist."""
    if layers not in rack.tables:
        slabs = [rack.buffers[layer] for layer in range(layers.first, layers.stop)]
        rack.tables[layers] = (NativeCache * len(slabs))(*(native_cache(slab, slab.sizes[1]) for slab in slabs))
    table: ctypes.Array[NativeCache] = rack.tables[layers]
    return table
