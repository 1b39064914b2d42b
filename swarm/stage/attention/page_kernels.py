"""Attention of a ragged batch over pages of keys and values, in Triton.

A row's bits must not depend on the other rows of the batch, nor on how its prompt was cut into chunks. So a program
always multiplies tiles of the same number of rows: a few tokens of one sequence, times query heads of one key head.
Positions are split every 512. A program computes one split, or all splits of its tile one after the other, whichever
fills the device better. Each split has its own largest score, sum and mixture; they are joined in the order of the
splits, by the same operations in both cases. What a row does not see changes nothing: its weights are 0 exactly, and
the factor of what was summed before is 1 exactly.

Sums are float32. The compiler must not fuse products with sums as it likes (``enable_fp_fusion``), so that all variants
of a kernel round alike; fused operations are written out. Products of float32 are three of TF32, about as precise.
Positions behind a tile's last one are never read.

Untried on a GPU: the tests run these kernels in Triton's interpreter, and compile them for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from swarm.stage.attention.pages import PAGE

if TYPE_CHECKING:
    from swarm.stage.attention.options import AttentionOptions
    from swarm.stage.attention.page_plan import PagePlan
    from swarm.stage.attention.paged import LayerPages

SPLIT: Final = 512  # positions
_WIDE_BYTES: Final = 512  # of a key; wider ones are multiplied in smaller tiles, which fit into shared memory
_LOG2_E: Final = tl.constexpr(1.4426950408889634)
_MOST_PARTS_BYTES: Final = 1 << 28  # memory for mixtures by split; beyond it, splits are computed one after the other
# Numbers that change from batch to batch, and tensors within others, whose alignment does: kernels must not be compiled
# again for them, since the worker's health check would take a compilation in a step for a hang.
_BATCH_NUMBERS: Final = ("window", "chunk", "p_token", "table_width", "most_splits")
_BATCH_TENSORS: Final = ("addresses", "offsets", "starts", "counts", "tables", "pages", "token_pages", "token_places")


def supports(query: torch.Tensor, options: AttentionOptions) -> bool:
    """Whether the kernels know these options."""
    return options.rounded is None


@triton.jit
def _find_rows(
    tile, offsets, starts, counts, window, chunk, GROUP: tl.constexpr, GROUP_UP: tl.constexpr, ROWS: tl.constexpr
):
    """Return a tile's rows: key head, query head, token in the batch, position, first position seen, and whether it
    exists; and the first position that the tile sees, and the end of its positions."""
    offset, start, count = tl.load(offsets + tile), tl.load(starts + tile), tl.load(counts + tile)
    blocks: tl.constexpr = (GROUP + GROUP_UP - 1) // GROUP_UP
    head = tl.program_id(1) // blocks
    row = tl.arange(0, ROWS)
    token, member = row // GROUP_UP, tl.program_id(1) % blocks * GROUP_UP + row % GROUP_UP
    is_row = (token < count) & (member < GROUP)
    position = start + token
    seen_from = tl.zeros([ROWS], tl.int32)
    if window > 0:
        seen_from = position - window + 1
    elif chunk > 0:
        seen_from = position // chunk * chunk
    seen_from = tl.maximum(seen_from, 0)
    first = tl.min(tl.where(is_row, seen_from, start))
    return head, head * GROUP + member, offset + token, position, seen_from, is_row, first, start + count


@triton.jit
def _load_keys(base, place, at, stop, BEGIN: tl.constexpr, UP: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Load numbers of keys from ``BEGIN`` on, as columns. They are loaded as rows: as columns, the compiler reads each
    number alone."""
    number = BEGIN + tl.arange(0, UP)
    mask = (at < stop)[:, None] & (number < SIZE)[None, :]
    return tl.trans(tl.load(base + place[:, None] * STRIDE + number[None, :], mask=mask, other=0.0))


@triton.jit
def _change_scores(scores, softcap, slope, position, seen_from, at, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Return the exponents of the weights, to the base 2."""
    if HAS_CAP:
        # tanh, by exponentials of numbers that are not positive
        part = tl.exp2(tl.abs(scores / softcap) * -2.8853900817779268)
        bounded = (1.0 - part) / (1.0 + part)
        scores = tl.where(scores < 0, -bounded, bounded) * softcap
    if HAS_SLOPES:
        scores = tl.fma(slope[:, None], (at[None, :] - position[:, None]).to(tl.float32), scores)
    is_seen = (at[None, :] <= position[:, None]) & (at[None, :] >= seen_from[:, None])
    return tl.where(is_seen, scores * _LOG2_E, float("-inf"))


@triton.jit
def _join(all_max, all_sum, all_mix, top, total, mix):
    """Join a split to those before it."""
    new = tl.maximum(all_max, top)
    base = tl.where(new == float("-inf"), 0.0, new)
    before = tl.where(all_max == new, 1.0, tl.exp2(all_max - base))
    now = tl.where(top == new, 1.0, tl.exp2(top - base))
    joined = tl.fma(all_mix, tl.broadcast_to(before[:, None], all_mix.shape), mix * now[:, None])
    return new, tl.fma(all_sum, before, total * now), joined


@triton.jit
def _finish(
    all_max,
    all_sum,
    all_mix,
    sinks,
    out,
    head,
    token,
    is_row,
    o_token,
    o_head,
    VALUE: tl.constexpr,
    VALUE_UP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write the rows' results."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * _LOG2_E
        new = tl.maximum(all_max, sink)
        factor = tl.exp2(all_max - new)
        all_sum = tl.fma(all_sum, factor, tl.exp2(sink - new))
        all_mix = all_mix * factor[:, None]
    mixed = all_mix / tl.where(is_row, all_sum, 1.0)[:, None]
    number = tl.arange(0, VALUE_UP)
    tl.store(
        out + token[:, None].to(tl.int64) * o_token + head[:, None] * o_head + number[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & (number < VALUE)[None, :],
    )


@triton.jit(do_not_specialize=_BATCH_NUMBERS, do_not_specialize_on_alignment=_BATCH_TENSORS)
def _attend(
    query,
    addresses,
    sinks,
    slopes,
    out,
    part_max,
    part_sum,
    part_mix,
    offsets,
    starts,
    counts,
    tables,
    pages,
    scale,
    softcap,
    window,
    chunk,
    q_token,
    q_head,
    o_token,
    o_head,
    p_token,
    table_width,
    most_splits,
    FIRST_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_UP: tl.constexpr,
    KEY: tl.constexpr,
    KEY_ROW: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    VALUE_UP: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head, head, token, position, seen_from, is_row, first, stop = _find_rows(
        tile, offsets, starts, counts, window, chunk, GROUP, GROUP_UP, ROWS
    )
    table = pages + tl.load(tables + tile) * table_width
    q_at = query + token[:, None].to(tl.int64) * q_token + head[:, None] * q_head
    number = tl.arange(0, MAIN)
    q = tl.load(q_at + number[None, :], mask=is_row[:, None] & (number < KEY)[None, :], other=0.0)
    if REST:
        number = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_at + number[None, :], mask=is_row[:, None] & (number < KEY)[None, :], other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)
    value_at = tl.arange(0, VALUE_UP)
    first_split, last_split = first // SPLIT, (stop - 1) // SPLIT
    if BY_SPLIT:
        first_split = tl.maximum(first_split, tl.program_id(2))
        last_split = tl.minimum(last_split, tl.program_id(2))
    all_max = tl.full([ROWS], float("-inf"), tl.float32)
    all_sum = tl.zeros([ROWS], tl.float32)
    all_mix = tl.zeros([ROWS, VALUE_UP], tl.float32)
    for split in range(first_split, last_split + 1):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mix = tl.zeros([ROWS, VALUE_UP], tl.float32)
        begin = tl.maximum(split * SPLIT, first // BLOCK * BLOCK)
        end = tl.minimum(stop, (split + 1) * SPLIT)
        for block in range(begin, end, BLOCK):
            at = block + tl.arange(0, BLOCK)
            place = block % PAGE + tl.arange(0, BLOCK)  # a block is in one page
            address = tl.load(addresses + tl.load(table + block // PAGE))
            base = tl.multiple_of(address.to(tl.pointer_type(query.dtype.element_ty)), 16)
            keys = base + (FIRST_HEAD + kv_head) * (PAGE * KEY_ROW)
            k = _load_keys(keys, place, at, stop, 0, MAIN, KEY, KEY_ROW)
            scores = tl.dot(q, k, input_precision="tf32x3")
            if REST:
                k_rest = _load_keys(keys, place, at, stop, MAIN, REST, KEY, KEY_ROW)
                scores = tl.dot(q_rest, k_rest, acc=scores, input_precision="tf32x3")
            scores = _change_scores(scores * scale, softcap, slope, position, seen_from, at, HAS_CAP, HAS_SLOPES)
            new = tl.maximum(top, tl.max(scores, 1))
            above = tl.where(new == float("-inf"), 0.0, new)
            factor = tl.where(top == new, 1.0, tl.exp2(top - above))
            weights = tl.exp2(scores - above[:, None])
            if VALUE_ROW:
                values = base + HEADS * (PAGE * KEY_ROW) + (FIRST_HEAD + kv_head) * (PAGE * VALUE_ROW)
                v_at = values + place[:, None] * VALUE_ROW + value_at[None, :]
            else:  # values are the first numbers of the keys
                v_at = keys + place[:, None] * KEY_ROW + value_at[None, :]
            v = tl.load(v_at, mask=(at < stop)[:, None] & (value_at < VALUE)[None, :], other=0.0)
            total = tl.fma(total, factor, tl.sum(weights, 1))
            mix = tl.dot(weights.to(v.dtype), v, acc=mix * factor[:, None], input_precision="tf32x3")
            top = new
        if BY_SPLIT:
            slot = token.to(tl.int64) * p_token + head * most_splits + split
            tl.store(part_max + slot, top, mask=is_row)
            tl.store(part_sum + slot, total, mask=is_row)
            tl.store(part_mix + slot[:, None] * VALUE_UP + value_at[None, :], mix, mask=is_row[:, None])
        else:
            all_max, all_sum, all_mix = _join(all_max, all_sum, all_mix, top, total, mix)
    if not BY_SPLIT:
        _finish(all_max, all_sum, all_mix, sinks, out, head, token, is_row, o_token, o_head, VALUE, VALUE_UP, HAS_SINKS)


@triton.jit(do_not_specialize=_BATCH_NUMBERS, do_not_specialize_on_alignment=_BATCH_TENSORS)
def _join_splits(
    sinks,
    out,
    part_max,
    part_sum,
    part_mix,
    offsets,
    starts,
    counts,
    window,
    chunk,
    o_token,
    o_head,
    p_token,
    most_splits,
    GROUP: tl.constexpr,
    GROUP_UP: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_UP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    _, head, token, _, _, is_row, first, stop = _find_rows(
        tl.program_id(0), offsets, starts, counts, window, chunk, GROUP, GROUP_UP, ROWS
    )
    value_at = tl.arange(0, VALUE_UP)
    all_max = tl.full([ROWS], float("-inf"), tl.float32)
    all_sum = tl.zeros([ROWS], tl.float32)
    all_mix = tl.zeros([ROWS, VALUE_UP], tl.float32)
    for split in range(first // SPLIT, (stop - 1) // SPLIT + 1):
        slot = token.to(tl.int64) * p_token + head * most_splits + split
        top = tl.load(part_max + slot, mask=is_row, other=0.0)
        total = tl.load(part_sum + slot, mask=is_row, other=0.0)
        mix = tl.load(part_mix + slot[:, None] * VALUE_UP + value_at[None, :], mask=is_row[:, None], other=0.0)
        all_max, all_sum, all_mix = _join(all_max, all_sum, all_mix, top, total, mix)
    _finish(all_max, all_sum, all_mix, sinks, out, head, token, is_row, o_token, o_head, VALUE, VALUE_UP, HAS_SINKS)


@triton.jit(do_not_specialize_on_alignment=_BATCH_TENSORS)
def _write(
    key,
    value,
    addresses,
    token_pages,
    token_places,
    k_token,
    k_head,
    v_token,
    v_head,
    FIRST_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_UP: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_UP: tl.constexpr,
    PAGE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    address = tl.load(addresses + tl.load(token_pages + token))
    base = tl.multiple_of(address.to(tl.pointer_type(key.dtype.element_ty)), 16)
    place = tl.load(token_places + token)
    number = tl.arange(0, KEY_UP)
    row = tl.load(key + token * k_token + head * k_head + number, mask=number < KEY)
    tl.store(base + ((FIRST_HEAD + head) * PAGE + place) * KEY + number, row, mask=number < KEY)
    if VALUE:
        number = tl.arange(0, VALUE_UP)
        row = tl.load(value + token * v_token + head * v_head + number, mask=number < VALUE)
        values = base + HEADS * (PAGE * KEY)
        tl.store(values + ((FIRST_HEAD + head) * PAGE + place) * VALUE + number, row, mask=number < VALUE)


def write_pages(plan: PagePlan, store: LayerPages, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the keys and values ``[tokens, heads, size]`` of a batch."""
    key, value, tables, shape = _dense(key), _dense(value), plan.tables, store.layer.shape
    _write[(len(tables.token_pages), len(store.heads))](
        *(key, value, store.addresses(plan.device), tables.token_pages, tables.token_places),
        *(*key.stride()[:2], *value.stride()[:2]),
        FIRST_HEAD=store.heads.start,
        HEADS=shape.heads,
        KEY=shape.key_size,
        KEY_UP=triton.next_power_of_2(shape.key_size),
        VALUE=shape.value_size,
        VALUE_UP=triton.next_power_of_2(max(1, shape.value_size)),
        PAGE=PAGE,
    )


def attend_pages(
    plan: PagePlan,
    store: LayerPages,
    query: torch.Tensor,
    options: AttentionOptions,
    *,
    value_size: int,
    by_split: bool | None = None,
) -> torch.Tensor:
    """Attend with queries ``[tokens, heads, size]``; return ``[tokens, heads, size of a value]``, zeros for tokens of
    no sequence. ``by_split``: whether programs compute one split each; None: as it fills the device."""
    query, shape, num_heads = _dense(query), store.layer.shape, query.shape[1]
    group = num_heads // len(store.heads)
    rows, block = _tile_sizes(shape.key_size * query.element_size())
    group_up = min(rows, triton.next_power_of_2(group))
    tiles = plan.tiles(max(1, rows // group_up))
    num_splits, num_blocks = tiles.last // SPLIT + 1, len(store.heads) * -(-group // group_up)
    out, value_up = query.new_zeros(len(query), num_heads, value_size), max(16, triton.next_power_of_2(value_size))
    if by_split is None:
        parts_bytes = len(query) * num_heads * num_splits * value_up * 4
        by_split = _should_split(num_splits, len(tiles.offsets) * num_blocks, parts_bytes, query.device)
    parts = _new_parts(query, num_splits if by_split else 0, value_up)
    empty = query.new_empty(1, dtype=torch.float32)
    sinks, slopes = (empty if each is None else each.float().contiguous() for each in (options.sinks, options.slopes))
    reach = options.window or 0, options.chunk or 0
    main, rest = _split_size(query.shape[2])
    same = {
        **{"GROUP": group, "GROUP_UP": group_up, "VALUE": value_size, "VALUE_UP": value_up},
        **{"ROWS": rows, "SPLIT": SPLIT, "HAS_SINKS": options.sinks is not None},
    }
    _attend[(len(tiles.offsets), num_blocks, num_splits if by_split else 1)](
        *(query, store.addresses(plan.device), sinks, slopes, out, *parts),
        *(tiles.offsets, tiles.starts, tiles.counts, tiles.tables, plan.tables.pages),
        *(options.scale, options.softcap or 1.0, *reach, *query.stride()[:2], *out.stride()[:2]),
        *(num_heads * num_splits, plan.tables.pages.shape[1], num_splits),
        **{"FIRST_HEAD": store.heads.start, "HEADS": shape.heads, "KEY": query.shape[2], "KEY_ROW": shape.key_size},
        **{"MAIN": main, "REST": rest, "VALUE_ROW": shape.value_size, "PAGE": PAGE, "BLOCK": block},
        **{"HAS_CAP": options.softcap is not None, "HAS_SLOPES": options.slopes is not None, "BY_SPLIT": by_split},
        **same,
        num_warps=4 if shape.key_size <= 128 else 8,
        enable_fp_fusion=False,
    )
    if by_split:
        _join_splits[(len(tiles.offsets), num_blocks)](
            *(sinks, out, *parts, tiles.offsets, tiles.starts, tiles.counts, *reach, *out.stride()[:2]),
            *(num_heads * num_splits, num_splits),
            **same,
            enable_fp_fusion=False,
        )
    return out


def _should_split(num_splits: int, num_programs: int, parts_bytes: int, device: torch.device) -> bool:
    """Whether programs compute one split each: where whole tiles leave the device idle, and its memory suffices."""
    return num_splits > 1 and parts_bytes <= _MOST_PARTS_BYTES and num_programs < 2 * _num_processors(device)


def _new_parts(query: torch.Tensor, num_splits: int, value_up: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return memory for each row's largest score, sum and mixture by split."""
    num = query.shape[0] * query.shape[1] * num_splits
    largest, total = (query.new_empty(max(1, num), dtype=torch.float32) for _ in range(2))
    return largest, total, query.new_empty(max(1, num * value_up), dtype=torch.float32)


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``[tokens, heads, size]`` whose numbers are adjacent."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _tile_sizes(key_bytes: int) -> tuple[int, int]:
    """Return the rows of a tile, and how many positions are multiplied at a time."""
    if key_bytes <= _WIDE_BYTES:
        return 64, 64
    return (32, 32) if key_bytes <= 3 * _WIDE_BYTES else (16, 16)


def _split_size(size: int) -> tuple[int, int]:
    """Return the two powers of two, 16 at least, that cover a key: 576 = 512 + 64. The second may be 0."""
    main = max(16, 1 << (size.bit_length() - 1))
    return main, 0 if size <= main else max(16, triton.next_power_of_2(size - main))


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
