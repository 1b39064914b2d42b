"""How a multimodal model's folder says that it sees images, and which tensors its vision tower has. Does not import
torch.

Images are served for the kinds in ``_KINDS``. Of other multimodal models the text tower alone is served.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.params import MAX_IMAGE_TOKENS
from swarm.stage.model.folder_files import read_json
from swarm.wire.messages import Vision

PREPROCESSOR = "preprocessor_config.json"

_KINDS = frozenset({"qwen3_vl", "qwen3_vl_moe"})
_STORED = re.compile(r"(?:model\.)?visual\.(?P<rest>.+)")


def is_tower(name: str) -> bool:
    """Whether a stored tensor of this name belongs to a vision tower."""
    return _STORED.fullmatch(name) is not None


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether images are served for this kind of model."""
    return config.get("model_type") in _KINDS


def find_tower(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the vision tower, by the names of the tower's own; empty if images are not served."""
    if not has_images(config):
        return {}
    matches = ((_STORED.fullmatch(name), tensor) for name, tensor in tensors.items())
    tower = {f"visual.{match['rest']}": tensor for match, tensor in matches if match}
    return tower if all(tensor.is_float for tensor in tower.values()) else {}


def read_vision(folder: Path, config: Mapping[str, Any]) -> Vision:
    """Return how the model of a folder sees images. Raises ``ModelError``. Settings that the files leave out have the
    values of transformers."""
    path = folder / PREPROCESSOR
    own, tower = read_json(path) if path.is_file() else {}, config.get("vision_config") or {}
    size = own.get("size") or {}
    values = (
        config.get("image_token_id", 151655),
        config.get("vision_start_token_id", 151652),
        config.get("vision_end_token_id", 151653),
        own.get("patch_size", tower.get("patch_size", 16)),
        own.get("merge_size", tower.get("spatial_merge_size", 2)),
        own.get("min_pixels") or size.get("shortest_edge") or 1 << 16,
        own.get("max_pixels") or size.get("longest_edge") or 1 << 24,
        own.get("image_mean") or (0.5, 0.5, 0.5),
        own.get("image_std") or (0.5, 0.5, 0.5),
        len(tower.get("deepstack_visual_indexes", (8, 16, 24))) or 1,
        tower.get("depth", 27),
    )
    try:
        return msgspec.convert(values, Vision)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} or config.json describes images in a way that can't be served ({error})") from None


def work_bytes(
    config: Mapping[str, Any], vision: Vision, element_bytes: int, num_tokens: int = MAX_IMAGE_TOKENS
) -> int:
    """Return the memory that the first stage takes for images besides the tower's weights: for the work on one of
    ``num_tokens``, and for the features of others that it keeps, which are as many (``ImageEncoder``).

    The work has the pixels, each patch's hidden state, its places, and two layers' queries, keys and values of all
    patches.
    """
    tower = config.get("vision_config") or {}
    hidden, out = int(tower.get("hidden_size", 1152)), int(tower.get("out_hidden_size", 3584))
    num_patches = num_tokens * vision.merge**2
    features = num_tokens * out * (1 + len(tower.get("deepstack_visual_indexes", (8, 16, 24))))
    place_bytes = 4 * (8 + 4) + 2 * 4 * hidden // int(tower.get("num_heads", 16))
    numbers = (1 + 2 * 3) * num_patches * hidden + 2 * features
    return numbers * element_bytes + num_patches * place_bytes + num_tokens * vision.token_bytes
