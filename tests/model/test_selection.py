"""Selection of positions by an index: which ones, and that nothing else in the batch decides it."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.stage import native
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.selection import MAX_POSITIONS, PositionIndex, Selection, choose_largest
from swarm.wire.messages import Row

HEADS, SIZE, TOP_K = 5, 24, 30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def index_of(tokens: slice, seed: int = 1, num: int = 200) -> PositionIndex:
    """Some tokens of a random sequence."""
    chance = torch.Generator().manual_seed(seed)
    queries, keys, weights = (
        torch.randn(num, *shape, generator=chance) for shape in ((HEADS, SIZE), (SIZE,), (HEADS,))
    )
    return PositionIndex(TOP_K, None, queries[tokens], keys[tokens], weights[tokens], SIZE**-0.5)


def select(rows: list[Row], *parts: PositionIndex) -> Selection | None:
    """Select for a batch of these rows, whose sequences' numbers are their seeds."""
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("queries", "keys", "weights"))
    batch = PositionIndex(TOP_K, None, *joined, SIZE**-0.5)
    whole = {row.sequence: index_of(slice(None), row.sequence).keys for row in rows}
    batch.select(tuple(layout_spans(rows)), lambda span: whole[span.sequence][: span.start + span.count])
    return batch.selection


def alone(seed: int, num: int) -> Selection:
    selection = select([Row(seed, 0, num, False)], index_of(slice(0, num), seed))
    assert selection is not None
    return selection


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
def test_a_selection_does_not_depend_on_the_batch(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two sequences in one batch, beside one that sees few positions."""
    if kernels == "torch's":
        monkeypatch.setattr(native, "library", lambda: None)
    expected = [alone(seed, 200) for seed in (1, 2)]
    rows = [Row(1, 20, 77, False), Row(3, 0, 9, False), Row(2, 150, 1, False)]
    parts = index_of(slice(20, 97), 1), index_of(slice(0, 9), 3), index_of(slice(150, 151), 2)
    selection = select(rows, *parts)
    assert selection is not None
    assert selection.tokens.tolist() == [*range(10, 77), 77 + 9]
    assert torch.equal(selection.positions[:-1], expected[0].positions[:67])
    assert torch.equal(selection.positions[-1], expected[1].positions[150 - TOP_K])


def test_scores_are_those_of_the_definition() -> None:
    """The largest sums over heads of weighted products above 0, of the positions that a query sees."""
    index, selection = index_of(slice(None)), alone(1, 200)
    products = torch.einsum("thd,sd->ths", index.queries.double(), index.keys.double()) * SIZE**-0.5
    scores = (products.relu() * index.weights.double()[..., None]).sum(1)
    scores.masked_fill_(torch.ones(200, 200).triu(1).bool(), -math.inf)
    expected = scores[TOP_K:].sort(descending=True, stable=True).indices[:, :TOP_K].sort().values
    assert selection.tokens.tolist() == list(range(TOP_K, 200))
    assert torch.equal(selection.positions, expected)


def test_the_first_of_equal_scores_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, math.nan, -math.inf]])
    assert choose_largest(scores, 2).nonzero()[:, 1].tolist() == [1, 2, 0, 3]


def test_without_more_positions_than_it_takes_nothing_is_selected() -> None:
    assert select([Row(1, 0, TOP_K, False)], index_of(slice(0, TOP_K))) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_carry_a_selection(dtype: torch.dtype) -> None:
    """In numbers that every dtype represents, up to the largest position."""
    positions = torch.tensor([0, 1, 255, 256, 511, 512, MAX_POSITIONS // 2, MAX_POSITIONS - 1])
    selection = Selection(torch.tensor([1, 3]), torch.stack([positions, positions]))
    rows = selection.to_rows(4, len(positions), dtype)
    again = Selection.from_rows(rows, torch.tensor([5, MAX_POSITIONS - 1, 0, MAX_POSITIONS + 7]))
    assert again is not None
    assert again.tokens.tolist() == [1, 3]
    assert torch.equal(again.positions, selection.positions)


def test_rows_of_anything_give_positions_that_tokens_see() -> None:
    """Rows of a dry run are random, and those of a broken computation are not numbers."""
    rows = torch.cat([torch.randn(3, 16) * 1e4, torch.full((1, 16), math.nan)])
    selection = Selection.from_rows(rows, torch.tensor([7, 8, 100, 9]))
    assert selection is not None
    assert selection.tokens.tolist() == [1, 2, 3]
    assert bool((selection.positions >= 0).all())
    assert bool((selection.positions <= torch.tensor([[8], [100], [9]])).all())
