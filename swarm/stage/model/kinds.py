"""Kinds of models that are refused by ``config.json`` alone, before anything is imported or started. No torch here.

The load check decides what is served: it computes a tiny model. Importing torch and transformers for it takes seconds,
so what it finds out about a whole kind is noted here. ``tools/families.py`` compares these notes with the load check.
"""

from __future__ import annotations

import runpy
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.stage.model.folder_files import read_json
from swarm.stage.quantization.search import read_quantization

_ENCODER = "an encoder, which doesn't continue a text"
_BOTH = "an encoder with a decoder; only decoders alone are served"

# Kinds, by what they are or have.
REFUSED = {
    _ENCODER: (
        *("albert", "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
        *("deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert", "funnel", "ibert", "longformer"),
        *("megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert"),
        *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl"),
        *("xmod", "yoso", "clip", "siglip", "siglip2", "vit", "dinov2", "dinov3_vit", "hubert", "wav2vec2"),
    ),
    _BOTH: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "longt5", "m2m_100", "marian", "mbart"),
        *("moonshine", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
        *("speech_to_text", "t5", "t5gemma", "trocr", "umt5", "whisper", "florence2", "musicgen", "musicgen_melody"),
    ),
    "layers with a state between positions that is not supported": (
        *("bailing_hybrid", "inkling2_text", "inkling_text", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma"),
        *("rwkv", "xlstm", "zamba", "zamba2", "zaya"),
    ),
    "attention with an index of positions, which is not supported": (
        *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    ),
    "attention in transformers that can't be replaced": ("cpmant", "ctrl", "git", "reformer", "xlm", "xlnet"),
    "attention that is not supported": ("diffllama", "doge"),
    "layers that need more than the layer before them": ("blt", "hrm_text", "longcat_flash"),
    "a draft model, which reads another model's layers": ("gemma4_assistant", "gemma4_unified_assistant"),
}
_REASONS = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds}


def check_folder(folder: Path) -> None:
    """Raise ``ModelError`` if the folder's configuration alone says that the model can't be served."""
    config, adapter = folder / "config.json", folder / "adapter_config.json"
    if config.is_file():
        settings = read_json(config)
        check_kind(folder, settings)
        read_quantization(folder, settings, read_json)
    elif adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        raise ModelError(f"{folder} is an adapter (peft) of {base}, and no model; name the base model")


def check_kind(folder: Path, config: dict[str, Any]) -> None:
    """Raise ``ModelError`` if models of the configuration's kind can't be served."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return
    reason = _REASONS.get(kind) or (_BOTH if config.get("is_encoder_decoder") is True else None)
    if reason is not None:
        raise ModelError(f"{folder}: models of kind {kind} can't be served: {reason}")
    known = _known_kinds()
    if not known or kind in known:
        return
    if "auto_map" in config:
        raise ModelError(
            f"{folder}: transformers doesn't support this model, which brings Python code of its own (auto_map in "
            "config.json); Swarm never runs a model's code: use a model of a family that transformers has"
        )
    raise ModelError(f"{folder}: transformers {version('transformers')} has no models of kind {kind}")


@cache
def _known_kinds() -> frozenset[str]:
    """Return the kinds that the installed transformers has; empty if it does not list them in a file of its own."""
    package = find_spec("transformers")
    file = package and package.origin and Path(package.origin).parent / "models/auto/auto_mappings.py"
    return frozenset(runpy.run_path(str(file))["CONFIG_MAPPING_NAMES"]) if file and file.is_file() else frozenset()
