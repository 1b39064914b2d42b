"""A stage's step as one call into C: operations over a few buffers, listed once when the stage is loaded.

No interpreter then runs between two kernels: there is no call to prepare, no lock to get back from other threads, no
tensor to make. The operations are the ones that the stage's modules would have called, with the same weights in the
same order, so a program has the modules' bits. ``recipes`` writes the program; modules that it does not recognise run
as modules. Before a program is used for requests, its results are compared with the modules'
(``swarm.stage.engine.dry_runs``).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from swarm.stage import native
from swarm.stage.attention import kernel_args, native_attention
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.executor import FenceRaised
from swarm.stage.native import cores
from swarm.stage.native.adapters import AdaptedRows, AdapterPart, RowAdapters, current_adapters, make_table
from swarm.stage.native.linears import NativeLinear
from swarm.wire.messages import LayerRange

# Indices of the buffers.
HIDDEN, NORMED, WIDE, MIXED = range(4)
NUM_BUFFERS = 4
# Operation codes, as in program.h.
NORM, MULTIPLY, MIX, ROTATE, ATTEND, ADD = range(6)
# Target duration of one call. Between two calls the step can be stopped, and progress is reported.
CALL_S = 0.025

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class NormArgs(ctypes.Structure):
    """Arguments of a norm: ``SwarmNorm`` of program.h. The structures below mirror program.h, too."""

    _fields_ = [
        ("weight", _pointer),
        *((name, _count) for name in ("size", "count", "first", "stride", "rounded")),
        ("epsilon", ctypes.c_float),
    ]


class ProductArgs(ctypes.Structure):
    _fields_ = [("matrix", _pointer), ("first", _count), ("stride", _count), ("slot", _count)]


class HeadArgs(ctypes.Structure):
    _fields_ = [("how", kernel_args.NativeOptions), *((name, _count) for name in ("size", "query_heads", "key_heads"))]


class WidthArgs(ctypes.Structure):
    _fields_ = [("elements", _count)]


class Op(ctypes.Structure):
    _fields_ = [*((name, _count) for name in ("code", "source", "target", "kind", "layer")), ("what", _pointer)]


class _Rack(ctypes.Structure):
    _fields_ = [("spans", _pointer), ("num_spans", _count), ("caches", _pointer)]


class _Step(ctypes.Structure):
    _fields_ = [
        ("buffers", _pointer * NUM_BUFFERS),
        ("num_rows", _count),
        ("cosines", _pointer),
        ("sines", _pointer),
        *((name, _count) for name in ("table", "table_kind", "turned")),
        ("racks", _pointer),
        ("num_racks", _count),
        ("threads", _count),
        ("adapted", _pointer),
    ]


@dataclass(frozen=True, slots=True)
class BufferShapes:
    """Elements of a row in each buffer, and empty keys and values with a layer's heads and sizes."""

    widths: tuple[int, ...]
    keys: torch.Tensor


_refusals: list[str] = []  # at most one entry: why this process computes module by module


def disabled_reason() -> str:
    """Return why this process computes layers module by module instead of by programs; empty if it uses programs."""
    return _refusals[0] if _refusals else ""


def is_enabled() -> bool:
    """Whether this process computes with programs where a stage has one."""
    return not _refusals and native.library() is not None


def disable(reason: str) -> None:
    """Compute module by module from now on, in the whole process."""
    _refusals[:] = [reason]


@contextmanager
def disabled(reason: str) -> Iterator[None]:
    """Compute module by module in this context, in the whole process."""
    before = _refusals[:]
    disable(reason)
    try:
        yield
    finally:
        _refusals[:] = before


class Program:
    """Operations of some layers, and of the norm and head after them on the last stage.

    ``layers`` has each layer's operations; ``head`` the ones after the layers, a norm and then products, empty if there
    are none.
    """

    def __init__(
        self,
        layers: LayerRange,
        operations: Sequence[Sequence[Op]],
        head: Sequence[Op],
        shape: BufferShapes,
        *,
        num_words: int,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        num_rotated: Callable[[torch.Tensor, torch.Tensor], int],
        products: Sequence[NativeLinear],
        owners: object,
    ) -> None:
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self._run, self._layers, self._shape, self._num_words = library.swarm_run, layers, shape, num_words
        self._embed, self._rotary, self._num_rotated = embed, rotary, num_rotated
        self._products = tuple(products)  # by slot
        # by adapter: its parts of the products, with one of them by which a table that is not valid any more shows
        self._adapter_tables: dict[str, tuple[ctypes.Array[Any], NativeLinear, AdapterPart]] = {}
        self._owners = owners  # owners of the memory that the operations point to
        flat = [op for each in operations for op in each]
        self._ops, self._head = (Op * len(flat))(*flat), (Op * len(head))(*head)
        self._begins = [0]  # index of each layer's first operation
        for each in operations:
            self._begins.append(self._begins[-1] + len(each))
        # seconds per layer, from recent steps, by the number of rows (as a power of two)
        self._layer_s: dict[int, float] = {}

    def run(self, forward_pass: ForwardPass, ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        """Run a pass, with the same result as :meth:`Stage.run`."""
        with use_pass(forward_pass), torch.inference_mode():
            hidden = self._first(forward_pass, ids)
            cosines, sines = (table[0].contiguous() for table in self._rotary(hidden.unsqueeze(0), positions))
            buffers = [hidden, *(hidden.new_empty(len(hidden), width) for width in self._shape.widths[1:])]
            _check_bounds(forward_pass, len(hidden), len(cosines))
            racks = self._rack_array(forward_pass)
            adapted = self._adapted_rows(current_adapters(), len(hidden))
            step = _Step(
                (_pointer * NUM_BUFFERS)(*(buffer.data_ptr() for buffer in buffers)),
                len(hidden),
                cosines.data_ptr(),
                sines.data_ptr(),
                cosines.shape[-1],
                native.KINDS[cosines.dtype],
                self._num_rotated(cosines, sines),
                ctypes.addressof(racks),
                len(racks),
                cores.num_threads(),
                None if adapted is None else ctypes.addressof(adapted.native),
            )
            self._run_layers(forward_pass, step)
            if forward_pass.keep_rows is not None:
                hidden = hidden[forward_pass.keep_rows]
            forward_pass.output = hidden.unsqueeze(0)
            forward_pass.on_layers_done()
            if not self._head:
                return forward_pass.output
            return self._run_head(forward_pass, hidden, step) if forward_pass.keep_rows is not None else None

    def _first(self, this: ForwardPass, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the first layer's input, in memory that the layers may write to."""
        if ids is not None:
            return self._embed(ids)[0].contiguous()
        assert this.hidden is not None, "a stage that doesn't embed is sent hidden states"
        if this.hidden.shape[2] != self._shape.widths[HIDDEN]:
            raise ValueError(f"hidden states of {this.hidden.shape[2]} numbers for {self._shape.widths[HIDDEN]}")
        return this.hidden[0].clone(memory_format=torch.contiguous_format)

    def _adapted_rows(self, adapters: RowAdapters | None, num_rows: int) -> AdaptedRows | None:
        if adapters is None:
            return None
        if len(adapters.which) != num_rows:
            raise ValueError(f"adapters of {len(adapters.which)} rows for {num_rows}")
        return adapters.table(map(self._adapter_table, adapters.names))

    def _adapter_table(self, name: str) -> ctypes.Array[Any]:
        """Return an adapter's parts of the products. An adapter that was dropped and loaded again has other parts."""
        known = self._adapter_tables.get(name)
        if known is not None and known[1].adapters.get(name) is known[2]:
            return known[0]
        self._adapter_tables = {
            key: value for key, value in self._adapter_tables.items() if value[1].adapters.get(key) is value[2]
        }
        parts = [product.adapters.get(name) for product in self._products]
        table = make_table(parts)
        for product, part in zip(self._products, parts, strict=True):
            if part is not None:
                self._adapter_tables[name] = table, product, part
                break
        return table

    def _rack_array(self, this: ForwardPass) -> ctypes.Array[_Rack]:
        batches = native_attention.rack_batches(this)
        racks = [
            _Rack(ctypes.addressof(each.spans), len(each.spans), self._cache_table(this, each)) for each in batches
        ]
        return (_Rack * len(racks))(*racks)

    def _cache_table(self, this: ForwardPass, together: kernel_args.RackBatch) -> int:
        """Return the address of a table with a rack's keys and values, layer by layer."""
        if self._layers not in together.rack.tables:
            keys = self._shape.keys
            for layer in range(self._layers.first, self._layers.stop):
                this.arena.ensure_buffer(together.rack, layer, keys, keys)
        return ctypes.addressof(kernel_args.cache_table(together.rack, self._layers))

    def _run_layers(self, this: ForwardPass, step: _Step) -> None:
        sequences, size = tuple(span.sequence for span in this.spans), ctypes.sizeof(Op)
        for first, stop in self._split_calls(step.num_rows):
            if this.is_fenced():
                raise FenceRaised
            begin, end = self._begins[first], self._begins[stop]
            began = time.perf_counter()
            native.check_status(self._run(ctypes.addressof(self._ops) + begin * size, end - begin, ctypes.byref(step)))
            self._layer_s[step.num_rows.bit_length()] = (time.perf_counter() - began) / (stop - first)
            for layer in range(first, stop):
                this.arena.mark_written(sequences, self._layers.first + layer)
                this.on_progress()

    def _split_calls(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Split the layers into calls of about the target duration."""
        first, num_layers = 0, len(self._begins) - 1
        while first < num_layers:
            layer_s = self._layer_s.get(num_rows.bit_length(), CALL_S)
            stop = min(num_layers, first + max(1, int(CALL_S / max(layer_s, 1e-9))))
            yield first, stop
            first = stop

    def _run_head(self, this: ForwardPass, hidden: torch.Tensor, step: _Step) -> torch.Tensor | None:
        if not len(hidden):
            return None
        normed, num_rows = torch.empty_like(hidden), len(hidden) - this.num_pooled
        logits = hidden.new_empty(num_rows, self._num_words)
        step.buffers[HIDDEN], step.buffers[NORMED] = hidden.data_ptr(), normed.data_ptr()
        step.buffers[WIDE], step.buffers[MIXED], step.num_rows = logits.data_ptr(), None, len(hidden)
        step.adapted = None  # no adapter changes the head
        native.check_status(self._run(self._head, 1, ctypes.byref(step)))
        this.normed = normed
        num_products = len(self._head) - 1
        if not num_products or not num_rows:
            return normed[:num_rows] if num_rows else None
        step.num_rows = num_rows
        products = ctypes.addressof(self._head) + ctypes.sizeof(Op)
        native.check_status(self._run(products, num_products, ctypes.byref(step)))
        return logits


def _check_bounds(this: ForwardPass, num_rows: int, num_positions: int) -> None:
    """Raise ``ValueError`` if the step would read or write beyond its rows, or beyond a sequence's slot."""
    if num_positions != num_rows:
        raise ValueError(f"positions of {num_positions} rows for {num_rows}")
    for span in this.spans:
        rack, _ = this.arena.slot(span.sequence)
        if span.offset + span.count > num_rows or span.start + span.count > rack.positions:
            raise ValueError(
                f"sequence {span.sequence}: rows {span.offset} to {span.offset + span.count} at {span.start} "
                f"don't fit into {num_rows} rows and {rack.positions} positions"
            )
