"""Images in prompts of Qwen3-VL, against transformers' whole model."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from swarm.errors import IllegalMove
from swarm.params import MAX_IMAGE_TOKENS, ImageSpan, image_digest
from swarm.stage import native
from swarm.stage.engine import images as engine_images
from swarm.stage.engine import portability
from swarm.stage.engine.images import ImageEncoder, rotary_positions
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, FenceRaised
from swarm.stage.model.vision import work_bytes
from swarm.stage.model.vision_tower import ImageFeatures, ImageWork, VisionTower
from swarm.stage.quantization.at_load import Quantization
from swarm.testing_images import FAKE_VISION, FakeImages, fake_image
from swarm.wire.messages import ImageParts, LayerRange, Row
from tests.model.cutting import MANY, Cutter, Pipeline, never, nothing, ready
from tests.model.seeing import EXPERTS, IMAGE, NUM_LAYERS, VISION, Prompt, SeeingPipeline, save_model

PROMPT = Prompt(20, (3, 5), 7, (2, 2), 30)
STRANGER = Prompt(3, (4, 9), 40, seed=50)
TILED = Prompt(4, (17, 29), 6, seed=70)  # its image has tiles of different sizes
CUTS = ((0, NUM_LAYERS), (0, 3, NUM_LAYERS), (0, 3, 4, NUM_LAYERS))

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(kind: str = "qwen3_vl", dtype: torch.dtype = torch.float32) -> Path:
        if (kind, dtype) not in made:
            more = EXPERTS if kind.endswith("moe") else {}
            made[kind, dtype] = save_model(tmp_path_factory.mktemp(kind), kind, dtype, **more)
        return made[kind, dtype]

    return folder


@pytest.fixture(scope="module")
def cutter() -> Cutter:
    return Cutter()


def whole_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def whole_logits(folder: Path, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        model = whole_model(folder)
        result: torch.Tensor = model(torch.tensor([prompt.tokens]), use_cache=False, **prompt.arguments()).logits[0]
    return result


def in_pieces(pipeline: SeeingPipeline, bounds: tuple[int, ...]) -> torch.Tensor:
    """The prompt's logits if it is cut at these places, each piece beside some of another sequence with images."""
    pipeline.open({1: PROMPT, 2: STRANGER})
    pieces, at = [], 0
    for start, stop in itertools.pairwise((0, *bounds, len(PROMPT.tokens))):
        beside = STRANGER.tokens[at : at + 9]
        pieces.append(pipeline.logits((2, at, beside), (1, start, PROMPT.tokens[start:stop]))[1])
        at += len(beside)
    return torch.cat(pieces)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_logits_equal_the_whole_models(kind: str, folders: Folders, cutter: Cutter) -> None:
    expected = whole_logits(folders(kind), PROMPT)
    for lines in CUTS:
        pipeline = SeeingPipeline(cutter.cut(folders(kind), lines))
        pipeline.open({1: PROMPT})
        (actual,) = pipeline.logits((1, 0, PROMPT.tokens))
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5, lines
    blind = SeeingPipeline(cutter.cut(folders(kind), CUTS[0]))
    blind.open({1: None})
    (unseen,) = blind.logits((1, 0, PROMPT.tokens))
    assert float((unseen - expected).abs().max() / expected.abs().max()) > 0.1  # the images matter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_neither_chunks_nor_cuts_nor_neighbours(dtype: str, folders: Folders, cutter: Cutter) -> None:
    folder = folders("qwen3_vl", getattr(torch, dtype))
    whole = SeeingPipeline(cutter.cut(folder, CUTS[0], dtype))
    whole.open({1: PROMPT})
    (expected,) = whole.logits((1, 0, PROMPT.tokens))
    for lines, bounds in zip(CUTS, ((21, 50), (1, 25, 26, 33, 60), (30,)), strict=True):
        assert torch.equal(in_pieces(SeeingPipeline(cutter.cut(folder, lines, dtype)), bounds), expected)
    if dtype == "bfloat16":
        distance = (expected.float() - whole_logits(folder, PROMPT)).abs().mean()
        assert float(distance / expected.float().abs().mean()) < 0.1


def test_quantized_weights_leave_the_tower_plain(folders: Folders, cutter: Cutter) -> None:
    how, folder = Quantization("int8"), folders("qwen3_vl", torch.bfloat16)
    whole = SeeingPipeline(cutter.cut(folder, CUTS[0], "bfloat16", how))
    whole.open({1: PROMPT})
    (expected,) = whole.logits((1, 0, PROMPT.tokens))
    assert torch.equal(in_pieces(SeeingPipeline(cutter.cut(folder, CUTS[1], "bfloat16", how)), (21, 50)), expected)
    plain = SeeingPipeline(cutter.cut(folder, CUTS[0], "bfloat16"))
    image, towers = PROMPT.images[0], [line.stages[0]._layers.active.stage.tower for line in (whole, plain)]
    with torch.inference_mode():
        features = [tower.encode(image, PROMPT.pixels[image.digest]).embeddings for tower in towers]
    assert torch.equal(*features)
    plain.open({1: PROMPT})
    assert not torch.equal(plain.logits((1, 0, PROMPT.tokens))[0], expected)  # the layers are quantized


def test_a_chunk_needs_no_pixels_of_other_chunks_images(folders: Folders, cutter: Cutter) -> None:
    """Each worker that takes over computes an image again from the pixels that come with the step."""
    pipeline = SeeingPipeline(cutter.cut(folders(), CUTS[1]))
    pipeline.open({1: PROMPT})
    (expected,) = pipeline.logits((1, 0, PROMPT.tokens))
    pipeline.open({1: PROMPT})
    first = pipeline.logits((1, 0, PROMPT.tokens[:30]))[0]
    pipeline.stages[0].drop_spare()  # forgets features
    rest = pipeline.logits((1, 30, PROMPT.tokens[30:]))[0]
    assert torch.equal(torch.cat((first, rest)), expected)


def test_missing_pixels_are_an_error(folders: Folders, cutter: Cutter) -> None:
    pipeline = SeeingPipeline(cutter.cut(folders(), CUTS[1]))
    pipeline.open({1: PROMPT})
    pipeline.stages[0].drop_spare()
    batch = pipeline.batch(None, (1, 0, PROMPT.tokens), is_first=False)
    with pytest.raises(IllegalMove, match=r"pixels of image \w+ are missing"):
        pipeline.stages[0].forward(batch, never, nothing)


def test_greedy_tokens_equal_generate(folders: Folders, cutter: Cutter) -> None:
    made = whole_model(folders()).generate(
        torch.tensor([PROMPT.tokens]), **PROMPT.arguments(), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    pipeline = SeeingPipeline(cutter.cut(folders(), CUTS[2]))
    pipeline.open({1: PROMPT})
    history, start = list(PROMPT.tokens), 0
    for _ in range(16):
        token = int(pipeline.logits((1, start, history[start:]))[0][-1].argmax())
        start = len(history)
        history.append(token)
    assert history == made[0].tolist()


def test_rotary_positions_equal_transformers(folders: Folders) -> None:
    arguments = PROMPT.arguments()
    expected, _ = whole_model(folders()).model.get_rope_index(
        torch.tensor([PROMPT.tokens]), arguments["mm_token_type_ids"], arguments["image_grid_thw"]
    )
    num = len(PROMPT.tokens)
    assert rotary_positions(PROMPT.images, 0, num).tolist() == expected[:, 0].tolist()
    for start, stop in itertools.combinations(range(0, num + 1, 3), 2):
        part = rotary_positions(PROMPT.images, start, stop - start)
        assert part.tolist() == expected[:, 0, start:stop].tolist(), (start, stop)


def test_only_the_first_stage_has_the_tower(folders: Folders) -> None:
    first, last = (ready(folders(), layers) for layers in (LayerRange(0, 3), LayerRange(3, NUM_LAYERS)))
    manifest = first.manifest
    assert manifest == last.manifest
    assert manifest.vision is not None
    assert manifest.vision.num_layers == len(VISION["deepstack_visual_indexes"])
    assert (manifest.vision.token, "text only" in manifest.architecture) == (IMAGE, False)
    towers = [[name for name in stage._layers.active.stage.modules if name == "visual"] for stage in (first, last)]
    assert towers == [["visual"], []]
    model = whole_model(folders()).model
    tower, embedding = (
        sum(p.nbytes for p in part.parameters()) for part in (model.visual, model.language_model.embed_tokens)
    )
    assert manifest.embed_bytes == tower + embedding
    assert manifest.image_bytes == work_bytes({"vision_config": VISION}, manifest.vision, 4, MAX_IMAGE_TOKENS)


def test_text_alone_needs_no_tower(folders: Folders) -> None:
    executor = TorchExecutor(str(folders()), dtype="float32", memory_limit=MANY, images=False)
    manifest, whole = executor.manifest, ready(folders(), LayerRange(0, 3)).manifest
    assert (manifest.vision, "text only" in manifest.architecture) == (None, True)
    assert (manifest.image_bytes, whole.image_bytes > 0) == (0, True)
    tower = sum(parameter.nbytes for parameter in whole_model(folders()).model.visual.parameters())
    assert whole.embed_bytes - manifest.embed_bytes == tower
    executor.prepare(LayerRange(0, 1), (), 8, nothing)  # may end between the layers that take features
    executor.activate(LayerRange(0, 1))
    stage = executor._layers.active.stage
    assert (stage.tower, "visual" in stage.modules) == (None, False)


def test_the_towers_bits_do_not_depend_on_the_processor(folders: Folders) -> None:
    """The tower leaves no operation to torch whose bits do."""
    stage = ready(folders(), LayerRange(0, 3))._layers.active.stage
    image: ImageSpan = PROMPT.images[0]
    with torch.inference_mode(), portability.watch_operations() as operations:
        stage.tower.encode(image, PROMPT.pixels[image.digest])
    assert operations <= {"arange", "floor"}  # exact for these numbers


@pytest.mark.parametrize("by", ["our kernels", "torch"])
def test_an_image_of_several_tiles(by: str, folders: Folders) -> None:
    with native.disabled("to see torch's") if by == "torch" else nullcontext():
        executor = ready(folders(), LayerRange(0, NUM_LAYERS))
        tower = tower_of(executor)
        assert tower.vision.num_tiles(17 * 29) == 8
        pipeline = SeeingPipeline(Pipeline([executor]))
        pipeline.open({1: TILED})
        (actual,) = pipeline.logits((1, 0, TILED.tokens))
    expected = whole_logits(folders(), TILED)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_images_bits_do_not_depend_on_when_its_parts_are_computed(dtype: str, folders: Folders) -> None:
    """Its parts are computed a few at a time, between those of another image, whatever a fence interrupts."""
    tower = tower_of(ready(folders("qwen3_vl", getattr(torch, dtype)), LayerRange(0, 3), dtype))
    image, pixels = TILED.images[0], TILED.pixels[TILED.images[0].digest]
    with torch.inference_mode():
        expected = tower.encode(image, pixels)
        first, *works = (ImageWork(tower, image, pixels) for _ in range(3))
        stranger = STRANGER.images[0]
        other = ImageWork(tower, stranger, STRANGER.pixels[stranger.digest])
        while not first.is_done:
            first.compute_part()
            if not other.is_done:
                other.compute_part()
            for work in works:
                work.compute_part()
        encoder = ImageEncoder()
        order = ImageParts(1, image, 0, first.num_parts)
        fence = iter([False, False, True])
        with pytest.raises(FenceRaised):
            encoder.advance(tower, (order,), TILED.pixels, lambda: next(fence), nothing)
        progress: list[int] = []
        encoder.advance(tower, (order,), {}, never, lambda: progress.append(1))
        assert len(progress) == first.num_parts - 2
        rows = encoder.find_rows(tower, batch_of(TILED))
    assert rows is not None
    for features in (first.features(), *(work.features() for work in works)):
        assert torch.equal(features.embeddings, expected.embeddings)
        assert all(map(torch.equal, features.added, expected.added))
    assert torch.equal(rows.embeddings, expected.embeddings)


def test_steps_compute_an_image_in_parts(folders: Folders, cutter: Cutter) -> None:
    """The tokens of the image need no pixels then, and a step computes no more of an image than it is ordered to."""
    pipeline = SeeingPipeline(cutter.cut(folders(), CUTS[1]))
    pipeline.open({1: TILED})
    (expected,) = pipeline.logits((1, 0, TILED.tokens))
    stage = pipeline.stages[0]
    stage.drop_spare()
    pipeline.open({1: TILED, 2: STRANGER})
    image = TILED.images[0]
    num_parts = tower_of(stage).vision.num_parts(image.num_tokens)
    progress: list[int] = []
    for beside, first in enumerate(range(0, num_parts, 2)):
        parts = (ImageParts(1, image, first, min(first + 2, num_parts)),)
        batch = pipeline.batch(None, (2, beside, STRANGER.tokens[beside : beside + 1])) if beside < 3 else EMPTY
        pixels = TILED.pixels if first == 0 else {}
        progress.clear()
        result = stage.forward(replace(batch, image_parts=parts, pixels=pixels), never, lambda: progress.append(1))
        assert len(progress) == parts[0].stop - first + (3 if batch.rows else 0)
        assert (result.hidden is None) == (not batch.rows)
    whole = pipeline.batch(None, (1, 0, TILED.tokens), is_first=False)
    hidden = stage.forward(whole, never, nothing).hidden
    actual = pipeline.stages[1].logits(pipeline.batch(hidden, (1, 0, TILED.tokens), is_first=False))
    assert torch.equal(actual, expected)


def test_parts_whose_beginning_is_missing_are_left_to_the_step_with_the_tokens(folders: Folders) -> None:
    stage = ready(folders(), LayerRange(0, 3))
    pipeline = SeeingPipeline(Pipeline([stage, ready(folders(), LayerRange(3, NUM_LAYERS))]))
    pipeline.open({1: TILED})
    parts = (ImageParts(1, TILED.images[0], 3, 9),)
    progress: list[int] = []
    stage.forward(replace(EMPTY, image_parts=parts), never, lambda: progress.append(1))
    assert progress == []
    (actual,) = pipeline.logits((1, 0, TILED.tokens))
    assert actual.isfinite().all()


def test_features_that_no_step_needs_go_first(folders: Folders) -> None:
    tower = tower_of(ready(folders(), LayerRange(0, 3)))
    encoder, prompts = ImageEncoder(), [Prompt((18, 20), seed=seed * 10) for seed in (1, 2, 3)]
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            image = prompt.images[0]
            if number == 2:  # there is room for two of them
                encoder.advance(tower, (ImageParts(1, prompts[1].images[0], 0, 0),), {}, never, nothing)
            encoder.advance(tower, (ImageParts(1, image, 0, 99),), prompt.pixels, never, nothing)
        first, second, third = (replace(batch_of(prompt), pixels={}) for prompt in prompts)
        assert encoder.find_rows(tower, first) is not None
        assert encoder.find_rows(tower, third) is not None
        with pytest.raises(IllegalMove, match="are missing"):
            encoder.find_rows(tower, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_work_on_an_image_takes_the_memory_that_is_counted(dtype: str, folders: Folders) -> None:
    """Beside it, the features of others are kept. Where memory has pages, the arena takes what is written."""
    tower = tower_of(ready(folders("qwen3_vl", getattr(torch, dtype)), LayerRange(0, 3), dtype))
    image, pixels = TILED.images[0], TILED.pixels[TILED.images[0].digest]
    before = tensor_bytes()
    with torch.inference_mode():
        work = ImageWork(tower, image, pixels)
        while not work.is_done:
            work.compute_part()
    arenas = [each.arena for each in work._projected if each.arena is not None]
    unwritten = sum(arena.allocated_bytes for arena in arenas) - len(arenas) * 2 * work._projected[0].queries.nbytes
    taken = tensor_bytes() - before - unwritten + len(pixels) + work.features().num_bytes
    element_bytes = work.features().embeddings.element_size()
    counted = work_bytes({"vision_config": VISION}, tower.vision, element_bytes, image.num_tokens)
    assert 0.98 * counted < taken < 1.02 * counted


def tensor_bytes() -> int:
    """Bytes of all tensors."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_new_plan_drops_the_work_on_an_image_and_a_stage_without_the_tower_drops_all(folders: Folders) -> None:
    stage = ready(folders(), LayerRange(0, 3))
    begun = replace(EMPTY, image_parts=(ImageParts(1, TILED.images[0], 0, 5),), pixels=TILED.pixels)
    whole = replace(EMPTY, image_parts=(ImageParts(1, STRANGER.images[0], 0, 99),), pixels=STRANGER.pixels)
    progress: list[int] = []
    for batch in (whole, begun):
        stage.forward(batch, never, lambda: progress.append(1))
    tower = weakref.ref(stage._layers.active.stage.modules["visual"])
    tensors = [weakref.ref(each.embeddings) for each in stage._images._kept.values()]
    work = weakref.ref(stage._images._work._projected[0].queries)
    stage.prepare(LayerRange(0, 3), (), 8, nothing)
    stage.activate(LayerRange(0, 3))
    gc.collect()
    assert (work() is None, tower() is None, [each() is None for each in tensors]) == (True, False, [False])
    progress.clear()
    stage.forward(replace(whole, pixels={}), never, lambda: progress.append(1))
    assert progress == [], "features are kept"
    stage.forward(begun, never, nothing)
    stage.prepare(LayerRange(3, NUM_LAYERS), (), 8, nothing)
    stage.activate(LayerRange(3, NUM_LAYERS))
    gc.collect()
    assert (tower() is None, [each() is None for each in tensors]) == (True, [True])


class PlainWork:
    """Work on an image, without a tower."""

    def __init__(self, _: object, image: ImageSpan, pixels: bytes) -> None:
        self.digest, self.num_done, self._num_tokens = image.digest, 0, image.num_tokens
        self.num_parts = FAKE_VISION.num_parts(image.num_tokens)

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_parts

    def compute_part(self) -> None:
        self.num_done += 1

    def features(self) -> ImageFeatures:
        return ImageFeatures(torch.zeros(self._num_tokens, 1), ())


@pytest.mark.parametrize("seed", range(40))
def test_the_fake_model_keeps_and_needs_images_as_the_encoder_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a simulated swarm that keeps the fake model's rules would keep the encoder's."""
    monkeypatch.setattr(engine_images, "ImageWork", PlainWork)
    monkeypatch.setattr(engine_images, "MAX_FEATURE_TOKENS", 50)
    encoder, fake, random, tower = ImageEncoder(), FakeImages(room=50), Random(seed), cast(VisionTower, object())
    images = [fake_image(0, 4, 5, colour) for colour in range(3)] + [fake_image(0, 6, 10, 0)]
    for _ in range(60):
        span, data = random.choice(images)
        pixels = {span.digest: data} if random.random() < 0.5 else {}
        parts = (ImageParts(1, span, random.choice([0, 0, 1, 4]), random.choice([0, 1, 4, 5, 99])),)
        batch = Batch((Row(1, 0, 1, False),), np.zeros(1, np.int64), None, (), images=((span,),), pixels=pixels)
        has_tower = random.random() < 0.5
        pairs: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (
                partial(encoder.advance, tower, parts, pixels, never, nothing),
                partial(fake.advance, FAKE_VISION, parts, pixels),
            ),
            (partial(encoder.find_rows, tower, batch), partial(fake.find, FAKE_VISION, span, pixels)),
            (
                partial(encoder.start_epoch, tower if has_tower else None),
                partial(fake.start_epoch, has_tower=has_tower),
            ),
        ]
        real_act, fake_act = random.choice(pairs)
        assert problem(real_act) == problem(fake_act)
        work = encoder._work
        assert (list(encoder._kept), work and (work.digest, work.num_done)) == (list(fake.kept), fake.work)


def problem(act: Callable[[], object]) -> str:
    try:
        act()
    except IllegalMove as error:
        return str(error)
    return ""


def test_the_same_pixels_in_another_shape_have_their_own_features(folders: Folders) -> None:
    tower, encoder = tower_of(ready(folders(), LayerRange(0, 3))), ImageEncoder()
    pixels = bytes([255]) * (16 * tower.vision.token_bytes)
    with torch.inference_mode():
        for rows, columns in ((2, 8), (4, 4), (2, 8)):
            image = ImageSpan(0, rows, columns, image_digest(rows, columns, pixels))
            batch = Batch((Row(1, 0, 16, False),), np.full(16, IMAGE), None, (), images=((image,),))
            found = encoder.find_rows(tower, replace(batch, pixels={image.digest: pixels}))
            assert found is not None
            assert torch.equal(found.embeddings, tower.encode(image, pixels).embeddings)


EMPTY = Batch((), np.zeros(0, np.int64), None, ())


def batch_of(prompt: Prompt) -> Batch:
    """The whole prompt as a batch."""
    rows = (Row(1, 0, len(prompt.tokens), False),)
    return Batch(rows, np.asarray(prompt.tokens), None, (), images=(prompt.images,), pixels=prompt.pixels)


def tower_of(executor: TorchExecutor) -> VisionTower:
    active = executor._layers.active
    assert active is not None
    assert active.stage.tower is not None
    return active.stage.tower
