"""Layers computed again for a comparison: the bits of those that computed first, whatever else is held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarm.errors import IllegalMove
from swarm.params import SamplingParams
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, ForwardResult, SampleJob
from swarm.stage.recheck import compute_digest
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import never, nothing, random_tokens, ready

TOKENS = random_tokens(70, seed=33)


def again(
    executor: TorchExecutor, layers: LayerRange, hidden: np.ndarray | None, chunks: tuple[int, ...]
) -> list[ForwardResult]:
    """The sequence through these layers, in chunks, apart from what is held."""
    found, start = [], 0
    for count in chunks:
        part = None if hidden is None else hidden[start : start + count]
        tokens = np.asarray(TOKENS[start : start + count], np.int64)
        batch = Batch((Row(7, start, count, False),), tokens, part, (), alone=False, through=layers)
        found.append(executor.recheck(batch, sum(chunks), never, nothing))
        start += count
    return found


def digest(parts: list[ForwardResult]) -> str:
    return compute_digest(np.concatenate([part.hidden for part in parts if part.hidden is not None]))


def first_run(executor: TorchExecutor, hidden: np.ndarray | None = None) -> np.ndarray:
    """As it was computed: 40 positions, then one by one, beside another sequence."""
    found = []
    for sequence in (1, 2):
        executor.open(sequence, 128)
    for start, count in ((0, 40), *((position, 1) for position in range(40, 70))):
        rows = (Row(2, start, count, False), Row(1, start, count, False))
        tokens = np.asarray([*TOKENS[start : start + count][::-1], *TOKENS[start : start + count]], np.int64)
        both = None if hidden is None else np.concatenate([hidden[start : start + count]] * 2)
        result = executor.forward(Batch(rows, tokens, both, ()), never, nothing).hidden
        assert result is not None
        found.append(result[count:])
    return np.concatenate(found)


@pytest.mark.parametrize("chunks", [(32, 32, 6), (70,), (1,) * 70], ids=["chunks", "whole", "one by one"])
def test_standby_layers_compute_the_same_bits(llama: Path, chunks: tuple[int, ...]) -> None:
    """A worker that keeps the layers warm for others, and computes with its own, gets the very bits that their holder
    logged, from the tokens or from hidden states; a sign changed in the input, and it does not."""
    first, second, checker = (
        ready(llama, LayerRange(0, 3)),
        ready(llama, LayerRange(3, 6)),
        ready(llama, LayerRange(6, 8)),
    )
    hidden = first_run(first)
    behind = first_run(second, hidden)
    checker.keep((LayerRange(0, 6),), nothing, lambda _: False)
    checker.open(7, 128)  # a sequence of the same number, which it holds
    held = checker.kv_used()
    assert digest(again(checker, LayerRange(0, 3), None, chunks)) == compute_digest(hidden)
    assert digest(again(checker, LayerRange(3, 6), hidden, chunks)) == compute_digest(behind)
    assert checker.kv_used() == held
    wrong = hidden.copy()
    wrong[0, 0] = -wrong[0, 0]
    assert digest(again(checker, LayerRange(3, 6), wrong, chunks)) != compute_digest(behind)


def test_the_last_layers_draw_the_same_token(llama: Path) -> None:
    """What is drawn again is what was drawn, with its seed and history."""
    whole, checker = ready(llama, LayerRange(0, 8)), ready(llama, LayerRange(0, 3))
    checker.keep((LayerRange(3, 8),), nothing, lambda _: False)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.2)
    job = SampleJob(0, params, 11, list(TOKENS), 20)
    tokens = np.asarray(TOKENS, np.int64)
    whole.open(1, 128)
    drawn = whole.forward(Batch((Row(1, 0, 70, True),), tokens, None, (job,)), never, nothing).sampled
    checker.open(1, 128)
    hidden = checker.forward(Batch((Row(1, 0, 70, False),), tokens, None, ()), never, nothing).hidden
    assert hidden is not None
    again(checker, LayerRange(3, 8), hidden, (32, 37))  # and the last position with its draw:
    begin = Batch((Row(7, 0, 69, False),), tokens[:69], hidden[:69], (), alone=False, through=LayerRange(3, 8))
    checker.recheck(begin, 70, never, nothing)
    end = Batch((Row(7, 69, 1, True),), tokens[69:], hidden[69:], (job,), alone=False, through=LayerRange(3, 8))
    (found,) = checker.recheck(end, 70, never, nothing).sampled
    assert found.token == drawn[0].token


def test_what_is_not_loaded_is_not_computed(llama: Path) -> None:
    """Nothing is read from disk for it, and a row can't begin in the middle."""
    checker = ready(llama, LayerRange(0, 3))
    with pytest.raises(IllegalMove, match="layer 3 is not loaded here"):
        again(checker, LayerRange(2, 5), np.zeros((4, checker.manifest.hidden_size), np.float32), (4,))
    middle = Batch((Row(7, 4, 1, False),), np.zeros(1, np.int64), None, (), through=LayerRange(0, 3))
    with pytest.raises(IllegalMove, match="from the middle"):
        checker.recheck(middle, 8, never, nothing)
