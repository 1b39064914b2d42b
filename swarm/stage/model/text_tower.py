"""Text tower of a multimodal model: which tensors of its checkpoint belong to it. Does not import torch.

A model that also reads images or sound is served for text: its text tower is loaded like a plain causal model, under
the names that the tensors of such a model have. The other towers are neither fetched nor read. Two generations of
checkpoints put the tower in different places (``language_model.model.layers``, ``model.language_model.layers``), and a
few, such as Qwen2-VL's, beside the other towers (``model.layers``, ``visual``).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from swarm.errors import ModelError

# Appended to the architecture of a model whose other towers are not loaded.
TEXT_ONLY = " (text only)"
# For users of such a model.
TEXT_ONLY_NOTE = "text only: its parts for images or audio are not loaded"

# Classes of text towers that get a plain linear head, by the kind of their configuration.
HEADLESS_TOWERS = {
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "granite_docling_text": "GraniteDoclingTextModel",
    "hunyuan_vl_text": "HunYuanVLTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "glm4v_moe_text": "Glm4vMoeTextModel",
    "glm4v_text": "Glm4vTextModel",
    "glm_ocr_text": "GlmOcrTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
}
# Text towers that transformers has a causal class for, but does not list.
CAUSAL_TOWERS = {
    "emu3_text_model": "Emu3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
}

_SECTIONS = ("text_config", "vision_config", "audio_config", "thinker_config")
_NESTED = re.compile(r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model|llm)\.(?:model\.)?(?P<rest>.+)")
_FLAT = re.compile(r"(?:thinker\.)?(?P<name>model\.(?!embed_tokens_extend\.).+)")  # that one: towers of Phi 4
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_USUAL_IMAGE_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)  # of Llama 3.2 Vision, whose files may leave them out
_HEAD = re.compile(r"(?:thinker\.)?(?:model\.)?(?P<name>lm_head\..+)")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether this content of a ``config.json`` has sections for several towers."""
    return any(isinstance(config.get(name), dict) and config[name] for name in _SECTIONS)


def choose_names(stored: Iterable[str]) -> Callable[[str], str | None]:
    """Return the function that maps a stored name to the name in a plain causal model; to None, if the tensor belongs
    to another tower. ``stored`` are the names of all tensors."""
    is_nested = any((match := _NESTED.fullmatch(name)) and match["rest"].startswith("layers.") for name in stored)

    def plain_name(name: str) -> str | None:
        if head := _HEAD.fullmatch(name):
            return head["name"]
        match = (_NESTED if is_nested else _FLAT).fullmatch(name)
        if match is None or not is_nested:
            return match and match["name"]
        return match["rest"] if match["rest"].startswith("lm_head.") else f"model.{match['rest']}"

    return plain_name


def image_layers(config: Mapping[str, Any]) -> list[int]:
    """Return which layers of a text tower attend to an image's embeddings alone. transformers skips them in a text, so
    they are not loaded, and the others are counted without them. Raises ``ModelError``."""
    section = config.get("text_config")
    text = section if isinstance(section, dict) else config
    if text.get("model_type") not in ("mllama", "mllama_text_model"):
        return []
    layers = text.get("cross_attention_layers")
    if layers is None:
        return sorted(_USUAL_IMAGE_LAYERS)
    if not isinstance(layers, list | tuple) or not all(isinstance(layer, int) for layer in layers):
        raise ModelError(f"config.json has cross_attention_layers = {layers!r}, no list of layers; download it again")
    return sorted(layers)


def number_layers(plain_name: Callable[[str], str | None], dropped: Sequence[int]) -> Callable[[str], str | None]:
    """Return the function that maps names as ``plain_name`` does, without the layers that are dropped."""

    def renumbered(name: str) -> str | None:
        plain = plain_name(name)
        match = None if plain is None else _LAYER.fullmatch(plain)
        if match is None:
            return plain
        layer = int(match["layer"])
        if layer in dropped:
            return None
        return f"model.layers.{layer - bisect.bisect(dropped, layer)}.{match['rest']}"

    return renumbered if dropped else plain_name
