"""Names of tensors in GGUF files, translated to those of transformers' modules. Does not import torch.

llama.cpp's converter changes some tensors, by architecture: it orders the rows of queries and keys by pairs instead of
halves, stores a norm's weight plus one, and splits the experts' joined matrix.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.gguf_formats import FORMATS, PLAIN, check_type
from swarm.stage.quantization.stored import StoredWeight


class Change(enum.Enum):
    """What has to be undone."""

    NONE = "none"
    QUERY_ROWS = "pairs of query rows"  # each head's rows in the order 0, n/2, 1, n/2 + 1, …
    KEY_ROWS = "pairs of key rows"
    PLUS_ONE = "plus one"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file under the model's name for it, and what has to be undone to make it the model's."""

    stored: StoredTensor
    change: Change = Change.NONE


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one architecture's tensors. ``layer`` maps the middle of ``blk.N.….weight`` to a module of the layer."""

    layer: Mapping[str, str]
    has_pairs: bool = False  # rows of queries and keys are ordered by pairs
    has_shifted_norms: bool = False  # norms are stored plus one
    ignored: frozenset[str] = frozenset()  # tensors whose contents the configuration has


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_ROPE = frozenset({"rope_freqs.weight"})

# By model type of transformers.
NAMES: dict[str, Names] = {
    "llama": Names(_ATTENTION | _GATED | _PRE_NORMS, has_pairs=True, ignored=_ROPE),
    "mistral": Names(_ATTENTION | _GATED | _PRE_NORMS, has_pairs=True, ignored=_ROPE),
    "mixtral": Names(_ATTENTION | _EXPERTS | _PRE_NORMS | {"ffn_gate_inp": "mlp.gate"}, has_pairs=True),
    "qwen2": Names(_ATTENTION | _GATED | _PRE_NORMS),
    "qwen3": Names(_ATTENTION | _HEAD_NORMS | _GATED | _PRE_NORMS),
    "qwen3_moe": Names(_ATTENTION | _HEAD_NORMS | _EXPERTS | _PRE_NORMS | {"ffn_gate_inp": "mlp.gate"}),
    "gemma": Names(_ATTENTION | _GATED | _PRE_NORMS, has_shifted_norms=True),
    "gemma2": Names(_ATTENTION | _GATED | _GEMMA_NORMS, has_shifted_norms=True),
    "gemma3_text": Names(_ATTENTION | _HEAD_NORMS | _GATED | _GEMMA_NORMS, has_shifted_norms=True),
    "phi3": Names(
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
        | _PRE_NORMS
    ),
    "gpt_oss": Names(
        _ATTENTION
        | _EXPERTS
        | {
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    "granite": Names(_ATTENTION | _GATED | _PRE_NORMS, has_pairs=True),
    "olmo2": Names(
        _ATTENTION
        | _HEAD_NORMS
        | _GATED
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "starcoder2": Names(_ATTENTION | _PRE_NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<middle>[\w.]+)\.(?P<leaf>weight|bias)")


def translate_names(model: GgufModel, model_type: str, num_layers: int) -> dict[str, GgufTensor]:
    """Return the tensors by the names that transformers' modules have. The experts' gate and up projections keep names
    of their own.

    Raises ``ModelError`` for a tensor that is not known: the model would be computed without it.
    """
    names = NAMES[model_type]
    return dict(_translate(model, names, num_layers))


def sort_tensors(tensors: Mapping[str, GgufTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredWeight]]:
    """Return the plain tensors and the quantized matrices, by the same names.

    Raises ``ModelError`` if something else than a matrix, or the matrices of experts, is quantized.
    """
    stored = {name: tensor.stored for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in stored.items() if tensor.dtype in PLAIN}
    quantized = {
        name: StoredWeight(name, FORMATS[tensor.dtype], tensor.shape, tensor.dtype, {"codes": tensor})
        for name, tensor in stored.items()
        if tensor.dtype in FORMATS
    }
    for weight in quantized.values():
        if len(weight.shape) != (3 if ".experts." in weight.name else 2):
            part = weight.parts["codes"]
            raise ModelError(
                f"{part.path} stores {weight.name} of shape {list(weight.shape)} as {part.dtype}, in which only "
                "matrices can be stored; download it again"
            )
    return plain, quantized


def _translate(model: GgufModel, names: Names, num_layers: int) -> Iterator[tuple[str, GgufTensor]]:
    for tensor in model.tensors.values():
        if tensor.name in names.ignored:
            continue
        check_type(str(tensor.path), tensor.name, tensor.dtype)
        name = _translate_name(tensor.name, names, num_layers)
        if name is None:
            raise ModelError(
                f"{tensor.path} has the tensor {tensor.name}, which is not supported for the architecture "
                f"{model.metadata['general.architecture']}; use the model's safetensors files"
            )
        yield name, GgufTensor(replace(tensor, name=name), _change_of(tensor.name, name, names))


def _translate_name(name: str, names: Names, num_layers: int) -> str | None:
    stem, _, leaf = name.rpartition(".")
    if stem in _OUTSIDE and leaf in ("weight", "bias"):
        return f"{_OUTSIDE[stem]}.{leaf}"
    match = _LAYER.fullmatch(name)
    if match is None or match["middle"] not in names.layer or int(match["layer"]) >= num_layers:
        return None
    module = f"model.layers.{int(match['layer'])}.{names.layer[match['middle']]}"
    if match["middle"] in _EXPERTS:
        return module if match["leaf"] == "weight" else f"{module}_bias"
    return module if match["middle"] == "attn_sinks" else f"{module}.{match['leaf']}"


def _change_of(stored_name: str, name: str, names: Names) -> Change:
    if names.has_pairs and ".attn_q." in stored_name:
        return Change.QUERY_ROWS
    if names.has_pairs and ".attn_k." in stored_name:
        return Change.KEY_ROWS
    if names.has_shifted_norms and name.endswith("norm.weight"):
        return Change.PLUS_ONE
    return Change.NONE
