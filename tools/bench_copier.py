#!/usr/bin/env python3
"""Train a model that edits code and quotes lines of it, for benchmarks of repetitive text.

    bench_copier.py FOLDER [--steps 1050] [--hidden 1024 --layers 12]

The model has the embedded demo model's shape, tokenizer and first weights. It learns two tasks on the sources of this
repository: to write a passage again with one name replaced, and to write those lines of a passage that contain a word.
``task`` writes prompts of the same kind from files that the training did not read. The answers are mostly copies of the
prompt, as those of a large model are when it edits code or extracts passages.

``--hidden`` and ``--layers`` write the same model into larger matrices, of which all else is zero. It writes the same
texts (but for rounding) and takes the time of a model of that size.
"""

from __future__ import annotations

import argparse
import copy
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
PEAK_RATE = 1e-3
PART = "training.pt"  # an unfinished training
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


def repetitions(rng: Random, step: int) -> list[tuple[list[int], int]]:
    """Return a batch that teaches copying: random tokens, longer ones later."""
    length = rng.randint(6, min(60, 10 + step // 12))
    return [_repetition(rng, length) for _ in range(3 * ROWS)]


def tasks(rng: Random, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """Return a batch of tasks, and some repetitions of the same length."""
    examples = [_example(rng, texts, tokenizer) for _ in range(ROWS - 2)]
    return [*examples, *(_repetition(rng, rng.randint(60, MAX_TOKENS // 2 - 1)) for _ in range(2))]


def padded(examples: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels."""
    length = max(len(tokens) for tokens, _ in examples)
    inputs = torch.zeros((len(examples), length), dtype=torch.long)
    labels = torch.full((len(examples), length), -100)
    for row, (tokens, begin) in enumerate(examples):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, begin : len(tokens)] = torch.tensor(tokens[begin:])
    return inputs, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, part: Path) -> None:
    """Train: two thirds of the steps are repetitions of random tokens, which are short, and the rest are tasks. An
    interrupted training goes on with what is in ``part``."""
    first = 0
    if part.is_file():
        saved = torch.load(part)
        first = int(saved["step"])
        model.load_state_dict(saved["model"])
    rng, texts = Random(20 + first), sources(LEARNED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    began, losses, num_repetitions = time.monotonic(), [], 2 * steps // 3
    model.train()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min((step + 1) / 50, 1.0 if step < num_repetitions else 3 * (1.01 - step / steps))
        inputs, labels = padded(repetitions(rng, step) if step < num_repetitions else tasks(rng, texts, tokenizer))
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            torch.save({"step": step + 1, "model": model.state_dict()}, part)
            note(f"step {step + 1}/{steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s")


def widen(model: LlamaForCausalLM, hidden: int, layers: int) -> LlamaForCausalLM:
    """Write a model into a larger one of the same head size, whose other weights are zero."""
    small = model.config
    factor = hidden // small.hidden_size
    config = copy.deepcopy(small)
    config.hidden_size, config.num_hidden_layers = hidden, layers
    config.intermediate_size = 3 * hidden
    config.num_attention_heads = factor * small.num_attention_heads
    config.num_key_value_heads = factor * small.num_key_value_heads
    config.rms_norm_eps = small.rms_norm_eps / factor  # the mean is over more values, of which all others are 0
    wide = LlamaForCausalLM(config).requires_grad_(False)
    known = model.state_dict()
    for name, weight in wide.state_dict().items():
        weight.zero_()
        if name in known:
            part = known[name] / factor**0.5 if "norm" in name else known[name]
            weight[tuple(slice(size) for size in part.shape)] = part
    return wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1050, help="of training; some minutes on two cores")
    parser.add_argument("--hidden", type=int, default=0, help="size of the hidden state; a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--trained", type=Path, help="folder of the model if it is trained already")
    arguments = parser.parse_args()
    torch.manual_seed(20)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(arguments.trained or SHIPPED, dtype=torch.float32)
    if arguments.trained is None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        train(model, tokenizer, arguments.steps, arguments.folder / PART)
        (arguments.folder / PART).unlink(missing_ok=True)
    if arguments.hidden:
        model = widen(model, arguments.hidden, arguments.layers)
    model.eval().to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    note(str(arguments.folder))


if __name__ == "__main__":
    main()
