"""The executor's contract: plans, sequences, the fence, and what goes wrong."""

from __future__ import annotations

import json
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.broker.planner.problem import ModelSizes
from swarm.errors import DeviceError, IllegalMove, KvFull, ModelError
from swarm.params import SamplingParams
from swarm.stage.attention.grid import GRID
from swarm.stage.engine import dry_runs, forward, measure
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, FenceRaised, SampleJob
from swarm.stage.model import program
from swarm.stage.native import shared_cache
from swarm.stage.shell.pieces import forward_in_pieces
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import MANY, never, nothing, random_tokens, ready
from tests.model.models import llama_config

TOKENS = random_tokens(60, seed=21)
KINDS_OF_COST = ("prefill", "decode", "stage", "head", "embed")


def step(executor: TorchExecutor, start: int, count: int, sequence: int = 1, hidden: Any = None) -> Any:
    tokens = np.asarray(TOKENS[start : start + count], np.int64)
    return executor.forward(Batch((Row(sequence, start, count, False),), tokens, hidden, ()), never, nothing)


def prepared(executor: TorchExecutor, first: int, stop: int, *standby: LayerRange) -> None:
    executor.prepare(LayerRange(first, stop), standby, 8, nothing)
    executor.activate(LayerRange(first, stop))


def test_layers_that_stay_keep_their_kv(llama: Path) -> None:
    """Over a change of plan, layers that stay keep keys and values; what they compute next has the same bits."""
    reference, moved = ready(llama, LayerRange(0, 4)), ready(llama, LayerRange(0, 6))
    for executor in (reference, moved):
        executor.open(1, 64)
        step(executor, 0, 40)
    prepared(moved, 0, 4)
    assert np.array_equal(step(moved, 40, 5).hidden, step(reference, 40, 5).hidden)
    region = moved._arena.region(1, 5)
    assert region is None  # and the others' is gone


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)])
def test_a_device_is_tested_with_the_layers_in_use(
    llama: Path, monkeypatch: pytest.MonkeyPatch, layers: LayerRange
) -> None:
    """Whether the stage embeds, has the head, or neither: a sound one passes, and what it holds stays; one that
    computes another number now and then, or none, fails."""
    executor = ready(llama, layers)
    seen: list[None] = []
    executor.test(lambda: seen.append(None))
    assert len(seen) == 3 * len(layers)
    assert len(executor._arena) == 0
    sound = dry_runs.run_batch
    for number, (wrong, says) in enumerate([(1.0, "twice and came to different"), (float("nan"), "not finite")]):
        calls: list[None] = []

        def broken(*args: Any, wrong: float = wrong, calls: list[None] = calls, **more: Any) -> Any:
            calls.append(None)
            result = sound(*args, **more)
            if len(calls) == 1:
                result = result + wrong
            return result

        monkeypatch.setattr(dry_runs, "run_batch", broken)
        with pytest.raises(DeviceError, match=says):
            executor.test(nothing)
        assert calls, number


def test_without_layers_there_is_nothing_to_test(llama: Path) -> None:
    TorchExecutor(str(llama)).test(nothing)


def test_pieces_have_the_bits_of_the_whole(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in pieces, after an attempt that failed half-way: the same hidden states as in one."""
    monkeypatch.setattr(program, "CALL_S", 0.0)  # a layer a call, so that it can fail between two
    whole, pieces = ready(llama, LayerRange(0, 3)), ready(llama, LayerRange(0, 3))
    tokens = np.asarray(TOKENS[:50], np.int64)
    batch = Batch((Row(1, 0, 45, False), Row(2, 0, 5, False)), tokens, None, ())
    for executor in (whole, pieces):
        executor.open(1, 64)
        executor.open(2, 64)
    with pytest.raises(FenceRaised):
        pieces.forward(batch, iter([False, True]).__next__, nothing)
    found = forward_in_pieces(pieces, batch, never, nothing)
    assert found.hidden is not None
    assert np.array_equal(found.hidden, whole.forward(batch, never, nothing).hidden)


def test_what_can_be_spared_is_dropped(llama: Path) -> None:
    executor = ready(llama, LayerRange(0, 2))
    executor.keep((LayerRange(3, 5),), nothing, lambda _: False)
    executor.drop_spare()
    assert executor.standby_bytes == 0
    executor.open(1, 64)
    step(executor, 0, 4)


def test_new_layers_catch_up(llama: Path) -> None:
    """A layer just taken over starts with nothing; after the same positions went through it, all is as if it had
    always been there."""
    reference, grown = ready(llama, LayerRange(0, 5)), ready(llama, LayerRange(0, 4))
    for executor in (reference, grown):
        executor.open(1, 64)
        step(executor, 0, 40)
    prepared(grown, 0, 5)
    step(grown, 0, 25)
    step(grown, 25, 15)
    assert np.array_equal(step(grown, 40, 5).hidden, step(reference, 40, 5).hidden)


def test_nothing_is_loaded_twice(llama: Path) -> None:
    """Layers that are held already, in use or on standby, are not read again."""
    executor = ready(llama, LayerRange(2, 5))
    first = executor.stats()["loaded_bytes"]
    prepared(executor, 2, 6, LayerRange(6, 7))
    layer = executor.manifest.layer_bytes[0]
    assert executor.stats()["loaded_bytes"] - first == layer
    assert executor.keep((LayerRange(6, 7),), nothing, lambda _: False) == (LayerRange(6, 7),)
    assert executor.stats()["loaded_bytes"] - first == 2 * layer
    assert executor.weight_bytes == 5 * layer
    prepared(executor, 3, 7)
    assert executor.stats()["loaded_bytes"] - first == 2 * layer
    assert executor.weight_bytes == 4 * layer


def test_each_new_layer_is_warmed_up_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is reported as loaded, with steps of several sizes, whether it is to serve or kept for others; what is
    warm already costs nothing more."""
    warmed: list[tuple[LayerRange, int]] = []

    def recorded(stage: Any, arena: Any, batch: Batch, **rest: Any) -> Any:
        if not rest.get("by_modules"):  # the same step once more, for comparison
            warmed.append((stage.layers, len(batch.tokens)))
        return forward.run_batch(stage, arena, batch, **rest)

    monkeypatch.setattr(dry_runs, "run_batch", recorded)

    def new() -> set[tuple[LayerRange, int]]:
        assert len(warmed) == len(set(warmed))
        found = set(warmed)
        warmed.clear()
        return found

    executor = TorchExecutor(str(llama))
    assert executor.prepare(LayerRange(0, 3), (), 8, nothing).warm_up_s > 0.0
    assert new() == _passes(LayerRange(0, 3))
    executor.activate(LayerRange(0, 3))
    executor.keep((LayerRange(3, 5),), nothing, lambda _: False)
    assert new() == _passes(LayerRange(3, 4)) | _passes(LayerRange(4, 5))
    executor.prepare(LayerRange(0, 5), (), 8, nothing)
    assert new() == set()
    executor.activate(LayerRange(0, 5))
    executor.prepare(LayerRange(2, 6), (), 8, nothing)
    assert new() == _passes(LayerRange(5, 6))


def _passes(layers: LayerRange) -> set[tuple[LayerRange, int]]:
    """As a step of one sequence that decodes, of a short prompt and of a long one."""
    return {(layers, num) for num in (1, 32, 128)}


def test_layers_kept_for_others(llama: Path) -> None:
    """They are loaded beside those in use and change nothing there; a plan that needs them finds them warm, and
    computes with the bits of layers read at once. What is kept no longer is forgotten; what was in use can be kept."""
    executor, whole = ready(llama, LayerRange(2, 4)), ready(llama, LayerRange(2, 6))
    capacity = executor.kv_capacity()
    executor.prepare(LayerRange(2, 4), (LayerRange(4, 6),), 8, nothing)
    executor.activate(LayerRange(2, 4))
    assert executor.kv_capacity() <= capacity
    assert executor.keep((LayerRange(4, 6), LayerRange(0, 1)), nothing, lambda _: False) == (
        LayerRange(0, 1),
        LayerRange(4, 6),
    )
    loaded = executor.stats()["loaded_bytes"]
    assert executor.prepare(LayerRange(2, 6), (LayerRange(0, 1),), 8, nothing).warm_up_s == 0.0
    assert executor.stats()["loaded_bytes"] == loaded
    executor.activate(LayerRange(2, 6), (LayerRange(0, 1),))
    for each in (executor, whole):
        each.open(1, 64)
    hidden = np.random.default_rng(7).standard_normal((40, executor.manifest.hidden_size)).astype(np.float32)
    assert np.array_equal(step(executor, 0, 40, hidden=hidden).hidden, step(whole, 0, 40, hidden=hidden).hidden)
    executor.prepare(LayerRange(0, 4), (LayerRange(4, 6),), 8, nothing)
    assert executor.stats()["loaded_bytes"] == loaded + executor.manifest.layer_bytes[1]
    executor.activate(LayerRange(0, 4), (LayerRange(4, 6),))
    assert executor.keep((), nothing, lambda _: False) == ()
    with pytest.raises(IllegalMove, match="was not loaded"):
        prepared_with(executor, LayerRange(0, 4), (LayerRange(4, 6),))


def test_a_takeover_computes_no_rotary_table_again(llama: Path) -> None:
    """All stages of a worker share them: the tables of a new stage, or of a part of it for a replay, would take longer
    than the first step itself."""
    executor = ready(llama, LayerRange(0, 3))
    executor.keep((LayerRange(3, 5),), nothing, lambda _: False)
    executor.open(1, 64)
    hidden = step(executor, 0, 40).hidden
    misses = executor.stats()["rope_misses"]
    executor.prepare(LayerRange(0, 5), (), 8, nothing)
    executor.activate(LayerRange(0, 5))
    replay = Batch((Row(1, 0, 40, False),), np.asarray(TOKENS[:40], np.int64), hidden, (), through=LayerRange(3, 5))
    executor.forward(replay, never, nothing)
    step(executor, 40, 1)
    assert executor.stats()["rope_misses"] == misses


def test_keeping_stops_for_what_is_waited_for(llama: Path) -> None:
    """Between two layers, with what is there."""
    executor = ready(llama, LayerRange(0, 2))
    answers = iter((False, False, True))
    assert executor.keep((LayerRange(2, 8),), nothing, lambda _: next(answers)) == (LayerRange(2, 4),)
    with pytest.raises(ModelError, match="layers"):
        executor.keep((LayerRange(2, 9),), nothing, lambda _: False)


def prepared_with(executor: TorchExecutor, layers: LayerRange, kept: tuple[LayerRange, ...]) -> None:
    executor.prepare(layers, kept, 8, nothing)
    executor.activate(layers, kept)


def test_prepare_beside_computing(llama: Path) -> None:
    """While a loader thread prepares other layers, the compute thread's results keep their bits."""
    executor, reference = ready(llama, LayerRange(0, 4)), ready(llama, LayerRange(0, 4))
    for each in (executor, reference):
        each.open(1, 64)
    expected = [step(reference, position, 1).hidden for position in range(60)]
    problems: list[BaseException] = []

    def load() -> None:
        try:
            for stop in (8, 5, 8):
                executor.prepare(LayerRange(1, stop), (), 8, nothing)
        except ModelError as error:
            problems.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    actual = [step(executor, position, 1).hidden for position in range(60)]
    loader.join(30)
    assert not loader.is_alive()
    assert not problems
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def test_progress(llama: Path) -> None:
    """Loading reports bytes that grow to the announced total."""
    executor = TorchExecutor(str(llama), dtype="float32", memory_limit=MANY)
    seen: list[tuple[int, int]] = []
    executor.prepare(LayerRange(0, 3), (), 8, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(executor.manifest.layer_bytes[:3]) + executor.manifest.embed_bytes
    assert len(seen) > 20


@pytest.mark.parametrize("by", ["program", "modules"])
def test_fence_between_layers(llama: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raised fence stops a step at the next layer; the positions can be computed again, with the same bits."""
    monkeypatch.setattr(program, "CALL_S", 0.0)  # a layer a call: these take microseconds
    monkeypatch.setattr(program, "_refusals", ["to try"] if by == "modules" else [])
    executor, reference = ready(llama, LayerRange(0, 4)), ready(llama, LayerRange(0, 4))
    for each in (executor, reference):
        each.open(1, 64)
        step(each, 0, 10)
    asked, done = iter([False, False, True]), []
    batch = Batch((Row(1, 10, 3, False),), np.asarray([9, 9, 9], np.int64), None, ())
    with pytest.raises(FenceRaised):
        executor.forward(batch, lambda: next(asked), lambda: done.append(1))
    assert len(done) == 2
    assert np.array_equal(step(executor, 10, 5).hidden, step(reference, 10, 5).hidden)
    assert executor.stats()["fenced"] == 1


def test_kv_is_counted_in_blocks(llama: Path) -> None:
    """What is written counts, in blocks of 32 positions, and comes back; opening again drops what was there."""
    executor = ready(llama, LayerRange(0, 2))
    executor.open(1, 100)
    executor.open(2, 100)
    assert executor.kv_used() == 0
    step(executor, 0, 1, 1)
    step(executor, 0, 33, 2)
    assert executor.kv_used() == 32 + 64
    step(executor, 33, 20, 2)
    assert executor.kv_used() == 32 + 64
    executor.fork(3, 2, 32, 100)
    assert executor.kv_used() == 32 + 64 + 32
    executor.shrink(2, 32)
    assert executor.kv_used() == 32 + 32 + 32
    executor.open(2, 32)
    assert executor.kv_used() == 32 + 32
    executor.release(3)
    executor.release(3)
    executor.truncate(99, 0)
    assert executor.kv_used() == 32
    executor.truncate(1, 0)
    assert executor.kv_used() == 0
    executor.reset()
    assert executor.kv_used() == 0
    assert executor.kv_capacity() % 32 == 0
    per_token = sum(executor.manifest.kv_bytes_per_token[:2])
    assert executor.kv_capacity() == executor._memory.kv_budget(LayerRange(0, 2), frozenset()) // per_token // 32 * 32


def test_no_more_is_written_than_there_is_room_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences may reserve more than there is; a step that would write more than there is is refused, and what was
    there before it stays as it was."""
    executor, reference = ready(llama, LayerRange(0, 2)), ready(llama, LayerRange(0, 2))
    monkeypatch.setattr(executor, "kv_capacity", lambda: 64)
    for each in (executor, reference):
        each.open(1, 64)
        each.open(2, 64)
        step(each, 0, 32, 1)
    step(executor, 0, 32, 2)
    with pytest.raises(KvFull, match="96 positions are in use, the capacity is 64"):
        step(executor, 32, 1, 2)
    executor.release(2)
    assert np.array_equal(step(executor, 32, 5, 1).hidden, step(reference, 32, 5, 1).hidden)


def test_what_is_cut_off_gives_its_memory_back(llama: Path) -> None:
    """Keys and values beyond the cut read as zeros afterwards, those before it are untouched."""
    executor = ready(llama, LayerRange(0, 2))
    length, cut = 512, 160
    executor.open(1, length)
    tokens = np.asarray(random_tokens(length, seed=5), np.int64)
    executor.forward(Batch((Row(1, 0, length, False),), tokens, None, ()), never, nothing)
    region = executor._arena.region(1, 1)
    assert region is not None
    per_position = region.keys.shape[2] * region.keys.itemsize // region.layouts[0].unit
    on_a_page = mmap.PAGESIZE // per_position  # positions of one head
    first_free = -(-cut // on_a_page) * on_a_page
    assert first_free < length
    before, behind = region.read(0, cut), region.read(first_free, length)
    assert all(part.any() for part in behind)
    executor.shrink(1, cut)
    assert all(torch.equal(now, then) for now, then in zip(region.read(0, cut), before, strict=True))
    assert not any(part.any() for part in region.read(first_free, length))


def test_broken_rules(llama: Path) -> None:
    """What the stage's core must not ask for is refused, with the reason."""
    executor = TorchExecutor(str(llama), dtype="float32", memory_limit=MANY)
    with pytest.raises(IllegalMove, match="no layers are active"):
        step(executor, 0, 1)
    with pytest.raises(IllegalMove, match="not prepared"):
        executor.activate(LayerRange(0, 2))
    prepared(executor, 1, 3)
    with pytest.raises(IllegalMove, match="never opened"):
        step(executor, 0, 1)
    executor.open(1, 32)
    with pytest.raises(IllegalMove, match="reserved 32"):
        step(executor, 30, 4)
    with pytest.raises(IllegalMove, match="without hidden states"):
        step(executor, 0, 4)


def test_not_finite_fails_the_sequence(llama: Path) -> None:
    """A sequence whose logits are no numbers is named as failed; the one beside it is sampled."""
    executor = ready(llama, LayerRange(7, 8))
    for sequence in (1, 2):
        executor.open(sequence, 32)
    hidden = np.ones((2, 64), np.float32)
    hidden[0] = np.nan
    jobs = tuple(SampleJob(row, SamplingParams(), 0, [5, 6], 2) for row in (0, 1))
    rows = (Row(1, 0, 1, True), Row(2, 0, 1, True))
    done = executor.forward(Batch(rows, np.asarray([6, 6], np.int64), hidden, jobs), never, nothing)
    assert [each.sequence for each in done.failed] == [1]
    assert "not finite" in done.failed[0].reason
    assert [(each.sequence, each.position) for each in done.sampled] == [(2, 2)]


def test_measured_costs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured before anything is loaded: prompts and decodes of several sizes, short and long, the head and
    the embedding; with the threads of a step among others, and where they differ, with all."""
    monkeypatch.setattr(
        "swarm.stage.engine.measure._PATIENCE_S", 60.0
    )  # on a busy machine larger sizes would be left out
    executor = TorchExecutor(str(llama), memory_limit=MANY, threads=1, threads_alone=2)
    costs = executor.measure()
    for alone in (False, True):
        kinds = {kind: [c for c in costs if c.kind == kind and c.alone is alone] for kind in KINDS_OF_COST}
        assert all(kinds.values())
        assert {cost.rows for cost in kinds["decode"]} >= {1, 4, 16}
        assert len({cost.context for cost in kinds["decode"]}) > 1
        assert len({(cost.rows, cost.context) for cost in kinds["prefill"]}) == len(kinds["prefill"])
    assert all(cost.seconds > 0 for cost in costs)
    assert executor.stats()["loaded_bytes"] == 0
    executor = TorchExecutor(str(llama), memory_limit=MANY, threads=2, threads_alone=2)
    costs = executor.measure()
    alone, among = ({(c.kind, c.rows, c.context) for c in costs if c.alone is each} for each in (True, False))
    assert alone == among


def test_a_stage_that_rested_takes_longer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which counts for steps that are alone, and for what a step takes beside its layers."""
    monkeypatch.setattr(measure._LayerBench, "measure_idle_penalty", lambda self, threads: 0.5)
    costs = TorchExecutor(str(llama), memory_limit=MANY, threads=1, threads_alone=1).measure()
    found = {(c.kind, c.rows, c.context, c.alone): c.seconds for c in costs}
    for (kind, rows, context, is_alone), seconds in found.items():
        more = seconds - found[kind, rows, context, False]
        assert more == pytest.approx(0.5 if is_alone and kind == "stage" else 0.0)


def test_what_a_sibling_has_measured(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are forked from one measure once for the same model, device and threads, and again for others."""
    monkeypatch.setattr(shared_cache, "_memory", None)
    shared_cache.create_shared_cache()
    executor = TorchExecutor(str(llama), memory_limit=MANY, threads=1, threads_alone=1)
    executor.measure()
    monkeypatch.setattr(measure, "_measure_costs", lambda *_: ())
    assert {cost.kind for cost in executor.measure()} == set(KINDS_OF_COST)
    assert TorchExecutor(str(llama), memory_limit=MANY, threads=1, threads_alone=2).measure() == ()


def test_manifest(llama: Path) -> None:
    """The manifest adds up, and two executors of the same folder agree."""
    one, two = (TorchExecutor(str(llama), memory_limit=MANY).manifest for _ in range(2))
    assert one.difference(two) is None
    weights = load_file(llama / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    assert sum(one.layer_bytes) + one.embed_bytes + one.head_bytes == size
    assert (one.num_layers, one.hidden_size, one.vocab_size, one.context) == (8, 64, 500, 1024)
    assert one.eos_token_ids == (2,)
    assert one.kv_bytes_per_token == (2 * 2 * 8 * 4,) * 8
    assert one.dtype == "float32"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, llama: Path) -> Path:
    """A copy of the model that a test may spoil."""
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refused(folder: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        prepared(TorchExecutor(str(folder), **({"memory_limit": MANY} | options)), 0, 8)
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_no_such_folder(tmp_path: Path) -> None:
    """A wrong path, a file instead of a folder, an empty folder: each says so."""
    assert "no directory" in refused(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    assert "is neither a directory nor a .gguf file" in refused(file)
    assert "config.json is missing" in refused(tmp_path)


def test_damaged_config(folder: Path) -> None:
    """A config.json that is no JSON, or misses what is needed, is named."""
    change_config(folder, num_hidden_layers=None)
    assert "num_hidden_layers" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json can't be read" in refused(folder)


def test_missing_weights(folder: Path) -> None:
    """No safetensors file at all, a missing tensor, a missing layer."""
    change_weights(folder, lambda weights: weights.pop("model.layers.3.mlp.up_proj.weight"))
    assert "model.layers.3.mlp.up_proj.weight" in refused(folder)
    change_weights(folder, lambda weights: [weights.pop(name) for name in list(weights) if ".layers.5." in name])
    assert "layer 5" in refused(folder)
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(folder)


def test_wrong_shape(folder: Path) -> None:
    """A tensor that doesn't fit the configuration is named with both shapes."""
    change_weights(folder, lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(9, 64)}))
    text = refused(folder)
    assert "model.layers.2.mlp.up_proj.weight" in text
    assert "[9, 64]" in text
    assert "[176, 64]" in text


@pytest.mark.parametrize("keep", [0, 4, 60, 5000, -1])
def test_file_cut_off(folder: Path, keep: int) -> None:
    """A weights file that ends too early is noticed before anything is loaded, and named."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors.*download it again"):
        TorchExecutor(str(folder), memory_limit=MANY)


def test_damaged_header(folder: Path) -> None:
    """A header that is no JSON, or lies about sizes, is refused."""
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:8] + b"\xff" + good[9:])
    assert "model.safetensors" in refused(folder)
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [0, 9]
    lying = json.dumps(header).encode()
    path.write_bytes(len(lying).to_bytes(8, "little") + lying + good[8 + length :])
    assert "model.norm.weight" in refused(folder)


def test_shards(save: Any) -> None:
    """A missing shard, an index that names a tensor its shard lacks or a file elsewhere: each is named."""
    folder = save(llama_config(num_hidden_layers=8), shard="400KB")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    index_path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.extra": shards[0]}}))
    assert "model.extra" in refused(folder)
    index_path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.extra": "../x.safetensors"}}))
    assert "not a file name" in refused(folder)
    index_path.write_text(json.dumps(index))
    (folder / shards[1]).unlink()
    assert f"{shards[1]} is missing" in refused(folder)


def test_unfit_models(folder: Path) -> None:
    """Kinds of models that would be computed wrongly are refused before weights are read, with the reason."""
    change_config(folder, architectures=["Nonsense"], model_type="nonsense")
    assert "has no models of kind nonsense" in refused(folder)
    change_config(folder, architectures=["ReformerModelWithLMHead"], model_type="reformer")
    assert "attention by hashes" in refused(folder)
    change_config(folder, architectures=["LlamaForCausalLM"], model_type="llama")
    change_config(folder, quantization_config={"quant_method": "fp8"})
    assert "quantized" in refused(folder)


def test_unfit_options(llama: Path) -> None:
    """Unknown devices and dtypes, too little memory, layers that don't exist."""
    assert "device 'abacus'" in refused(llama, device="abacus")
    assert "dtype 'int3'" in refused(llama, dtype="int3")
    assert "device cpu can't compute in float16: use auto, float32 or bfloat16" in refused(llama, dtype="float16")
    assert "raise its memory limit" in refused(llama, memory_limit=1 << 20)
    executor = TorchExecutor(str(llama), memory_limit=MANY)
    for layers in (LayerRange(3, 3), LayerRange(0, 9)):
        with pytest.raises(ModelError, match="not a range"):
            executor.prepare(layers, (), 8, nothing)


def test_keys_and_values_get_their_share(llama: Path) -> None:
    """Of what the weights leave; and that is what the broker is told of, and the room that there is."""
    whole = LayerRange(0, 8)
    some = [TorchExecutor(str(llama), dtype="float32", memory_limit=MANY, kv_share=part) for part in (0.25, 0.75)]
    assert [each.kv_share for each in some] == [0.25, 0.75]
    rooms = [each.prepare(whole, (), 8, nothing).kv_tokens for each in some]
    assert rooms[1] == pytest.approx(3 * rooms[0], rel=0.01)
    model = ModelSizes.from_manifest(some[1].manifest)
    assert rooms[1] == model.kv_positions(whole, MANY, 0.75) // GRID * GRID


def test_failed_prepare_changes_nothing(folder: Path) -> None:
    """After a refused plan, the old one goes on with the same bits, and a later good one is accepted."""
    executor = ready(folder, LayerRange(0, 3))
    executor.open(1, 64)
    step(executor, 0, 10)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ModelError, match="ends inside tensor"):
        executor.prepare(LayerRange(0, 8), (), 8, nothing)
    with pytest.raises(IllegalMove):
        executor.activate(LayerRange(0, 8))
    reference = [step(executor, 10, 5).hidden]
    path.write_bytes(good)
    other = ready(folder, LayerRange(0, 3))
    other.open(1, 64)
    step(other, 0, 10)
    assert np.array_equal(reference[0], step(other, 10, 5).hidden)
    prepared(executor, 0, 8)
