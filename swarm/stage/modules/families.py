"""Insertion of our own modules in place of a model's, where the computation is recognised.

With few rows, computing takes little longer than calling. Matrices with a common input therefore become one,
activations move into the products before them, norms make no copies, and a layer's experts are multiplied in one call.
A module that is not recognised keeps the model's own code, around products of ours.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

from swarm.stage.modules import experts
from swarm.stage.modules.attention import replace_attention
from swarm.stage.modules.embeddings import replace_embedding
from swarm.stage.modules.mlps import load_linear, replace_activation, replace_dropout, replace_mlp
from swarm.stage.modules.norms import replace_norm
from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import same_code
from swarm.stage.native.linears import NativeModule

_SOFTCAP = "swarm_softcap"  # attribute of the head's matrix: the soft cap of its logits


def _replace_head(part: Any, read: WeightReader) -> NativeModule | None:
    limit = getattr(part, _SOFTCAP, None)
    if limit is None or type(part) is not nn.Linear:
        return None
    return load_linear(part, read, ("softcap", ""), limit)


# The first rule that returns a module wins.
_RULES = (
    replace_norm,
    replace_activation,
    replace_dropout,
    replace_attention,
    replace_mlp,
    experts.replace_mixture,
    experts.replace_experts,
    replace_embedding,
    _replace_head,
)


def replace_modules(model: nn.Module, name: str, read: WeightReader) -> None:
    """Replace the known modules under ``name`` by ours, with their weights, which ``read`` reads."""
    part = model.get_submodule(name)
    for rule in _RULES:
        replacement = rule(part, read)
        if replacement is not None:
            model.set_submodule(name, replacement)
            return
    for leaf, _ in list(part.named_children()):
        replace_modules(model, f"{name}.{leaf}", read.under(leaf))


def move_softcap(model: Any) -> None:
    """Move the soft cap of the logits from the model's forward into the head's product."""
    limit = getattr(model.config, "final_logit_softcapping", None)
    if limit is not None and any(same_code(model, known) for known in (Gemma2ForCausalLM, Gemma3ForCausalLM)):
        setattr(model.get_output_embeddings(), _SOFTCAP, float(limit))
        model.config = copy.copy(model.config)
        vars(model.config)["final_logit_softcapping"] = None  # a strict class takes no None
