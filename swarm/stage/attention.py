"""Who attends to what: keys and values of every sequence, and the attention function that reads and writes them.

The function is registered with transformers, so any decoder whose attention is pluggable calls it with the queries,
keys and values of one ragged batch ``[1, heads, tokens, size]``. Which tokens belong to which sequence and position
stands in the :class:`~swarm.stage.passes.Pass` that the calling thread has made current.

A row's result must have the same bits whatever else is in the batch and however the prompt was cut. The order in which
a kernel sums depends on the number of keys, so that number may depend on the row's own position only: positions lie on
a grid of 32, queries are cut at its lines, and each tile attends to everything up to the next line after it. Keys past
a row's own position are masked: they have weight exactly 0, and what lies there is finite. A window begins on a line
of the grid too. And small products take other kernels, so a tile has at least eight rows, or twelve
(a group's query heads count as rows of their common key head).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm.errors import ModelError
from swarm.stage.arena import Region
from swarm.stage.passes import GRID, Tile, current_pass
from swarm.stage.steady import steadily

NAME = "swarm"
# Measured: float32 products of 1–3, 5–7 and 9–11 rows take kernels that sum in another order.
_MIN_ROWS = {torch.float32: 12}
_FEWEST_ROWS = 8
# Arguments that say nothing about who attends to what; any other one must be understood or refused.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
    }
)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; returns ``[1, tokens, heads, size]``. Writes keys and values first."""
    _refuse_unknown(module, attention_mask, dropout, others)
    this, layer = current_pass(), int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = _How(scale, sliding_window, softcap, s_aux)
    num_heads, num_tokens = query.shape[1], query.shape[2]
    folded = query[0].view(key.shape[1], -1, num_tokens, query.shape[3])
    output = value.new_zeros(num_tokens, num_heads, value.shape[3])
    for span in this.spans:
        region = this.arena.region(span.sequence, layer) or this.arena.make(span.sequence, layer, key, value)
        stop = span.offset + span.count
        region.keys[:, span.start : span.start + span.count] = key[0, :, span.offset : stop]
        region.values[:, span.start : span.start + span.count] = value[0, :, span.offset : stop]
        for tile in span.tiles:
            result = _attend_tile(folded[:, :, tile.offset : tile.offset + tile.count], region, tile, how)
            output[tile.offset : tile.offset + tile.count] = result
    return output.unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class _How:
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def _attend_tile(query: torch.Tensor, region: Region, tile: Tile, how: _How) -> torch.Tensor:
    """``query`` [key heads, group, count, size] → [count, heads, size]."""
    key_heads, group, count, size = query.shape
    num_rows = group * count
    rows = query.reshape(key_heads, num_rows, size)
    missing = _MIN_ROWS.get(rows.dtype, _FEWEST_ROWS) - num_rows
    if missing > 0:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    low, high = _first_key(tile.line, how.window), tile.line + GRID
    scores = torch.bmm(rows, _dense(region.keys[:, low:high]).transpose(1, 2)).float().mul_(how.scale)
    if how.softcap is not None:
        scores = steadily(torch.tanh, scores.div_(how.softcap)).mul_(how.softcap)
    _mask(scores[:, :num_rows].view(key_heads, group, count, high - low), tile, how.window, low)
    weights = _softmax(scores, _sink_column(how.sinks, scores, count)).to(query.dtype)
    mixed = torch.bmm(weights, region.values[:, low:high])[:, :num_rows]
    return mixed.reshape(key_heads * group, count, -1).transpose(0, 1)


def _dense(keys: torch.Tensor) -> torch.Tensor:
    """oneDNN multiplies by the transpose of a piece of a larger tensor five times slower than by that of a copy."""
    return keys.contiguous() if keys.dtype == torch.bfloat16 else keys


def _first_key(line: int, window: int | None) -> int:
    """Where a tile's keys begin: a line of the grid, the same for every row of the tile."""
    return 0 if window is None else max(0, line - window + 1) // GRID * GRID


def _softmax(scores: torch.Tensor, column: torch.Tensor | None) -> torch.Tensor:
    """``column``: one more score per row that takes weight and gives nothing."""
    if column is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _sink_column(sinks: torch.Tensor | None, scores: torch.Tensor, count: int) -> torch.Tensor | None:
    """A query head's sink for each of its rows; padding rows get one too, it doesn't matter which."""
    if sinks is None:
        return None
    key_heads, num_rows, _ = scores.shape
    column = sinks.float().view(key_heads, -1).repeat_interleave(count, dim=1)
    return torch.nn.functional.pad(column, (0, num_rows - column.shape[1])).unsqueeze(-1)


def _mask(scores: torch.Tensor, tile: Tile, window: int | None, low: int) -> None:
    """Only the last 32 keys can lie after a query, and only the first 64 before its window."""
    first = tile.start - tile.line
    device = str(scores.device)
    scores[..., -GRID:].masked_fill_(_later(device)[first : first + tile.count], float("-inf"))
    if window is not None and tile.line + GRID > window:
        too_old = _too_old(tile.line - low - window, device)[first : first + tile.count]
        columns = min(scores.shape[-1], too_old.shape[-1])
        scores[..., :columns].masked_fill_(too_old[:, :columns], float("-inf"))


@lru_cache(maxsize=8)
def _later(device: str) -> torch.Tensor:
    """[query, key] on one grid cell: is the key after the query?"""
    return torch.ones(GRID, GRID, dtype=torch.bool, device=device).triu(1)


@lru_cache(maxsize=256)
def _too_old(distance: int, device: str) -> torch.Tensor:
    """[query, key]: is the key, counted from the first one, out of the query's window?"""
    query = torch.arange(GRID, device=device)[:, None]
    return torch.arange(2 * GRID, device=device)[None, :] <= query + distance


def _refuse_unknown(module: torch.nn.Module, mask: object, dropout: float, others: dict[str, object]) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which is not supported"
        )


def _no_mask(*_: object, **__: object) -> None:
    """The grid masks; the model shall build nothing."""


def register() -> None:
    """Make the attention function known to transformers; calling it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
