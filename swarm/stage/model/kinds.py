"""Kinds of models that are refused by ``config.json`` alone, before anything is imported or started. No torch here.

The load check decides what is served: it computes a tiny model. Importing torch and transformers for it takes seconds,
so what it finds out about a whole kind is noted here. ``tools/families.py`` compares these notes with the load check.
"""

from __future__ import annotations

import ast
import runpy
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm.errors import UnservedModel
from swarm.stage.model.folder_files import read_json
from swarm.stage.model.text_tower import CAUSAL_TOWERS, HEADLESS_TOWERS
from swarm.stage.quantization.search import read_quantization

_ENCODER = "an encoder, which doesn't continue a text"
_BOTH = "an encoder with a decoder; only decoders alone are served"

# Kinds, by what they are or have.
REFUSED = {
    _ENCODER: (
        *("albert", "big_bird", "convbert", "deberta", "deberta-v2", "distilbert", "esm", "eurobert", "funnel"),
        *("ibert", "longformer", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer"),
        *("roc_bert", "roformer", "squeezebert", "xlm", "xlnet", "xmod", "yoso"),
        *("clip", "siglip", "siglip2", "vit", "dinov2", "dinov3_vit", "hubert", "wav2vec2"),
    ),
    _BOTH: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "longt5", "m2m_100", "marian", "mbart"),
        *("moonshine", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
        *(
            "speech_to_text",
            "t5",
            "t5gemma",
            "t5gemma2",
            "trocr",
            "umt5",
            "whisper",
            "florence2",
            "musicgen",
            "musicgen_melody",
        ),
    ),
    "attention to compressed positions, which is not supported": ("deepseek_v4",),
    "attention with an index of positions, which is not supported": ("qwen4_exp", "qwen4_exp_text"),
    "attention with scores that depend on the query and the distance, which is not supported": (
        *("inkling2_text", "inkling_text"),
    ),
    "attention by hashes, or with biases between segments, which is not supported": ("cpmant", "reformer"),
    "a text about an image, which it can't do without": ("git",),
    "patches of bytes, whose lengths another model decides": ("blt",),
    "layers that run several times for each token": ("hrm_text",),
    "speech and text together": ("moshi",),
    "a draft model, which reads another model's layers": ("gemma4_assistant", "gemma4_unified_assistant"),
}
# Encoders that continue a text if their configuration has ``is_decoder``.
CAN_DECODE = frozenset(
    {
        *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    }
)
_USUAL_LABELS = 2  # of a classifier whose configuration states none
# Kinds that are others under names of their own.
SAME_AS = {"kimi_k2": "deepseek_v3"}
# Values of ``use_bidirectional_attention`` that let tokens of a text see only earlier ones.
ONE_WAY = (None, False, "vision")
# Settings that a kind is refused with.
_REFUSED_SETTINGS = {"doge": {"is_moe": "experts that are chosen by other tokens' scores, too"}}
# Tables of transformers: models with a head over the vocabulary, and those that also read images or sound.
_TABLES = frozenset(f"MODEL_FOR_{what}_MAPPING_NAMES" for what in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"))
_REASONS = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds}


def check_folder(folder: Path) -> None:
    """Raise ``ModelError`` if the folder's configuration alone says that the model can't be served."""
    config, adapter = folder / "config.json", folder / "adapter_config.json"
    if config.is_file():
        settings = read_settings(folder)
        check_kind(folder, settings)
        read_quantization(folder, settings, read_json)
    elif adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        raise UnservedModel(
            f"{folder} is an adapter (peft) of {base}, and no model; name the base model, and this folder by "
            "--adapter NAME=DIR"
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``, with a kind that transformers has. Raises ``ModelError``."""
    return rename_kind(read_json(folder / "config.json", "a model folder needs it"))


def rename_kind(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration; if its kind is another one under a name of its own, under the name of that kind."""
    kind = config.get("model_type")
    return config | {"model_type": SAME_AS[kind]} if isinstance(kind, str) and kind in SAME_AS else config


def check_kind(folder: Path, config: dict[str, Any]) -> None:
    """Raise ``UnservedModel`` if models of the configuration's kind can't be served."""
    kind = rename_kind(config).get("model_type")
    if not isinstance(kind, str):
        return
    reason = _find_reason(kind, config)
    if reason is not None:
        raise UnservedModel(f"{folder}: models of kind {kind} can't be served: {reason}")
    num_labels = _count_labels(config)
    if num_labels > 1:
        raise UnservedModel(
            f"{folder}: classifiers with {num_labels} labels can't be served; one with a single label serves /v1/rerank"
        )
    known = _known_kinds()
    if not known or kind in known:
        return
    if "auto_map" in config:
        raise UnservedModel(
            f"{folder}: transformers doesn't support this model, which brings Python code of its own (auto_map in "
            "config.json); Swarm never runs a model's code: use a model of a family that transformers has"
        )
    raise UnservedModel(f"{folder}: transformers {version('transformers')} has no models of kind {kind}")


def is_classifier(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def _count_labels(config: dict[str, Any]) -> int:
    """Return the number of a classifier's labels, as transformers reads it; 0 for other models."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not is_classifier(str(names[0])):
        return 0
    sections = [section for section in (config.get("text_config"), config) if isinstance(section, dict)]
    for labels in (section.get("id2label") for section in sections):
        if isinstance(labels, dict):
            return len(labels)
    numbers = [section.get("num_labels") for section in sections]
    return next((number for number in numbers if isinstance(number, int)), _USUAL_LABELS)


def _find_reason(kind: str, config: dict[str, Any]) -> str | None:
    """Return why models of a kind of transformers' can't be served; None if nothing is known about it."""
    if kind in _REASONS:
        return _REASONS[kind]
    if config.get("is_encoder_decoder") is True:
        return _BOTH
    for setting, reason in _REFUSED_SETTINGS.get(kind, {}).items():
        if config.get(setting) is True:
            return reason
    section = config.get("text_config")
    text = section if isinstance(section, dict) else config
    if text.get("use_bidirectional_attention") not in ONE_WAY:
        return "attention to later tokens"
    kinds = _text_kinds()
    if kinds and kind in _known_kinds() - kinds and text.get("model_type") not in kinds:
        return "transformers has no model of this kind that continues a text"
    return _encodes(kind, config)


def _encodes(kind: str, config: dict[str, Any]) -> str | None:
    """Return the reason to refuse an encoder that could decode, but does not by its configuration."""
    if kind not in CAN_DECODE or (config.get("is_decoder") is True and not config.get("add_cross_attention")):
        return None
    return _ENCODER if config.get("is_decoder") is not True else _BOTH


def _transformers_file(name: str) -> Path | None:
    """Return a file of the installed transformers; None if it has no such file."""
    package = find_spec("transformers")
    file = package and package.origin and Path(package.origin).parent / name
    return file if file and file.is_file() else None


@cache
def _known_kinds() -> frozenset[str]:
    """Return the kinds that the installed transformers has; empty if it does not list them in a file of its own."""
    file = _transformers_file("models/auto/auto_mappings.py")
    return frozenset(runpy.run_path(str(file))["CONFIG_MAPPING_NAMES"]) if file else frozenset()


@cache
def _text_kinds() -> frozenset[str]:
    """Return the kinds that continue a text, alone or with images and sound; empty if transformers does not list them.

    The file is parsed instead of run: it imports torch.
    """
    file = _transformers_file("models/auto/modeling_auto.py")
    tables = [
        statement.value
        for statement in (ast.parse(file.read_text("utf-8")).body if file else ())
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in _TABLES
    ]
    if len(tables) != len(_TABLES):
        return frozenset()
    pairs = [node.elts for table in tables for node in ast.walk(table) if isinstance(node, ast.Tuple)]
    names = {pair[0].value for pair in pairs if pair and isinstance(pair[0], ast.Constant)}
    return frozenset(name for name in names if isinstance(name, str)) | HEADLESS_TOWERS.keys() | CAUSAL_TOWERS.keys()
