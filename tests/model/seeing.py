"""Small random Qwen3-VL models, images for them, and pipelines that take both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from swarm.params import ImageSpan, image_digest
from swarm.stage.executor import Batch
from swarm.wire.messages import Row
from tests.model.cutting import Pipeline, never, nothing, random_tokens
from tests.model.models import TEXT_PART

NUM_LAYERS = 5
PATCH, MERGE = 4, 2
IMAGE, BEGIN, END = 240, 241, 242  # token ids
TEXT: dict[str, Any] = TEXT_PART | {
    "num_hidden_layers": NUM_LAYERS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "depth": 4,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": 96,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1, 3],
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def save_model(
    folder: Path,
    kind: str = "qwen3_vl",
    dtype: torch.dtype = torch.float32,
    tokens: tuple[int, int, int] = (IMAGE, BEGIN, END),
    **text: Any,
) -> Path:
    """Save a random model in the layout in which checkpoints of this kind are released. ``tokens``: ids of an image's
    placeholder, beginning and end."""
    image, begin, end = tokens
    config = AutoConfig.for_model(
        kind,
        text_config=TEXT | text,
        vision_config=VISION,
        image_token_id=image,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        offset = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + offset
    model.to(dtype).save_pretrained(folder)
    return folder


def pixels_of(rows: int, columns: int, seed: int) -> bytes:
    """Random pixels of an image of this many tokens."""
    chance = np.random.default_rng(seed)
    return chance.integers(0, 256, rows * columns * MERGE * MERGE * 3 * PATCH * PATCH, np.uint8).tobytes()


class Prompt:
    """Text and images in turn: numbers stand for that many random tokens, pairs for images of these rows and columns.
    ``seed`` decides tokens and pixels."""

    def __init__(self, *parts: int | tuple[int, int], seed: int = 5) -> None:
        self.tokens: list[int] = []
        self.images: tuple[ImageSpan, ...] = ()
        self.pixels: dict[str, bytes] = {}
        for number, part in enumerate(parts):
            if isinstance(part, int):
                self.tokens += random_tokens(part, seed=seed + number, vocabulary=IMAGE)
                continue
            pixels = pixels_of(*part, seed=seed + number)
            image = ImageSpan(len(self.tokens) + 1, *part, image_digest(*part, pixels))
            self.images += (image,)
            self.pixels[image.digest] = pixels
            self.tokens += [BEGIN, *[IMAGE] * image.num_tokens, END]

    def replace_image(self, number: int, seed: int) -> None:
        """Give an image other pixels."""
        old = self.images[number]
        pixels = pixels_of(old.rows, old.columns, seed)
        new = ImageSpan(old.start, old.rows, old.columns, image_digest(old.rows, old.columns, pixels))
        self.images = (*self.images[:number], new, *self.images[number + 1 :])
        self.pixels[new.digest] = pixels

    def arguments(self) -> dict[str, Any]:
        """The prompt as transformers' model takes it."""
        values, grids = [], []
        for image in self.images:
            numbers = np.frombuffer(self.pixels[image.digest], np.uint8).reshape(-1, 3, 1, PATCH * PATCH)
            values.append(np.repeat((numbers / 255 - 0.5) / 0.5, 2, axis=2).reshape(len(numbers), -1))
            grids.append([1, image.rows * MERGE, image.columns * MERGE])
        return {
            "pixel_values": torch.from_numpy(np.concatenate(values)).float(),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (torch.tensor([self.tokens]) == IMAGE).int(),
        }


class SeeingPipeline:
    """A pipeline whose sequences may have images. The first stage gets the pixels that a step needs, as from a broker;
    ``pixels`` of other steps are not there."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.stages = pipeline.stages
        self._pipeline = pipeline
        self._prompts: dict[int, Prompt | None] = {}

    def open(self, prompts: dict[int, Prompt | None]) -> None:
        self._pipeline.open(*prompts)
        self._prompts |= prompts

    def batch(self, hidden: Any, *parts: tuple[int, int, Sequence[int]], is_first: bool = True) -> Batch:
        rows = tuple(Row(sequence, start, len(tokens), False) for sequence, start, tokens in parts)
        tokens = np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens in parts])
        prompts = [self._prompts[row.sequence] for row in rows]
        images = tuple(() if prompt is None else prompt.images for prompt in prompts)
        needed = {
            image.digest: prompt.pixels[image.digest]
            for row, prompt in zip(rows, prompts, strict=True)
            if prompt is not None and is_first
            for image in prompt.images
            if image.overlaps(row.start, row.start + row.count)
        }
        return Batch(rows, tokens, hidden, (), images=images if any(images) else (), pixels=needed)

    def logits(self, *parts: tuple[int, int, Sequence[int]]) -> list[torch.Tensor]:
        """Logits after every token of the parts (sequence, start, tokens)."""
        hidden = None
        for number, stage in enumerate(self.stages[:-1]):
            hidden = stage.forward(self.batch(hidden, *parts, is_first=number == 0), never, nothing).hidden
        result = self.stages[-1].logits(self.batch(hidden, *parts, is_first=len(self.stages) == 1))
        return list(torch.split(result, [len(tokens) for _, _, tokens in parts]))
