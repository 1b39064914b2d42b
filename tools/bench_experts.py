#!/usr/bin/env python3
"""Write a qwen3_moe of random weights as a GGUF file in bfloat16: for llama.cpp's quantizer, and from there for all.

bench_experts.py FILE [--tiny]

32 experts of which 8 compute, as wide as Qwen3-30B-A3B's and a quarter as deep: 1.9 billion parameters.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from bench_gguf import KINDS, add_shape, as_bytes

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
TINY = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SPREAD = 0.03


def shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Give the name and shape of every tensor."""
    hidden, experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_q_norm": (config["head_dim"],),
        "attn_k_norm": (config["head_dim"],),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, inner, hidden),
        "ffn_up_exps": (experts, inner, hidden),
        "ffn_down_exps": (experts, hidden, inner),
    }
    yield "token_embd.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"blk.{number}.{name}.weight", shape
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config["vocab_size"], hidden)


def dtype_of(name: str, shape: tuple[int, ...]) -> torch.dtype:
    """llama.cpp has norms and routers in float32."""
    return torch.float32 if len(shape) == 1 or "ffn_gate_inp" in name else torch.bfloat16


def write(file: Path, config: dict[str, int]) -> None:
    """Write ``file``; it appears when it is complete. One tensor is in memory at a time."""
    writer = gguf.GGUFWriter(None, "qwen3moe")
    add_shape(writer, config)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tensors = list(shapes(config))
    for name, shape in tensors:
        empty = as_bytes(torch.empty(shape, dtype=dtype_of(name, shape)))
        writer.add_tensor_info(name, empty.shape, empty.dtype, empty.nbytes, KINDS[dtype_of(name, shape)])
    partial = file.with_name(file.name + ".part")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensors:
        values = torch.empty(shape, dtype=dtype_of(name, shape))
        values.fill_(1.0) if len(shape) == 1 else values.normal_(0, SPREAD, generator=generator)
        writer.write_tensor_data(as_bytes(values))
    writer.close()
    os.replace(partial, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true", help="some megabytes, to try a benchmark out")
    arguments = parser.parse_args()
    write(arguments.file, TINY if arguments.tiny else SHAPE)


if __name__ == "__main__":
    main()
