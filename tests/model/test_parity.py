"""The cut model computes what transformers computes with the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.params import SamplingParams
from swarm.stage.engine import forward
from swarm.stage.executor import Batch
from swarm.wire.messages import Row
from tests.model.cutting import Cutter, Pipeline, cuts, never, nothing, random_tokens
from tests.model.models import llama_config, load_whole

# Relative to the largest logit. Measured: at most 1e-6; the wrong controls below come to 1e-2 and more.
TOLERANCE = 1e-5
LONG, SHORT = random_tokens(75, seed=1), random_tokens(24, seed=2)


@pytest.fixture(scope="module")
def whole(llama: Path) -> Any:
    return load_whole(llama)


@pytest.fixture(scope="module")
def expected(whole: Any) -> torch.Tensor:
    return reference(whole)


def reference(whole: Any) -> torch.Tensor:
    with torch.inference_mode():
        each = [whole(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in (LONG, SHORT)]
    return torch.cat(each)


def served(pipeline: Pipeline) -> torch.Tensor:
    """Prefill, prefill at an offset beside a stranger's first, and decodes of both, all positions' logits."""
    pipeline.open(1, 2)
    long, short = [], []
    long += pipeline.logits((1, 0, LONG[:40]))
    first, second = pipeline.logits((1, 40, LONG[40:70]), (2, 0, SHORT[:19]))
    long, short = [*long, first], [second]
    for step in range(5):
        mine, other = pipeline.logits((1, 70 + step, LONG[70 + step :][:1]), (2, 19 + step, SHORT[19 + step :][:1]))
        long, short = [*long, mine], [*short, other]
    return torch.cat([*long, *short])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
def test_every_cut(cutter: Cutter, llama: Path, expected: torch.Tensor, num_stages: int) -> None:
    """At every cut of eight layers into so many stages, logits equal the whole model's."""
    for lines in cuts(8, num_stages):
        assert difference(served(cutter.cut(llama, lines)), expected) < TOLERANCE, lines


def test_wrong_rope_is_noticed(
    cutter: Cutter, llama: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: one stage that rotates later chunks by one position too much fails the same comparison."""
    pipeline = cutter.cut(llama, (0, 3, 5, 8))
    right = forward._positions
    calls = 0

    def wrong(batch: Any, spans: Any, num_tokens: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        positions = right(batch, spans, num_tokens)
        middle_stage = calls % 3 == 2
        return positions + 1 if middle_stage and spans[0].start > 0 else positions

    monkeypatch.setattr(forward, "_positions", wrong)
    assert difference(served(pipeline), expected) > 100 * TOLERANCE


def test_one_altered_kv_element_is_noticed(cutter: Cutter, llama: Path) -> None:
    """Control: a single wrong number among the keys of one layer fails the same comparison."""
    pipeline = cutter.cut(llama, (0, 4, 8))
    pipeline.open(1)
    pipeline.logits((1, 0, LONG[:-1]))
    right = pipeline.logits((1, len(LONG) - 1, LONG[-1:]))[0]
    region = pipeline.stages[1]._arena.region(1, 5)
    assert region is not None
    with torch.inference_mode():
        keys, values = region.read(20, 21)
        keys[1, 0, 3] += 0.5
        region.write(20, keys, values)
    wrong = pipeline.logits((1, len(LONG) - 1, LONG[-1:]))[0]
    assert difference(wrong, right) > TOLERANCE


@pytest.mark.parametrize("lines", [(0, 8), (0, 2, 3, 8)])
def test_greedy_tokens_equal_generate(cutter: Cutter, llama: Path, whole: Any, lines: tuple[int, ...]) -> None:
    """Forty greedy tokens are those of transformers' own ``generate``."""
    pipeline = cutter.cut(llama, lines)
    pipeline.open(1)
    history, start = list(SHORT), 0
    for _ in range(40):
        token = pipeline.sample(1, history, start, SamplingParams(ignore_eos=True), seed=0).token
        start = len(history)
        history.append(token)
    prompt = torch.tensor([SHORT])
    made = whole.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert made[0].tolist() == history
    assert len(set(history[len(SHORT) :])) > 20  # it says something


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "400KB"])
def test_ways_to_store(save: Any, tied: bool, shard: str) -> None:
    """One file or shards, tied or untied embeddings: the same comparison holds."""
    folder = save(llama_config(tie_word_embeddings=tied, num_hidden_layers=3), shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "400KB")
    for lines in ((0, 3), (0, 1, 2, 3)):
        assert difference(served(Cutter().cut(folder, lines)), reference(load_whole(folder))) < TOLERANCE


def test_bfloat16_is_near_float32(cutter: Cutter, llama: Path, whole: Any, expected: torch.Tensor) -> None:
    """In bfloat16 the cut model is as near to the float32 one as transformers' own bfloat16 is."""
    mine = difference(served(cutter.cut(llama, (0, 3, 8), "bfloat16")).float(), expected)
    theirs = difference(reference(load_whole(llama, torch.bfloat16)).float(), expected)
    assert mine < 1.5 * theirs < 0.2


def test_hidden_states_own_their_memory(cutter: Cutter, llama: Path) -> None:
    """What a stage hands out is contiguous float32 that no later step writes over."""
    pipeline = cutter.cut(llama, (0, 4, 8))
    pipeline.open(1)
    first = pipeline.stages[0]

    def step(start: int, tokens: list[int]) -> Any:
        batch = Batch((Row(1, start, len(tokens), False),), np.asarray(tokens, np.int64), None, ())
        return first.forward(batch, never, nothing).hidden

    hidden = step(0, LONG[:10])
    kept = hidden.copy()
    for position in range(10, 20):
        step(position, LONG[position : position + 1])
    assert hidden.dtype == np.float32
    assert hidden.flags.c_contiguous
    assert hidden.shape == (10, 64)
    np.testing.assert_array_equal(hidden, kept)
