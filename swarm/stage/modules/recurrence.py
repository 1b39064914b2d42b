"""Recurrences with a state between positions: convolutions, gated delta rules, state spaces and linear attention.

Input: rows of a ragged batch, and segments of it with the state before and after them. Output: rows. Rules: every
sequence advances position by position in one order of operations, in float32, so no bit depends on chunks or on other
sequences. Our own kernels compute on a CPU; elsewhere a loop of torch's operations does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from swarm.stage import native
from swarm.stage.attention.passes import current_pass
from swarm.stage.attention.states import Segment
from swarm.stage.matmul.elementwise import apply_aligned
from swarm.stage.native import cores
from swarm.stage.native.linears import FUNCTIONS

_TORCH_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "swish": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}


class Segments:
    """A layer's segments in the current pass, each with the layer's state of so many numbers before and after it."""

    def __init__(self, layer: int, numbers: int) -> None:
        this = current_pass()
        self.parts: Sequence[Segment] = this.arena.states.segments(this.spans, layer, numbers)
        self.native = (native.NativeSegment * len(self.parts))(
            *(
                native.NativeSegment(part.offset, part.count, part.before.data_ptr(), part.after.data_ptr())
                for part in self.parts
            )
        )

    def split(self, state: int, *shape: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Return each segment's rows, and a part of the state, from number ``state`` on, before and after them."""
        place = slice(state, state + torch.Size(shape).numel())
        return [
            (
                slice(part.offset, part.offset + part.count),
                part.before[place].view(shape),
                part.after[place].view(shape),
            )
            for part in self.parts
        ]


def _has_kernels(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in native.KINDS and native.library() is not None


def apply_function(name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a function to every element, whose bits depend on the element alone."""
    if not _has_kernels(x):
        return apply_aligned(_TORCH_FUNCTIONS[name], x)
    x = x if x.is_contiguous() else x.contiguous()
    out, library = torch.empty_like(x), native.library()
    assert library is not None, "there are kernels"
    library.swarm_activate(native.KINDS[x.dtype], FUNCTIONS[name, ""], x.data_ptr(), out.data_ptr(), x.numel())
    return out


def norm_pieces(x: torch.Tensor, size: int, epsilon: float, weight: torch.Tensor) -> torch.Tensor:
    """Norm every piece of ``size`` elements of the float32 rows by its root mean square, and weight its elements."""
    pieces = x.reshape(-1, size)
    if not _has_kernels(x):
        return (pieces * torch.rsqrt((pieces * pieces).mean(-1, keepdim=True) + epsilon) * weight).view(x.shape)
    pieces = pieces if pieces.is_contiguous() else pieces.contiguous()
    out, library = torch.empty_like(pieces), native.library()
    assert library is not None, "there are kernels"
    rows = native.NativeRows(pieces.data_ptr(), size, out.data_ptr(), size)
    library.swarm_rms_norm(native.FLOAT32, ctypes.byref(rows), len(pieces), 1, size, weight.data_ptr(), epsilon, 0)
    return out.view(x.shape)


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    function: str,
    segments: Segments,
) -> torch.Tensor:
    """Convolve each channel of the rows by itself, and apply a function.

    ``weight`` is ``[taps, channels]``, the oldest input's first. The state begins with the last inputs.
    """
    taps, channels = weight.shape
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if _has_kernels(rows):
        assert rows.stride(1) == 1, "a row's channels are adjacent"
        job = native.NativeConvolution(
            ctypes.addressof(segments.native),
            *(len(segments.parts), 0, native.KINDS[rows.dtype]),
            *(rows.data_ptr(), rows.stride(0), out.data_ptr(), channels),
            *(channels, taps, FUNCTIONS[function, ""] if function != "none" else 0),
            *(weight.data_ptr(), None if bias is None else bias.data_ptr()),
        )
        _run("swarm_convolve", job)
        return out
    for where, before, after in segments.split(0, taps - 1, channels):
        inputs = torch.cat([before, rows[where].float()])
        after.copy_(inputs[len(inputs) - taps + 1 :])
        count = where.stop - where.start
        total = torch.zeros(count, channels, device=rows.device) if bias is None else bias.expand(count, channels)
        for tap in range(taps):
            total = total + inputs[tap : tap + count] * weight[tap]
        out[where] = (total if function == "none" else apply_function(function, total)).to(rows.dtype)
    return out


def shift(rows: torch.Tensor, segments: Segments, state: int, *, keep: bool = True) -> torch.Tensor:
    """Return the row before each row. The one before a segment's first is in the state, from number ``state`` on;
    with ``keep``, a segment's last row is written there."""
    out = torch.empty_like(rows)
    for where, before, after in segments.split(state, rows.shape[1]):
        out[where.start] = before.to(rows.dtype)
        out[where.start + 1 : where.stop] = rows[where.start : where.stop - 1]
        if keep:
            after.copy_(rows[where.stop - 1])
    return out


def raise_exponents(
    kept: torch.Tensor, new: torch.Tensor, segments: Segments, state: int, start: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest exponent before each row, and after it: what is ``kept`` is added to it, and ``new`` may be
    larger. ``kept`` and ``new`` are float32 ``[rows, numbers]``; a sequence begins with ``start``."""
    befores, afters, positions = torch.empty_like(new), torch.empty_like(new), current_pass().positions[0]
    for where, before, after in segments.split(state, new.shape[1]):
        last = torch.full_like(before, start) if positions[where.start] == 0 else before
        for row in range(where.start, where.stop):
            befores[row] = last
            last = torch.maximum(last + kept[row], new[row], out=afters[row])
        after.copy_(last)
    return befores, afters


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    segments: Segments,
    state: int,
) -> torch.Tensor:
    """Advance a matrix for each head: decay it, write ``key`` times ``value``, and read it with ``query``.

    All are float32: queries and keys ``[rows, key heads, keys]``, values ``[rows, heads, values]``, decays
    ``[rows, heads, 1 or keys]``. With ``beta``, ``[rows, heads]``, that share of a value is written of which what the
    state already has for the key is subtracted: the delta rule. Returns ``[rows, heads, values]``.
    """
    (heads, values), (key_heads, keys) = value.shape[1:], key.shape[1:]
    out = torch.empty(value.shape, device=value.device)
    if _has_kernels(value):
        decay, beta = decay.contiguous(), None if beta is None else beta.contiguous()
        for each in (query, key, value):
            assert each.stride()[1:] == (each.shape[2], 1), "a row's heads are adjacent"
        job = native.NativeRecurrence(
            ctypes.addressof(segments.native),
            *(len(segments.parts), state),
            *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(query.stride(0), key.stride(0), value.stride(0)),
            *(decay.data_ptr(), None if beta is None else beta.data_ptr(), out.data_ptr()),
            *(heads, key_heads, keys, values, decay.shape[-1]),
        )
        _run("swarm_recur", job)
        return out
    query, key = (each.repeat_interleave(heads // key_heads, dim=1) for each in (query, key))
    for where, before, after in segments.split(state, heads, keys, values):
        matrix = before
        for row in range(where.start, where.stop):
            matrix, change = matrix * decay[row].unsqueeze(-1), value[row]
            if beta is not None:
                change = (change - (matrix * key[row].unsqueeze(-1)).sum(1)) * beta[row].unsqueeze(-1)
            matrix = matrix + key[row].unsqueeze(-1) * change.unsqueeze(1)
            out[row] = (matrix * query[row].unsqueeze(-1)).sum(1)
        after.copy_(matrix)
    return out


def scan(
    x: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    *,
    write: torch.Tensor,
    read: torch.Tensor,
    segments: Segments,
    state: int,
) -> torch.Tensor:
    """Advance some numbers for each channel: decay them by ``exp(step * rate)``, add ``step * x * write``, and sum them
    weighted by ``read``.

    All are float32: ``x`` and ``step`` ``[rows, channels]``, ``rate`` ``[numbers, channels]``, ``write`` and ``read``
    ``[rows, numbers]``. Returns ``[rows, channels]``.
    """
    numbers, channels = rate.shape
    x, step, write, read = (each.contiguous() for each in (x, step, write, read))
    out = torch.empty_like(x)
    if _has_kernels(x):
        job = native.NativeScan(
            ctypes.addressof(segments.native),
            *(len(segments.parts), state),
            *(x.data_ptr(), step.data_ptr(), rate.data_ptr(), write.data_ptr(), read.data_ptr()),
            *(numbers, out.data_ptr(), channels, numbers),
        )
        _run("swarm_scan", job)
        return out
    for where, before, after in segments.split(state, numbers, channels):
        held = before
        for row in range(where.start, where.stop):
            kept = apply_function("exp", step[row] * rate) * held
            held = kept + (step[row] * x[row]) * write[row].unsqueeze(-1)
            out[row] = (held * read[row].unsqueeze(-1)).sum(0)
        after.copy_(held)
    return out


def _run(kernel: str, job: ctypes.Structure) -> None:
    library = native.library()
    assert library is not None, "there are kernels"
    getattr(library, kernel)(ctypes.byref(job), cores.num_threads())
