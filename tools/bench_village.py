#!/usr/bin/env python3
"""Train a wider demo model, whose matrices have whole super-groups of 256 inputs, and write texts of its kind.

    bench_village.py FOLDER [--steps 350]

The shipped one is too narrow for the K types of GGUF: llama.cpp's quantizer takes other types instead. Same tokenizer
and texts as the shipped one's; a quarter of its training is enough for a model whose errors mean something.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
import train_demo
from bench_lib import ROOT, note
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHIPPED = ROOT / "swarm" / "demo" / "village"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def text(count: int, seed: int) -> list[int]:
    """Return at least this many tokens of stories and chats, one after the other, that the models did not see."""
    tokens, _ = train_demo.write_tokens(tokenizer(), Random(seed), count)
    return [int(token) for token in tokens]


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED)


def train(folder: Path, steps: int) -> None:
    torch.manual_seed(train_demo.SEED)
    words = tokenizer()
    config = LlamaConfig(
        **SHAPE,
        vocab_size=train_demo.VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    count = steps * max(rows * length for _, rows, length in train_demo.PHASES)
    tokens, labels = train_demo.write_tokens(words, Random(train_demo.SEED), count)
    train_demo.train(model, tokens, labels, steps)
    train_demo.save(model.eval().to(torch.bfloat16), words, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=350, help="of training; some minutes on two cores")
    arguments = parser.parse_args()
    train(arguments.folder, arguments.steps)
    note(str(arguments.folder))


if __name__ == "__main__":
    main()
