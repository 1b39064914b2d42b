#!/usr/bin/env python3
"""Measure one part of what a GPU computes; tools/gpu_check runs all of them. Prints figures as one line of JSON.

bench_gpu.py PART --model FOLDER [--device cuda] [--tiny] [--seconds 60]

facts    what is installed, and how fast memory is read
model    write a model of random weights to FOLDER: the shape of Llama 3.1 8B in bfloat16, a small or a tiny one
decode   a token of 1 sequence and of 64, and a prompt of 4,096, against transformers
stages   the same with two stages on the device, one after the other, against one
pairs    a sequence's logits alone against the same ones in a crowd of 64, bit for bit
kill     a stage is killed under 16 sequences of 1,024 positions, in a swarm of three workers on the device
mixed    a swarm of a CPU's and a GPU's worker, each killed in turn
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]

from swarm.stage.shell.openmp import use_passive_waiting  # noqa: E402

use_passive_waiting()  # before torch

import numpy as np  # noqa: E402
import torch  # noqa: E402

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
SMALL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {"8b": LLAMA_8B, "small": SMALL, "tiny": TINY}
BASE = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
SPREAD = 0.02  # standard deviation of the weights
CROWD = 64
CONTEXT = 1024  # positions before a decode
PROMPT = 4096
RUNS = 20
NUM_PAIRS = 10_000
PAIR_LAYERS = 4  # the model's last layers, and its head
SHARE_OF_MEMORY = 0.9  # of the device's free memory, for all workers together

Figures = dict[str, Any]


class Sizes:
    """Sizes of the cases: the real ones, or tiny ones to try the tool out."""

    def __init__(self, *, tiny: bool) -> None:
        self.context, self.prompt = (48, 160) if tiny else (CONTEXT, PROMPT)
        self.runs = 2 if tiny else RUNS
        self.pairs = CROWD if tiny else NUM_PAIRS
        self.sequences, self.kill_context = (4, 64) if tiny else (16, 1024)
        self.kills = 1 if tiny else 3


# --- facts and model --------------------------------------------------------------------------------------------------


def facts(device: torch.device) -> Figures:
    from importlib import metadata  # noqa: PLC0415

    from swarm.stage import native  # noqa: PLC0415

    found: Figures = {"python": platform.python_version(), "processor": platform.processor() or platform.machine()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["native_kernels"] = native.library() is not None
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {"gpu": about.name, "gpu_bytes": about.total_memory, "cuda": torch.version.cuda}
        found["capability"] = f"{about.major}.{about.minor}"
    found["bytes_per_s"] = bandwidth(device)
    return found


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that the device reads from its memory: the best of several kernels and rounds."""
    block = torch.ones((1 << 30 if device.type == "cuda" else 1 << 24) // 4, device=device)
    best = 0.0
    for kernel in (block.sum, block.max, block.view(torch.int32).max) * 5:
        synchronize(device)
        began = time.perf_counter()
        kernel()
        synchronize(device)
        best = max(best, block.nbytes / (time.perf_counter() - began))
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_model(folder: Path, device: torch.device, shape: str) -> Figures:
    """Write shard by shard, so that only one is in memory; the weights are made on the device."""
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    began = time.perf_counter()
    config = AutoConfig.for_model(**BASE, **SHAPES[shape])
    config.dtype, config.architectures = "bfloat16", ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        shard = parts[2] if parts[1] == "layers" else parts[-2]
        shards.setdefault(f"model-{shard}.safetensors", {})[name] = weight.shape
    total = 0
    for file, weights in shards.items():
        tensors = {name: random_weight(shape, device, generator) for name, shape in weights.items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, {"format": "pt"})
    places = {name: file for file, weights in shards.items() for name in weights}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)  # last: a folder with a configuration is complete
    return {"bytes": total, "seconds": time.perf_counter() - began}


def random_weight(shape: torch.Size, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return weight.normal_(0, SPREAD, generator=generator).cpu()


# --- one process ------------------------------------------------------------------------------------------------------


def open_executor(model: Path, device: torch.device, first: int = 0, stop: int | None = None) -> Any:
    from swarm.stage.engine.torch_executor import TorchExecutor  # noqa: PLC0415
    from swarm.wire.messages import LayerRange  # noqa: PLC0415

    executor = TorchExecutor(str(model), device=str(device), dtype="bfloat16", kv_share=0.6)
    layers = LayerRange(first, stop or executor.manifest.num_layers)
    executor.prepare(layers, (), CROWD, lambda *_: None)
    executor.activate(layers)
    return executor


def median_time(once: Callable[[], object], runs: int, device: torch.device) -> float:
    """Return the median of some runs, after two that do not count."""
    took = []
    for run in range(runs + 2):
        synchronize(device)
        began = time.perf_counter()
        once()
        synchronize(device)
        if run >= 2:
            took.append(time.perf_counter() - began)
    return median(took)


class Pipeline:
    """Stages in this process, each with a part of the layers; hidden states pass through the host's memory."""

    def __init__(self, executors: Sequence[Any]) -> None:
        self.executors = executors
        self.vocabulary = executors[0].manifest.vocab_size

    def fill(self, num: int, context: int, more: int) -> None:
        """Open sequences with some positions each."""
        for executor in self.executors:
            executor.reset()
            for sequence in range(num):
                executor.open(sequence, context + more + 1)
        for sequence in range(num):
            self.step((sequence,), 0, context)

    def step(self, sequences: Sequence[int], start: int, count: int) -> None:
        """Compute positions of these sequences, with a greedy token of each. The same again overwrites them."""
        from swarm.params import SamplingParams  # noqa: PLC0415
        from swarm.stage.executor import Batch, SampleJob  # noqa: PLC0415
        from swarm.wire.messages import Row  # noqa: PLC0415

        rows = tuple(Row(sequence, start, count, True) for sequence in sequences)
        tokens = np.random.default_rng(start).integers(3, self.vocabulary, len(rows) * count)
        history, hidden = [3] * (start + count), None
        for executor in self.executors:
            is_last = executor is self.executors[-1]
            jobs = tuple(SampleJob(n, SamplingParams(), 0, history, 1) for n in range(len(rows))) if is_last else ()
            given = rows if is_last else tuple(Row(row.sequence, start, count, False) for row in rows)
            hidden = executor.forward(Batch(given, tokens, hidden, jobs), lambda: False, lambda: None).hidden

    def measure(self, sizes: Sizes, device: torch.device) -> Figures:
        """Time a token of one sequence and of a crowd, and a prompt in the chunks of a broker and in one."""
        from swarm.config import Settings  # noqa: PLC0415

        chunk = Settings().broker.prefill_chunk
        found: Figures = {}
        self.fill(CROWD, sizes.context, 1)
        for num in (1, CROWD):
            found[f"decode_{num}_s"] = median_time(
                lambda n=num: self.step(range(n), sizes.context, 1), sizes.runs, device
            )
        for executor in self.executors:
            executor.reset()
            executor.open(0, sizes.prompt)

        def prompt_in(chunk: int) -> None:
            for start in range(0, sizes.prompt, chunk):
                self.step((0,), start, min(chunk, sizes.prompt - start))

        found["prompt_s"] = median_time(lambda: prompt_in(sizes.prompt), 3, device)
        found["prompt_in_chunks_s"] = median_time(lambda: prompt_in(chunk), 3, device)
        return found


def measure_transformers(sizes: Sizes, device: torch.device, *, tiny: bool) -> Figures:
    """Time the same with transformers: torch's kernels, and weights that are made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: PLC0415

    config = AutoConfig.for_model(**BASE, **(TINY if tiny else LLAMA_8B))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    found: Figures = {}

    def compute(ids: torch.Tensor, cache: DynamicCache) -> None:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits.argmax(-1).tolist()

    with torch.inference_mode():
        for num in (1, CROWD):
            cache = DynamicCache(config=config)
            compute(torch.randint(3, config.vocab_size, (1, sizes.context), device=device), cache)
            cache.batch_repeat_interleave(num)
            ids = torch.randint(3, config.vocab_size, (num, 1), device=device)

            def once(ids: torch.Tensor = ids, cache: DynamicCache = cache) -> None:
                compute(ids, cache)
                cache.crop(-1)

            found[f"decode_{num}_s"] = median_time(once, sizes.runs, device)
        prompt = torch.randint(3, config.vocab_size, (1, sizes.prompt), device=device)
        found["prompt_s"] = median_time(lambda: compute(prompt, DynamicCache(config=config)), 3, device)
    return found


def decode(model: Path, device: torch.device, sizes: Sizes, *, tiny: bool) -> Figures:
    """Compare with transformers, and a token of one sequence with the time of reading the weights once."""
    executor = open_executor(model, device)
    own = Pipeline([executor]).measure(sizes, device)
    manifest, kernels = executor.manifest, executor._kernels.describe(executor._active_stage().modules)[0]
    read = sum(manifest.layer_bytes) + manifest.head_bytes + sizes.context * sum(manifest.kv_bytes_per_token)
    del executor
    release(device)
    floor_s = read / bandwidth(device)
    found: Figures = {"own": own, "kernels": kernels, "floor_s": floor_s, "floor_share": floor_s / own["decode_1_s"]}
    tell(found)  # so that they are there if the peer fails
    peer = measure_transformers(sizes, device, tiny=tiny)
    ratios = {name: peer[f"{name}_s"] / own[f"{name}_s"] for name in (f"decode_{CROWD}", "decode_1", "prompt")}
    ratios["prompt_in_chunks"] = peer["prompt_s"] / own["prompt_in_chunks_s"]
    return found | {"transformers": peer, "over_transformers": ratios}


def release(device: torch.device) -> None:
    import gc  # noqa: PLC0415

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def stages(model: Path, device: torch.device, sizes: Sizes) -> Figures:
    """Compare two stages on the device with one."""
    whole = open_executor(model, device)
    num_layers = whole.manifest.num_layers
    one = Pipeline([whole]).measure(sizes, device)
    del whole
    release(device)
    halves = [open_executor(model, device, *cut) for cut in ((0, num_layers // 2), (num_layers // 2, num_layers))]
    two = Pipeline(halves).measure(sizes, device)
    return {"one": one, "two": two, "ratios": {name: one[name] / two[name] for name in one}}


def pairs(model: Path, device: torch.device, sizes: Sizes, seconds: float) -> Figures:
    """Compare logits of a sequence that is computed alone with those in a crowd, bit for bit."""
    from swarm.stage.executor import Batch  # noqa: PLC0415
    from swarm.wire.messages import Row  # noqa: PLC0415

    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    executor = open_executor(model, device, max(0, num_layers - PAIR_LAYERS), num_layers)
    chance, width = np.random.default_rng(4), executor.manifest.row_width
    lengths = [int(length) for length in chance.integers(1, sizes.context, CROWD)]

    def compute(rows: Sequence[Row], hidden: np.ndarray) -> torch.Tensor:
        logits: torch.Tensor = executor.last_logits(Batch(tuple(rows), np.zeros(len(hidden), np.int64), hidden, ()))
        return logits

    for sequence, length in enumerate(lengths):
        executor.open(sequence, length + 1)
        compute([Row(sequence, 0, length, True)], chance.standard_normal((length, width), np.float32))
    began, compared, differ = time.perf_counter(), 0, 0
    while compared < sizes.pairs and time.perf_counter() - began < seconds:
        hidden = chance.standard_normal((CROWD, width), np.float32)
        rows = [Row(sequence, length, 1, True) for sequence, length in enumerate(lengths)]
        crowd = compute(rows, hidden)
        alone = [compute([row], hidden[n : n + 1]) for n, row in enumerate(rows)]
        differ += int((torch.cat(alone) != crowd).any(-1).sum())
        compared += CROWD
    return {"compared": compared, "differ": differ, "seconds": time.perf_counter() - began}


# --- swarms of processes ----------------------------------------------------------------------------------------------


def limit_workers(device: torch.device, num_workers: int) -> None:
    """Name the device and each worker's part of its memory in the environment of the workers to come."""
    os.environ["SWARM_WORKER__DEVICE"] = str(device)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        os.environ["SWARM_WORKER__MEMORY_LIMIT"] = str(int(free * SHARE_OF_MEMORY / num_workers))


async def kill(model: Path, device: torch.device, sizes: Sizes) -> Figures:
    """Measure the longest gap in the answers, beyond the usual one. The tokens must be those of an undisturbed run."""
    from recovery_stall import Case, stall  # noqa: PLC0415
    from recovery_swarm import STAGES  # noqa: PLC0415

    limit_workers(device, STAGES)
    outcomes = await stall(model, ["standby"], [Case(sizes.sequences, sizes.kill_context)], sizes.kills)
    return {
        "stalls_s": [each.stall_s for each in outcomes],
        "longest_stall_s": max(each.stall_s for each in outcomes),
        "usual_gap_s": outcomes[0].usual_s,
        "parts_s": outcomes[-1].split,
        "same_tokens": True,  # ``stall`` raises otherwise
    }


async def mixed(model: Path, device: torch.device, sizes: Sizes) -> Figures:
    """Kill the worker of the CPU and that of the GPU in turn; the other one goes on alone with all answers."""
    from bench_lib import random_prompt, vocabulary_of  # noqa: PLC0415
    from bench_swarm import Processes, answers  # noqa: PLC0415

    places = {"on-cpu": "cpu", "on-gpu": str(device)}
    settings = {
        "SWARM_BROKER__MODE": "overlapped",
        "SWARM_BROKER__DTYPE": "float32",
        "SWARM_PLAN__STANDBY": "neighbours",
        "SWARM_BROKER__PREFIX_CACHE": "false",
    }

    class Mixed(Processes):
        async def begin(self) -> None:
            self.launch_broker("--min-workers", "2")
            for name in places:
                self.start(name)
            await self.until_serving(2)

        def start(self, name: str) -> None:
            environment = {"SWARM_WORKER__DEVICE": places[name], "SWARM_WORKER__MEMORY_LIMIT": "8GiB"}
            self.launch_worker(name, model, max(1, (os.cpu_count() or 2) // 2), environment)

        async def whole(self) -> dict[str, Any]:
            await self.until("status", lambda s: s["state"] == "serving" and s["num_stages"] == 2 and not s["loading"])
            plan = await self.until("plan", lambda plan: len(plan["stages"]) == 2)
            return {stage["worker"]: stage["layers"] for stage in plan["stages"]}

    found: Figures = {}
    vocabulary = vocabulary_of(model)
    async with Mixed(settings) as swarm:
        found["layers"] = await swarm.whole()
        nodes = await swarm.client.query("nodes")
        found["dtypes"] = {row["name"]: row["dtype"] for row in nodes["workers"]}
        for victim in places:
            prompts = [random_prompt(32, vocabulary) for _ in range(sizes.sequences)]
            calm = await answers(swarm.client, prompts, 8, 24)

            async def strike(victim: str = victim) -> None:
                swarm.processes[victim].send_signal(signal.SIGKILL)
                await asyncio.to_thread(swarm.processes[victim].wait)

            streams = await answers(swarm.client, prompts, 8, 24, strike)
            same = sum(
                a == b for x, y in zip(streams, calm, strict=True) for a, b in zip(x.tokens, y.tokens, strict=True)
            )
            found[f"killed_{victim}"] = {
                "answers": len(prompts),
                "all_complete": all(len(stream.tokens) == 32 for stream in streams),
                "same_tokens": same / sum(len(stream.tokens) for stream in calm),
                "longest_gap_s": max(gap for stream in streams for gap in stream.gaps(0.0)),
            }
            swarm.start(victim)
            await swarm.whole()
    return found


# --- the command ------------------------------------------------------------------------------------------------------


def tell(figures: Figures) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["facts", "model", "decode", "stages", "pairs", "kill", "mixed"])
    parser.add_argument("--model", type=Path, default=Path("/tmp/swarm-bench/gpu"), help="folder of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the tool out")
    parser.add_argument("--shape", choices=SHAPES, help="of the model to write")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the pairs")
    arguments = parser.parse_args()
    device, model, sizes = torch.device(arguments.device), arguments.model, Sizes(tiny=arguments.tiny)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    match arguments.part:
        case "facts":
            tell(facts(device))
        case "model":
            tell(write_model(model, device, arguments.shape or ("tiny" if arguments.tiny else "8b")))
        case "decode":
            tell(decode(model, device, sizes, tiny=arguments.tiny))
        case "stages":
            tell(stages(model, device, sizes))
        case "pairs":
            tell(pairs(model, device, sizes, arguments.seconds))
        case "kill":
            tell(asyncio.run(kill(model, device, sizes)))
        case "mixed":
            tell(asyncio.run(mixed(model, device, sizes)))


if __name__ == "__main__":
    main()
