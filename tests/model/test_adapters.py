"""Adapters: rows with unlike ones in one batch, each with the bits that it has alone, and what merged weights give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from pydantic import ValidationError
from safetensors.torch import save_file

from swarm.config.worker import WorkerSettings
from swarm.errors import IllegalMove, ModelError
from swarm.stage import native
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import AdapterEntry, LayerRange, Row
from tests.model.adapters import LLAMA, make_adapter, merged_logits
from tests.model.cutting import MANY, never, nothing, random_tokens
from tests.model.models import llama_config, named_config

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

Save = Callable[..., Path]
Part = tuple[int, int, Sequence[int], str]  # sequence, start, tokens, adapter
ALL = LayerRange(0, 8)
SIDES = {"A": (4, 16), "B": (16, 4)}
PROMPTS = {number: random_tokens(30 + 7 * number, seed=number) for number in range(1, 6)}
# Sequences by adapter: two share one, and one has none.
NAMES = {1: "tall", 2: "", 3: "wide", 4: "tall", 5: "one"}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All modules; one module of some layers; unlike ranks and scales."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        "tall": make_adapter(folder / "tall", llama, seed=1, r=19, lora_alpha=19),
        "wide": make_adapter(
            folder / "wide", llama, seed=2, r=3, rank_pattern={"v_proj": 7}, alpha_pattern={"up_proj": 1.5}
        ),
        "one": make_adapter(folder / "one", llama, seed=3, targets=("v_proj",), layers=(1, 5), use_rslora=True),
    }
    return {name: str(path) for name, path in made.items()}


def ready(
    model: Path,
    adapters: Mapping[str, str],
    layers: LayerRange = ALL,
    dtype: str = "float32",
    quantization: Quantization = AS_STORED,
) -> TorchExecutor:
    executor = TorchExecutor(str(model), dtype=dtype, memory_limit=MANY, adapters=adapters, quantization=quantization)
    executor.prepare(layers, (), 8, nothing)
    executor.activate(layers)
    return executor


def logits(line: Sequence[TorchExecutor], *parts: Part) -> list[torch.Tensor]:
    """Logits after every token of the parts, each through a line of stages."""
    rows = tuple(Row(sequence, start, len(tokens), False) for sequence, start, tokens, _ in parts)
    tokens = np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens, _ in parts])
    names = tuple(name for *_, name in parts)
    hidden = None
    for stage in line[:-1]:
        hidden = stage.forward(Batch(rows, tokens, hidden, (), adapters=names), never, nothing).hidden
    result = line[-1].logits(Batch(rows, tokens, hidden, (), adapters=names))
    return list(torch.split(result, [row.count for row in rows]))


def alone(line: Sequence[TorchExecutor], sequence: int, adapter: str) -> torch.Tensor:
    for stage in line:
        stage.open(sequence, 128)
    (result,) = logits(line, (sequence, 0, PROMPTS[sequence], adapter))
    for stage in line:
        stage.release(sequence)
    return result


def in_crowd(line: Sequence[TorchExecutor], names: Mapping[int, str]) -> dict[int, torch.Tensor]:
    """All sequences in common batches: a part of each prompt, then the rest token by token."""
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in names}
    for stage in line:
        for sequence in names:
            stage.open(sequence, 128)
    parts = [(sequence, 0, PROMPTS[sequence][: 5 * sequence + 12], names[sequence]) for sequence in names]
    while parts:
        for (sequence, *_), result in zip(parts, logits(line, *parts), strict=True):
            found[sequence].append(result)
        reached = {sequence: sum(map(len, results)) for sequence, results in found.items()}
        parts = [
            (sequence, at, PROMPTS[sequence][at : at + 1], names[sequence])
            for sequence, at in reached.items()
            if at < len(PROMPTS[sequence])
        ]
    for stage in line:
        stage.reset()
    return {sequence: torch.cat(results) for sequence, results in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unlike_adapters_in_one_batch_have_each_one_s_bits(llama: Path, adapters: dict[str, str], dtype: str) -> None:
    """Among others, in chunks, cut in two, and without any adapter loaded where a sequence has none."""
    whole = [ready(llama, adapters, dtype=dtype)]
    crowd = in_crowd(whole, NAMES)
    plain = [ready(llama, {}, dtype=dtype)]
    for sequence, name in NAMES.items():
        assert torch.equal(crowd[sequence], alone(whole, sequence, name)), name
    assert torch.equal(crowd[2], alone(plain, 2, ""))
    assert not torch.equal(crowd[1], alone(plain, 1, ""))
    cut = [ready(llama, adapters, layers, dtype) for layers in (LayerRange(0, 3), LayerRange(3, 8))]
    for sequence, result in in_crowd(cut, NAMES).items():
        assert torch.equal(result, crowd[sequence])


@pytest.mark.parametrize("sequence", NAMES)
def test_an_adapter_gives_what_merged_weights_give(llama: Path, adapters: dict[str, str], sequence: int) -> None:
    name = NAMES[sequence]
    truth = merged_logits(llama, Path(adapters[name]) if name else None, PROMPTS[sequence])
    ours = alone([ready(llama, adapters)], sequence, name)
    assert (ours.double() - truth).abs().max() < 1e-4 * truth.abs().max()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_are_adapted_as_they_are(llama: Path, adapters: dict[str, str], weights: str) -> None:
    """The bits of each sequence alone; and with an adapter of nothing, those of no adapter."""
    how = Quantization(weights=weights)
    line = [ready(llama, adapters, quantization=how)]
    crowd = in_crowd(line, NAMES)
    for sequence, name in NAMES.items():
        assert torch.equal(crowd[sequence], alone(line, sequence, name)), name
    assert torch.equal(crowd[2], alone([ready(llama, {}, quantization=how)], 2, ""))
    assert not torch.equal(crowd[1], alone(line, 1, ""))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "mistral"])
def test_families_are_adapted(save: Save, tmp_path: Path, kind: str) -> None:
    """By programs and by modules the same bits, and what merged weights give."""
    model = save(named_config(kind))
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if kind == "phi3" else LLAMA
    adapter = make_adapter(tmp_path / "a", model, seed=4, targets=targets, r=5)
    executor = ready(model, {"a": str(adapter)}, LayerRange(0, 6))
    tokens = random_tokens(50, seed=9, vocabulary=250)
    truth = merged_logits(model, adapter, tokens)
    executor.open(1, 64)
    (ours,) = logits([executor], (1, 0, tokens, "a"))
    assert (ours.double() - truth).abs().max() < 1e-3 * truth.abs().max()
    batch = Batch((Row(2, 0, 50, False),), np.asarray(tokens, np.int64), None, (), adapters=("a",))
    executor.open(2, 64)
    executor._arena.mark_used(batch.rows[0])
    stage = executor._active_stage()
    by_modules = run_batch(stage, executor._arena, batch, head_rows=range(50), by_modules=True)
    assert by_modules is not None
    assert torch.equal(by_modules, ours)


def test_every_variant_of_the_kernels_adapts(llama: Path, adapters: dict[str, str]) -> None:
    """Near one another's numbers, and exact by itself."""
    library = native.library()
    assert library is not None
    found = []
    for variant in native.variants(library):
        with native.using_variant(variant):
            line = [ready(llama, adapters)]
            crowd = in_crowd(line, {1: "tall", 3: "wide"})
            assert torch.equal(crowd[3], alone(line, 3, "wide"))
            found.append(crowd[1])
    for result in found[1:]:
        assert (result - found[0]).abs().max() < 1e-3 * found[0].abs().max()


def test_adapters_are_part_of_the_model_s_identity_and_memory(llama: Path, adapters: dict[str, str]) -> None:
    plain, adapted = ready(llama, {}).manifest, ready(llama, adapters).manifest
    assert [each.name for each in adapted.adapters] == ["one", "tall", "wide"]
    inputs, outputs = 64, 8 * 2
    more = [a - b for a, b in zip(adapted.layer_bytes, plain.layer_bytes, strict=True)]
    assert more[1] - more[0] == 4 * 4 * (inputs + outputs)  # "one" adapts layers 1 and 5
    other = ready(llama, {**adapters, "one": adapters["wide"]}).manifest
    assert adapted.difference(other) == "adapters: one differ in size or content"
    assert plain.difference(adapted) == "adapters: one, tall, wide differ in size or content"


def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_loaded(
    llama: Path, save: Save, tmp_path: Path
) -> None:
    other = save(llama_config(hidden_size=96, num_attention_heads=6))
    with pytest.raises(
        ModelError, match=r"another model: its \S+ has 176 inputs and 96 outputs, the model's 176 and 64"
    ):
        ready(llama, {"a": str(make_adapter(tmp_path / "size", other, seed=1))})
    deeper = save(llama_config(num_hidden_layers=9))
    with pytest.raises(ModelError, match=r"changes model\.layers\.8\..*, which the model does not have"):
        ready(llama, {"a": str(make_adapter(tmp_path / "depth", deeper, seed=1))})


def test_an_adapter_of_a_module_that_can_t_be_adapted_is_refused(save: Save, tmp_path: Path) -> None:
    model = save(named_config("gpt_neox"))
    adapter = make_adapter(tmp_path / "a", model, seed=1, targets=("query_key_value",))
    with pytest.raises(ModelError, match=r"query_key_value, which can't be adapted in this kind of model"):
        ready(model, {"a": str(adapter)}, LayerRange(0, 6))


def test_an_adapter_that_is_not_loaded_is_never_left_out(llama: Path, adapters: dict[str, str]) -> None:
    executor = ready(llama, adapters)
    executor.open(1, 64)
    batch = Batch((Row(1, 0, 1, False),), np.array([5]), None, (), adapters=("green",))
    with pytest.raises(IllegalMove, match="there is no adapter 'green'"):
        executor.forward(batch, never, nothing)


def test_without_our_kernels_adapters_are_refused(llama: Path, adapters: dict[str, str]) -> None:
    with native.disabled("a test"), pytest.raises(ModelError, match=r"adapters need Swarm's kernels.*a test"):
        ready(llama, adapters)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peft_type": "IA3"}, "is an adapter of type IA3; only LORA is served"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trained embeddings"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"rank_pattern": {"q_proj": 3}, "r": 2}, ""),
    ],
)
def test_what_is_no_plain_lora_is_refused(
    llama: Path, tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    adapter = make_adapter(tmp_path / "a", llama, seed=1, **settings)
    if not problem:
        ready(llama, {"a": str(adapter)})
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": {}}))
        problem = "gives model.layers.0.self_attn.q_proj rank 2, adapter_model.safetensors has 3"
    with pytest.raises(ModelError, match=problem):
        TorchExecutor(str(llama), dtype="float32", memory_limit=MANY, adapters={"a": str(adapter)})


def test_a_bad_name_or_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    for text in ("a b=x", "a", "a=", "=x"):
        with pytest.raises(ValidationError, match="is not NAME=DIR, where NAME has letters"):
            WorkerSettings(adapters=(text,))
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing; an adapter is a folder in peft's format"):
        TorchExecutor(str(llama), adapters={"a": str(tmp_path)})


def test_adapters_are_loaded_and_dropped_while_layers_are_in_use(llama: Path, adapters: dict[str, str]) -> None:
    """With the bits of one that was there from the start; by keys, since another content may have the name later."""
    early = alone([ready(llama, adapters)], 1, "tall")
    executor = ready(llama, {})
    without = alone([executor], 1, "")
    for name in ("tall", "wide", "tall"):
        (entry,) = executor.load_adapters((AdapterEntry("red", adapters[name]),))
        assert entry.key == f"red@{entry.digest[:16]}"
        result = alone([executor], 1, entry.key)
        assert torch.equal(result, early) is (name == "tall")
        assert not torch.equal(result, without)
        assert torch.equal(alone([executor], 1, ""), without)
        executor.drop_adapters((entry.key,))
        batch = Batch((Row(2, 0, 1, False),), np.array([5]), None, (), adapters=(entry.key,))
        with pytest.raises(IllegalMove, match="there is no adapter 'red@"):
            executor.forward(batch, never, nothing)
    (entry,) = executor.load_adapters((AdapterEntry("red", adapters["tall"]),))
    executor.prepare(LayerRange(2, 7), (), 8, nothing)  # these have it; and layers that are loaded from now on
    executor.activate(LayerRange(2, 7))
    executor.prepare(ALL, (), 8, nothing)
    executor.activate(ALL)
    assert torch.equal(alone([executor], 1, entry.key), early)


def test_a_load_that_fails_leaves_nothing(llama: Path, adapters: dict[str, str], save: Save, tmp_path: Path) -> None:
    executor = ready(llama, {})
    capacity, before = executor.kv_capacity(), executor.weight_bytes
    entry = AdapterEntry("red", adapters["tall"])
    with pytest.raises(ModelError, match="has other files here than the adapter red of the swarm"):
        executor.load_adapters((AdapterEntry("red", adapters["tall"], "0" * 32),))
    other = make_adapter(tmp_path / "a", save(llama_config(num_hidden_layers=9)), seed=1)
    with pytest.raises(ModelError, match="which the model does not have"):
        executor.load_adapters((entry, AdapterEntry("blue", str(other))))
    executor.memory_bytes = before
    with pytest.raises(ModelError, match=r"lacks \S+ MiB beside its layers, keys and values; drop another adapter"):
        executor.load_adapters((entry,))
    assert executor.weight_bytes == before
    executor.memory_bytes = MANY
    (found,) = executor.load_adapters((entry,))
    assert executor.weight_bytes == before + sum(found.layer_bytes)
    assert executor.kv_capacity() == capacity  # the plan's promise holds


def test_a_name_on_a_hub_is_found_in_its_cache(
    llama: Path, adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request; a name that is not there is refused in one line."""
    commit = "c" * 40
    cached = tmp_path / "models--me--red"
    shutil.copytree(adapters["tall"], cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    by_name, by_folder = (ready(llama, {"red": source}).manifest for source in ("me/red", adapters["tall"]))
    assert by_name.adapters == by_folder.adapters
    with pytest.raises(ModelError, match=r"there is no directory or file me/blue, the cache .* forbids to ask the hub"):
        ready(llama, {"blue": "me/blue"})


def test_adapters_of_experts_are_refused_by_name(save: Save, tmp_path: Path) -> None:
    """Experts are one tensor, for which peft has another kind of adapter; attention beside them is adapted."""
    model = save(named_config("qwen3_moe"))
    folder = make_adapter(tmp_path / "a", model, seed=1, targets=("q_proj", "o_proj"))
    ready(model, {"a": str(folder)}, LayerRange(0, 6))
    expert = "model.layers.1.mlp.experts.0.gate_proj"
    save_file(
        {f"base_model.model.{expert}.lora_{side}.weight": torch.zeros(shape) for side, shape in SIDES.items()},
        folder / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=rf"changes {expert}"):
        ready(model, {"a": str(folder)}, LayerRange(0, 6))
