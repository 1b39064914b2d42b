#!/usr/bin/env python3
"""Write a model that copies passages of its prompt, for benchmarks of repetitive text.

    bench_copier.py FOLDER [--hidden 1024 --layers 12]

Its answers are like those of a large model that edits code or quotes from its prompt: mostly copies, in which a few
tokens differ. ``quote_prompt`` writes a prompt: a passage, and the first tokens of a quotation from it. Drawn at
temperature 1, about one token in 25 is not the most probable one.

Nothing is trained. The weights of two layers are an induction head [1]: in the first layer, seven heads copy the tokens
before each position to it; in the second one, eight heads look for positions with the same tokens before them, and copy
the token there. All other weights are zero. The model takes the time of any model of its size.

[1] Olsson et al., In-context Learning and Induction Heads, 2022.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from random import Random

import torch
from bench_lib import ROOT, note
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENIZER = ROOT / "swarm" / "demo" / "village"  # of the embedded demo model
HEAD = 128  # size of a head
CODE = 112  # values of a token's code, each 1 or -1
CONTEXT = 7  # tokens before a position that are compared
NUM_MATCHING = 8  # heads that compare them
THETA = 1e8  # of the rotary embedding: its slow half hardly turns within a prompt
SLOW = torch.tensor([index for index in range(HEAD) if index % (HEAD // 2) >= HEAD // 4])
CONSTANT = 8.0  # value of the last coordinate of every hidden state
SHARPNESS = 20.0  # of the heads that copy the tokens before a position
MATCH_SHARPNESS = 0.8  # of the heads that compare
MATCH_WEIGHTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # squares; the newest token first
LOGIT = 0.1  # per equal value of the codes: at temperature 1, the copied token has a probability of about 0.96


def copying_model(hidden: int, layers: int, seed: int = 20) -> LlamaForCausalLM:
    """Return a model that copies."""
    chance = torch.Generator().manual_seed(seed)
    vocabulary = len(PreTrainedTokenizerFast.from_pretrained(TOKENIZER))
    heads = hidden // HEAD
    if heads < NUM_MATCHING or layers < 2:
        raise ValueError(f"a hidden size of {hidden} or {layers} layers is too small: at least 1024 and 2 are needed")
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD, max_position_embeddings=2048,
        rope_theta=THETA, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.zero_()
    # A hidden state: code of the token, codes of the tokens before it, code of the next token, and a constant.
    codes = torch.randint(0, 2, (vocabulary, CODE), generator=chance) * 2.0 - 1
    blocks = [slice(CODE * index, CODE * (index + 1)) for index in range(CONTEXT + 2)]
    model.model.embed_tokens.weight[:, blocks[0]] = codes
    model.model.embed_tokens.weight[:, -1] = CONSTANT
    model.lm_head.weight[:, blocks[-1]] = LOGIT * codes
    first, second = model.model.layers[0], model.model.layers[1]
    first.input_layernorm.weight.fill_(_norm(1, hidden))
    second.input_layernorm.weight.fill_(_norm(1 + CONTEXT, hidden))
    model.model.norm.weight.fill_(_norm(2 + CONTEXT, hidden))

    frequencies = THETA ** (-torch.arange(HEAD // 4) / (HEAD / 2))
    fast = torch.arange(HEAD // 4)
    for index in range(CONTEXT):  # queries and keys are constant: the rotary embedding compares their distance
        rows = slice(HEAD * index, HEAD * index + CODE)
        angles, scale = frequencies * (index + 1), SHARPNESS * math.sqrt(HEAD) / CONSTANT
        first.self_attn.q_proj.weight[HEAD * index + fast, -1] = scale * torch.cos(angles)
        first.self_attn.q_proj.weight[HEAD * index + HEAD // 2 + fast, -1] = -scale * torch.sin(angles)
        first.self_attn.k_proj.weight[HEAD * index + fast, -1] = 1 / CONSTANT
        first.self_attn.v_proj.weight[rows, blocks[0]] = torch.eye(CODE)
        first.self_attn.o_proj.weight[blocks[index + 1], rows] = torch.eye(CODE)
    for index in range(NUM_MATCHING):
        rows = slice(HEAD * index, HEAD * index + CODE)
        for before, weight in enumerate(MATCH_WEIGHTS):
            mixed = torch.randn((len(SLOW), CODE), generator=chance) * math.sqrt(weight / CODE)
            query = MATCH_SHARPNESS * math.sqrt(HEAD) * mixed
            second.self_attn.q_proj.weight[HEAD * index + SLOW, blocks[before]] = query
            second.self_attn.k_proj.weight[HEAD * index + SLOW, blocks[before + 1]] = mixed
        second.self_attn.v_proj.weight[rows, blocks[0]] = torch.eye(CODE)
        second.self_attn.o_proj.weight[blocks[-1], rows] = torch.eye(CODE) / NUM_MATCHING
    return model


def _norm(num_codes: int, hidden: int) -> float:
    """Return the weight of a norm that leaves a hidden state with this number of codes as it is."""
    return math.sqrt((num_codes * CODE + CONSTANT**2) / hidden)


def sources(*folders: str) -> list[str]:
    """Return the texts of the Python files in folders of the repository."""
    return [path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def quote_prompt(rng: Random, texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> list[int]:
    """Return a prompt whose answer of ``length`` tokens quotes from it: a passage of code, a line that announces the
    quotation, and the quotation's first tokens."""
    while True:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 20 * length))
        passage = tokenizer.encode(text[start : start + 20 * length], add_special_tokens=False)
        size = length + rng.randint(40, 80)
        if len(passage) < size:
            continue
        passage = passage[:size]
        begin = rng.randrange(size - length - 8)
        announced = tokenizer.encode("\n\nThe same with small changes:\n", add_special_tokens=False)
        return [int(token) for token in (0, *passage, *announced, *passage[begin : begin + 8])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=1024, help="size of the hidden state; a multiple of 128")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    copying_model(arguments.hidden, arguments.layers).to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    note(str(arguments.folder))


if __name__ == "__main__":
    main()
