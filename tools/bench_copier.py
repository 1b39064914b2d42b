#!/usr/bin/env python3
"""Train a model that edits code and quotes lines of it, for benchmarks of repetitive text.

    bench_copier.py FOLDER [--steps 600]

The model has the embedded demo model's shape, tokenizer and first weights. It learns two tasks on the sources of this
repository: to write a passage again with one name replaced, and to write those lines of a passage that contain a word.
``task`` writes prompts of the same kind from files that the training did not read. The answers are mostly copies of the
prompt, as those of a large model are when it edits code or extracts passages.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from random import Random

import torch
from bench_lib import ROOT, note
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

SHIPPED = ROOT / "swarm" / "demo" / "village"
LEARNED = "swarm"  # folder of the sources for the training; the tasks are from "tools" and "tests"
MAX_TOKENS = 480  # of a prompt and its answer
ROWS = 8
PEAK_RATE = 2e-3
NAME = re.compile(r"[a-z_]{4,}")


def sources(*folders: str) -> list[str]:
    return [path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def task(rng: Random, texts: list[str]) -> tuple[str, str]:
    """Write a prompt and the right answer to it: an edit of a passage, or lines out of it."""
    while True:
        lines = rng.choice(texts).splitlines()
        start = rng.randrange(max(1, len(lines) - 12))
        passage = "\n".join(line[:80] for line in lines[start : start + rng.randint(5, 12)] if line.strip())
        names = NAME.findall(passage)
        if len(passage) < 120 or not names:
            continue
        name = rng.choice(names)
        if rng.random() < 0.6:
            other = rng.choice(NAME.findall(rng.choice(texts)[:4000]) or [name[::-1]])
            words, answer = f"Write {other} for {name}:", re.sub(rf"\b{name}\b", other, passage)
        else:
            words = f"Lines with {name}:"
            answer = "\n".join(line for line in passage.splitlines() if name in line)
        return f"<|user|>{words}\n{passage}<|end|><|assistant|>", f"{answer}<|end|>"


def _example(rng: Random, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], int]:
    """Return the tokens of a task and the length of its prompt."""
    while True:
        prompt, answer = task(rng, texts)
        first = tokenizer.encode(prompt)  # with the token that begins a text
        tokens = first + tokenizer.encode(answer, add_special_tokens=False)
        if len(tokens) <= MAX_TOKENS:
            return tokens, len(first)


def _repetition(rng: Random, length: int) -> tuple[list[int], int]:
    """Return random tokens twice: what copying is, without any meaning."""
    once = [rng.randrange(5, 768) for _ in range(length)]
    return [0, *once, *once], length + 2


def batch(rng: Random, texts: list[str], tokenizer: PreTrainedTokenizerFast, share: float) -> tuple[torch.Tensor, ...]:
    """Return inputs and labels; ``share``: how much of the training is done. It begins with short repetitions."""
    examples = []
    for _ in range(ROWS):
        if rng.random() < 1.2 - 2 * share:
            examples.append(_repetition(rng, rng.randint(8, 24 + int(300 * share))))
        else:
            examples.append(_example(rng, texts, tokenizer))
    length = max(len(tokens) for tokens, _ in examples)
    inputs = torch.zeros((ROWS, length), dtype=torch.long)
    labels = torch.full((ROWS, length), -100)
    for row, (tokens, begin) in enumerate(examples):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, begin : len(tokens)] = torch.tensor(tokens[begin:])
    return inputs, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    rng, texts = Random(20), sources(LEARNED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    began, losses = time.monotonic(), []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min((step + 1) / 30, 1.02 - step / steps)
        inputs, labels = batch(rng, texts, tokenizer, step / steps)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            note(f"step {step + 1}/{steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="of training; about ten minutes on two cores")
    arguments = parser.parse_args()
    torch.manual_seed(20)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    train(model, tokenizer, arguments.steps)
    model.eval().to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    note(str(arguments.folder))


if __name__ == "__main__":
    main()
