"""The numerics contract for every kind of model that is named as served: a sequence's logits have the same bits
whatever happens around it.

A case computes the same tokens under other circumstances and gives the logits from some position on; they must have the
bits of the whole sequence computed alone, in one piece, by one stage. The controls at the end break one thing each, and
the same comparison must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from swarm.stage import native
from swarm.stage.attention import sharing, tiles
from swarm.stage.attention.grid import Span
from swarm.stage.engine import forward
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.log import ActivationLog
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import Row
from tests.model.cutting import Cutter, Pipeline, never, nothing, random_tokens
from tests.model.models import ARCHITECTURES, LATENT, named_config

WITHOUT_NATIVE = "bfloat16 without native kernels"
# Quantized when they are loaded.
QUANTIZED = {
    "bfloat16 int4": Quantization("int4"),
    "float32 int8 by 128": Quantization("int8", group=128),
    "bfloat16 int4 times int8": Quantization("int4", activations="int8"),
}
SERVED: list[Any] = [(kind, dtype) for kind in ARCHITECTURES for dtype in ("float32", "bfloat16")]
SERVED += [
    pytest.param((kind, dtype), marks=[] if kind == "deepseek_v3" else pytest.mark.long)
    for kind in LATENT
    for dtype in ("float32", "bfloat16")
]
if native.library() is not None:  # else bfloat16 is without them anyway
    SERVED += [(kind, WITHOUT_NATIVE) for kind in ("gemma2", "deepseek_v3")]
    # Llama has nothing that gemma2 lacks, and gpt_oss's experts take torch minutes.
    SERVED += [pytest.param((kind, WITHOUT_NATIVE), marks=pytest.mark.long) for kind in ("llama", "gpt_oss")]
    SERVED += [(kind, "bfloat16 int4") for kind in ("qwen3", "gemma2", "gpt_neox", "phi3", "qwen3_moe", "gpt_oss")]
    SERVED += [("llama", how) for how in QUANTIZED]
    SERVED.append(pytest.param(("deepseek_v3", "bfloat16 int4"), marks=pytest.mark.long))
TOKENS = random_tokens(142, seed=3, vocabulary=251)  # longer than a cell of the attention's grid, and than any window
NUM_PROMPT = 112
MINE = 1
WHOLE = (0, 6)
# Chosen so that ranges of layers occur again: an executor is loaded once.
LINES = {1: WHOLE, 2: (0, 3, 6), 3: (0, 1, 3, 6), 4: (0, 1, 2, 3, 6), 5: (0, 1, 2, 3, 5, 6)}
MOST = 32


@dataclass
class Served:
    """One kind of model in one dtype."""

    folder: Path
    dtype: str
    cutter: Cutter
    quantization: Quantization

    def pipeline(self, num_stages: int = 1) -> Pipeline:
        return self.cutter.cut(self.folder, LINES[num_stages], self.dtype, self.quantization)


def fed(pipeline: Pipeline, chunk: int, start: int = 0, sequence: int = MINE) -> torch.Tensor:
    """The logits of all tokens from ``start`` on, in chunks."""
    places = range(start, len(TOKENS), chunk)
    return torch.cat([pipeline.logits((sequence, at, TOKENS[at : at + chunk]))[0] for at in places])


def alone(pipeline: Pipeline, chunk: int = len(TOKENS)) -> torch.Tensor:
    pipeline.open(MINE)
    return fed(pipeline, chunk)


# --- cases: (served) -> (from which position on, logits) --------------------------------------------------------------

Case = Callable[[Served], tuple[int, torch.Tensor]]


def in_chunks(chunk: int, served: Served) -> tuple[int, torch.Tensor]:
    """The prompt in chunks of this size, and what follows it too."""
    return 0, alone(served.pipeline(), chunk)


def token_by_token(served: Served) -> tuple[int, torch.Tensor]:
    """A part of the prompt, shorter than the grid's cell, and all further tokens alone."""
    pipeline = served.pipeline()
    pipeline.open(MINE)
    return 0, torch.cat((pipeline.logits((MINE, 0, TOKENS[:100]))[0], fed(pipeline, 1, start=100)))


def over_stages(num_stages: int, served: Served) -> tuple[int, torch.Tensor]:
    """Over so many stages, in chunks that are no multiple of anything."""
    return 0, alone(served.pipeline(num_stages), 57)


def in_crowds(num_stages: int, served: Served) -> tuple[int, torch.Tensor]:
    """In batches of 2 to 32, every size once, at another place each time, while strangers join and leave."""
    return 0, among_strangers(served.pipeline(num_stages))


def with_one_thread(served: Served) -> tuple[int, torch.Tensor]:
    """One thread instead of two, alone and in crowds."""
    pipeline = served.pipeline()
    (stage,) = pipeline.stages
    before, stage.threads_alone = stage.threads_alone, 1
    try:
        by_itself = alone(pipeline, 64)
        pipeline.release(MINE)
        return 0, torch.stack((by_itself, among_strangers(pipeline)))
    finally:
        stage.threads_alone = before


def after_a_prefix_hit(position: int, served: Served) -> tuple[int, torch.Tensor]:
    """It begins with blocks of a sequence that ended, and whose room was cut to them."""
    pipeline = served.pipeline(2)
    pipeline.open(7, MINE + 1)
    pipeline.logits((7, 0, TOKENS[: position + 20]), (MINE + 1, 0, TOKENS[::-1]))
    for stage in pipeline.stages:
        stage.shrink(7, position)
        stage.fork(MINE, 7, position, 512)
    pipeline.logits((MINE + 1, 5, random_tokens(40, seed=9, vocabulary=251)))
    pipeline.release(7)
    return position, fed(pipeline, 50, start=position)


def sharing_a_prefix(served: Served) -> tuple[int, torch.Tensor]:
    """It begins on the pages of another one, as far as they are whole."""
    with patch.object(sharing, "MIN_SHARED", 1):
        pipeline = served.pipeline(2)
        for stage in pipeline.stages:
            stage._arena.start_sharing(0)  # by the unit of the first fork, which cases before may have made
        pipeline.open(7)
        pipeline.logits((7, 0, TOKENS[:135]))
        for stage in pipeline.stages:
            stage.fork(MINE, 7, 128, 512)
            buffers = list(stage._arena._sequences[MINE].place.rack.buffers.values())
            like = buffers[0]
            unit = sharing.chunk_positions([each.shape for each in buffers], like.layouts, like.keys.itemsize)
            assert stage._transfers.sharing(stage._active_stage().layers)[0] == (unit if stage._arena.can_share else 0)
            assert stage._arena.shared_stop(MINE) == (128 // unit * unit if stage._arena.can_share else 0)
    pieces = []
    for at in range(128, len(TOKENS)):  # both write on
        rows = [(MINE, at, TOKENS[at : at + 1])]
        rows += [(7, at + 7, TOKENS[at : at + 1])] if at + 7 < len(TOKENS) else []
        pieces.append(pipeline.logits(*rows)[0])
    return 128, torch.cat(pieces)


def after_a_cut(position: int, served: Served) -> tuple[int, torch.Tensor]:
    """It went on otherwise, was cut back, and goes on in other chunks."""
    pipeline = served.pipeline(2)
    pipeline.open(MINE)
    pipeline.logits((MINE, 0, TOKENS[:position] + random_tokens(90, seed=8, vocabulary=251)))
    pipeline.truncate(MINE, position)
    return position, fed(pipeline, 45, start=position)


def after_a_replay(position: int, served: Served) -> tuple[int, torch.Tensor]:
    """The middle stage lost everything: it gets what the one before it had logged, in other chunks, up to where the
    others were cut to."""
    pipeline, log = served.pipeline(3), ActivationLog(1 << 30)
    pipeline.open(MINE, limit=256)
    logged(pipeline.stages, log, 0, TOKENS[: position + 13])
    pipeline.truncate(MINE, position)
    log.truncate(MINE, position)
    middle = pipeline.stages[1]
    middle.release(MINE)
    middle.open(MINE, 256)
    replay(middle, log, range(0, position), 37)
    pieces = [logged(pipeline.stages, log, at, TOKENS[at : at + 11]) for at in range(position, len(TOKENS), 11)]
    return position, torch.cat(pieces)


CASES: dict[str, Case] = {
    **{f"chunks of {chunk}": partial(in_chunks, chunk) for chunk in (1, 7, 64, 100)},
    "token by token": token_by_token,
    **{f"{num} stages": partial(over_stages, num) for num in LINES},
    "crowds": partial(in_crowds, 1),
    "crowds over 3 stages": partial(in_crowds, 3),
    "one thread": with_one_thread,
    **{f"prefix of {position}": partial(after_a_prefix_hit, position) for position in (32, 128)},
    "shared prefix": sharing_a_prefix,
    **{f"cut to {position}": partial(after_a_cut, position) for position in (33, 130)},
    **{f"replayed to {position}": partial(after_a_replay, position) for position in (50, 131)},
}

# Like others of their kind, at another place.
LONG = {
    "chunks of 1",  # like "token by token", from the first one on
    "chunks of 64",
    "chunks of 100",
    "2 stages",
    "4 stages",
    "crowds",
    "prefix of 128",
    "cut to 33",
    "replayed to 50",
}


# --- their parts ------------------------------------------------------------------------------------------------------


def among_strangers(pipeline: Pipeline) -> torch.Tensor:
    """The prompt in three chunks, then one token after the other: batches of 2, 3, … 32."""
    pipeline.open(MINE)
    pieces: list[torch.Tensor] = []
    at: dict[int, int] = {}  # strangers' positions
    bounds = [0, 30, 90, *range(NUM_PROMPT - 1, len(TOKENS) + 1)]
    for step, (start, stop) in enumerate(itertools.pairwise(bounds)):
        size = MOST - step % (MOST - 1)  # 32, 31, … 2, and 32 again
        coming = 1000 + step * MOST
        for stranger in [*at][: max(1, len(at) - size + 2)] if at else []:
            del at[stranger]
            pipeline.release(stranger)
        joining = range(coming, coming + size - 1 - len(at))
        pipeline.open(*joining, limit=128)
        at |= dict.fromkeys(joining, 0)
        parts = [strangers_part(stranger, position) for stranger, position in at.items()]
        at |= {stranger: position + len(tokens) for stranger, position, tokens in parts}
        place = step * 5 % size
        parts.insert(place, (MINE, start, TOKENS[start:stop]))
        assert len(parts) == size
        pieces.append(pipeline.logits(*parts)[place])
    return torch.cat(pieces)


def strangers_part(stranger: int, position: int) -> tuple[int, int, Sequence[int]]:
    count = 1 if position else 1 + stranger * 7 % 23
    return stranger, position, random_tokens(count, seed=stranger + position, vocabulary=251)


def logged(stages: Sequence[TorchExecutor], log: ActivationLog, start: int, tokens: Sequence[int]) -> torch.Tensor:
    """Feed tokens; every stage but the last logs what it sends on, as the sender does."""
    rows, ids, hidden = (Row(MINE, start, len(tokens), False),), np.asarray(tokens, np.int64), None
    for stage, line in zip(stages[:-1], LINES[3][1:], strict=False):
        hidden = stage.forward(Batch(rows, ids, hidden, ()), never, nothing).hidden
        assert hidden is not None
        log.append(MINE, line, start, hidden)
    return stages[-1].logits(Batch(rows, ids, hidden, ()))


def replay(middle: TorchExecutor, log: ActivationLog, positions: range, chunk: int, shift: int = 0) -> None:
    """Feed the middle stage of three what was logged for these positions."""
    for start in range(positions.start, positions.stop, chunk):
        stop = min(start + chunk, positions.stop)
        hidden = log.read(MINE, LINES[3][1], start + shift, stop + shift)
        assert hidden is not None
        rows, ids = (Row(MINE, start, stop - start, False),), np.asarray(TOKENS[start:stop], np.int64)
        middle.forward(Batch(rows, ids, hidden, ()), never, nothing)


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(save: Any) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = save(named_config(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Iterator[Served]:
    kind, dtype = request.param
    threads, patch = torch.get_num_threads(), pytest.MonkeyPatch()
    torch.set_num_threads(2)
    if dtype == WITHOUT_NATIVE:
        patch.setattr(native, "library", lambda: None)
    yield Served(folders(kind), dtype.split()[0], Cutter(), QUANTIZED.get(dtype, AS_STORED))
    patch.undo()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(served: Served) -> torch.Tensor:
    return alone(served.pipeline())


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected.expand(actual.shape))


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_bits(served: Served, case: str, expected: torch.Tensor) -> None:
    """The same bits in every case."""
    position, actual = CASES[case](served)
    assert same_bits(actual, expected[position:])


# --- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [(kind, "float32") for kind in ARCHITECTURES], ids="-".join, indirect=True)
def test_without_the_grid_bits_differ(served: Served, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: attention over exactly the keys there are computes the same thing with other bits. (In bfloat16 the
    rounding after each layer hides this here; ``test_exact`` has a control that it doesn't hide.)"""
    monkeypatch.setattr(native, "library", lambda: None)  # our own kernel has no grid to leave out
    monkeypatch.setattr(tiles, "keys_end", lambda tile: tile.start + tile.count)
    several = [alone(served.pipeline(), chunk) for chunk in (7, 33, 142)]
    assert not all(same_bits(each, several[0]) for each in several)
    # Gemma 2's own logits in float32 are 2.5e-5 off those in float64.
    assert all(float((each - expected).abs().max() / expected.abs().max()) < 5e-5 for each in several)


def test_the_least_change_differs(served: Served, expected: torch.Tensor) -> None:
    """Control: keys of one position, in one layer, next to what they were."""
    pipeline = served.pipeline()
    pipeline.open(MINE)
    pipeline.logits((MINE, 0, TOKENS[:130]))
    region = pipeline.stages[0]._arena.region(MINE, 0)
    assert region is not None
    keys, values = region.read(120, 121)
    region.write(120, torch.nextafter(keys, torch.full_like(keys, float("inf"))), values)
    assert not same_bits(fed(pipeline, 40, start=130), expected[130:])


def test_one_position_off_differs(served: Served, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a second chunk that is rotated one position too far shows in every row."""
    right = forward._positions

    def shifted(batch: Batch, spans: Sequence[Span], num: int) -> torch.Tensor:
        return right(batch, spans, num) + (spans[0].start > 0)

    monkeypatch.setattr(forward, "_positions", shifted)
    wrong = alone(served.pipeline(), 100)
    assert same_bits(wrong[:100], expected[:100])
    assert not (wrong[100:] == expected[100:]).all(dim=-1).any()


def test_a_strange_token_differs(served: Served, expected: torch.Tensor) -> None:
    """Control: one other token thirty positions ago, within every window, shows in every row up to there."""
    pipeline = served.pipeline()
    pipeline.open(MINE)
    other = [*TOKENS[:100], (TOKENS[100] + 1) % 250, *TOKENS[101:130]]
    wrong = pipeline.logits((MINE, 0, other))[0]
    assert same_bits(wrong[:100], expected[:100])
    assert not (wrong[100:] == expected[100:130]).all(dim=-1).any()


def test_a_strangers_keys_differ(served: Served, expected: torch.Tensor) -> None:
    """Control: going on from a stranger's keys instead of one's own shows in every row."""
    pipeline = served.pipeline()
    pipeline.open(7)
    pipeline.logits((7, 0, random_tokens(100, seed=8, vocabulary=251)))
    wrong = fed(pipeline, 70, start=100, sequence=7)
    assert not (wrong == expected[100:]).all(dim=-1).any()


def test_a_replay_one_position_off_differs(served: Served, expected: torch.Tensor) -> None:
    """Control: the log's lines fed one place too early show after the replay."""
    pipeline, log = served.pipeline(3), ActivationLog(1 << 30)
    pipeline.open(MINE, limit=256)
    logged(pipeline.stages, log, 0, TOKENS[:100])
    middle = pipeline.stages[1]
    middle.release(MINE)
    middle.open(MINE, 256)
    replay(middle, log, range(0, 99), 99, shift=1)
    replay(middle, log, range(99, 100), 1)
    wrong = logged(pipeline.stages, log, 100, TOKENS[100:101])
    assert not same_bits(wrong, expected[100:101])
