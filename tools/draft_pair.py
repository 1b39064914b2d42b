#!/usr/bin/env python3
"""Write a model of random weights and a draft model a tenth its size that agrees with it about a part of the tokens.

The draft model is the first layers of the large one, with the same embedding and head. The outputs of all later layers
are scaled down until both choose the same next token at the wanted share of positions. The text is as random as that of
any model of random weights, so that only the draft model can guess it.

draft_pair.py FOLDER [--layers 24] [--draft-layers 2] [--agreement 0.8] [--seed 1]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
SPREAD = 0.05  # of the weights
NUM_PROMPTS = 8
PROMPT_TOKENS = 16
ANSWER_TOKENS = 48
TRIES = 9  # halvings of the interval of scales


@dataclass(frozen=True)
class DraftPair:
    """The folders of two models, and the share of positions of greedy answers at which both choose the same token."""

    target: Path
    draft: Path
    agreement: float


def write_pair(
    folder: Path, *, layers: int = 24, draft_layers: int = 2, agreement: float = 0.8, seed: int = 1
) -> DraftPair:
    """Write ``target`` and ``draft`` into the folder, which may not exist yet."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=SPREAD)
    outputs = [weight.clone() for weight in later_outputs(model, draft_layers)]
    low, high = 0.0, 1.0
    share = 0.0
    for _ in range(TRIES):
        scale = (low + high) / 2
        for weight, whole in zip(later_outputs(model, draft_layers), outputs, strict=True):
            weight.copy_(whole * scale)
        share = measure_agreement(model, draft_layers, seed)
        low, high = (scale, high) if share > agreement else (low, scale)
    target, draft = folder / "target", folder / "draft"
    model.to(torch.bfloat16).save_pretrained(target)
    first_layers(model, draft_layers).save_pretrained(draft)
    return DraftPair(target, draft, share)


def later_outputs(model: LlamaForCausalLM, first: int) -> Iterator[torch.Tensor]:
    """Yield the matrices by which layers from ``first`` on add to the hidden states."""
    for layer in model.model.layers[first:]:
        yield layer.self_attn.o_proj.weight
        yield layer.mlp.down_proj.weight


def first_layers(model: LlamaForCausalLM, num: int) -> LlamaForCausalLM:
    """Return a model of the first layers, which shares the weights."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num]
    short = LlamaForCausalLM(config).to(model.dtype).eval().requires_grad_(False)
    names = short.state_dict().keys()
    short.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in names})
    return short


def measure_agreement(model: LlamaForCausalLM, draft_layers: int, seed: int) -> float:
    """Return the share of the model's greedy tokens that its first layers would choose, too."""
    chance = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, model.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=chance)
    whole = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    guessed = first_layers(model, draft_layers)(whole[:, :-1]).logits.argmax(-1)
    same = guessed[:, PROMPT_TOKENS - 1 :] == whole[:, PROMPT_TOKENS:]
    return float(same.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pair = write_pair(
        options.folder,
        layers=options.layers,
        draft_layers=options.draft_layers,
        agreement=options.agreement,
        seed=options.seed,
    )
    print(f"{pair.target} and {pair.draft} agree about {pair.agreement:.0%} of the tokens of greedy answers")


if __name__ == "__main__":
    main()
