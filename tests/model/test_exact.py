"""The numerics contract: a sequence's logits have the same bits whatever happens around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention.passes import current_pass
from tests.model.cutting import Cutter, Pipeline, random_tokens

PROMPT, ANSWER = random_tokens(150, seed=3), random_tokens(15, seed=4)
TOKENS = PROMPT + ANSWER
MINE = 1


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(pipeline: Pipeline, chunk: int = len(PROMPT)) -> torch.Tensor:
    """All positions' logits: the prompt in chunks, then one token after the other."""
    pipeline.open(MINE)
    return torch.cat(list(fed(pipeline, chunk)))


def fed(pipeline: Pipeline, chunk: int, start: int = 0) -> Iterator[torch.Tensor]:
    for begin in range(start, len(PROMPT), chunk):
        yield pipeline.logits((MINE, begin, PROMPT[begin : begin + chunk]))[0]
    for begin in range(max(start, len(PROMPT)), len(TOKENS)):
        yield pipeline.logits((MINE, begin, TOKENS[begin : begin + 1]))[0]


def among_strangers(pipeline: Pipeline, chunk: int, seed: int) -> torch.Tensor:
    """The same, while others come and go: each step has some of them, before and after mine in the batch."""
    chance = torch.Generator().manual_seed(seed)
    pipeline.open(MINE)
    at: dict[int, int] = {}
    pieces, begin, next_stranger = [], 0, 100
    while begin < len(TOKENS):
        if len(at) < 5:
            at[next_stranger] = 0
            pipeline.open(next_stranger)
            next_stranger += 1
        count = min(chunk, len(PROMPT) - begin) if begin < len(PROMPT) else 1
        parts: list[Any] = []
        for stranger, position in at.items():
            size = int(torch.randint(1, 40, (1,), generator=chance)) if position == 0 else 1
            parts.append((stranger, position, random_tokens(size, seed=stranger + position)))
            at[stranger] = position + size
        place = int(torch.randint(0, len(parts) + 1, (1,), generator=chance))
        parts.insert(place, (MINE, begin, TOKENS[begin : begin + count]))
        pieces.append(pipeline.logits(*parts)[place])
        begin += count
        if int(torch.randint(0, 4, (1,), generator=chance)) == 0:
            gone = min(at)
            del at[gone]
            pipeline.release(gone)
    return torch.cat(pieces)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


@pytest.fixture(scope="module")
def expected(cutter: Cutter, llama: Path) -> dict[str, torch.Tensor]:
    """Alone, one stage, the prompt in one piece."""
    return {dtype: alone(cutter.cut(llama, (0, 8), dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks(cutter: Cutter, llama: Path, dtype: str, chunk: int, expected: dict[str, torch.Tensor]) -> None:
    """However the prompt is cut into chunks."""
    assert same_bits(alone(cutter.cut(llama, (0, 8), dtype), chunk), expected[dtype])


@pytest.mark.parametrize("chunk", [7, 64, len(PROMPT)])
def test_strangers(cutter: Cutter, llama: Path, dtype: str, chunk: int, expected: dict[str, torch.Tensor]) -> None:
    """Whoever else is in the batch."""
    for seed in range(2):
        assert same_bits(among_strangers(cutter.cut(llama, (0, 8), dtype), chunk, seed), expected[dtype])


@pytest.mark.parametrize("lines", [(0, 3, 8), (0, 1, 8), (0, 2, 5, 8)])
def test_stages(
    cutter: Cutter, llama: Path, dtype: str, lines: tuple[int, ...], expected: dict[str, torch.Tensor]
) -> None:
    """Over however many stages, among strangers."""
    assert same_bits(alone(cutter.cut(llama, lines, dtype), 64), expected[dtype])
    assert same_bits(among_strangers(cutter.cut(llama, lines, dtype), 40, seed=9), expected[dtype])


@pytest.mark.parametrize("position", [0, 1, 31, 32, 33, 100, 151])
def test_truncated_and_computed_again(
    cutter: Cutter, llama: Path, dtype: str, position: int, expected: dict[str, torch.Tensor]
) -> None:
    """After forgetting everything from a position on, and computing it again in other chunks."""
    pipeline = cutter.cut(llama, (0, 5, 8), dtype)
    alone(pipeline)
    pipeline.truncate(MINE, position)
    if position < len(PROMPT):
        again = torch.cat(list(fed(pipeline, 20, start=position)))
    else:
        again = torch.cat(list(fed(pipeline, 1, start=position)))
    assert same_bits(again, expected[dtype][position:])


def test_other_tokens_left_behind(cutter: Cutter, llama: Path, dtype: str, expected: dict[str, torch.Tensor]) -> None:
    """What a cut-off branch wrote past the position doesn't matter."""
    pipeline = cutter.cut(llama, (0, 8), dtype)
    pipeline.open(MINE)
    pipeline.logits((MINE, 0, PROMPT[:50] + random_tokens(100, seed=8)))
    pipeline.truncate(MINE, 50)
    assert same_bits(torch.cat(list(fed(pipeline, 64, start=50))), expected[dtype][50:])


def test_one_thread_or_two(cutter: Cutter, llama: Path, dtype: str, expected: dict[str, torch.Tensor]) -> None:
    """However many threads compute."""
    pipeline = cutter.cut(llama, (0, 8), dtype)
    stage = pipeline.stages[0]
    before, stage.threads_alone = stage.threads_alone, 1
    try:
        single = alone(pipeline, 64)
    finally:
        stage.threads_alone = before
    assert same_bits(single, expected[dtype])


def test_without_the_grid_bits_differ(
    cutter: Cutter, llama: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    """Control: plain attention over exactly the keys there are, chunk by chunk, fails the same comparison."""

    def plain(query: torch.Tensor, slab: Any, group: Any, how: Any, _: Any, **__: Any) -> torch.Tensor:
        span = current_pass().spans[0]
        start, count = span.start + group.tokens.start - span.offset, group.num_queries
        region = slab.region(group.first_slot)
        fold = query.shape[1] // region.keys.shape[0]
        keys, values = (part[:, : start + count].repeat_interleave(fold, 0) for part in (region.keys, region.values))
        visible = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        # The queries come scaled already where that is exact.
        answer = scaled_dot_product_attention(query.transpose(0, 1), keys, values, visible, scale=how.scale)
        return answer.transpose(0, 1)

    monkeypatch.setattr(native, "library", lambda: None)  # our own kernel has no grid to leave out
    monkeypatch.setattr(attention, "_attend_group", plain)
    pipeline = cutter.cut(llama, (0, 8), dtype)
    whole = alone(pipeline)
    others = [alone(cutter.cut(llama, (0, 8), dtype), chunk) for chunk in (1, 7, 33)]
    assert not all(same_bits(each, whole) for each in others)
    off = (whole - expected[dtype]).abs().max() / whole.abs().max()
    assert float(off) < 0.15  # it computes the same thing, only in another order
