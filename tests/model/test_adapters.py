"""Adapters: rows with unlike ones in one batch, each with the bits that it has alone, and what merged weights give."""

from __future__ import annotations

import json
import math
import re
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from swarm.config.worker import WorkerSettings
from swarm.errors import IllegalMove, ModelError
from swarm.stage import native
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.model import text_models
from swarm.stage.native.adapters import RowAdapters
from swarm.stage.native.linears import NativeLinear
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import AdapterEntry, LayerRange, Row
from tests.model.adapted_stages import ALL, alone, logits, ready
from tests.model.adapters import LLAMA, make_adapter, merged_logits
from tests.model.cutting import MANY, never, nothing, random_tokens
from tests.model.models import llama_config, named_config

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

Save = Callable[..., Path]
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
        assert torch.equal(crowd[sequence], alone(whole, PROMPTS[sequence], name)), name
    assert torch.equal(crowd[2], alone(plain, PROMPTS[2], ""))
    assert not torch.equal(crowd[1], alone(plain, PROMPTS[1], ""))
    cut = [ready(llama, adapters, layers, dtype) for layers in (LayerRange(0, 3), LayerRange(3, 8))]
    for sequence, result in in_crowd(cut, NAMES).items():
        assert torch.equal(result, crowd[sequence])


@pytest.mark.parametrize("sequence", NAMES)
def test_an_adapter_gives_what_merged_weights_give(llama: Path, adapters: dict[str, str], sequence: int) -> None:
    name = NAMES[sequence]
    truth = merged_logits(llama, Path(adapters[name]) if name else None, PROMPTS[sequence])
    ours = alone([ready(llama, adapters)], PROMPTS[sequence], name)
    assert (ours.double() - truth).abs().max() < 1e-4 * truth.abs().max()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_are_adapted_as_they_are(llama: Path, adapters: dict[str, str], weights: str) -> None:
    """The bits of each sequence alone; and with an adapter of nothing, those of no adapter."""
    how = Quantization(weights=weights)
    line = [ready(llama, adapters, quantization=how)]
    crowd = in_crowd(line, NAMES)
    for sequence, name in NAMES.items():
        assert torch.equal(crowd[sequence], alone(line, PROMPTS[sequence], name)), name
    assert torch.equal(crowd[2], alone([ready(llama, {}, quantization=how)], PROMPTS[2], ""))
    assert not torch.equal(crowd[1], alone(line, PROMPTS[1], ""))


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
            assert torch.equal(crowd[3], alone(line, PROMPTS[3], "wide"))
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
    config = named_config("mllama_text_model", cross_attention_layers=[])
    text_models.register(config)
    tower = save(config)
    with pytest.raises(ModelError, match="counts layers for images, which are not loaded"):
        ready(tower, {"a": str(make_adapter(tmp_path / "images", tower, seed=1))})


def check_refused(model: Path, folder: str, message: str) -> None:
    """At the start and at run time."""
    with pytest.raises(ModelError, match=message):
        ready(model, {"a": folder}, LayerRange(0, 6))
    executor = ready(model, {}, LayerRange(0, 6))
    with pytest.raises(ModelError, match=message):
        executor.load_adapters((AdapterEntry("red", folder),))


@pytest.mark.parametrize(("kind", "target"), [("gpt_neox", "query_key_value"), ("deepseek_v3", "kv_b_proj")])
def test_an_adapter_of_a_module_that_can_t_be_adapted_is_refused(
    save: Save, tmp_path: Path, kind: str, target: str
) -> None:
    """At the start and at run time: a product whose outputs are mixed, and one that is divided among the heads of
    latents. The layers stay as they are."""
    model = save(named_config(kind))
    folder = str(make_adapter(tmp_path / "a", model, seed=1, targets=(target,)))
    message = rf"changes \w+\.layers\.0\.\w+\.{target}, which can't be adapted in this kind of model"
    check_refused(model, folder, message)


@pytest.mark.parametrize(("kind", "target"), [("mixtral", "w2"), ("qwen3_moe", "down_proj")])
def test_an_adapter_of_experts_is_refused_as_such(
    llama: Path, save: Save, tmp_path: Path, kind: str, target: str
) -> None:
    """At the start and at run time; a model without experts lacks them."""
    model = save(named_config(kind))
    folder = str(make_adapter(tmp_path / "a", model, seed=1, targets=(target,)))
    message = rf"changes model\.layers\.0\.\w+\.experts\.0\.{target}, and experts can't be adapted; serve the merged"
    check_refused(model, folder, message)
    with pytest.raises(ModelError, match=rf"experts\.0\.{target}, which the model does not have"):
        ready(llama, {"a": folder})


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


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", math.nan),
        ("float32", math.inf),
        ("float16", -math.inf),
        ("bfloat16", math.nan),
        ("float64", math.inf),
        ("float64", 1e300),
    ],
)
def test_weights_that_are_not_finite_are_refused(llama: Path, tmp_path: Path, dtype: str, value: float) -> None:
    """At the start and at run time: rows that name the adapter would have no results. Of float64, also what is infinite
    in float32; the largest number is served."""
    folder = make_adapter(tmp_path / "a", llama, seed=1)
    path = folder / "adapter_model.safetensors"
    kind = getattr(torch, dtype)
    tensors = {name: tensor.to(kind) for name, tensor in load_file(path).items()}
    broken = next(name for name in reversed(tensors) if ".lora_B." in name)
    tensors[broken][1, 2] = min(torch.finfo(kind).max, torch.finfo(torch.float32).max)
    save_file(tensors, path)
    executor = ready(llama, {})
    entry = AdapterEntry("red", str(folder))
    executor.drop_adapters((executor.load_adapters((entry,))[0].key,))
    tensors[broken][1, 2] = value
    save_file(tensors, path)
    message = (
        rf"a/adapter_model\.safetensors has NaN or infinite values in {re.escape(broken)}; load another checkpoint"
    )
    with pytest.raises(ModelError, match=message):
        executor.load_adapters((entry,))
    with pytest.raises(ModelError, match=message):
        TorchExecutor(str(llama), dtype="float32", memory_limit=MANY, adapters={"red": str(folder)})


def test_a_bad_name_or_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    for text in ("a b=x", "a", "a=", "=x"):
        with pytest.raises(ValidationError, match="is not NAME=DIR, where NAME has letters"):
            WorkerSettings(adapters=(text,))
    with pytest.raises(ValidationError, match="two adapters are called a, and requests select one by its name"):
        WorkerSettings(adapters=("a=x", "b=x", "a=y"))
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing; an adapter is a folder in peft's format"):
        TorchExecutor(str(llama), adapters={"a": str(tmp_path)})
    for source in (f"{tmp_path}/none", "none", "owner/name:Q4_K_M"):
        with pytest.raises(ModelError, match=f"there is no directory {source}; an adapter is a folder in peft"):
            TorchExecutor(str(llama), adapters={"a": source})
    with pytest.raises(ModelError, match=f"an adapter is called {llama.name}, as the model is, so that no request"):
        TorchExecutor(str(llama), adapters={llama.name: str(tmp_path)})


def test_adapters_are_loaded_and_dropped_while_layers_are_in_use(llama: Path, adapters: dict[str, str]) -> None:
    """With the bits of one that was there from the start; by keys, since another content may have the name later."""
    early = alone([ready(llama, adapters)], PROMPTS[1], "tall")
    executor = ready(llama, {})
    without = alone([executor], PROMPTS[1], "")
    for name in ("tall", "wide", "tall"):
        (entry,) = executor.load_adapters((AdapterEntry("red", adapters[name]),))
        assert entry.key == f"red@{entry.digest[:16]}"
        result = alone([executor], PROMPTS[1], entry.key)
        assert torch.equal(result, early) is (name == "tall")
        assert not torch.equal(result, without)
        assert torch.equal(alone([executor], PROMPTS[1], ""), without)
        executor.drop_adapters((entry.key,))
        batch = Batch((Row(2, 0, 1, False),), np.array([5]), None, (), adapters=(entry.key,))
        with pytest.raises(IllegalMove, match="there is no adapter 'red@"):
            executor.forward(batch, never, nothing)
    (entry,) = executor.load_adapters((AdapterEntry("red", adapters["tall"]),))
    executor.prepare(LayerRange(2, 7), (), 8, nothing)  # these have it; and layers that are loaded from now on
    executor.activate(LayerRange(2, 7))
    executor.prepare(ALL, (), 8, nothing)
    executor.activate(ALL)
    assert torch.equal(alone([executor], PROMPTS[1], entry.key), early)


def test_an_adapter_whose_files_changed_is_not_mixed_with_its_former_self(
    llama: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    """Layers that are loaded later refuse the new weights, of adapters from the start, too."""
    folder = tmp_path / "red"
    shutil.copytree(adapters["tall"], folder)
    late, early = ready(llama, {}, LayerRange(0, 2)), ready(llama, {"red": str(folder)}, LayerRange(0, 2))
    late.load_adapters((AdapterEntry("red", str(folder)),))
    make_adapter(folder, llama, seed=5, r=19, lora_alpha=19)
    for executor in (late, early):
        with pytest.raises(
            ModelError, match=r"red \(\S+red\) has other weights for .* now than when it was loaded: put"
        ):
            executor.prepare(LayerRange(2, 4), (), 8, nothing)
    shutil.copytree(adapters["tall"], folder, dirs_exist_ok=True)
    for executor in (late, early):
        executor.prepare(LayerRange(2, 4), (), 8, nothing)


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


def test_an_adapter_in_use_stays_as_it_is_when_it_is_loaded_again(
    llama: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    """A step that is under way has the addresses of its parts; a load that fails takes nothing away either."""
    executor = ready(llama, {})
    entry = AdapterEntry("red", adapters["tall"])
    (found,) = executor.load_adapters((entry,))
    before = alone([executor], PROMPTS[1], found.key)
    parts = [part for linear in products(executor) for part in linear.adapters.values()]
    assert executor.load_adapters((entry,)) == (found,)
    other = make_adapter(tmp_path / "a", llama, seed=1)
    memory, executor.memory_bytes = executor.memory_bytes, executor.weight_bytes
    with pytest.raises(ModelError, match="drop another adapter"):
        executor.load_adapters((entry, AdapterEntry("blue", str(other))))
    executor.memory_bytes = memory
    assert parts
    after = [part for linear in products(executor) for part in linear.adapters.values()]
    assert all(a is b for a, b in zip(parts, after, strict=True))
    assert torch.equal(alone([executor], PROMPTS[1], found.key), before)


def test_a_step_keeps_the_parts_of_its_adapters_alive(llama: Path, adapters: dict[str, str]) -> None:
    executor = ready(llama, {})
    (found,) = executor.load_adapters((AdapterEntry("red", adapters["tall"]),))
    (linear, *_) = products(executor)
    part = weakref.ref(linear.adapters[found.key])
    rows = linear._adapted(RowAdapters((found.key,), np.zeros(1, np.int32)), 1)
    executor.drop_adapters((found.key,))
    assert part() is not None
    del rows
    assert part() is None


def test_layers_that_are_loading_lack_what_is_dropped_meanwhile(llama: Path, adapters: dict[str, str]) -> None:
    """A plan's layers, and standby layers: they began to load with the adapter."""
    executor = ready(llama, {}, LayerRange(0, 2))
    for load in (
        lambda progress: executor.prepare(LayerRange(2, 5), (), 8, progress),
        lambda progress: executor.keep((LayerRange(5, 6),), progress, lambda _: False),
    ):
        (found,) = executor.load_adapters((AdapterEntry("red", adapters["tall"]),))
        num_calls = 0

        def drop_at_once(*_: object, key: str = found.key) -> None:
            nonlocal num_calls
            num_calls += 1
            executor.drop_adapters((key,))

        load(drop_at_once)
        assert num_calls
        modules = [module for _, module in executor._layers._all_modules()]
        linears = [each for module in modules for each in module.modules() if isinstance(each, NativeLinear)]
        assert linears
        assert not any(each.adapters for each in linears)


def products(executor: TorchExecutor) -> list[NativeLinear]:
    modules = executor._active_stage().modules.values()
    return [each for module in modules for each in module.modules() if isinstance(each, NativeLinear)]


def test_a_name_on_a_hub_is_found_in_its_cache(
    llama: Path, adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request; a name that is not there is refused in one line. What is loaded at run time has the commit."""
    commit = "c" * 40
    cached = tmp_path / "models--me--red"
    shutil.copytree(adapters["tall"], cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    by_name, by_folder = (ready(llama, {"red": source}).manifest for source in ("me/red", adapters["tall"]))
    assert by_name.adapters == by_folder.adapters
    executor = ready(llama, {})
    (found,) = executor.load_adapters((AdapterEntry("red", "me/red"),))
    assert found.source == f"me/red@{commit}"
    shutil.copytree(adapters["wide"], cached / "snapshots" / ("d" * 40))
    (cached / "refs" / "main").write_text("d" * 40)  # the branch has moved on
    assert ready(llama, {}).load_adapters((found,)) == (found,)
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
