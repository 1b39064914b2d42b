#!/usr/bin/env python3
"""Where the time of a step goes inside the model: one executor with all layers, in one process, without any wire.

Modules of known kinds and the attention function are timed; "between" is what lies outside of them. The timing itself
costs a few microseconds per module: "untimed" is the same step without it. For wire and broker, see
bench_decode.py --what time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from bench_lib import PASSIVE, Row, add_model_options, model_of, note, random_prompt, tell
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm.params import SamplingParams
from swarm.stage.attention import function as attention
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, SampleJob
from swarm.wire import messages

# By a part of the class's name, so that a kernel that comes later is counted too. A module's time is its own, without
# that of the modules it calls: an MLP's is its activation, an attention module's is rotating and reshaping.
KINDS = {
    "Linear": "linears",
    "Gated": "linears",
    "Norm": "norms",
    "Rope": "rope",
    "Rotary": "rope",
    "Embedding": "embedding",
    "MLP": "activation",
    "Mlp": "activation",
    "Steady": "activation",
    "Attention": "around attention",
}
COLUMNS = ("linears", "attention", "around attention", "norms", "activation", "rope", "embedding")
MARGIN = 8
CHUNK = 256


@dataclass(frozen=True)
class Case:
    """``sequences`` of ``context`` tokens each, and the step that is timed: ``tokens`` more of each."""

    name: str
    sequences: int
    context: int
    tokens: int


CASES = (
    Case("1 sequence, 16 before", 1, 16, 1),
    Case("16 sequences, 16 before", 16, 16, 1),
    Case("16 sequences, 1,000 before", 16, 1000, 1),
    Case("a prompt of 512", 1, 0, 512),
)


class Clock:
    """Seconds by kind, each without what was timed inside of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, kind: str) -> None:
        self._count()
        self._running.append(kind)

    def leave(self) -> None:
        self._count()
        self._running.pop()

    def _count(self) -> None:
        now = perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


def kind_of(module: torch.nn.Module) -> str | None:
    name = type(module).__name__
    return next((kind for part, kind in KINDS.items() if part in name), None)


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """All modules of known kinds, and the attention function."""
    kinds: dict[int, str | None] = {}

    def kind(module: torch.nn.Module) -> str | None:
        if id(module) not in kinds:
            kinds[id(module)] = kind_of(module)
        return kinds[id(module)]

    def before(module: torch.nn.Module, _: Any) -> None:
        found = kind(module)
        if found:
            clock.enter(found)

    def after(module: torch.nn.Module, *_: Any) -> None:
        if kind(module):
            clock.leave()

    plain = ALL_ATTENTION_FUNCTIONS[attention.NAME]

    def attend(*arguments: Any, **more: Any) -> Any:
        clock.enter("attention")
        result = plain(*arguments, **more)
        clock.leave()
        return result

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after)
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attend)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, plain)
        for hook in hooks:
            hook.remove()


class Model:
    """All layers in one executor."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.executor = TorchExecutor(str(folder), threads=threads or None)
        layers = messages.LayerRange(0, self.executor.manifest.num_layers)
        self.executor.prepare(layers, (), 64, lambda *_: None)
        self.executor.activate(layers)

    def prepare(self, case: Case) -> list[list[int]]:
        """Open the case's sequences and compute what lies before its step; their tokens, the step's included."""
        self.executor.reset()
        count = case.context + case.tokens
        prompts = [random_prompt(count, self.executor.manifest.vocab_size) for _ in range(case.sequences)]
        self.executor.open(0, count + MARGIN)
        for begin in range(0, case.context, CHUNK):
            self.step({0: prompts[0]}, begin, min(begin + CHUNK, case.context), sample=False)
        for number in range(1, case.sequences):  # keys and values of its own, whatever they say
            self.executor.fork(number, 0, case.context, count + MARGIN)
        return prompts

    def step(self, prompts: dict[int, list[int]], begin: int, end: int, *, sample: bool = True) -> float:
        """Seconds for these positions of all of the sequences, sampling included."""
        rows = tuple(messages.Row(number, begin, end - begin, sample) for number in prompts)
        tokens = np.concatenate([np.asarray(tokens[begin:end], np.int64) for tokens in prompts.values()])
        histories = [tokens[:end] for tokens in prompts.values()] if sample else []
        jobs = tuple(SampleJob(row, SamplingParams(), 0, seen, 1) for row, seen in enumerate(histories))
        began = perf_counter()
        self.executor.forward(Batch(rows, tokens, None, jobs), lambda: False, lambda: None)
        return perf_counter() - began


def measure(model: Model, case: Case, rounds: int) -> Row:
    """Milliseconds by kind. The step is computed again and again: each one overwrites the last one's keys."""
    prompts = dict(enumerate(model.prepare(case)))
    samples: dict[str, list[float]] = defaultdict(list)

    def step() -> float:
        return 1000 * model.step(prompts, case.context, case.context + case.tokens)

    step()
    for _ in range(rounds):
        samples["untimed"].append(step())
        clock = Clock()
        with timed(clock):
            total = step()
        found = {kind: 1000 * clock.seconds[kind] for kind in COLUMNS}
        for kind, spent in found.items():
            samples[kind].append(spent)
        samples["between"].append(total - sum(found.values()))
    return Row(case.name, "ms", dict(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    if any(name not in os.environ for name in PASSIVE):  # read when torch is loaded: too late for this process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PASSIVE)
    folder = model_of(arguments)
    model = Model(folder, arguments.threads)
    rows = []
    for case in CASES:
        note(f"{case.name} …")
        rows.append(measure(model, case, arguments.rounds))
    tell(rows, "step", {"model": str(folder), "threads": torch.get_num_threads()}, as_json=arguments.json)


if __name__ == "__main__":
    main()
