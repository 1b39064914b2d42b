#!/usr/bin/env python3
"""How long a swarm takes to be there, what it holds in memory, and what warming up saves.

    cold      nothing of the model in the page cache
    warm      all of it
    first     the first pass of a prompt and the first decode of a loaded stage, warmed up and not (one process)

Without --model, the 1.1 B Llama shape of bench_model.py is written to --model-dir once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import psutil
from bench_lib import PASSIVE, Row, Swarm, add_model_options, model_of, note, random_prompt, run, tell, vocabulary_of

MIB = 1 << 20
PROMPT = 16
PASSES = 8  # of one token each, to compare the first with
ANSWER_S = 600.0


def forget(model: Path) -> None:
    """Have the system drop the model's files from its page cache; it does so only where nobody has them mapped."""
    os.sync()  # pages not yet written stay
    for path in model.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def remember(model: Path) -> None:
    """Read the files once."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(64 * MIB):
                pass


async def start(model: Path, stages: int, threads: int) -> dict[str, float]:
    """Start a swarm, ask it for one answer, stop it: seconds of each part, and MiB of each process."""
    began = perf_counter()
    async with Swarm(model, stages, threads) as swarm:
        found = {"start to serving (s)": perf_counter() - began}
        plan = (await swarm.client.query("plan"))["stages"]
        assert isinstance(plan, list)
        found["slowest stage's loading (s)"] = max(float(stage["load_s"]) for stage in plan)
        found["slowest stage's warm-up (s)"] = max(float(stage["warm_up_s"]) for stage in plan)
        for which in ("first", "second"):
            began = perf_counter()
            await swarm.client.generate(random_prompt(PROMPT, vocabulary_of(model)), max_tokens=1, timeout=ANSWER_S)
            found[f"{which} request's first token (s)"] = perf_counter() - began
        workers = (await swarm.client.query("nodes"))["workers"]
        assert isinstance(workers, list)
        layers = {str(stage["worker"]): int(stage["weight_bytes"]) for stage in plan}
        for worker in workers:
            name, resident = str(worker["name"]), psutil.Process(int(worker["pid"])).memory_info().rss
            found[f"{name}: weights (MiB)"] = layers[name] / MIB
            found[f"{name}: resident (MiB)"] = resident / MIB
    return found


async def load(model: Path, stages: int, threads: int, rounds: int) -> tuple[list[Row], dict[str, object]]:
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for how, prepare in (("warm", remember), ("cold", forget)):
            note(f"{how} start {number + 1} of {rounds} …")
            prepare(model)
            for what, figure in (await start(model, stages, threads)).items():
                samples.setdefault(what, {}).setdefault(how, []).append(figure)
    rows = [
        Row(what.partition(" (")[0], what[what.index("(") + 1 : -1], both, "warm") for what, both in samples.items()
    ]
    return [*rows, *warm_up_rows(model, threads, rounds)], {}


def warm_up_rows(model: Path, threads: int, rounds: int) -> list[Row]:
    """In fresh processes: what the first passes take if nothing has warmed up before, and if it has."""
    samples: dict[str, dict[str, list[float]]] = {}
    environment = os.environ | PASSIVE
    for _ in range(rounds):
        for how, flag in (("warm", "--warm"), ("cold", "--cold")):
            command = [sys.executable, __file__, "--model", str(model), "--threads", str(threads), flag]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=ANSWER_S, env=environment)
            for what, seconds in json.loads(done.stdout).items():
                samples.setdefault(what, {}).setdefault(how, []).append(1000 * seconds)
    return [Row(f"{what}, warmed up or not", "ms", both, "warm") for what, both in samples.items()]


def first_passes(model: Path, threads: int, *, warm: bool) -> dict[str, float]:
    """Seconds of the first pass of a prompt, of the first decode, and of later ones, in this process."""
    import numpy as np  # noqa: PLC0415 (only this process computes)

    from swarm.params import SamplingParams  # noqa: PLC0415
    from swarm.stage.executor import Batch, SampleJob  # noqa: PLC0415
    from swarm.stage.torch_executor import TorchExecutor  # noqa: PLC0415
    from swarm.wire import messages  # noqa: PLC0415

    executor = TorchExecutor(str(model), threads=threads or None)
    if not warm:
        executor._warm = lambda _: 0.0  # type: ignore[method-assign]
    layers = messages.LayerRange(0, executor.manifest.num_layers)
    executor.prepare(layers, (), 1, lambda *_: None)
    executor.activate(layers)
    executor.open(1, PROMPT + PASSES + 1)
    tokens = random_prompt(PROMPT + PASSES, executor.manifest.vocab_size)

    def seconds(begin: int, end: int) -> float:
        job = SampleJob(0, SamplingParams(), 0, tokens[:end], PROMPT)
        batch = Batch(
            (messages.Row(1, begin, end - begin, True),), np.asarray(tokens[begin:end], np.int64), None, (job,)
        )
        began = perf_counter()
        executor.forward(batch, lambda: False, lambda: None)
        return perf_counter() - began

    prompt = seconds(0, PROMPT)
    decodes = [seconds(PROMPT + number, PROMPT + number + 1) for number in range(PASSES)]
    return {"first pass, a prompt": prompt, "first decode": decodes[0], "a later decode": min(decodes[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each stage; 0: as swarm up chooses")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = model_of(arguments)
    if arguments.warm or arguments.cold:
        print(json.dumps(first_passes(model, arguments.threads, warm=arguments.warm)))
        return
    rows, facts = run(load(model, arguments.stages, arguments.threads, arguments.rounds))
    tell(rows, "load", {"model": str(model), "stages": arguments.stages, **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()
