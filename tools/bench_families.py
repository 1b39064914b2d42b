#!/usr/bin/env python3
"""Time families of models against transformers: a small random model of each kind, both in this process, in turns.

One executor with all layers stands for Swarm, without any wire; transformers runs its own forward with its own cache
and its default attention. A round is one token of each sequence after a short prompt, or a whole prompt. On a machine
that others use, one thread and ``--clock cpu`` (processor time) tell more than the time that passed.

``--save FOLDER`` only writes the models there, one folder each: bench_decode.py --model FOLDER/qwen3_moe then measures
one over the stages of a real swarm.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_lib import Row, note, tell, turns
from bench_stage import loaded
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.wire import messages

CONTEXT = 64
VOCABULARY = 32000
COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 1024},
    "qwen3_next": {
        **{"layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "num_experts": 32},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        **{"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    },
    "falcon_h1": {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
    "deepseek_v3": {
        **{"num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 512, "n_group": 4, "topk_group": 2},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1},
        **{"n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 512},
    },
}
# Least ratios to transformers that are wanted: with one sequence, with eight, and of a prompt.
GOALS: dict[str, tuple[float, float, float]] = dict.fromkeys(
    ("deepseek_v3", "qwen3_next", "falcon_h1"), (1.3, 1.3, 1.2)
)


def save(kind: str, folder: Path, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(kind, **(COMMON | FAMILIES[kind]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.02)
    model.save_pretrained(folder)


Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def tokens(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)


class Theirs:
    """transformers, with a cache of its own."""

    kernels = "its own"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def prompt(self, sequences: int, count: int) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._step(torch.from_numpy(tokens(sequences * count, 1)).view(sequences, count))

    def decode(self, sequences: int, at: int) -> None:
        self._step(torch.from_numpy(tokens(sequences, at)).view(sequences, 1))

    def _step(self, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)


class Ours:
    """One stage with everything."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        threads, name = torch.get_num_threads(), str(dtype).removeprefix("torch.")
        self._executor = TorchExecutor(str(folder), dtype=name, threads=threads, threads_alone=threads)
        self.kernels = loaded(self._executor)

    def prompt(self, sequences: int, count: int) -> None:
        self._executor.reset()
        for sequence in range(sequences):
            self._executor.open(sequence, 1024)
        self._step(sequences, 0, count, 1)

    def decode(self, sequences: int, at: int) -> None:
        self._step(sequences, at, 1, at)

    def _step(self, sequences: int, start: int, count: int, seed: int) -> None:
        rows = tuple(messages.Row(sequence, start, count, False) for sequence in range(sequences))
        with torch.inference_mode():
            self._executor.last_logits(Batch(rows, tokens(sequences * count, seed), None, ())).argmax(-1)


def decoding(side: Theirs | Ours, sequences: int, steps: int, now: Clock) -> float:
    """Milliseconds of one step, after a short prompt."""
    side.prompt(sequences, CONTEXT)
    side.decode(sequences, CONTEXT)
    began = now()
    for at in range(CONTEXT + 1, CONTEXT + 1 + steps):
        side.decode(sequences, at)
    return (now() - began) / steps * 1e3


def prompting(side: Theirs | Ours, count: int, now: Clock) -> float:
    began = now()
    side.prompt(1, count)
    return (now() - began) * 1e3


def measure(kind: str, options: argparse.Namespace) -> list[Row]:
    dtype, now = getattr(torch, options.dtype), CLOCKS[options.clock]
    with tempfile.TemporaryDirectory() as folder:
        save(kind, Path(folder), dtype)
        sides = {"Swarm": Ours(Path(folder), dtype), "transformers": Theirs(Path(folder), dtype)}
    note(f"{kind}: {sides['Swarm'].kernels}")
    cases: dict[str, Callable[[Theirs | Ours], float]] = {
        "1 sequence": lambda side: decoding(side, 1, options.steps, now),
        "8 sequences": lambda side: decoding(side, 8, options.steps, now),
        f"prompt of {options.prompt}": lambda side: prompting(side, options.prompt, now),
    }
    rows = []
    for (name, case), goal in zip(cases.items(), GOALS.get(kind, (None,) * len(cases)), strict=True):
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for side, counts in turns(sides, options.rounds):
            figure = case(sides[side])
            if counts:
                samples[side].append(figure)
        rows.append(Row(f"{kind}, {name}", "ms", samples, baseline="transformers", target=goal))
        note(f"{rows[-1].case}: {rows[-1].medians} {rows[-1].ratios}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps of a round")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the models there, measure nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.save is not None:
        for kind in options.families:
            save(kind, options.save / kind, getattr(torch, options.dtype))
        return
    torch.set_num_threads(options.threads)
    rows = [row for kind in options.families for row in measure(kind, options)]
    facts = {name: getattr(options, name) for name in ("dtype", "threads", "rounds", "clock")}
    tell(rows, "families of models", facts, as_json=options.json)


if __name__ == "__main__":
    main()
