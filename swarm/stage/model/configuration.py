"""A model's ``config.json``, read as transformers reads it and checked for features that a stage can serve.

Python code in a model's folder never runs: transformers' own classes build the model, or it is refused.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from swarm.errors import ModelError
from swarm.stage.model.text_models import text_config_of


def read_config(folder: Path) -> Any:
    """Read ``config.json`` as transformers does; of a multimodal model, return the text tower's configuration. Raises
    ``ModelError``.

    Without ``trust_remote_code=False``, transformers asks at the terminal whether to run the folder's own Python.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if _has_own_code(folder):
            raise ModelError(
                f"{folder}: transformers doesn't support this model, which brings Python code of its own (auto_map in "
                "config.json); Swarm never runs a model's code: use a model of a family that transformers has"
            ) from None
        raise ModelError(
            f"{folder}: transformers doesn't support this model ({' '.join(str(error).split())[:200]})"
        ) from None
    return text_config_of(config)


def _has_own_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def check_config(config: Any) -> Any:
    """Reject a configuration that the attention function or the batching would silently compute incorrectly; return a
    copy, of a multimodal model that of the text tower."""
    config = text = text_config_of(config)
    name = type(config).__name__
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {each.get("rope_type") for each in rope.values() if isinstance(each, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ModelError(f"{name}: rotary positions that depend on the whole batch's length can't be served")
    layer_types = set(getattr(text, "layer_types", None) or ())
    unknown = layer_types - {"full_attention", "sliding_attention", "attention"}
    if unknown:
        raise ModelError(f"{name}: layers of type {', '.join(sorted(unknown))} keep a state that is not supported")
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelError(f"{name}: attention to later tokens can't be served")
    config = copy.deepcopy(config)
    config.use_cache = False
    return config
