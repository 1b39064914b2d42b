"""Causal models over the text towers of multimodal models.

transformers has a causal class for most text towers, such as Mistral's. For the others, which it only builds inside of
a whole multimodal model, a class of the tower and a linear head is made here.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from swarm.errors import ModelError

# Classes of text towers under a plain linear head, by the kind of their configuration.
_TOWERS = {
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
_CAUSAL = {"emu3_text_model": "Emu3ForCausalLM"}
_REFUSED = {"paligemma": "attends to later tokens of a prompt"}


def text_config_of(config: Any) -> Any:
    """Return the configuration of a model's text tower: its own for a model of text only.

    Raises ``ModelError`` if the tower can't be served alone.
    """
    text = config.get_text_config()
    if text is config:
        return config
    if config.model_type in _REFUSED:
        raise ModelError(f"{type(config).__name__}: it {_REFUSED[config.model_type]}, so it can't be served")
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise ModelError(f"{type(config).__name__}: a decoder that reads from an encoder can't be served")
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def register(config: Any) -> None:
    """Let transformers build a causal model over this text tower, if it has no class for that."""
    kind, tower, causal = type(config), _TOWERS.get(config.model_type), _CAUSAL.get(config.model_type)
    if (tower or causal) and kind not in AutoModelForCausalLM._model_mapping:
        made = getattr(transformers, causal) if causal else _make_class(kind, getattr(transformers, str(tower)))
        AutoModelForCausalLM.register(kind, made, exist_ok=True)


def _make_class(kind: type[Any], tower: type[Any]) -> type[Any]:
    family: Any = next(part for part in tower.__mro__[1:] if issubclass(part, PreTrainedModel))

    def build(self: Any, config: Any) -> None:
        family.__init__(self, config)
        self.model = tower(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    return type(
        kind.__name__.removesuffix("Config") + "ForCausalLM",
        (family,),
        {
            "__init__": build,
            "forward": LlamaForCausalLM.forward,
            "base_model_prefix": "model",
            "config_class": kind,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        },
    )
