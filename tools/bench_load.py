#!/usr/bin/env python3
"""Measure how long a swarm takes to be there, what it holds in memory, and what warming up saves.

    warm, cold            all of the model in the page cache, or nothing; with --drop-caches (root) nothing at all, so
                          that programs are read from the disk too. A virtual machine's host may still have it
    warmed up or not      the first passes of a loaded stage, in one process: after its warm-up (warm), and without

Without --model, the 1.1 B Llama shape of bench_model.py is written to --model-dir once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import psutil
from bench_lib import (
    PASSIVE,
    BenchError,
    Row,
    add_model_options,
    model_of,
    note,
    random_prompt,
    run,
    tell,
    vocabulary_of,
)
from bench_swarm import Swarm

MIB = 1 << 20
PROMPT = 16
PASSES = 8  # of one token each, to compare the first with
ANSWER_S = 600.0
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SIZE, INT = ctypes.c_size_t, ctypes.c_int


def forget(model: Path, *, everything: bool) -> None:
    """Have the system drop the model's files from its page cache; it does so only where nobody has them mapped."""
    os.sync()  # pages not yet written stay
    if everything:
        drop_caches()
    for path in model.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drop_caches() -> None:
    try:
        DROP_CACHES.write_text("1")
    except OSError as error:
        raise BenchError(f"--drop-caches writes {DROP_CACHES}, which needs root: {error.strerror}") from None


def cached_share(model: Path) -> float:
    """Measure the part of the model's files that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, SIZE, INT, INT, INT, ctypes.c_long]
    libc.munmap.argtypes, libc.mincore.argtypes = [ctypes.c_void_p, SIZE], [ctypes.c_void_p, SIZE, ctypes.c_void_p]
    present = total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            size = path.stat().st_size
            start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)  # reads nothing yet
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = libc.mincore(start, size, pages)
            libc.munmap(start, size)
        if failed:
            raise BenchError(f"the system doesn't tell what of {path} is in its page cache")
        present, total = present + sum(page & 1 for page in pages), total + len(pages)
    return present / total


def remember(model: Path) -> None:
    """Read the files once, into the page cache."""
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
        for worker in sorted(workers, key=lambda worker: str(worker["name"])):
            name, resident = str(worker["name"]), psutil.Process(int(worker["pid"])).memory_info().rss
            found[f"{name}: weights (MiB)"] = layers[name] / MIB
            found[f"{name}: resident (MiB)"] = resident / MIB
    return found


async def load(
    model: Path, stages: int, threads: int, rounds: int, *, everything: bool
) -> tuple[list[Row], dict[str, object]]:
    samples: dict[str, dict[str, list[float]]] = {}
    shares: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(rounds):
        for how, cached in shares.items():
            note(f"{how} start {number + 1} of {rounds} …")
            if how == "cold":
                forget(model, everything=everything)
            else:
                remember(model)
            cached.append(100 * cached_share(model))
            for what, figure in (await start(model, stages, threads)).items():
                samples.setdefault(what, {}).setdefault(how, []).append(figure)
    rows = [
        Row(what.partition(" (")[0], what[what.index("(") + 1 : -1], both, "cold") for what, both in samples.items()
    ]
    firsts = warm_up_rows(model, threads, rounds)
    found = ", ".join(f"{how} {max(each) if how == 'cold' else min(each):.0f} %" for how, each in shares.items())
    facts: dict[str, object] = {
        "page cache": f"{found} of the model at the start{', nothing else either' if everything else ''}",
        "saved by warming up": ", ".join(
            f"{saved(row):.0f} ms of the {row.case.partition(',')[0]}" for row in firsts[:2]
        ),
    }
    return [*rows, *firsts], facts


def saved(row: Row) -> float:
    return row.medians["cold"] - row.medians["warm"]


def warm_up_rows(model: Path, threads: int, rounds: int) -> list[Row]:
    """Measure in fresh processes what the first passes take if nothing has warmed up before, and if it has."""
    samples: dict[str, dict[str, list[float]]] = {}
    environment = os.environ | PASSIVE
    for _ in range(rounds):
        for how, flag in (("cold", "--cold"), ("warm", "--warm")):
            command = [sys.executable, __file__, "--model", str(model), "--threads", str(threads), flag]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=ANSWER_S, env=environment)
            for what, seconds in json.loads(done.stdout).items():
                samples.setdefault(what, {}).setdefault(how, []).append(1000 * seconds)
    return [Row(f"{what}, warmed up or not", "ms", both, "cold") for what, both in samples.items()]


def first_passes(model: Path, threads: int, *, warm: bool) -> dict[str, float]:
    """Time, in seconds, the first pass of a prompt, of the first decode, and of later ones, in this process."""
    import numpy as np  # noqa: PLC0415 (only this process computes)
    from bench_stage import loaded  # noqa: PLC0415

    from swarm.params import SamplingParams  # noqa: PLC0415
    from swarm.stage.engine.torch_executor import TorchExecutor  # noqa: PLC0415
    from swarm.stage.executor import Batch, SampleJob  # noqa: PLC0415
    from swarm.wire import messages  # noqa: PLC0415

    executor = TorchExecutor(str(model), threads=threads or None)
    if not warm:
        executor._warm_up_stage = lambda _: 0.0  # type: ignore[method-assign, assignment]
    loaded(executor, 1)
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
    return {"first pass": prompt, "first decode": decodes[0], "quickest later decode": min(decodes[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each stage; 0: as swarm up chooses")
    parser.add_argument("--drop-caches", action="store_true", help="cold means the whole page cache (root)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = model_of(arguments)
    if arguments.warm or arguments.cold:
        print(json.dumps(first_passes(model, arguments.threads, warm=arguments.warm)))
        return
    everything = arguments.drop_caches
    rows, facts = run(load(model, arguments.stages, arguments.threads, arguments.rounds, everything=everything))
    tell(rows, "load", {"model": str(model), "stages": arguments.stages, **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()
