"""The attention kernel at the sizes of real models: a row's bits depend on its own sequence and position only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from swarm.errors import IllegalMove
from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention import options, tiles
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.native import cores
from swarm.wire.messages import LayerRange, Row

LENGTH = 170  # more than a cell of the grid
LONG = 2100  # more than two stretches of our own kernel
MINE = 1
# Query heads, key heads, size of a head: of Llama 1B and 8B, Gemma, Phi-3, GPT-NeoX, Falcon's single key head, and odd.
HEADS = [(32, 4, 64), (32, 8, 128), (8, 4, 256), (32, 32, 96), (16, 16, 80), (71, 1, 64), (6, 2, 20), (9, 3, 22)]
HOWS = {
    "plain": {},
    "window": {"window": 100},
    "narrow window": {"window": 7},
    "chunk": {"chunk": 96},
    "narrow chunk": {"chunk": 7},
    "slopes": {"slopes": True},
    "rounded slopes": {"slopes": True, "rounded": 0.4},
    "soft cap": {"softcap": 50.0},
    "sinks in a window": {"window": 128, "sinks": True},
    "sinks": {"sinks": True},
    "odd scale": {"scale": 0.07},
}

# Query heads, sizes of a latent with its rotated key, and of the latent: of DeepSeek V2 Lite, and odd ones.
LATENTS = [(16, 576, 512), (6, 48, 40), (19, 33, 21)]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _variants() -> list[str]:
    opened = native.library()
    return [] if opened is None else native.variants(opened)


VARIANTS = _variants()
WITHOUT = "without"  # our own kernels
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
needs_library = pytest.mark.skipif(not VARIANTS, reason=f"no native kernels: {native.unavailable_reason()}")


DTYPES = [f"{kind} {how}" for kind in KINDS for how in (*VARIANTS, WITHOUT)]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Either kind, with every variant of our own kernels that runs here, and with torch's."""
    kind, how = str(request.param).split()
    with native.disabled("to test torch's") if how == WITHOUT else native.using_variant(how):
        yield KINDS[kind]


@pytest.fixture(autouse=True)
def _threads() -> Iterable[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_parts(heads: tuple[int, int, int], length: int, seed: int, dtype: torch.dtype) -> Tensors:
    queries, keys, size = heads
    chance = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, n, size, generator=chance).to(dtype) for n in (queries, keys, keys))


def latent_parts(sizes: tuple[int, int, int], length: int, seed: int, dtype: torch.dtype) -> Tensors:
    num_queries, size, value_size = sizes
    query, key, _ = random_parts((num_queries, 1, size), length, seed, dtype)
    return query, key, key[..., :value_size]


def made_latent(sizes: tuple[int, int, int]) -> options.AttentionOptions:
    return options.AttentionOptions(sizes[1] ** -0.5, None, None, None, latents=options.Latents(sizes[2]))


def made(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, sinks: bool, **how: Any) -> Any:
    column = torch.randn(heads[0], generator=torch.Generator().manual_seed(5)).to(dtype) if sinks else None
    slopes = 0.5 ** torch.arange(1, heads[0] + 1) if "slopes" in how else None
    return options.AttentionOptions(
        *(how.get("scale", heads[2] ** -0.5), window, how.get("softcap"), column, how.get("chunk"), slopes),
        rounded=how.get("rounded"),
    )


def fed(
    mine: Tensors, how: Any, chunks: Iterable[int], strangers: dict[int, Tensors], garbage: float | None = None
) -> torch.Tensor:
    """All rows' results, in chunks; each stranger has one more position in every chunk, some before mine.

    ``garbage`` lies, before a chunk is fed, where its positions and all after them will be written.
    """
    arena, at, pieces = KvArena(torch.device("cpu")), 0, []
    for sequence in (MINE, *strangers):
        arena.open(sequence, len(mine[0]))
    for step, count in enumerate(chunks):
        rows = {sequence: (step, 1) for sequence in strangers if sequence < MINE}
        rows |= {MINE: (at, count)} | {sequence: (step, 1) for sequence in strangers if sequence > MINE}
        of = {MINE: mine} | strangers
        batch = [torch.cat([of[s][n][start : start + c] for s, (start, c) in rows.items()]) for n in range(3)]
        spans = tuple(layout_spans(Row(s, start, c, False) for s, (start, c) in rows.items()))
        if garbage is not None:
            is_latent = how.latents is not None
            left_behind(arena, at, len(mine[0]), [batch[1], batch[2][..., :0] if is_latent else batch[2]], garbage)
        with use_pass(ForwardPass(arena, LayerRange(0, 1), spans)), torch.inference_mode():
            result = attention.attend_rows(0, *batch, how)
        place = next(span.offset for span in spans if span.sequence == MINE)
        pieces.append(result[place : place + count].clone())
        at += count
    return torch.cat(pieces)


def left_behind(arena: KvArena, start: int, stop: int, like: list[torch.Tensor], garbage: float) -> None:
    dense = [part[:1].expand(stop - start, -1, -1).transpose(0, 1).clone().fill_(garbage) for part in like]
    with torch.inference_mode():
        arena.ensure_region(MINE, 0, *dense).write(start, *dense)


def plan_of(chunk: int, first: int = 0) -> list[int]:
    return [first][: bool(first)] + [min(chunk, LENGTH - at) for at in range(first, LENGTH, chunk)]


CASES = [(heads, "plain") for heads in HEADS] + [(heads, how) for heads in (HEADS[0], HEADS[-1]) for how in HOWS]


def rows_cases() -> Iterator[object]:
    """Each case with each kind of kernels. Plain C and torch take their time: with the many heads of real models they
    compute in one case, the others are long. Plain C has the bits of the vectors (``test_processors_agree``). Torch's
    products of bfloat16 are tried with odd heads alone: the rules beside them are computed in float32."""
    for kind, (heads, how) in product(DTYPES, dict.fromkeys(CASES)):
        is_long = kind.endswith((" portable", f" {WITHOUT}")) and heads in HEADS[:6] and (heads, how) != CASES[0]
        if kind == f"bfloat16 {WITHOUT}":
            is_long = (heads, how) != (HEADS[6], "plain")
        yield pytest.param(kind, heads, how, marks=pytest.mark.long if is_long else (), id=f"{kind}-{heads}-{how}")


@pytest.mark.parametrize(("dtype", "heads", "how"), [*rows_cases()], indirect=["dtype"])
def test_rows(heads: tuple[int, int, int], how: str, dtype: torch.dtype) -> None:
    """In chunks of 1, 7, 64, 100 by one thread, whole by two, alone and beside strangers: the same bits; near to the
    plain formula."""
    kind = made(heads, dtype, **({"window": None, "sinks": False} | HOWS[how]))
    mine = random_parts(heads, LENGTH, 1, dtype)
    check_rows(mine, kind, {sequence: random_parts(heads, LENGTH, sequence + 7, dtype) for sequence in (0, 2, 5)})


def latents_cases() -> Iterator[object]:
    """As above: plain C and torch compute with the sizes of a real model in float32, with small ones in bfloat16."""
    for kind, sizes in product(DTYPES, LATENTS):
        is_slow = kind in ("bfloat16 portable", f"bfloat16 {WITHOUT}") and sizes != LATENTS[1]
        yield pytest.param(kind, sizes, marks=pytest.mark.long if is_slow else (), id=f"{kind}-{sizes}")


@pytest.mark.parametrize(("dtype", "sizes"), [*latents_cases()], indirect=["dtype"])
def test_latents(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The same for keys that begin with their values."""
    mine = latent_parts(sizes, LENGTH, 1, dtype)
    strangers = {sequence: latent_parts(sizes, LENGTH, sequence + 7, dtype) for sequence in (0, 2, 5)}
    check_rows(mine, made_latent(sizes), strangers)


def check_rows(mine: Tensors, kind: Any, strangers: dict[int, Tensors]) -> None:
    torch.set_num_threads(2)
    whole = fed(mine, kind, [LENGTH], {})
    torch.set_num_threads(1)
    for plan in (plan_of(1, 110), plan_of(7), plan_of(64), plan_of(100)):
        assert torch.equal(fed(mine, kind, plan, {}), whole), plan[:2]
    torch.set_num_threads(2)
    for plan in (plan_of(1, 120), plan_of(33)):
        assert torch.equal(fed(mine, kind, plan, strangers), whole), plan[:2]
    off = (whole.float() - formula(mine, kind)).abs().max()
    assert float(off) < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[whole.dtype]


def formula(mine: Tensors, how: options.AttentionOptions) -> torch.Tensor:
    """What it should come to, in float64 and without any care for bits."""
    query, keys, values = (part.double().transpose(0, 1) for part in mine)
    fold = len(query) // len(keys)
    scores = query @ keys.repeat_interleave(fold, 0).transpose(1, 2) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    length = query.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (how.window or length))
    if how.chunk is not None:
        hidden |= torch.arange(length) < (torch.arange(length) // how.chunk * how.chunk)[:, None]
    if how.slopes is not None and how.rounded is None:
        scores = scores - distance * how.slopes[:, None, None]
    elif how.slopes is not None:
        scores = scores + (how.slopes[:, None, None].bfloat16() * torch.arange(length)).double() * how.rounded
    scores = scores.masked_fill(hidden, float("-inf"))
    if how.sinks is not None:
        column = how.sinks.double()[:, None, None].expand(-1, length, 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)[..., :length]
    return (weights @ values.repeat_interleave(fold, 0)).transpose(0, 1).float()


@needs_library
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("heads", [(8, 2, 64), (9, 3, 22), (4, 4, 9)], ids=str)
def test_processors_agree(heads: tuple[int, int, int], how: str) -> None:
    """All variants that widen what they multiply give the same bits, whatever their registers. (Those that multiply
    bfloat16 itself are a kind of their own there.)"""
    for kind in KINDS.values():
        mine = random_parts(heads, LENGTH, 1, kind)
        rules = made(heads, kind, **({"window": None, "sinks": False} | HOWS[how]))
        found = {name: under(name, mine, rules, [100, 70]) for name in VARIANTS}
        of_its_own = () if kind == torch.float32 else ("avx512bf16", "amx")
        alike = [found[name] for name in VARIANTS if name not in of_its_own]
        assert all(torch.equal(one, other) for one, other in pairwise(alike))


@needs_library
@pytest.mark.parametrize("sizes", LATENTS, ids=str)
def test_processors_agree_on_latents(sizes: tuple[int, int, int]) -> None:
    for kind in KINDS.values():
        mine, rules = latent_parts(sizes, LENGTH, 1, kind), made_latent(sizes)
        of_its_own = () if kind == torch.float32 else ("avx512bf16", "amx")
        alike = [under(name, mine, rules, [100, 70]) for name in VARIANTS if name not in of_its_own]
        assert all(torch.equal(one, other) for one, other in pairwise(alike))


def under(variant: str, mine: Tensors, how: object, chunks: list[int]) -> torch.Tensor:
    with native.using_variant(variant):
        return fed(mine, how, chunks, {})


def stretches_cases() -> Iterator[object]:
    """Plain C computes one case of each dtype: it has the bits of the vectors (``test_processors_agree``)."""
    for kind, how in product(DTYPES, ("plain", "window", "sinks", "chunk", "slopes")):
        is_long = kind.endswith(" portable") and how != "window"
        yield pytest.param(kind, how, marks=pytest.mark.long if is_long else (), id=f"{kind}-{how}")


@pytest.mark.parametrize(("dtype", "how"), [*stretches_cases()], indirect=["dtype"])
def test_stretches(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a long context, too, where threads share what one row sees: one token after the other by one thread and
    by two, in chunks, and whole. Keys and values of which one is wider than a tile and the other odd."""
    monkeypatch.setattr(cores, "_expected", {1, 2})  # as a worker says it: a library may split long sums over threads
    keys, values = random_parts((2, 1, 9), LONG, 1, dtype), random_parts((2, 1, 80), LONG, 2, dtype)
    mine = keys[0], keys[1], values[2]
    check_stretches(mine, made((2, 1, 9), dtype, **({"window": None, "sinks": False} | HOWS[how])))


def test_stretches_of_latents(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_expected", {1, 2})
    check_stretches(latent_parts((2, 89, 80), LONG, 1, dtype), made_latent((2, 89, 80)))


def check_stretches(mine: Tensors, kind: Any) -> None:
    torch.set_num_threads(2)
    whole = fed(mine, kind, [LONG], {})
    for threads, plan in ((1, [1020, 1000, *([1] * 80)]), (2, [1020, 1000, *([1] * 80)]), (2, [1025, 1075])):
        torch.set_num_threads(threads)
        assert torch.equal(fed(mine, kind, plan, {}), whole), (threads, plan[:3])
    limits = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
    assert float((whole.float() - formula(mine, kind)).abs().max()) < limits[whole.dtype]


@needs_library
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_end_has_no_effect(variant: str, kind: str) -> None:
    """Not even if it is no number: positions after a row's own are not looked at, written or not."""
    cases = [
        (random_parts(heads, LENGTH, 1, KINDS[kind]), made(heads, KINDS[kind], None, False))
        for heads in ((8, 2, 64), (9, 3, 22))
    ]
    for mine, rules in [*cases, (latent_parts(LATENTS[2], LENGTH, 1, KINDS[kind]), made_latent(LATENTS[2]))]:
        with native.using_variant(variant):
            clean = fed(mine, rules, plan_of(33), {})
            for garbage in (float("nan"), float("inf")):
                assert torch.equal(fed(mine, rules, plan_of(33), {}, garbage), clean)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_shows(value: float, dtype: torch.dtype) -> None:
    """Control: the same within what a row sees makes it none, too, and no row before it."""
    plain = random_parts((8, 2, 64), LENGTH, 1, dtype), made((8, 2, 64), dtype, None, False)
    for mine, kind in (plain, (latent_parts(LATENTS[1], LENGTH, 1, dtype), made_latent(LATENTS[1]))):
        mine[1][100] = value
        result = fed(mine, kind, [100, 1, 69], {})
        assert result[:100].isfinite().all()
        assert result[100:].isnan().any(-1).all()


@needs_library
def test_other_kernels_half_way_are_refused() -> None:
    """Keys and values lie as the kernels want them that wrote them: nobody else may read them."""
    mine = random_parts((2, 1, 16), 4, 1, torch.float32)
    arena = KvArena(torch.device("cpu"))
    arena.open(MINE, 10)
    with (
        use_pass(ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans([Row(MINE, 0, 4, False)])))),
        torch.inference_mode(),
    ):
        attention.attend_rows(0, *mine, made((2, 1, 16), torch.float32, None, False))
        with native.disabled("to change"), pytest.raises(IllegalMove, match="as other kernels want them"):
            attention.attend_rows(0, *mine, made((2, 1, 16), torch.float32, None, False))


@needs_library
def test_kinds_are_not_mixed() -> None:
    """The kernel reads all three as numbers of one kind."""
    query, key, value = random_parts((2, 1, 16), 4, 1, torch.float32)
    arena = KvArena(torch.device("cpu"))
    arena.open(MINE, 10)
    with (
        use_pass(ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans([Row(MINE, 0, 4, False)])))),
        pytest.raises(ValueError, match="are not of one kind"),
    ):
        attention.attend_rows(0, query.bfloat16(), key, value, made((2, 1, 16), torch.float32, None, False))


@pytest.mark.parametrize("heads", [(32, 4, 64), (6, 2, 20)], ids=str)
def test_without_the_grid_bits_differ(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: over exactly the keys there are, the same comparison fails."""
    monkeypatch.setattr(native, "library", lambda: None)  # our own kernel has no grid to leave out
    monkeypatch.setattr(tiles, "keys_end", lambda tile: tile.start + tile.count)
    kind = made(heads, torch.float32, None, False)
    mine = random_parts(heads, LENGTH, 1, torch.float32)
    assert not torch.equal(fed(mine, kind, plan_of(7), {}), fed(mine, kind, [LENGTH], {}))
