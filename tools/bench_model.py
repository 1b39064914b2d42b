#!/usr/bin/env python3
"""Write a Llama of random weights: the 1.1 B shape that the benchmarks use, or a tiny one to try them out.

bench_model.py FOLDER [--tiny]
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


def write(folder: Path, shape: dict[str, int]) -> None:
    """In bfloat16, the same weights every time."""
    config = LlamaConfig(**shape, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, SPREAD, generator=generator)
        else:
            parameter.data.fill_(1.0)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a model of a megabyte, to try a benchmark out")
    arguments = parser.parse_args()
    write(arguments.folder, TINY if arguments.tiny else SHAPE)


if __name__ == "__main__":
    main()
