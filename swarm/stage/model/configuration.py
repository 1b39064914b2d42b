"""A model's ``config.json``, read as transformers reads it and checked for features that a stage can serve.

Python code in a model's folder never runs: transformers' own classes build the model, or it is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from swarm.errors import ModelError, shorten
from swarm.stage.model.folder_files import read_json
from swarm.stage.model.kinds import CAN_DECODE, ONE_WAY, rename_kind
from swarm.stage.model.text_models import text_config_of

# Layers of a type that none of our modules computes show in the comparison of cut and whole models.
_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "indexed_attention",
        "sliding_attention",
        "chunked_attention",
        "attention",
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "mlp",
        "moe",
    }
)

# What transformers' classes raise for settings that they can't use, such as a model without heads.
ERRORS_OF_SETTINGS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, ImportError),
    *(RuntimeError, StrictDataclassError),  # those of tensors' shapes; of types
)


def read_config(folder: Path) -> Any:
    """Read ``config.json`` as transformers does; of a multimodal model, return the text tower's configuration. Raises
    ``ModelError``.

    Without ``trust_remote_code=False``, transformers asks at the terminal whether to run the folder's own Python.
    """
    return text_config_of(read_whole_config(folder))


def read_whole_config(folder: Path) -> Any:
    """Read ``config.json`` as transformers does, with all towers of a multimodal model. Raises ``ModelError``."""
    settings = read_json(folder / "config.json", "a model folder needs it")
    renamed = rename_kind(settings)
    try:
        if renamed is not settings:  # transformers would ask for the folder's code
            return AutoConfig.for_model(**renamed)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ERRORS_OF_SETTINGS as error:
        raise ModelError(f"{folder}: transformers doesn't support this model ({shorten(error)})") from None
    return config


def check_config(config: Any) -> Any:
    """Reject a configuration that the attention function or the batching would silently compute incorrectly; return a
    copy, of a multimodal model that of the text tower."""
    try:
        return _check_config(config)
    except ERRORS_OF_SETTINGS as error:
        raise ModelError(
            f"{type(config).__name__}: config.json has settings that can't be used ({type(error).__name__}: "
            f"{shorten(error)})"
        ) from None


def _check_config(config: Any) -> Any:
    config = text = text_config_of(config)
    name = type(config).__name__
    layer_types = set(getattr(text, "layer_types", None) or ())
    unknown = layer_types - _LAYER_TYPES
    if unknown:
        raise ModelError(f"{name}: layers of type {', '.join(sorted(unknown))} keep a state that is not supported")
    if getattr(text, "use_bidirectional_attention", None) not in ONE_WAY:
        raise ModelError(f"{name}: attention to later tokens can't be served")
    if text.model_type in CAN_DECODE and (not text.is_decoder or text.add_cross_attention):
        raise ModelError(f"{name}: without is_decoder, or with add_cross_attention, it doesn't continue a text alone")
    config = fix_rope(config)
    config.use_cache = False
    return config


def fix_rope(config: Any) -> Any:
    """Return a copy whose rotary tables do not depend on the length of what is computed.

    ``longrope`` has factors for sequences up to the original context, and others for longer ones. transformers takes
    one or the other by the longest sequence of a batch, and begins anew when a sequence outgrows the original context.
    Here, all sequences take the long factors if the model's context is longer than the original one. ``dynamic``
    stretches positions of sequences that are longer than the model's context, which are not served; with Hunyuan's
    ``alpha``, it stretches all by the same factor.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for table in (rope, *rope.values()):
        if not isinstance(table, dict):
            continue
        if table.get("rope_type") == "dynamic" and not table.get("alpha"):
            table["rope_type"] = "default"
        elif table.get("rope_type") == "longrope":
            original = table.get("original_max_position_embeddings") or text.max_position_embeddings
            kept, other = ("long", "short") if text.max_position_embeddings > original else ("short", "long")
            table[f"{other}_factor"] = table[f"{kept}_factor"]
    return config
