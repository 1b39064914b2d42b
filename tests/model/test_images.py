"""Images in prompts of Qwen3-VL, against transformers' whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from swarm.errors import IllegalMove
from swarm.params import ImageSpan
from swarm.stage.engine import portability
from swarm.stage.engine.images import rotary_positions
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import LayerRange
from tests.model.cutting import MANY, Cutter, never, nothing, ready
from tests.model.seeing import EXPERTS, IMAGE, NUM_LAYERS, VISION, Prompt, SeeingPipeline, save_model

PROMPT = Prompt(20, (3, 5), 7, (2, 2), 30)
STRANGER = Prompt(3, (4, 9), 40, seed=50)
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


def test_text_alone_needs_no_tower(folders: Folders) -> None:
    executor = TorchExecutor(str(folders()), dtype="float32", memory_limit=MANY, images=False)
    manifest, whole = executor.manifest, ready(folders(), LayerRange(0, 3)).manifest
    assert (manifest.vision, "text only" in manifest.architecture) == (None, True)
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
