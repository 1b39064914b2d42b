"""Mixtures of experts on a GPU, without a synchronisation with the host.

The choices of a step's rows are sorted by expert. Each expert's rows are cut into tiles; the table of tiles is computed
on the device and has as many entries as there can be tiles, since the host does not know how many rows an expert got.
A row's results are added in the order of the experts' numbers, in float32, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from swarm.stage.cuda.matmul import Tiles

_COLUMNS = 512  # that a program adds up


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """A step's choices ``[rows, choices]``, sorted by expert; choices of no expert come last."""

    num_choices: int  # of a row
    order: torch.Tensor  # int64: which of the flat choices each sorted one is
    sources: torch.Tensor  # int64: the row of each sorted choice
    ends: torch.Tensor  # int32 [experts]: the sorted choice after the last one of each expert
    experts: torch.Tensor  # int32: of each sorted choice


def sort_choices(chosen: torch.Tensor, num_experts: int) -> SortedChoices:
    """Sort choices ``[rows, choices]`` by expert, in the order of the rows. Those below 0 are of no expert."""
    flat = chosen.reshape(-1)
    flat = torch.where(flat < 0, num_experts, flat)
    experts, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device), right=True)
    num_choices = chosen.shape[-1]
    return SortedChoices(num_choices, order, order.div(num_choices, rounding_mode="floor"), ends.int(), experts.int())


def make_tiles(choices: SortedChoices, height: int) -> Tiles:
    """Return the tiles of up to ``height`` sorted choices of one expert."""
    ends, num_rows = choices.ends, len(choices.order)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    last_tiles = torch.cumsum((ends - starts + height - 1).div(height, rounding_mode="floor"), 0)
    num_experts = len(ends)
    most = min(num_rows, num_experts + num_rows // height)
    numbers = torch.arange(most, device=ends.device)
    experts = torch.searchsorted(last_tiles, numbers, right=True)
    is_tile, experts = experts < num_experts, experts.clamp(max=num_experts - 1)
    first_tiles = torch.nn.functional.pad(last_tiles[:-1], (1, 0))
    tile_starts = starts[experts] + (numbers - first_tiles[experts]) * height
    stops = torch.where(is_tile, torch.minimum(tile_starts + height, ends[experts]), tile_starts)
    return Tiles(experts.int(), tile_starts.int(), stops.int(), choices.experts)


def equal_tiles(num_groups: int, num_rows: int, height: int, device: torch.device) -> Tiles:
    """Return the tiles of groups of ``num_rows`` rows each, one after the other; each has a matrix of its own."""
    by_group = torch.arange(0, num_rows, height, device=device)
    groups = torch.arange(num_groups, device=device)
    starts = (groups[:, None] * num_rows + by_group).flatten()
    experts = groups.repeat_interleave(len(by_group))
    stops = torch.minimum(starts + height, (experts + 1) * num_rows)
    return Tiles(experts.int(), starts.int(), stops.int(), groups.repeat_interleave(num_rows).int())


@triton.jit
def _combine(results, weights, places, ends, out, num_experts, hidden, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_chosen = tl.load(ends + num_experts - 1)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in range(CHOICES):
        place = tl.load(places + row * CHOICES + choice)
        is_chosen = place < num_chosen
        limit = tl.where(is_chosen, hidden, 0)
        result = tl.load(results + place * hidden + column, mask=column < limit, other=0.0)
        weight = tl.load(weights + place, mask=is_chosen, other=0.0)
        total += result.to(tl.float32) * weight.to(tl.float32)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def combine(results: torch.Tensor, weights: torch.Tensor, choices: SortedChoices) -> torch.Tensor:
    """Return the weighted sums of each row's results. ``results`` is ``[sorted choices, hidden]``, ``weights`` is
    ``[rows, choices]``."""
    num_rows, hidden = len(weights), results.shape[1]
    numbers = torch.arange(len(choices.order), device=results.device)
    places = torch.empty_like(choices.order).index_copy_(0, choices.order, numbers)
    # ascending places are ascending experts
    places = places.view(num_rows, choices.num_choices).sort(dim=1).values
    out = results.new_empty(num_rows, hidden)
    if num_rows:
        _combine[(num_rows, -(-hidden // _COLUMNS))](
            *(results, weights.reshape(-1)[choices.order], places, choices.ends, out, len(choices.ends), hidden),
            CHOICES=choices.num_choices,
            COLUMNS=_COLUMNS,
            enable_fp_fusion=False,
        )
    return out
