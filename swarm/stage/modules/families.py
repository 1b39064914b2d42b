"""Modules of our own in the place of the model's, where what these compute is known.

Few rows take little longer to compute than to call. So matrices with a common input become one, activations move into
the products before them, norms waste no copies, and a layer's experts are multiplied in one call. What is not
recognised keeps the model's own code around products of ours.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

from swarm.stage import native
from swarm.stage.modules import experts
from swarm.stage.modules.heads import attention_of
from swarm.stage.modules.mlps import activation_of, mlp_of, nothing_of
from swarm.stage.modules.norms import norm_of
from swarm.stage.modules.recognition import same_code
from swarm.stage.native.linears import NativeLinear, Own

_SOFTCAP = "swarm_softcap"  # what the head's matrix remembers: the soft cap of its logits


def _head_of(part: Any, read: native.Read) -> Own | None:
    limit = getattr(part, _SOFTCAP, None)
    if limit is None or type(part) is not nn.Linear:
        return None
    bias = None if part.bias is None else read("bias", part.bias)
    return NativeLinear(read("weight", part.weight), bias, ("softcap", ""), limit)


_RULES = (norm_of, activation_of, nothing_of, attention_of, mlp_of, experts.mixture_of, experts.experts_of, _head_of)


def fill(model: nn.Module, name: str, read: native.Read) -> None:
    """Put modules of ours, with their weights, in the place of those under ``name`` that are known."""
    part = model.get_submodule(name)
    for rule in _RULES:
        made = rule(part, native.under(name, read))
        if made is not None:
            model.set_submodule(name, made)
            return
    for leaf, _ in list(part.named_children()):
        fill(model, f"{name}.{leaf}", read)


def take_softcap(model: Any) -> None:
    """Let the head's product cap the logits, as the model's forward would have done after it."""
    limit = getattr(model.config, "final_logit_softcapping", None)
    if limit is not None and any(same_code(model, known) for known in (Gemma2ForCausalLM, Gemma3ForCausalLM)):
        setattr(model.get_output_embeddings(), _SOFTCAP, float(limit))
        model.config = copy.copy(model.config)
        model.config.final_logit_softcapping = None
