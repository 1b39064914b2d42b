"""Text tower of a multimodal model: which tensors of its checkpoint belong to it. Does not import torch.

A model that also reads images or sound is served for text: its text tower is loaded like a plain causal model, under
the names that the tensors of such a model have. The other towers are neither fetched nor read. Two generations of
checkpoints put the tower in different places (``language_model.model.layers``, ``model.language_model.layers``), and a
few, such as Qwen2-VL's, beside the other towers (``model.layers``, ``visual``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Appended to the architecture of a model whose other towers are not loaded.
TEXT_ONLY = " (text only)"
# For users of such a model.
TEXT_ONLY_NOTE = "text only: its parts for images or audio are not loaded"

_SECTIONS = ("text_config", "vision_config", "audio_config", "thinker_config")
_NESTED = re.compile(r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model|llm)\.(?:model\.)?(?P<rest>.+)")
_FLAT = re.compile(r"(?:thinker\.)?(?P<name>model\.(?!embed_tokens_extend\.).+)")  # that one: towers of Phi 4
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
