"""Sizes of a model by its ``config.json``: what a manifest needs, whatever the weights are. No torch here, unless a
configuration leaves settings out that only transformers knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.stage.model.kinds import read_settings
from swarm.stage.model.sizes import count_latents, find_head_sizes, find_key_heads
from swarm.stage.model.text_tower import image_layers, is_multimodal
from swarm.wire.messages.common import MAX_LAYERS

MAX_SIZE = (1 << 31) - 1  # upper bound of every size in a configuration
_MAX_HEADS = 1 << 20  # upper bound of the number of heads, and of a head's size
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HEAD_SIZES = ("head_dim", "attention_head_dim", "kv_channels")
_WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")  # kinds with states between positions alone
# Of kinds whose configurations may state none. Those without attention have no limit of their own.
_USUAL_CONTEXT = {"bloom": 2048, "falcon": 2048, "recurrent_gemma": 8192} | dict.fromkeys(_WITHOUT_ATTENTION, 131072)

# Settings that describe a text tower; where all are present, transformers need not be asked.
_TEXT_SETTINGS = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
}

# Kinds of text towers whose stages pass on more than hidden states (``layer_inputs``), and the settings that decide it.
WIDE_KINDS = {"gemma3n_text", "gemma4_text", "gemma4_unified_text"}
_WIDE_SETTINGS = {"layer_types", "num_kv_shared_layers", "hidden_size_per_layer_input"}
# Kinds of text towers with an index of positions, in some layers or shared by several.
INDEXED_KINDS = {"dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"}
_PAD_POSITIONS = {  # kinds whose first positions stand for padding
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
}
# All of these, and others whose sizes depend on settings that files leave out.
_KINDS_WITH_DEFAULTS = {
    *(WIDE_KINDS | INDEXED_KINDS | _PAD_POSITIONS),
    *("jetmoe", "mimo_v2_flash", "mllama_text_model", "zamba", "zamba2", "recurrent_gemma", "zaya"),
}


class ModelSettings:
    """Settings of a model folder: those of ``config.json`` (``config``), and of its text tower (``text_config``).

    Raises ``ModelError`` with the file and the problem.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_settings(folder)
        self.is_multimodal = is_multimodal(self.config)
        has_defaults = self.config.get("model_type") in _KINDS_WITH_DEFAULTS
        self.text_config = _read_text_config(folder, self.config) if self.is_multimodal or has_defaults else self.config

    def check_sizes(self) -> None:
        """Raise ``ModelError`` for a size that a manifest needs and the configuration lacks."""
        for name in ("architecture", "num_layers", "hidden_size", "vocab_size", "context", "kv_numbers"):
            getattr(self, name)

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or [self.config.get("model_type")]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ModelError(f"{self.folder / 'config.json'} names no architecture; is this a language model's folder?")
        return names[0]

    @property
    def num_layers(self) -> int:
        kinds = self.text_config.get("layers_block_type")
        if isinstance(kinds, list) and 0 < len(kinds) <= MAX_LAYERS:
            return len(kinds)  # Nemotron-H: transformers stores no number
        if self.text_config.get("model_type") == "longcat_flash":
            return self._positive_setting("num_layers", most=MAX_LAYERS)  # transformers counts each twice
        return self._positive_setting("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS)

    @property
    def hidden_size(self) -> int:
        return self._positive_setting("hidden_size", "n_embd", "n_embed", "d_model")

    @property
    def vocab_size(self) -> int:
        return self._positive_setting("vocab_size")

    @property
    def context(self) -> int:
        names = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "model_max_length")
        usual = _USUAL_CONTEXT.get(str(self.text_config.get("model_type")))
        if usual is not None and not any(name in self.text_config for name in names):
            return usual
        most = self._positive_setting(*names)
        if self.text_config.get("model_type") in _PAD_POSITIONS:
            most -= int(self.text_config["pad_token_id"]) + 1
        return most

    @property
    def _has_attention(self) -> bool:
        """Whether the configuration has heads of attention. Models of states alone are counted as one small head."""
        return self.text_config.get("model_type") not in _WITHOUT_ATTENTION

    @property
    def num_kv_heads(self) -> int:
        if not self._has_attention:
            return 1
        stated = find_key_heads(self.text_config.get)
        if type(stated) is int and 0 < stated <= _MAX_HEADS:
            return stated
        return self._positive_setting(*_HEAD_COUNTS, most=_MAX_HEADS)

    @property
    def head_size(self) -> int:
        if any(isinstance(self.text_config.get(name), int) for name in _HEAD_SIZES):
            return self._positive_setting(*_HEAD_SIZES, most=_MAX_HEADS)
        if not self._has_attention:
            return 1
        return self.hidden_size // self._positive_setting(*_HEAD_COUNTS)

    @property
    def kv_numbers(self) -> int:
        """Numbers that a layer stores of one position: of its keys and values, or one latent with a rotated key."""
        if self.text_config.get("kv_lora_rank") is not None:
            latent = self._positive_setting("kv_lora_rank") + self._positive_setting("qk_rope_head_dim")
            return latent * count_latents(self.text_config.get)
        return self.num_kv_heads * sum(find_head_sizes(self.text_config.get, self.head_size))

    def _positive_setting(self, *names: str, most: int = MAX_SIZE) -> int:
        """Return the first of these settings that the configuration has, as a positive integer."""
        for name in names:
            value = self.text_config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
                return value
        raise ModelError(f"{self.folder / 'config.json'} has no usable {names[0]}; is this a language model's folder?")


def _read_text_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a multimodal model's text tower. Raises ``ModelError``.

    Files leave out settings that equal transformers' defaults, which only transformers knows.
    """
    section = config.get("text_config")
    needed = _TEXT_SETTINGS
    if isinstance(section, dict) and section.get("model_type") in WIDE_KINDS:
        needed = needed | _WIDE_SETTINGS
    if isinstance(section, dict) and section.keys() >= needed and not image_layers(config):
        return section
    from swarm.stage.model.configuration import read_config  # noqa: PLC0415 (imports torch)

    settings: dict[str, Any] = read_config(folder).to_dict()
    return settings
