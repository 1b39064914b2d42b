#!/usr/bin/env python3
"""Run the load check for kinds of models, and print the table of families in docs/reference/models.md.

python tools/families.py            every causal kind of transformers, each in a process of its own; some minutes
python tools/families.py KIND…      these kinds only, with the reason of each refusal

A kind stands for a model with the settings that its class has by default, or with those of a real model in ``CONFIGS``
where the class has none that work. Exits with 1 if the notes in swarm/stage/model/kinds.py say otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarm.errors import ModelError
from swarm.stage.engine.selfcheck import check_cut, check_kernels
from swarm.stage.model.kinds import CAN_DECODE, REFUSED

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA4 = {
    **{"hidden_size": 1536, "num_key_value_heads": 1, "num_hidden_layers": 35, "num_kv_shared_layers": 20},
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "use_double_wide_mlp": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "num_hidden_layers": 32,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "rope_parameters": {"full_attention": None, "sliding_attention": _ROPE},
    },
    "dbrx": {
        **{"d_model": 6144, "n_heads": 48, "n_layers": 40},
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {
        **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27},
        **{"kv_lora_rank": 512, "q_lora_rank": None, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        **{"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gemma4": {"text_config": {"model_type": "gemma4_text", **_GEMMA4}},
    "gemma4_text": _GEMMA4,
    "granite_swa": {"attention_multiplier": 1 / 64, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "granitemoehybrid": {
        **{"num_hidden_layers": 40, "layer_types": [*["linear_attention"] * 9, "full_attention"] * 4},
        **{"hidden_size": 4096, "mamba_n_heads": 128},
    },
    "hunyuan_v1_dense": {"head_dim": 128, "rope_parameters": _ROPE},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "rope_parameters": _ROPE},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": ["conv", "conv", "full_attention", "conv"] * 6},
    "zamba2": {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "n_mamba_heads": 80},
    "ministral": {"hidden_size": 4096, "head_dim": 128, "num_key_value_heads": 8, "rope_parameters": _ROPE},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
}
CONFIGS |= {kind: {"is_decoder": True} for kind in CAN_DECODE}
_LIMIT_S = 120  # of one kind's check


def real_config(kind: str) -> Any:
    """Return the configuration of a model of this kind, as large as real ones."""
    return AutoConfig.for_model(kind, **CONFIGS.get(kind, {}))


def check(kind: str) -> str:
    """Return why the load check refuses models of this kind, in float32 or bfloat16; "" if it accepts them."""
    try:
        config = real_config(kind)
        check_cut(config)
        check_kernels(config, "bfloat16")
    except (ModelError, StrictDataclassError, AssertionError, ValueError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def check_alone(kind: str) -> str:
    """Do the same in a process of its own: a kind may take too long, or break another's imports."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_S)
        os.close(reads)
        os.write(writes, json.dumps(check(kind)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return str(json.loads(result)) if result else f"the check took more than {_LIMIT_S} s, or ended its process"


def render(served: list[str], refused: list[str]) -> str:
    """Return the rows of the table: the kinds that are served, and the others by their reason."""
    reasons = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds}
    rows = [("served", served)]
    for reason in (*REFUSED, "not served for text yet"):
        rows.append((reason, [kind for kind in refused if reasons.get(kind, "not served for text yet") == reason]))
    return "\n".join(f"| {what} | {', '.join(f'`{kind}`' for kind in kinds)} |" for what, kinds in rows if kinds)


def causal_kinds() -> list[str]:
    """Return the kinds that transformers has with a head over the vocabulary."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main() -> int:
    named = sys.argv[1:]
    reasons = {kind: check_alone(kind) for kind in named or causal_kinds()}
    served, refused = ([kind for kind, reason in reasons.items() if bool(reason) is not_] for not_ in (False, True))
    for kind in refused if named else ():
        print(f"{kind}: {reasons[kind]}", file=sys.stderr)
    print(render(served, refused))
    noted = {kind for kinds in REFUSED.values() for kind in kinds}
    for kind in sorted(noted & set(served)):
        print(f"{kind} is served: take it out of swarm/stage/model/kinds.py", file=sys.stderr)
    return 1 if noted & set(served) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
