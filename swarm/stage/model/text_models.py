"""Causal models over the text towers of multimodal models.

transformers has a causal class for most text towers, such as Mistral's. For the others, which it only builds inside of
a whole multimodal model, a class of the tower and a linear head is made here.
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GraniteForCausalLM, LlamaForCausalLM, PreTrainedModel

from swarm.errors import ModelError
from swarm.stage.model.text_tower import CAUSAL_TOWERS, HEADLESS_TOWERS, image_layers

# Text towers whose logits are scaled, as by this class.
_SCALED = {"granite_docling_text": GraniteForCausalLM}
_REFUSED = {
    "moshi": "continues speech and text together",  # its checkpoints have parts that no text model has
    "paligemma": "attends to later tokens of a prompt",
}


def text_config_of(config: Any) -> Any:
    """Return the configuration of a model's text tower: its own for a model of text only.

    Raises ``ModelError`` if the tower can't be served alone.
    """
    if config.model_type in _REFUSED:
        raise ModelError(f"{type(config).__name__}: it {_REFUSED[config.model_type]}, so it can't be served")
    text = _without_image_layers(config.get_text_config())
    if config.get_text_config() is config:
        return text
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise ModelError(f"{type(config).__name__}: a decoder that reads from an encoder can't be served")
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    return text


def _without_image_layers(text: Any) -> Any:
    """Return the configuration without the layers that attend to images, which do nothing in a text."""
    layers = image_layers(text.to_dict())
    if not layers:
        return text
    text = copy.deepcopy(text)
    text.num_hidden_layers -= len(layers)
    text.cross_attention_layers = []
    return text


def register(config: Any) -> None:
    """Let transformers build a causal model over this text tower, if it has no class for that."""
    kind, tower, causal = type(config), HEADLESS_TOWERS.get(config.model_type), CAUSAL_TOWERS.get(config.model_type)
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
            "forward": _SCALED.get(kind.model_type, LlamaForCausalLM).forward,
            "base_model_prefix": "model",
            "config_class": kind,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        },
    )
