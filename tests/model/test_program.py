"""A step as one call has the bits of the modules that it stands for, whatever is computed and however it is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from swarm.config import Settings
from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine import selfcheck
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.model import program
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.shell import resources
from swarm.wire.messages import LayerRange, Row
from swarm.wire.transport.keys import new_pair
from tests.model.cutting import nothing
from tests.model.models import ARCHITECTURES, named_config

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

CPU = torch.device("cpu")
# What a program can't do yet, and why.
BY_MODULES = {"gemma3_text": "Gemma3TextModel is not supported", "gpt_neox": "GPTNeoXModel is not supported"}
KNOWN = sorted(ARCHITECTURES.keys() - BY_MODULES.keys())
LIBRARY = native.library()
VARIANTS = [""] if LIBRARY is None else native.variants(LIBRARY)
# A prompt in chunks, then steps (sequence, first position, tokens): mixed ones, of two racks, and some that are written
# again after a cut.
CHUNKS = tuple((1, sum((1, 2, 3, 7, 17, 40, 100)[:n]), count) for n, count in enumerate((1, 2, 3, 7, 17, 40, 100)))
STEPS = (
    *((chunk,) for chunk in CHUNKS),
    ((1, 170, 1), (2, 0, 33), (3, 0, 150)),
    ((3, 150, 1), (1, 171, 1), (2, 33, 1), (9, 0, 5)),
    "cut",
    ((2, 20, 9), (1, 172, 1)),
    *(((1, 173 + n, 1), (2, 29 + n, 1), (9, 5 + n, 1)) for n in range(3)),
)


def stages_of(config: Any, dtype: torch.dtype) -> list[Stage]:
    """A tiny model cut in two."""
    skeleton = ModelSkeleton(config, CPU, dtype)
    state = selfcheck._random_model(config).state_dict()
    weights = WeightLoader(skeleton, selfcheck.MemorySource(state), lambda _: None)
    middle, num = skeleton.num_layers // 2, skeleton.num_layers
    return [Stage(skeleton, layers, {}, weights) for layers in (LayerRange(0, middle), LayerRange(middle, num))]


class Way:
    """The steps, through programs or through modules, with keys and values of its own."""

    def __init__(self, stages: list[Stage], *, by_modules: bool, threads: int) -> None:
        self._stages, self._by_modules, self._threads = stages, by_modules, threads
        self.arena = KvArena(CPU)
        for sequence, limit in ((1, 200), (2, 200), (3, 200), (9, 900)):
            self.arena.open(sequence, limit)

    def step(self, parts: Any) -> list[torch.Tensor]:
        """What leaves each stage: hidden states, then logits of every other row."""
        if parts == "cut":
            self.arena.truncate(2, 20)
            return []
        rows = tuple(Row(sequence, start, count, True) for sequence, start, count in parts)
        for row in rows:
            self.arena.mark_used(row)
        num = sum(row.count for row in rows)
        tokens = np.random.default_rng(num).integers(3, 200, num)
        given, hidden = [], None
        for stage in self._stages:
            result = run_batch(
                stage,
                self.arena,
                Batch(rows, tokens, hidden, ()),
                head_rows=range(0, num, 2) if stage.has_head else None,
                threads=self._threads,
                by_modules=self._by_modules,
            )
            assert result is not None
            given.append(result)
            hidden = result.float().numpy()
        return given

    def held(self, layers: int) -> list[torch.Tensor]:
        regions = [self.arena.region(sequence, layer) for sequence in (1, 2, 3, 9) for layer in range(layers)]
        return [part for region in regions if region is not None for part in region.read(0, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "variant"), [*((kind, VARIANTS[0]) for kind in KNOWN), *(("qwen3", other) for other in VARIANTS[1:])]
)
def test_a_program_has_the_bits_of_its_modules(kind: str, dtype: torch.dtype, variant: str) -> None:
    """Any number of rows, prompts in chunks, mixed steps, after a cut; in each variant, by any number of threads."""
    config = named_config(kind)
    with native.using_variant(variant):
        stages = stages_of(config, dtype)
        assert [stage.no_program_reason for stage in stages] == ["", ""]
        one, other = Way(stages, by_modules=False, threads=2), Way(stages, by_modules=True, threads=1)
        for parts in STEPS:
            for mine, theirs in zip(one.step(parts), other.step(parts), strict=True):
                assert mine.shape == theirs.shape
                assert torch.equal(mine, theirs), parts
                assert bool(mine.isfinite().all())
        held = list(zip(one.held(config.num_hidden_layers), other.held(config.num_hidden_layers), strict=True))
        assert len(held) == 2 * 4 * config.num_hidden_layers
        assert all(torch.equal(mine, theirs) for mine, theirs in held)


@pytest.mark.parametrize("kind", [*BY_MODULES, "glm"])
def test_unknown_parts_stay_with_their_modules(kind: str) -> None:
    """The stage says what it doesn't know, and computes as before."""
    glm = AutoConfig.for_model("glm", num_hidden_layers=2, pad_token_id=0, hidden_size=64, head_dim=16)
    stages = stages_of(glm if kind == "glm" else named_config(kind), torch.float32)
    assert all(stage.program is None for stage in stages)
    assert {stage.no_program_reason for stage in stages} == {BY_MODULES.get(kind, "GlmAttention is not supported")}


def test_every_layer_is_reported_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress counts layers, however many of them a call takes; the layers are left once, before the head."""
    stage = stages_of(named_config("llama"), torch.float32)[1]
    for seconds, num_asked in ((1e-9, 3), (10.0, 1)):
        monkeypatch.setattr(program, "CALL_S", seconds)
        told: list[str] = []
        for start in (0, 1):  # the first step finds out how long a layer takes
            told.clear()
            arena = KvArena(CPU)
            arena.open(1, 32)
            run_batch(
                stage,
                arena,
                Batch((Row(1, start, 1, True),), np.asarray([5]), np.ones((1, 96), np.float32), ()),
                head_rows=(0,),
                is_fenced=lambda told=told: told.append("asked") or False,
                on_progress=lambda told=told: told.append("layer"),
                on_layers_done=lambda told=told: told.append("left"),
            )
        assert told.count("layer") == 3
        assert told.count("asked") == num_asked
        assert told[-1] == "left"


def test_the_rows_that_came_stay_as_they_are() -> None:
    """A program works in place: not on what was sent, which is logged."""
    stage = stages_of(named_config("llama"), torch.float32)[1]
    arena, hidden = KvArena(CPU), np.random.default_rng(1).standard_normal((3, 96), np.float32)
    before = hidden.copy()
    arena.open(1, 32)
    run_batch(stage, arena, Batch((Row(1, 0, 3, True),), np.asarray([5, 6, 7]), hidden, ()), head_rows=(2,))
    assert np.array_equal(hidden, before)


def test_a_step_beyond_a_sequences_place_is_refused() -> None:
    """Nothing is written beyond what a sequence's place has room for."""
    stage = stages_of(named_config("llama"), torch.float32)[0]
    arena = KvArena(CPU)
    arena.open(1, 32)
    batch = Batch((Row(1, 120, 20, False),), np.arange(3, 23), None, ())
    with pytest.raises(ValueError, match=r"sequence 1: .*don't fit into 20 rows and 128 positions"):
        run_batch(stage, arena, batch)


def test_other_bits_and_the_modules_compute(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that computes something else than its modules is found when it is loaded, and is not used: the worker
    says why."""
    monkeypatch.setattr(program, "_refusals", [])
    executor = TorchExecutor(str(llama), dtype="float32", memory_limit=1 << 30)
    first = program.Program._first
    monkeypatch.setattr(program.Program, "_first", lambda *how: first(*how) * (1 + 2**-10))
    kernels = executor.prepare(LayerRange(2, 4), (), 8, nothing).kernels
    assert kernels.endswith("(module by module: a step as one call has other bits than its modules)")
    assert not program.is_enabled()


def test_without_programs_the_bits_that_are_named_are_the_same(llama: Path) -> None:
    """Layers move between a worker with programs and one without, since both have the same bits."""
    executor = TorchExecutor(str(llama), dtype="bfloat16", memory_limit=1 << 30)
    assert program.is_enabled()
    one = executor.prepare(LayerRange(0, 4), (), 8, nothing)
    with program.disabled("worker.program is off"):
        other = executor.prepare(LayerRange(0, 4), (), 8, nothing)
    assert other.kernels == f"{one.kernels} (module by module: worker.program is off)"
    assert one.bits == other.bits


def test_the_setting_turns_programs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured or loaded."""
    monkeypatch.setattr(program, "_refusals", [])
    seen: list[str] = []

    def executor(*_: object, **__: object) -> None:
        seen.append(program.disabled_reason())
        raise ModelError("enough")

    monkeypatch.setattr(resources, "TorchExecutor", executor)
    for value in ("auto", "off"):
        settings = Settings.model_validate({"worker": {"program": value}})
        with pytest.raises(ModelError, match="enough"):
            resources.open_resources(settings, new_pair())
    assert seen == ["", "worker.program is off"]


def test_steps_cover_what_they_should() -> None:
    """Control: each step begins where the sequence's last one ended, but after the cut."""
    ends: dict[int, int] = {}
    for sequence, start, count in itertools.chain.from_iterable(step for step in STEPS if step != "cut"):
        assert ends.get(sequence, 0) == start or (sequence, start) == (2, 20)
        ends[sequence] = start + count
