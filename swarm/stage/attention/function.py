"""Attention function for transformers: writes keys and values, and computes each row's attention to them.

The function is registered with transformers, so any decoder with pluggable attention calls it with the queries, keys
and values of one ragged batch ``[1, heads, tokens, size]``. The calling thread's current ``ForwardPass`` (``passes``)
holds which tokens belong to which sequence and position. On a CPU, our own kernel computes attention
(``native_attention``); on other devices, keys and values are in pages (``paged``). The rest of this text describes the
path on a CPU where our kernel was not built.

A row's result must have the same bits whatever else is in the batch and however the prompt was split. The order in
which a kernel sums depends on the number of keys, so that number may depend on the row's own position only. Positions
lie in cells of 128, and a query attends to everything up to the end of its cell. Keys past a row's own position are
masked: their weight is exactly 0, and their values are finite (``guesses``). Keys begin on a multiple of 32. A
group's query heads count as rows of their common key head, and products take fixed numbers of rows that a probe has
shown to be safe (``probe``). Sequences share a product only where the probe shows that each has the bits that it has
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm.errors import ModelError
from swarm.stage.attention import native_attention
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import CELL
from swarm.stage.attention.guesses import clean_guesses, spoil
from swarm.stage.attention.options import AttentionOptions, Latents, Reach
from swarm.stage.attention.paged import attend_pages
from swarm.stage.attention.passes import ForwardPass, current_pass
from swarm.stage.attention.racks import LayerBuffer, Rack
from swarm.stage.attention.selection import PositionIndex, SelectedPositions, select_positions, stored_latents
from swarm.stage.attention.tiles import AttentionPlan, TileGroup, plan_attention
from swarm.stage.matmul import proofs
from swarm.stage.matmul.elementwise import apply_aligned
from swarm.stage.matmul.probe import Product, Proof, RowTile, prove, split_rows
from swarm.stage.native import cores

NAME = "swarm"
LATENT_HEADS = "latent_heads"
INDEXER = "indexer"  # an attention module's index of positions; None if it shares an earlier layer's
# Key counts that the probe tries. A row's position decides how many keys there are, and libraries may split long sums
# over threads where they do not split short ones.
_PROBED_KEYS = (CELL, 3 * CELL, 17 * CELL)
# Kinds of attention whose window transformers puts into the mask alone.
_MASKED_WINDOWS = frozenset({"PhimoeAttention"})
# Arguments that do not change which keys a query attends to. Any other argument must be understood or rejected.
_IGNORED_ARGUMENTS = frozenset(
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
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | AllSeen | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: SelectedPositions | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers expects it; return ``[1, tokens, heads, size]``. Writes keys and values first."""
    _refuse_unknown(module, None if attention_mask is ALL_SEEN else attention_mask, dropout, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if type(module).__name__ in _MASKED_WINDOWS:
        sliding_window = module.config.sliding_window
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    if is_chunked(module):
        options = replace(options, window=None, chunk=module.config.attention_chunk_size)
    layer, heads = int(module.layer_idx), getattr(module, LATENT_HEADS, None)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if heads is None:
        return attend_rows(layer, query, key, value, options).unsqueeze(0), None
    if isinstance(indices, PositionIndex) and getattr(module, INDEXER) is not None:
        key = torch.cat((key, indices.keys.unsqueeze(1)), dim=-1)
    options = replace(options, latents=heads.latents)
    mixed = attend_rows(layer, heads.absorb(query), key, value, options, index=indices)
    return heads.expand(mixed).unsqueeze(0), None


class LatentHeads(Protocol):
    """Heads that share one latent per position. An attention module that has them, under the name ``LATENT_HEADS``,
    passes its queries as they are, latents as keys, and the latents' values."""

    latents: Latents

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries ``[tokens, heads, size]`` for latents."""
        ...

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return each head's result from its mixture of latents ``[tokens, heads, size]``."""
        ...


class AllSeen:
    """Mask of a model that reads one: nothing is masked, in whatever part of it."""

    def __getitem__(self, _: object) -> AllSeen:
        return self


ALL_SEEN = AllSeen()


def is_chunked(module: Any) -> bool:
    """Whether the module's layer attends to its own chunk only. transformers puts that into the mask alone."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return bool(module.layer_idx < len(kinds)) and kinds[module.layer_idx] == "chunked_attention"


def attend_rows(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    *,
    index: SelectedPositions | None = None,
) -> torch.Tensor:
    """Attend with queries, keys and values ``[tokens, heads, size]``; return the same shape. Tokens of no sequence get
    zeros. ``index`` selects positions; if it is the layer's own, the keys end with those of the index."""
    forward_pass = current_pass()
    if forward_pass.arena.pool is not None:
        return attend_pages(forward_pass, layer, (query, key, value), options, index=index)
    find_buffer = _buffer_finder(forward_pass.arena, layer, key, value, options.latents)
    if native_attention.supports(key):
        if index is None:
            return native_attention.attend_native(forward_pass, layer, (query, key, value), options, find_buffer)
        parts = query, key, value
        return native_attention.attend_selected(forward_pass, layer, parts, options, find_buffer, index=index)
    groups = _pass_groups(forward_pass, options.reach, query.device)
    is_latent = options.latents is not None
    key, value, spoiled = clean_guesses(groups.guesses, key, value, is_latent=is_latent)
    _write_keys_values(groups, find_buffer, key, key[..., :0] if is_latent else value)
    forward_pass.arena.mark_written(groups.sequences, layer)
    num_tokens, selection = len(query), None
    if index is not None:
        query = select_positions(index, forward_pass, query, key, stored_latents(forward_pass.arena, find_buffer))
        selection = index.selection
    # a power of two: scaling the queries, which are fewer than the scores, is exact
    if math.frexp(options.scale)[0] == 0.5:
        query, options = query * options.scale, replace(options, scale=1.0)
    output = value.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    proof, together = prove_attention(query, key, value, is_latent=is_latent)
    for group in groups.groups if together else groups.single_groups:
        hidden = selection.hidden(group.tokens, num_tokens, group.low, group.high) if selection else None
        some = query[group.tokens]
        output[group.tokens] = _attend_group(some, find_buffer(group.rack), group, options, proof, hidden=hidden)
    return output if spoiled is None else spoil(output, spoiled)


def _buffer_finder(
    arena: KvArena, layer: int, key: torch.Tensor, value: torch.Tensor, latents: Latents | None
) -> Callable[[Rack], LayerBuffer]:
    """Return a function that returns the layer's memory in a rack for keys and values ``[tokens, heads, size]``: of the
    head with these latents, if any."""
    keys, values = key[:1].transpose(0, 1), value[:1].transpose(0, 1)
    if latents is None:
        return lambda rack: arena.ensure_buffer(rack, layer, keys, values)
    keys = keys.expand(latents.num_heads, -1, -1)
    return lambda rack: arena.ensure_buffer(rack, layer, keys, keys[..., :0]).only_head(latents.head)


def prove_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_latent: bool = False
) -> tuple[Proof, bool]:
    """Return the proof for torch's attention with such heads ``[tokens, heads, size]``, and whether sequences may share
    a product. ``is_latent``: values are the first numbers of the keys."""
    heads, sizes = key.shape[1], (key.shape[2], value.shape[2])
    numbers = cores.thread_numbers(0)
    for together in (True, False):
        what = ("latent " if is_latent else "") + ("attention of 3" if together else "attention")
        name = (what, str(query.dtype), heads, *sizes, numbers)
        proof = proofs.get_proof(
            name, partial(_prove, heads, sizes, query.dtype, numbers, together, is_latent=is_latent)
        )
        if proof.exact:
            break
    return proof, together


def _prove(
    heads: int, sizes: tuple[int, int], dtype: torch.dtype, numbers: tuple[int, ...], together: bool, *, is_latent: bool
) -> Proof:
    """Try the three products of attention (scores, weights, mixture) on one sequence alone; with ``together``, also
    between two other sequences."""
    chance, key_size, value_size = torch.Generator().manual_seed(13), *sizes
    caches = [
        tuple(torch.randn(3 * heads, keys, size, generator=chance).to(dtype) for size in sizes) for keys in _PROBED_KEYS
    ]
    if is_latent:
        caches = [(keys, keys[..., :value_size]) for keys, _ in caches]

    def attend_once(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        weights = _softmax(_scores(rows, keys).mul_(key_size**-0.5), None)
        return torch.bmm(weights.to(dtype), values)

    def product(flat: torch.Tensor) -> torch.Tensor:
        rows, mine, results = flat.view(len(flat), heads, key_size).transpose(0, 1), slice(heads, 2 * heads), []
        for keys, values in caches:
            alone = attend_once(rows, keys[mine], values[mine])
            if together:
                among = attend_once(torch.cat((rows.flip(1), rows, rows * 2)), keys, values)[mine]
                # NaN equals nothing, so a difference fails the probe
                alone = torch.where(alone == among, alone, torch.nan)
            results.append(alone.transpose(0, 1).reshape(len(flat), -1))
        return torch.cat(results, dim=1)

    outputs, work = heads * value_size * len(caches), heads * (key_size + value_size) * sum(_PROBED_KEYS)
    return prove(product, (heads * key_size,), outputs, dtype=dtype, work=work, numbers=numbers)


def _pass_groups(forward_pass: ForwardPass, reach: Reach, device: torch.device) -> AttentionPlan:
    groups = forward_pass.groups_by_reach.get(reach)
    if groups is None:
        groups = forward_pass.groups_by_reach[reach] = plan_attention(
            forward_pass.arena, forward_pass.spans, reach, device
        )
        forward_pass.cache_stats.mask_misses += 1
    else:
        forward_pass.cache_stats.mask_hits += 1
    return groups


def _write_keys_values(
    groups: AttentionPlan, find_buffer: Callable[[Rack], LayerBuffer], key: torch.Tensor, value: torch.Tensor
) -> None:
    for write in groups.token_writes:
        slab = find_buffer(write.rack)
        at = (write.slots, write.positions)
        slab.keys.transpose(1, 2).index_put_(at, key[write.tokens])
        slab.values.transpose(1, 2).index_put_(at, value[write.tokens])
    for piece in groups.span_writes:
        region, span = find_buffer(piece.rack).region(piece.slot), piece.span
        tokens = slice(span.offset, span.offset + span.count)
        region.write(span.start, key[tokens].transpose(0, 1), value[tokens].transpose(0, 1))


def _attend_group(
    query: torch.Tensor,
    slab: LayerBuffer,
    group: TileGroup,
    options: AttentionOptions,
    proof: Proof,
    *,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a group's attention from queries [tokens, heads, size]; return [tokens, heads, size of a value].
    ``hidden``: positions that are not selected ``[tokens, positions]``."""
    keys, latents = _keys(slab.keys, group), options.latents
    values = _keys(slab.values, group) if latents is None else keys[..., : latents.value_size]
    folded = _fold(query, group, slab.keys.shape[1])
    num_rows = folded.shape[1]
    before = cores.use_threads(keys.numel() * num_rows, proof.threads)
    scores = _multiply_in_tiles(_scores, folded, keys, proof)
    if options.scale != 1.0:
        scores.mul_(options.scale)
    if options.softcap is not None:
        scores = apply_aligned(torch.tanh, scores.div_(options.softcap)).mul_(options.softcap)
    if options.slopes is not None:
        numbers = torch.arange(group.low, group.high)
        slopes = options.slopes.view(1, slab.keys.shape[1], -1, 1, 1)
        _split(scores, group).add_(options.bias(slopes, group.positions, numbers))
    _mask(scores, group)
    if hidden is not None:
        _split(scores, group).masked_fill_(hidden.view(group.num_tiles, 1, 1, group.num_queries, -1), float("-inf"))
    weights = _softmax(scores, _sink_column(options.sinks, slab.keys.shape[1], group)).to(query.dtype)
    mixed = _multiply_in_tiles(torch.bmm, weights, values, proof)
    cores.restore_threads(before)
    return _unfold(mixed, group)


def _multiply_in_tiles(product: Product, rows: torch.Tensor, others: torch.Tensor, proof: Proof) -> torch.Tensor:
    """Multiply rows ``[heads, rows, …]`` with each head's keys or values, one tile of rows at a time."""
    if not proof.exact:
        return product(rows, others)
    return torch.cat(
        [product(_tile(rows, cut), others)[:, : cut.count] for cut in split_rows(rows.shape[1], proof.sizes)], 1
    )


def _tile(rows: torch.Tensor, cut: RowTile) -> torch.Tensor:
    some = rows[:, cut.first : cut.first + cut.count]
    missing = cut.size - cut.count
    return torch.nn.functional.pad(some, (0, 0, 0, missing)) if missing else some.contiguous()


def _keys(cache: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Return a group's keys or values ``[num * heads, keys, size]`` from ``[slots, heads, positions, size]``, without a
    copy."""
    some = cache[group.first_slot : group.first_slot + group.num_tiles, :, group.low : group.high]
    return (
        some.flatten(0, 1)
        if group.num_tiles == 1 or some.stride(0) == some.shape[1] * some.stride(1)
        else _copy_dense(some)
    )


def _copy_dense(some: torch.Tensor) -> torch.Tensor:
    """Copy the keys: heads are so small that slots are padded to whole pages, and a view is impossible."""
    return some.reshape(-1, *some.shape[2:])


def _fold(query: torch.Tensor, group: TileGroup, key_heads: int) -> torch.Tensor:
    """Turn query heads and tokens into rows of their key head: ``[num * key heads, group * count, size]``."""
    shape = (group.num_tiles, group.num_queries, key_heads, -1, query.shape[-1])
    return query.reshape(shape).permute(0, 2, 3, 1, 4).reshape(group.num_tiles * key_heads, -1, query.shape[-1])


def _unfold(mixed: torch.Tensor, group: TileGroup) -> torch.Tensor:
    split = _split(mixed, group)
    return split.permute(0, 3, 1, 2, 4).reshape(group.num_tiles * group.num_queries, -1, mixed.shape[-1])


def _split(rows: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """View the rows as ``[num, key heads, query heads of each, count, …]``."""
    return rows.view(group.num_tiles, rows.shape[0] // group.num_tiles, -1, group.num_queries, rows.shape[2])


def _scores(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply every row with every key; return float32.

    oneDNN (16 bit) packs the second operand of a product at every call. It is therefore the few queries, not the many
    keys.
    """
    if rows.dtype == torch.float32:
        return torch.bmm(rows, keys.transpose(1, 2))
    product = torch.bmm(keys, rows.transpose(1, 2)).transpose(1, 2)
    return product.to(torch.float32, memory_format=torch.contiguous_format)


def _softmax(scores: torch.Tensor, column: torch.Tensor | None) -> torch.Tensor:
    """Return the attention weights of the scores, in place if possible.

    ``column``: one additional score per row (an attention sink). It takes part in the normalisation, but its weight is
    dropped.
    """
    if column is None:
        return torch.softmax(scores, dim=-1, out=scores)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _sink_column(sinks: torch.Tensor | None, key_heads: int, group: TileGroup) -> torch.Tensor | None:
    """Return the query head's sink for each of its rows."""
    if sinks is None:
        return None
    column = sinks.float().view(key_heads, -1).repeat_interleave(group.num_queries, dim=1)
    return column.repeat(group.num_tiles, 1).unsqueeze(-1)


def _mask(scores: torch.Tensor, group: TileGroup) -> None:
    split = _split(scores, group)
    if group.later is not None:
        split[..., -group.later.shape[-1] :].masked_fill_(group.later, float("-inf"))
    if group.before_reach is not None:
        split[..., : group.before_reach.shape[-1]].masked_fill_(group.before_reach, float("-inf"))


def _refuse_unknown(module: torch.nn.Module, mask: object, dropout: float, others: dict[str, object]) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in _IGNORED_ARGUMENTS]
    if mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} requires attention with {', '.join(unknown)}, which is not supported"
        )


def _no_mask(*_: object, **__: object) -> None:
    """Return no mask: the groups mask by position, so the model must not build one."""


def register() -> None:
    """Register the attention function with transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
