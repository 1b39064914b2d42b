"""Rebuilding some layers of a stage: the executor runs a chunk through these alone, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.stage.executor import Batch
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import Cutter, Pipeline, never, nothing, random_tokens

TOKENS = random_tokens(120, 5)
HELD = 100  # positions before the loss


def chunk(start: int, stop: int, hidden: np.ndarray | None, through: LayerRange) -> Batch:
    tokens = np.asarray(TOKENS[start:stop], np.int64)
    return Batch((Row(1, start, stop - start, False),), tokens, hidden, (), through=through)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("through", [LayerRange(4, 6), LayerRange(4, 8), LayerRange(5, 7), LayerRange(6, 8)])
def test_rebuilt_layers_have_the_same_bits(cutter: Cutter, llama: Path, dtype: str, through: LayerRange) -> None:
    """A stage that lost some of its layers' keys and values goes on as if nothing had been, after a replay in other
    chunks through these layers alone."""
    first, second = cutter.cut(llama, (0, 4, 8), dtype).stages
    pipeline = Pipeline([first, second])
    pipeline.open(1)
    expected = torch.cat([pipeline.logits((1, 0, TOKENS[:HELD]))[0], pipeline.logits((1, HELD, TOKENS[HELD:]))[0]])

    pipeline = Pipeline([first, second])
    pipeline.open(1)
    head = pipeline.logits((1, 0, TOKENS[:HELD]))[0]
    inputs = _inputs(cutter, llama, dtype, through.first)
    for layer in range(through.first, through.stop):  # as if another worker had had them, and they never came here
        region = second._arena.region(1, layer)
        assert region is not None
        region.keys.zero_()
        region.values.zero_()
    for start, stop in ((0, 64), (64, 71), (71, HELD)):
        done = second.forward(chunk(start, stop, inputs[start:stop], through), never, nothing)
        assert (done.hidden is None) == (through.stop == 8)
        assert not done.sampled
    tail = pipeline.logits((1, HELD, TOKENS[HELD:]))[0]
    assert torch.equal(torch.cat([head, tail]), expected)


def _inputs(cutter: Cutter, llama: Path, dtype: str, boundary: int) -> np.ndarray:
    """What a log at this boundary holds."""
    (stage,) = cutter.cut(llama, (0, boundary), dtype).stages
    stage.open(1, 512)
    tokens = np.asarray(TOKENS[:HELD], np.int64)
    hidden = stage.forward(Batch((Row(1, 0, HELD, False),), tokens, None, ()), never, nothing).hidden
    assert hidden is not None
    return hidden


def test_without_the_replay_the_bits_differ(cutter: Cutter, llama: Path) -> None:
    """Control: the loss above is one."""
    first, second = cutter.cut(llama, (0, 4, 8)).stages
    pipeline = Pipeline([first, second])
    pipeline.open(1)
    pipeline.logits((1, 0, TOKENS[:HELD]))
    expected = pipeline.logits((1, HELD, TOKENS[HELD:]))[0]
    pipeline.truncate(1, HELD)
    region = second._arena.region(1, 5)
    assert region is not None
    region.keys.zero_()
    assert not torch.equal(pipeline.logits((1, HELD, TOKENS[HELD:]))[0], expected)
