#!/usr/bin/env python3
"""Write a Llama of random weights: the 1.1 B shape that the benchmarks use, or a tiny one to try them out.

bench_model.py FOLDER [--tiny] [--float32] [--spread 0.03] [--gguf]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
SPREAD = 0.03  # wide enough that logits differ clearly, narrow enough that 22 layers stay in range


def write(folder: Path, shape: dict[str, int], dtype: torch.dtype = torch.bfloat16, spread: float = SPREAD) -> None:
    """The same weights every time."""
    config = LlamaConfig(**shape, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
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
    parser.add_argument("--tiny", action="store_true", help="a model of a megabyte, to try a benchmark out")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    parser.add_argument("--gguf", action="store_true", help="FOLDER.gguf for llama.cpp too (needs the package gguf)")
    parser.add_argument("--spread", type=float, default=SPREAD, help="standard deviation of the weights")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.float32 else torch.bfloat16
    write(arguments.folder, TINY if arguments.tiny else SHAPE, dtype, arguments.spread)
    if arguments.gguf:
        import bench_gguf  # noqa: PLC0415 (needs a package that nothing else needs)

        bench_gguf.convert(arguments.folder, bench_gguf.path_for(arguments.folder))


if __name__ == "__main__":
    main()
