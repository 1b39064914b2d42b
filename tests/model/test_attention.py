"""The attention kernel at the sizes of real models: a row's bits depend on its own sequence and position only."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from swarm.stage import attention, native, tiles
from swarm.stage.arena import KvArena
from swarm.stage.passes import Pass, running, spans_of
from swarm.wire.messages import LayerRange, Row

LENGTH = 170  # more than a cell of the grid
MINE = 1
# Query heads, key heads, size of a head: of Llama 1B and 8B, Gemma, Phi-3, GPT-NeoX, Falcon's single key head, and odd.
HEADS = [(32, 4, 64), (32, 8, 128), (8, 4, 256), (32, 32, 96), (16, 16, 80), (71, 1, 64), (6, 2, 20), (9, 3, 22)]
HOWS = {
    "plain": {},
    "window": {"window": 100},
    "narrow window": {"window": 7},
    "soft cap": {"softcap": 50.0},
    "sinks in a window": {"window": 128, "sinks": True},
    "odd scale": {"scale": 0.07},
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 without native kernels"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    name, without, _ = str(request.param).partition(" without")
    if without:
        if native.library() is None:
            pytest.skip(f"no native kernels ({native.absence()}): bfloat16 is without them anyway")
        monkeypatch.setattr(native, "library", lambda: None)
    return getattr(torch, name)


@pytest.fixture(autouse=True)
def _threads() -> Iterable[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_parts(heads: tuple[int, int, int], length: int, seed: int, dtype: torch.dtype) -> Tensors:
    queries, keys, size = heads
    chance = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, n, size, generator=chance).to(dtype) for n in (queries, keys, keys))


def made(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, sinks: bool, **how: float) -> object:
    column = torch.randn(heads[0], generator=torch.Generator().manual_seed(5)).to(dtype) if sinks else None
    return attention.How(how.get("scale", heads[2] ** -0.5), window, how.get("softcap"), column)


def fed(mine: Tensors, how: object, chunks: Iterable[int], strangers: dict[int, Tensors]) -> torch.Tensor:
    """All rows' results, in chunks; each stranger has one more position in every chunk, some before mine."""
    arena, at, pieces = KvArena(torch.device("cpu")), 0, []
    for sequence in (MINE, *strangers):
        arena.open(sequence, LENGTH)
    for step, count in enumerate(chunks):
        rows = {sequence: (step, 1) for sequence in strangers if sequence < MINE}
        rows |= {MINE: (at, count)} | {sequence: (step, 1) for sequence in strangers if sequence > MINE}
        of = {MINE: mine} | strangers
        batch = [torch.cat([of[s][n][start : start + c] for s, (start, c) in rows.items()]) for n in range(3)]
        spans = tuple(spans_of(Row(s, start, c, False) for s, (start, c) in rows.items()))
        with running(Pass(arena, LayerRange(0, 1), spans)), torch.inference_mode():
            result = attention.attend_rows(0, *batch, how)
        place = next(span.offset for span in spans if span.sequence == MINE)
        pieces.append(result[place : place + count].clone())
        at += count
    return torch.cat(pieces)


def plan_of(chunk: int, first: int = 0) -> list[int]:
    return [first][: bool(first)] + [min(chunk, LENGTH - at) for at in range(first, LENGTH, chunk)]


CASES = [(heads, "plain") for heads in HEADS] + [(heads, how) for heads in (HEADS[0], HEADS[-1]) for how in HOWS]


@pytest.mark.parametrize(("heads", "how"), dict.fromkeys(CASES), ids=str)
def test_rows(heads: tuple[int, int, int], how: str, dtype: torch.dtype) -> None:
    """In chunks of 1, 7, 64, 100 by one thread, whole by two, alone and beside strangers: the same bits; near to the
    plain formula."""
    kind = made(heads, dtype, **({"window": None, "sinks": False} | HOWS[how]))
    mine = random_parts(heads, LENGTH, 1, dtype)
    strangers = {sequence: random_parts(heads, LENGTH, sequence + 7, dtype) for sequence in (0, 2, 5)}
    torch.set_num_threads(2)
    whole = fed(mine, kind, [LENGTH], {})
    torch.set_num_threads(1)
    for plan in (plan_of(1, 110), plan_of(7), plan_of(64), plan_of(100)):
        assert torch.equal(fed(mine, kind, plan, {}), whole), plan[:2]
    torch.set_num_threads(2)
    for plan in (plan_of(1, 120), plan_of(33)):
        assert torch.equal(fed(mine, kind, plan, strangers), whole), plan[:2]
    off = (whole.float() - formula(mine, kind)).abs().max()
    assert float(off) < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]


def formula(mine: Tensors, how: attention.How) -> torch.Tensor:
    """What it should come to, in float64 and without any care for bits."""
    query, keys, values = (part.double().transpose(0, 1) for part in mine)
    fold = len(query) // len(keys)
    scores = query @ keys.repeat_interleave(fold, 0).transpose(1, 2) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (distance < 0) | (distance >= (how.window or LENGTH))
    scores = scores.masked_fill(hidden, float("-inf"))
    if how.sinks is not None:
        column = how.sinks.double()[:, None, None].expand(-1, LENGTH, 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)[..., :LENGTH]
    return (weights @ values.repeat_interleave(fold, 0)).transpose(0, 1).float()


@pytest.mark.parametrize("heads", [(32, 4, 64), (6, 2, 20)], ids=str)
def test_without_the_grid_bits_differ(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: over exactly the keys there are, the same comparison fails."""
    monkeypatch.setattr(tiles, "keys_end", lambda tile: tile.start + tile.count)
    kind = made(heads, torch.float32, None, False)
    mine = random_parts(heads, LENGTH, 1, torch.float32)
    assert not torch.equal(fed(mine, kind, plan_of(7), {}), fed(mine, kind, [LENGTH], {}))
