"""The numerics contract, further: crowds of every size, many stages, and what recovery relies on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.log import ActivationLog
from swarm.wire.messages import Row
from tests.model.cutting import Cutter, never, nothing, random_tokens

PROMPT, ANSWER = random_tokens(70, seed=5), random_tokens(6, seed=6)
TOKENS = PROMPT + ANSWER
MINE = 1


def alone(cutter: Cutter, folder: Path, lines: tuple[int, ...], dtype: str) -> torch.Tensor:
    pipeline = cutter.cut(folder, lines, dtype)
    pipeline.open(MINE)
    pieces = [pipeline.logits((MINE, 0, PROMPT))[0]]
    pieces += [pipeline.logits((MINE, at, TOKENS[at : at + 1]))[0] for at in range(len(PROMPT), len(TOKENS))]
    return torch.cat(pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 5, 8, 17, 32])
def test_in_batches_of_every_size(cutter: Cutter, llama: Path, dtype: str, size: int) -> None:
    """A decode has the same bits alone and as one of 2 to 32, wherever it stands among them."""
    expected = alone(cutter, llama, (0, 8), dtype)
    pipeline = cutter.cut(llama, (0, 8), dtype)
    strangers = list(range(100, 100 + size - 1))
    pipeline.open(MINE, *strangers)
    lengths = {stranger: 1 + 7 * n for n, stranger in enumerate(strangers)}
    parts = [(stranger, 0, random_tokens(length, seed=stranger)) for stranger, length in lengths.items()]
    pieces = [pipeline.logits(*parts, (MINE, 0, PROMPT))[-1]]
    for place, at in enumerate(range(len(PROMPT), len(TOKENS))):
        crowd = [(stranger, length + place, random_tokens(1, seed=at)) for stranger, length in lengths.items()]
        where = (place * 5) % size
        crowd.insert(where, (MINE, at, TOKENS[at : at + 1]))
        pieces.append(pipeline.logits(*crowd)[where])
    assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lines", [(0, 1, 3, 5, 8), (0, 2, 3, 4, 7, 8)])
def test_over_four_and_five_stages(cutter: Cutter, llama: Path, dtype: str, lines: tuple[int, ...]) -> None:
    """The number of stages does not show in the bits."""
    assert torch.equal(alone(cutter, llama, lines, dtype), alone(cutter, llama, (0, 8), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [16, 32, 100])
def test_a_stage_rebuilt_from_the_log_of_its_inputs(cutter: Cutter, llama: Path, dtype: str, chunk: int) -> None:
    """The middle stage forgets everything and is fed what the one before had logged, in other chunks: what comes after
    has the bits of an undisturbed run."""
    expected = alone(cutter, llama, (0, 8), dtype)
    lines = (0, 3, 6, 8)
    stages = cutter.cut(llama, lines, dtype).stages
    middle = stages[1]
    for stage in stages:
        stage.open(MINE, 512)
    log = ActivationLog(1 << 30)
    got = [_through(stages, lines, log, 0, PROMPT)]

    middle.release(MINE)
    middle.open(MINE, 512)
    for start in range(0, len(PROMPT), chunk):
        stop = min(start + chunk, len(PROMPT))
        logged = log.read(MINE, 3, start, stop)
        assert logged is not None
        rows = (Row(MINE, start, stop - start, False),)
        middle.forward(Batch(rows, np.asarray(PROMPT[start:stop], np.int64), logged, ()), never, nothing)

    got += [_through(stages, lines, log, at, TOKENS[at : at + 1]) for at in range(len(PROMPT), len(TOKENS))]
    assert torch.equal(torch.cat(got), expected)


def test_a_stage_rebuilt_with_one_position_missing_differs(cutter: Cutter, llama: Path) -> None:
    """Control: the comparison sees a single lost position."""
    expected = alone(cutter, llama, (0, 8), "float32")
    lines = (0, 3, 8)
    stages = cutter.cut(llama, lines, "float32").stages
    for stage in stages:
        stage.open(MINE, 512)
    log = ActivationLog(1 << 30)
    _through(stages, lines, log, 0, PROMPT)
    stages[1].release(MINE)
    stages[1].open(MINE, 512)
    logged = log.read(MINE, 3, 1, len(PROMPT))
    assert logged is not None
    rows = (Row(MINE, 0, len(PROMPT) - 1, False),)
    stages[1].forward(Batch(rows, np.asarray(PROMPT[1:], np.int64), logged, ()), never, nothing)
    got = _through(stages, lines, log, len(PROMPT), TOKENS[len(PROMPT) : len(PROMPT) + 1])
    assert not torch.equal(got, expected[len(PROMPT) : len(PROMPT) + 1])


def _through(
    stages: Sequence[TorchExecutor], lines: Sequence[int], log: ActivationLog, start: int, tokens: list[int]
) -> torch.Tensor:
    """Feed tokens; every stage but the last logs what it sends on, as the sender does."""
    rows = (Row(MINE, start, len(tokens), False),)
    ids = np.asarray(tokens, np.int64)
    hidden = None
    for stage, boundary in zip(stages[:-1], lines[1:], strict=False):
        hidden = stage.forward(Batch(rows, ids, hidden, ()), never, nothing).hidden
        assert hidden is not None
        log.append(MINE, boundary, start, hidden)
    return stages[-1].logits(Batch(rows, ids, hidden, ()))
