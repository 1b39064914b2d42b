#!/usr/bin/env python3
"""Compare embeddings by a swarm with those by transformers: the same texts and weights, in turns.

    bench_embed.py [--model DIR | --shape 200m] [--float32] [--stages 1] [--texts 32] [--lengths 16,512] [--pooling …]

transformers computes batches of 32 texts, sorted by length as sentence-transformers does, padded, without a head. The
swarm gets all texts at once. Each round has new texts, so that no cache helps.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from bench_lib import (
    BenchError,
    Row,
    add_model_options,
    model_of,
    numbers,
    run,
    tell,
    turns,
    vocabulary_of,
    wait_passively,
)
from bench_swarm import Swarm
from numpy.typing import NDArray
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from swarm.params import SamplingParams

BATCH = 32  # the default of sentence-transformers
ALIKE = 0.99  # least cosine of the two embeddings of a text, in bfloat16
SWARM, PEER = "swarm", "transformers"

Texts = list[list[int]]
Vectors = list[NDArray[np.float32]]


def draw_texts(count: int, lengths: Sequence[int], vocabulary: int, seed: int) -> Texts:
    """Draw texts of random tokens, whose lengths are evenly spread in their logarithm."""
    dice = random.Random(seed)
    low, high = np.log(lengths)
    return [
        [dice.randrange(3, vocabulary) for _ in range(round(np.exp(dice.uniform(low, high))))] for _ in range(count)
    ]


@torch.inference_mode()
def embed_in_batches(model: PreTrainedModel, texts: Texts, pooling: str) -> Vectors:
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    found: dict[int, NDArray[np.float32]] = {}
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        longest = len(texts[places[0]])
        ids = torch.tensor([texts[place] + [0] * (longest - len(texts[place])) for place in places])
        mask = torch.tensor([[1] * len(texts[place]) + [0] * (longest - len(texts[place])) for place in places])
        outputs = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.float()
        if pooling == "mean":
            pooled = (outputs * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        else:
            pooled = outputs[torch.arange(len(places)), mask.sum(1) - 1]
        found |= dict(zip(places, pooled.numpy(), strict=True))
    return [found[place] for place in range(len(texts))]


async def embed_by_swarm(swarm: Swarm, texts: Texts, pooling: str) -> Vectors:
    params = SamplingParams(vector="mean" if pooling == "mean" else "last")
    answers = await swarm.client.compute_vectors([tuple(text) for text in texts], params)
    return [np.frombuffer(answer.vector, "<f4") for answer in answers]


def check_alike(ours: Vectors, theirs: Vectors) -> float:
    """Return the least cosine of two vectors of one text."""
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)]
    if not min(cosines) >= ALIKE:
        raise BenchError(f"the vectors of a text differ: their cosine is {min(cosines):.4f}")
    return min(cosines)


async def compare(folder: Path, arguments: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = AutoModel.from_pretrained(folder, dtype="auto").eval()
    samples: dict[str, list[float]] = {SWARM: [], PEER: []}
    vocabulary, least, seed = vocabulary_of(folder), 1.0, 0
    vectors: dict[str, Vectors] = {}
    async with Swarm(folder, arguments.stages, arguments.threads) as swarm:
        for number, (name, counts) in enumerate(turns(samples, arguments.rounds)):
            seed = number // len(samples)
            texts = draw_texts(arguments.texts, arguments.lengths, vocabulary, seed)
            began = perf_counter()
            if name == SWARM:
                vectors[name] = await embed_by_swarm(swarm, texts, arguments.pooling)
            else:
                vectors[name] = embed_in_batches(model, texts, arguments.pooling)
            seconds = perf_counter() - began
            if counts:
                samples[name].append(sum(map(len, texts)) / seconds)
            if number % 2:
                least = min(least, check_alike(vectors[SWARM], vectors[PEER]))
    case = f"{arguments.texts} texts of {arguments.lengths[0]} to {arguments.lengths[1]} tokens, {arguments.pooling}"
    row = Row(case, "tokens/s", samples, PEER, target=1.3)
    return [row], {"least cosine of the two": round(least, 5), "rounds": arguments.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shape", default="200m", help="of bench_model.py, if no model is named")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of each contestant; 0: as it chooses")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--lengths", type=numbers, default=(16, 512), help="of the shortest and the longest text")
    parser.add_argument("--pooling", choices=("last", "mean"), default="mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    if len(arguments.lengths) != 2:
        sys.exit("bench_embed.py: --lengths takes two numbers")
    wait_passively()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = model_of(arguments, arguments.shape, wide=arguments.float32)
    rows, facts = run(compare(folder, arguments))
    tell(rows, "embeddings", {"model": str(folder), "stages": arguments.stages, **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()
