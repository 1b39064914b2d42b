"""Vectors of the last stage are transformers' own, and have the same bits however the positions came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForSequenceClassification

from swarm.errors import IllegalMove, ModelError
from swarm.params import SamplingParams, VectorKind
from swarm.stage.engine.vectors import VectorPool
from swarm.stage.executor import Batch, ForwardResult, SampleJob, VectorJob
from swarm.stage.model import program
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.embedding import read_pooling
from swarm.stage.shell.pieces import forward_in_pieces
from swarm.wire.messages import Pooling, Row
from tests.model.conftest import Save
from tests.model.cutting import Cutter, Pipeline, never, nothing, random_tokens
from tests.model.models import llama_config, named_config, random_model

TOLERANCE = 5e-5  # relative to the largest number; measured: at most 1.1e-5 (gemma2)
TEXT, OTHER = random_tokens(150, seed=5), random_tokens(90, seed=6)
SERVED = ("llama", "qwen3", "gemma2", "mixtral", "gpt_neox")


def run(pipeline: Pipeline, rows: Sequence[Row], tokens: Sequence[int], jobs: dict[int, VectorKind]) -> ForwardResult:
    """One step; ``jobs``: the kind of vector by sequence, for rows that end their prompt if they sample."""
    hidden, ids = None, np.asarray(tokens, np.int64)
    for stage in pipeline.stages[:-1]:
        hidden = stage.forward(Batch(tuple(rows), ids, hidden, ()), never, nothing).hidden
    vectors = tuple(VectorJob(n, jobs[r.sequence], r.sample) for n, r in enumerate(rows) if r.sequence in jobs)
    samples = tuple(
        SampleJob(n, SamplingParams(), 1, [1, 2], 2) for n, r in enumerate(rows) if r.sample and r.sequence not in jobs
    )
    return pipeline.stages[-1].forward(Batch(tuple(rows), ids, hidden, samples, vectors=vectors), never, nothing)


def alone(pipeline: Pipeline, tokens: Sequence[int], kind: VectorKind, *chunks: int) -> NDArray[np.float32]:
    """The vector of a sequence that comes in chunks of these lengths, and the rest."""
    pipeline.open(1)
    at = 0
    for count in (*chunks, len(tokens) - sum(chunks)):
        is_end = at + count == len(tokens)
        done = run(pipeline, [Row(1, at, count, is_end)], tokens[at : at + count], {1: kind})
        at += count
    [vector] = done.vectors
    assert vector.position == len(tokens)
    assert not done.sampled
    return np.frombuffer(vector.vector, np.float32)


def difference(actual: NDArray[np.float32], expected: torch.Tensor) -> float:
    return float(np.abs(actual - expected.numpy()).max() / np.abs(expected.numpy()).max())


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, save: Save) -> Path:
    return save(named_config(request.param, vocab_size=500))


@pytest.fixture(scope="module")
def outputs(folder: Path) -> torch.Tensor:
    whole = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return whole(torch.tensor([TEXT]), use_cache=False).last_hidden_state[0]


def test_vectors_are_transformers_own(cutter: Cutter, folder: Path, outputs: torch.Tensor) -> None:
    pipeline = cutter.cut(folder, (0, 3, 6))
    assert difference(alone(pipeline, TEXT, "last"), outputs[-1]) < TOLERANCE
    assert difference(alone(pipeline, TEXT, "mean"), outputs.double().mean(0).float()) < TOLERANCE


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_bits_depend_on_the_text_alone(cutter: Cutter, folder: Path, kind: VectorKind) -> None:
    """Alone, in chunks, over cuts, in pieces after a shortage of memory, beside others, and module by module."""
    expected = alone(cutter.cut(folder, (0, 6)), TEXT, kind)
    for lines in ((0, 3, 6), (0, 2, 4, 6)):
        assert np.array_equal(alone(cutter.cut(folder, lines), TEXT, kind, 33, 1, 60), expected)
    pipeline = cutter.cut(folder, (0, 6))
    assert np.array_equal(alone(pipeline, TEXT, kind, 1, 100), expected)
    with program.disabled("a test"):
        assert np.array_equal(alone(pipeline, TEXT, kind, 70), expected)
    pipeline.open(1, 2, 3)
    run(pipeline, [Row(2, 0, 50, False), Row(1, 0, 100, False)], OTHER[:50] + TEXT[:100], {1: kind, 2: "mean"})
    rows = [Row(3, 0, 40, True), Row(1, 100, 50, True), Row(2, 50, 40, True)]
    done = run(pipeline, rows, OTHER[:40] + TEXT[100:] + OTHER[50:], {1: kind, 2: "mean"})
    assert [sampled.sequence for sampled in done.sampled] == [3]
    first, second = (np.frombuffer(item.vector, np.float32) for item in done.vectors)
    assert np.array_equal(first, expected)
    assert np.array_equal(second, alone(pipeline, OTHER, "mean"))


def test_tokens_beside_vectors_are_those_without(cutter: Cutter, folder: Path) -> None:
    pipeline = cutter.cut(folder, (0, 6))
    pipeline.open(1, 2)
    rows = [Row(1, 0, 60, True), Row(2, 0, 90, True)]
    beside = run(pipeline, rows, TEXT[:60] + OTHER, {1: "mean"}).sampled
    pipeline.open(2)
    assert run(pipeline, [Row(2, 0, 90, True)], OTHER, {}).sampled == beside


def test_pieces_add_to_one_sum(cutter: Cutter, llama: Path) -> None:
    pipeline = cutter.cut(llama, (0, 8))
    expected = alone(pipeline, TEXT, "mean")
    pipeline.open(1)
    batch = Batch((Row(1, 0, 150, True),), np.asarray(TEXT), None, (), vectors=(VectorJob(0, "mean", True),))
    [vector] = forward_in_pieces(pipeline.stages[0], batch, never, nothing).vectors
    assert np.array_equal(np.frombuffer(vector.vector, np.float32), expected)


def test_a_mean_never_goes_on_without_its_sum(cutter: Cutter, llama: Path) -> None:
    """Positions that came by another way, such as copies, are not in it."""
    pipeline = cutter.cut(llama, (0, 8))
    pipeline.open(1)
    run(pipeline, [Row(1, 0, 40, False)], TEXT[:40], {})
    with pytest.raises(IllegalMove, match="sum is not there"):
        run(pipeline, [Row(1, 40, 10, True)], TEXT[40:50], {1: "mean"})


def test_a_step_that_fails_leaves_the_sums_as_they_were() -> None:
    """It may be computed again, in pieces."""
    pool, outputs = VectorPool(), [torch.ones(4, 8)]
    rows = (Row(1, 0, 2, False), Row(2, 2, 2, False))
    jobs = (VectorJob(0, "mean", is_end=False), VectorJob(1, "mean", is_end=True))
    batch = Batch(rows, np.zeros(4, np.int64), None, (), vectors=jobs)
    with pytest.raises(IllegalMove, match="its sum is not there"):
        pool.compute(batch, None, outputs, "float32")
    assert pool.sums == {}


def test_numbers_that_are_not_finite_fail_the_request(cutter: Cutter, llama: Path, monkeypatch: Any) -> None:
    pipeline = cutter.cut(llama, (0, 8))
    stage = pipeline.stages[0]._active_stage()
    monkeypatch.setattr(stage, "program", None)
    hook = stage._base.register_forward_hook(lambda *args: args[-1][0].fill_(float("nan")), prepend=True)
    pipeline.open(1)
    done = run(pipeline, [Row(1, 0, 5, True)], TEXT[:5], {1: "last"})
    hook.remove()
    assert not done.vectors
    assert "not finite" in done.failed[0].reason


# --- classifiers, and models without any head


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    config = named_config(request.param, vocab_size=500, num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    donor = dict(random_model(config).named_parameters())
    chance = torch.Generator().manual_seed(3)  # a score near 0 would have a large relative difference
    for name, parameter in model.named_parameters():
        parameter.data = donor[name].data if name in donor else torch.randn(parameter.shape, generator=chance) * 0.3
    model.eval().save_pretrained(folder)
    return folder


def test_scores_are_transformers_own(cutter: Cutter, classifier: Path) -> None:
    whole = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = whole(torch.tensor([TEXT])).logits[0]
    pipeline = cutter.cut(classifier, (0, 2, 6))
    score = alone(pipeline, TEXT, "scores", 40)
    assert difference(score, expected) < TOLERANCE
    with program.disabled("a test"):
        assert np.array_equal(alone(cutter.cut(classifier, (0, 6)), TEXT, "scores"), score)


def test_a_classifier_s_manifest_states_its_labels(classifier: Path) -> None:
    manifest = Checkpoint(classifier).manifest("float32")
    assert (manifest.is_headless, manifest.num_labels) == (True, 1)


def test_an_encoder_without_any_head_is_served(cutter: Cutter, llama: Path, tmp_path: Path) -> None:
    """As E5 and others are stored: an architecture without a head, whose tensors lack the prefix."""
    AutoModel.from_pretrained(llama, dtype=torch.float32).save_pretrained(tmp_path)
    manifest = Checkpoint(tmp_path).manifest("float32")
    assert (manifest.architecture, manifest.is_headless, manifest.num_labels) == ("LlamaModel", True, 0)
    expected = alone(cutter.cut(llama, (0, 8)), TEXT, "last")
    assert np.array_equal(alone(cutter.cut(tmp_path, (0, 5, 8)), TEXT, "last"), expected)
    cutter.cut(tmp_path, (0, 8)).stages[0].test(nothing)


# --- what the folder states


def write_modules(folder: Path, pooling: dict[str, Any] | None, *more: str) -> None:
    kinds = ["Transformer", *(["Pooling"] if pooling is not None else []), *more]
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": "" if n == 0 else f"{n}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("pooling", "more", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, ("Normalize",), Pooling("mean", True)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, (), Pooling("last", False)),
        ({"pooling_mode": "lasttoken"}, ("Normalize",), Pooling("last", True)),
        ({"pooling_mode_cls_token": True}, (), Pooling("cls", False)),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), Pooling("mean+Dense", False)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, (), Pooling("mean+max", False)),
        (None, (), None),
    ],
)
def test_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, pooling: dict[str, Any] | None, more: tuple[str, ...], expected: Pooling | None
) -> None:
    write_modules(tmp_path, pooling, *more)
    assert read_pooling(tmp_path) == expected


def test_a_folder_without_modules_states_no_pooling(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


@pytest.mark.parametrize(
    "modules", ['{"a": 1}', "[3]", "no json", '[{"path": "../x", "type": "sentence_transformers.models.Pooling"}]']
)
def test_modules_that_are_damaged_are_refused(tmp_path: Path, modules: str) -> None:
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelError, match=r"modules\.json can't be read as a list of modules"):
        read_pooling(tmp_path)


def test_pooling_is_in_the_manifest_and_is_no_reason_to_refuse_a_worker(save: Save) -> None:
    folder = save(llama_config())
    before = Checkpoint(folder).manifest("float32")
    write_modules(folder, {"pooling_mode_mean_tokens": True})
    after = Checkpoint(folder).manifest("float32")
    assert (before.pooling, after.pooling) == (None, Pooling("mean", False))
    assert before.difference(after) is None
