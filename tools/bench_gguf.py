#!/usr/bin/env python3
"""Write a Llama checkpoint as a GGUF file, so that llama.cpp can compute with the very same weights.

    bench_gguf.py FOLDER [FILE]        FILE: FOLDER.gguf beside the folder, unless named

For benchmarks, so prompts are token ids: a folder with a byte-level tokenizer brings its words, otherwise the
vocabulary is as many tokens without text. Matrices keep their dtype, the norms become float32, as llama.cpp wants them.
It rotates neighbours (0 1)(2 3)… of a head where transformers rotates halves (0 n/2)(1 n/2+1)…: rows of the query and
key matrices are reordered to that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# What this file knows how to say; anything else would be a different computation under the same name.
PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

try:
    import gguf
except ModuleNotFoundError:
    raise SystemExit("GGUF files are written by the package 'gguf': pip install gguf") from None

KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}


def path_for(folder: Path) -> Path:
    """Say where the file of a checkpoint lies unless another place is named."""
    return folder.with_name(folder.name + ".gguf")


def convert(folder: Path, file: Path) -> None:
    """Write ``file``; it appears when it is whole. One matrix is in memory at a time."""
    config = read_config(folder)
    writer = gguf.GGUFWriter(None, "llama")
    add_shape(writer, config)
    add_words(writer, folder, config)
    with ExitStack() as stack:
        shards = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        if not shards:
            raise SystemExit(f"{folder} holds no safetensors files")
        dtype = add_infos(writer, shards, config)
        writer.add_file_type(FILE_TYPES[dtype])
        partial = file.with_name(file.name + ".part")
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in converted(shards, config):
            writer.write_tensor_data(as_bytes(tensor))
        writer.close()
    os.replace(partial, file)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for name, value in PLAIN.items():
        if config.get(name, value) != value:
            raise SystemExit(f"{folder} is not a plain Llama: its {name} is {config.get(name)!r}, not {value!r}")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise SystemExit(f"{folder} is not a plain Llama: its rotary positions are scaled")
    config["rope_theta"] = rope["rope_theta"]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def add_words(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """What tokens stand for. Raises SystemExit for a tokenizer that isn't byte-level BPE."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        writer.add_tokenizer_model("no_vocab")  # llama.cpp then makes as many tokens without text
        return
    told = json.loads(file.read_text())
    if told["model"]["type"] != "BPE" or (told.get("decoder") or {}).get("type") != "ByteLevel":
        raise SystemExit(f"{file} is not byte-level BPE")
    special = {token["id"]: token["content"] for token in told["added_tokens"] if token["special"]}
    words = {number: word for word, number in told["model"]["vocab"].items()} | special
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types([_kind(number, words, special) for number in range(size)])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in told["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _kind(number: int, words: dict[int, str], special: dict[int, str]) -> gguf.TokenType:
    if number in special:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.NORMAL if number in words else gguf.TokenType.UNUSED


def add_infos(writer: gguf.GGUFWriter, shards: list[Any], config: dict[str, Any]) -> torch.dtype:
    """Announce every tensor; the matrices' dtype."""
    dtypes = set()
    for name, tensor in converted(shards, config):
        data = as_bytes(tensor)
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, KINDS[tensor.dtype])
        if tensor.dim() > 1:
            dtypes.add(tensor.dtype)
    if len(dtypes) != 1:
        raise SystemExit(f"the matrices have {len(dtypes)} dtypes; one is needed")
    return dtypes.pop()


def converted(shards: list[Any], config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in shards:
        for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            yield gguf_name(name), as_wanted(name, shard.get_tensor(name), config)


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    known = LAYER.get(rest.removesuffix(".weight"))
    if not name.startswith("model.layers.") or known is None or not rest.endswith(".weight"):
        raise SystemExit(f"a Llama has no tensor {name}")
    return f"blk.{number}.{known}.weight"


def as_wanted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor.float()
    if name.endswith("q_proj.weight"):
        return neighbours(tensor, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return neighbours(tensor, config["num_key_value_heads"])
    return tensor


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from (first half, second half) to (a pair, a pair, …)."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, nargs="?")
    arguments = parser.parse_args()
    file = arguments.file or path_for(arguments.folder)
    convert(arguments.folder, file)
    print(file, file=sys.stderr)


if __name__ == "__main__":
    main()
