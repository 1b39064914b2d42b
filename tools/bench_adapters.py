#!/usr/bin/env python3
"""Time what LoRA adapters cost: steps of the same rows in one process, in turns, with none, one for all, and mixed.

A turn decodes 16 positions of every sequence in common steps, or computes a prompt of every sequence in one step. The
adapters change all linear layers. "mixed": neighbouring sequences have unlike adapters. Ratios are throughput ÷ that
without adapters; a ratio of 0.87 is a cost of 15 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_lib import Row as Case
from bench_lib import add_model_options, model_of, note, tell, turns
from safetensors.torch import save_file

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import AdapterEntry, LayerRange, Row

CHOICES = {"float": "auto", "int8": "int8", "int4": "int4"}
GOAL = 1 / 1.15
NONE, ONE, MIXED = "none", "one for all", "mixed"


def write_adapter(folder: Path, config: dict[str, int], rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers of a Llama."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    few = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    shapes |= {f"self_attn.{name}_proj": (hidden, few) for name in "kv"}
    shapes |= {f"mlp.{name}_proj": (hidden, wide) for name in ("gate", "up")} | {"mlp.down_proj": (wide, hidden)}
    chance, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(config["num_hidden_layers"]):
        for module, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{name}A.weight"] = torch.randn(rank, inputs, generator=chance) * 0.01
            tensors[f"{name}B.weight"] = torch.randn(outputs, rank, generator=chance) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


class Work:
    """Steps of some sequences with a loaded model; each turn gives them other adapters."""

    def __init__(self, model: Path, weights: str, options: argparse.Namespace) -> None:
        config = json.loads((model / "config.json").read_text())
        layers = LayerRange(0, config["num_hidden_layers"])
        self._num, self._prompt, self._steps = options.sequences, options.prompt, options.steps
        self._executor = TorchExecutor(str(model), dtype=options.dtype, quantization=Quantization(weights=weights))
        self._executor.prepare(layers, (), self._num, lambda *_: None)
        self._executor.activate(layers)
        with tempfile.TemporaryDirectory() as name:
            folder, numbers = Path(name), range(options.adapters)
            written = [write_adapter(folder / f"a{number}", config, options.rank, number) for number in numbers]
            entries = self._executor.load_adapters(tuple(AdapterEntry(each.name, str(each)) for each in written))
        keys = [entry.key for entry in entries]
        self.adapters: dict[str, tuple[str, ...]] = {
            NONE: (),
            ONE: (keys[0],) * self._num,
            MIXED: tuple(keys[sequence % len(keys)] for sequence in range(self._num)),
        }
        self._tokens = np.random.default_rng(0).integers(3, config["vocab_size"], self._prompt * self._num)

    def time_turn(self, what: str, adapters: tuple[str, ...]) -> float:
        """Return the milliseconds of the prompts, or of a step of decoding."""
        for sequence in range(self._num):
            self._executor.open(sequence, self._prompt + self._steps)
        began = time.perf_counter()
        self._step(0, self._prompt, adapters)
        computed = time.perf_counter()
        for number in range(self._steps if what == "decoding" else 0):
            self._step(self._prompt + number, 1, adapters)
        done = time.perf_counter()
        for sequence in range(self._num):
            self._executor.release(sequence)
        return (computed - began if what == "prompts" else (done - computed) / self._steps) * 1e3

    def _step(self, start: int, count: int, adapters: tuple[str, ...]) -> None:
        rows = tuple(Row(sequence, start, count, False) for sequence in range(self._num))
        batch = Batch(rows, self._tokens[: count * self._num], None, (), alone=True, adapters=adapters)
        self._executor.forward(batch, lambda: False, lambda: None)


def measure(model: Path, name: str, options: argparse.Namespace) -> list[Case]:
    work, cases = Work(model, CHOICES[name], options), []
    for what in ("decoding", "prompts"):
        samples: dict[str, list[float]] = {each: [] for each in work.adapters}
        for side, counts in turns(work.adapters, options.rounds):
            figure = work.time_turn(what, work.adapters[side])
            if counts:
                samples[side].append(figure)
        cases.append(Case(f"{name}, {what}", "ms", samples, baseline=NONE, goals={MIXED: GOAL}))
        note(f"{cases[-1].case}: {cases[-1].medians} {cases[-1].ratios}")
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shape", default="1.1b", help="of the model that is made where none is named")
    parser.add_argument("--weights", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    for option, default in (("sequences", 8), ("adapters", 4), ("rank", 16), ("prompt", 64)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps of a turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = model_of(options, options.shape)
    cases = [case for name in options.weights for case in measure(model, name, options)]
    facts = {name: getattr(options, name) for name in ("shape", "dtype", "sequences", "adapters", "rank", "rounds")}
    tell(cases, "adapters", facts, as_json=options.json)


if __name__ == "__main__":
    main()
