#!/usr/bin/env python3
"""Write a model of random weights: one of the shapes that the benchmarks use, or a tiny one to try them out.

bench_model.py FOLDER [--shape 1.1b] [--float32] [--spread 0.03] [--gguf]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIDDLE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LONG = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
WORDS = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
# Four of Llama 3.1 8B's layers.
WIDE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CACHED = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
QUALITY = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# Layers as in Qwen3-Next 80B, fewer and with fewer experts.
NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 10,
}
# Falcon-H1 0.5B.
HYBRID = {
    "model_type": "falcon_h1",
    "vocab_size": 32784,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
# By name: the usual one; a small one for long contexts; one with as many words as chat models have; one
# whose weights (40 MB) hardly come from memory, so that stages on one machine don't wait for each other's; one for
# logits of thousands of positions, in whole super-groups of 256; two with states between positions.
SHAPES: dict[str, Mapping[str, int | str]] = {
    "1.1b": SHAPE,
    "200m": MIDDLE,
    "long": LONG,
    "words": WORDS,
    "wide": WIDE,
    "cached": CACHED,
    "quality": QUALITY,
    "qwen3-next": NEXT,
    "falcon-h1": HYBRID,
    "tiny": TINY,
}
SPREAD = 0.03  # wide enough that logits differ clearly, narrow enough that 22 layers stay in range


def write(
    folder: Path, shape: Mapping[str, int | str], dtype: torch.dtype = torch.bfloat16, spread: float = SPREAD
) -> None:
    """Write the model; its weights are the same every time."""
    settings = {"model_type": "llama", "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(**(settings | dict(shape)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread, generator=generator)
        else:
            parameter.data.fill_(1.0)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b", help="tiny: a megabyte, to try a benchmark out")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    parser.add_argument("--gguf", action="store_true", help="FOLDER.gguf for llama.cpp too (needs the package gguf)")
    parser.add_argument("--spread", type=float, default=SPREAD, help="standard deviation of the weights")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.float32 else torch.bfloat16
    write(arguments.folder, SHAPES[arguments.shape], dtype, arguments.spread)
    if arguments.gguf:
        import bench_gguf  # noqa: PLC0415 (needs a package that nothing else needs)

        bench_gguf.convert(arguments.folder, bench_gguf.path_for(arguments.folder))


if __name__ == "__main__":
    main()
