#!/usr/bin/env python3
"""What adapters cost: the same steps with and without, in turns, in one process.

bench_adapters.py [--weights auto|int4] [--rounds 6] [--sequences 8] [--adapters 4] [--rank 16]

Each turn decodes 16 positions of every sequence in common steps, or computes prompts of 64; with unlike adapters of all
linear layers, or with none. Prints medians, and the cost: the ratio of neighbouring turns, in percent above 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_lib import add_model_options, model_of
from safetensors.torch import save_file

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import AdapterEntry, LayerRange, Row

STEPS, PROMPT = 16, 64
GOAL = 15.0  # percent


def write_adapter(folder: Path, config: dict[str, int], rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers of a Llama."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    few = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    shapes |= {f"self_attn.{name}_proj": (hidden, few) for name in "kv"}
    shapes |= {f"mlp.{name}_proj": (hidden, wide) for name in ("gate", "up")} | {"mlp.down_proj": (wide, hidden)}
    chance, tensors = torch.Generator().manual_seed(seed), {}
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
    """Steps of some sequences, each with its adapter."""

    def __init__(self, executor: TorchExecutor, num: int, vocabulary: int) -> None:
        self.executor, self.num = executor, num
        self.tokens = np.random.default_rng(0).integers(3, vocabulary, PROMPT * num)

    def step(self, start: int, count: int, adapters: tuple[str, ...]) -> None:
        rows = tuple(Row(sequence, start, count, False) for sequence in range(self.num))
        batch = Batch(rows, self.tokens[: count * self.num], None, (), alone=True, adapters=adapters)
        self.executor.forward(batch, lambda: False, lambda: None)

    def run(self, what: str, adapters: tuple[str, ...]) -> float:
        """Return the seconds of a turn."""
        for sequence in range(self.num):
            self.executor.open(sequence, PROMPT + STEPS)
        began = time.perf_counter()
        self.step(0, PROMPT, adapters)
        computed = time.perf_counter()
        for number in range(STEPS if what == "decode" else 0):
            self.step(PROMPT + number, 1, adapters)
        done = time.perf_counter()
        for sequence in range(self.num):
            self.executor.release(sequence)
        return computed - began if what == "prompt" else done - computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shape", default="1.1b", help="of the model that is made where none is named")
    parser.add_argument("--weights", default="auto")
    for name, default in (("rounds", 6), ("sequences", 8), ("adapters", 4), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    model = model_of(arguments, arguments.shape)
    config = json.loads((model / "config.json").read_text())
    executor = TorchExecutor(str(model), dtype="bfloat16", quantization=Quantization(weights=arguments.weights))
    layers = LayerRange(0, config["num_hidden_layers"])
    executor.prepare(layers, (), arguments.sequences, lambda *_: None)
    executor.activate(layers)
    with tempfile.TemporaryDirectory() as folder:
        entries = executor.load_adapters(
            tuple(
                AdapterEntry(f"a{n}", str(write_adapter(Path(folder) / f"a{n}", config, arguments.rank, n)))
                for n in range(arguments.adapters)
            )
        )
    adapted = tuple(entries[sequence % len(entries)].key for sequence in range(arguments.sequences))
    work = Work(executor, arguments.sequences, config["vocab_size"])
    for what in ("decode", "prompt"):
        work.run(what, ())
        work.run(what, adapted)
        turns = [(work.run(what, ()), work.run(what, adapted)) for _ in range(arguments.rounds)]
        plain, with_them = (statistics.median(side) for side in zip(*turns, strict=True))
        cost = 100 * (statistics.median(b / a for a, b in turns) - 1)
        print(f"{arguments.weights} {what}: {plain:.3f} s, with adapters {with_them:.3f} s: {cost:+.1f} % (≤ {GOAL:g})")


if __name__ == "__main__":
    main()
