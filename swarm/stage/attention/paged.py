"""Attention of a pass over a pool's pages, on other devices than CPUs.

On a CUDA device with Triton, one kernel computes all rows of a layer (``page_kernels``). Elsewhere, and with the
options that the kernel does not know, torch computes one sequence after the other: this is also what the kernel is
tested against. Its bits are not held to anything.

Scores are summed in float32, and the queries are scaled before: a score in float16 could overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from swarm.stage.attention.guesses import clean_guesses, mark_guesses, spoil
from swarm.stage.attention.page_plan import PagePlan
from swarm.stage.attention.pages import PagedRegion, PagePool, PoolLayer
from swarm.stage.attention.selection import SelectedPositions, select_positions

if TYPE_CHECKING:
    from swarm.stage.attention.grid import Span
    from swarm.stage.attention.options import AttentionOptions
    from swarm.stage.attention.passes import ForwardPass
    from swarm.stage.attention.selection import Selection


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages of a layer, as one call of attention sees them: with these key heads."""

    pool: PagePool
    layer: PoolLayer
    heads: range

    def region(self, pages: list[int]) -> PagedRegion:
        return PagedRegion(self.layer, pages, self.heads)

    def addresses(self, device: torch.device) -> torch.Tensor:
        """Return the addresses of the layer's pages, by number."""
        return self.pool.addresses(device)[self.layer.row]


def attend_pages(
    forward_pass: ForwardPass,
    layer: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    *,
    index: SelectedPositions | None,
) -> torch.Tensor:
    """Attend with queries, keys and values ``[tokens, heads, size]``; return the same shape. Writes keys and values
    first. Tokens of no sequence get zeros. ``index``: see ``attend_rows``."""
    query, key, value = parts
    plan = plan_pages(forward_pass, query.device)
    is_latent, value_size = options.latents is not None, value.shape[2]
    key, value, spoiled = clean_guesses(plan.guesses, key, value, is_latent=is_latent)
    store = _ensure_layer(forward_pass, plan, layer, (key, value), options)
    kernels = find_kernels(query.device)
    write = _write if kernels is None else kernels.write_pages
    write(plan, store, key, key[..., :0] if is_latent else value)
    selection = None
    if index is not None:
        query = select_positions(index, forward_pass, query, key, lambda span: _read_latents(plan, store, span))
        selection = index.selection
    if kernels is None or selection is not None or not kernels.supports(query, options):
        out = _attend(plan, store, query, options, value_size=value_size, selection=selection)
    else:
        out = kernels.attend_pages(plan, store, query, options, value_size=value_size)
    return out if spoiled is None else spoil(out, spoiled)


def plan_pages(forward_pass: ForwardPass, device: torch.device) -> PagePlan:
    """Return the pass's plan, made at the first layer."""
    plan = forward_pass.page_plan
    if plan is None:
        pages = tuple(forward_pass.arena.pages(span.sequence) for span in forward_pass.spans)
        plan = PagePlan(forward_pass.spans, pages, device, mark_guesses(forward_pass.spans, device))
        forward_pass.page_plan = plan
        forward_pass.cache_stats.mask_misses += 1
    else:
        forward_pass.cache_stats.mask_hits += 1
    return plan


@cache
def find_kernels(device: torch.device) -> Any:
    """Return the module with the device's kernels; None if it has none."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    # Triton loads slowly, and exists on few machines
    return import_module("swarm.stage.attention.page_kernels")


def _ensure_layer(
    forward_pass: ForwardPass,
    plan: PagePlan,
    layer: int,
    parts: tuple[torch.Tensor, torch.Tensor],
    options: AttentionOptions,
) -> LayerPages:
    keys, values = (part[:1].transpose(0, 1) for part in parts)
    heads, latents = range(len(keys)), options.latents
    if latents is not None:
        keys = keys.expand(latents.num_heads, -1, -1)
        values, heads = keys[..., :0], range(latents.head, latents.head + 1)
    arena = forward_pass.arena
    held = arena.ensure_pages(plan.sequences, layer, keys, values)
    assert arena.pool is not None, "pages are in a pool"
    return LayerPages(arena.pool, held, heads)


def _write(plan: PagePlan, store: LayerPages, key: torch.Tensor, value: torch.Tensor) -> None:
    for span, pages in zip(plan.spans, plan.pages, strict=True):
        tokens = slice(span.offset, span.offset + span.count)
        store.region(pages).write(span.start, key[tokens].transpose(0, 1), value[tokens].transpose(0, 1))


def _read_latents(plan: PagePlan, store: LayerPages, span: Span) -> torch.Tensor:
    pages = plan.pages[plan.spans.index(span)]
    return store.region(pages).read(0, span.start + span.count)[0][0]


def _attend(
    plan: PagePlan,
    store: LayerPages,
    query: torch.Tensor,
    options: AttentionOptions,
    *,
    value_size: int,
    selection: Selection | None,
) -> torch.Tensor:
    """Attend by torch: gather a sequence's keys and values, and compute its tiles."""
    out = query.new_zeros(*query.shape[:2], value_size)
    for span, pages in zip(plan.spans, plan.pages, strict=True):
        low = max(0, int(options.reach.first(span.start)))
        keys, values = (part.float() for part in store.region(pages).read(low, span.start + span.count))
        if options.latents is not None:
            values = keys[..., :value_size]
        for tile in span.tiles:
            tokens, seen = slice(tile.offset, tile.offset + tile.count), slice(tile.start + tile.count - low)
            hidden = None if selection is None else selection.hidden(tokens, len(query), low, low + seen.stop)
            mixed = _attend_tile(query[tokens], (keys[:, seen], values[:, seen]), options, (tile.start, low), hidden)
            out[tokens] = mixed.to(out.dtype)
    return out


def _attend_tile(
    query: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    begins: tuple[int, int],
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Compute some consecutive queries ``[tokens, heads, size]``. ``begins``: positions of the first one, and of the
    first key. ``hidden``: positions that are not selected ``[tokens, positions]``."""
    keys, values = stored
    count, num_heads = query.shape[:2]
    rows = (query.float() * options.scale).view(count, len(keys), -1, query.shape[2])
    scores = torch.einsum("tkgd,kpd->kgtp", rows, keys)
    positions = torch.arange(begins[0], begins[0] + count, device=query.device)[:, None]
    numbers = torch.arange(begins[1], begins[1] + keys.shape[1], device=query.device)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.slopes is not None:
        scores = scores + options.bias(options.slopes.view(len(keys), -1, 1, 1), positions, numbers)
    unseen = (numbers > positions) | (numbers < options.reach.first(positions))
    scores = scores.masked_fill(unseen if hidden is None else unseen | hidden, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.float().view(len(keys), -1, 1, 1).expand(-1, -1, count, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("kgtp,kpd->tkgd", weights, values).reshape(count, num_heads, -1)
