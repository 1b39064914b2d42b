#!/usr/bin/env python3
"""Compare what ``swarm doctor --model … --workers N`` predicts with what that swarm then does on this machine.

For each number of workers, in each round: the forecast, then a swarm of that many, started for it. Told are medians:
tokens per second of 1, 4 and 16 sequences that decode together (prompts of 448 tokens, answers of 128), seconds of a
prompt of 512 tokens until its first token, and took ÷ predicted (of seconds).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench_lib import (
    PASSIVE,
    BenchError,
    add_model_options,
    model_of,
    note,
    numbers,
    random_prompt,
    tell_lines,
    vocabulary_of,
    wait_passively,
)
from bench_swarm import Swarm, answers

from swarm.demo import model_path
from swarm.errors import SwarmError

PROMPT, ANSWER = 448, 128  # so that half way a sequence has as many positions as a plan is made for
ROWS = (1, 4, 16)
LONG = 512
WHAT = (*(f"{rows} sequences" for rows in ROWS), f"prompt of {LONG}")


async def predicted(model: Path, num_workers: int) -> list[float]:
    """Seconds of a step of 1, 4 and 16, then of the prompt, as ``swarm doctor`` tells a stranger: with nothing set in
    its environment that this program needs for itself."""
    own = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    command = (sys.executable, "-m", "swarm", "doctor", "--json", "--model", str(model), "--workers", str(num_workers))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=own)
    said, _ = await process.communicate()
    try:
        told = next(each["text"] for each in json.loads(said)["findings"] if each["about"] == "outlook")
    except (ValueError, StopIteration):
        raise BenchError("there was no forecast; why is said above") from None
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d.,]+) tokens/s", told)]
    prompt = re.search(r"takes ([\d.]+) s", told)
    if len(rates) != len(ROWS) or prompt is None:
        raise BenchError(f"the forecast is not understood: {told}")
    return [*(rows / rate for rows, rate in zip(ROWS, rates, strict=True)), float(prompt[1])]


async def taken(model: Path, num_workers: int) -> list[float]:
    """The same, measured."""
    vocabulary = vocabulary_of(model)
    async with Swarm(model, num_workers) as swarm:
        await answers(swarm.client, [random_prompt(PROMPT, vocabulary)], 1, ANSWER)  # warms up
        found = []
        for rows in ROWS:
            streams = await answers(swarm.client, [random_prompt(PROMPT, vocabulary) for _ in range(rows)], 1, ANSWER)
            began, ended = max(each.times[0] for each in streams), min(each.times[-1] for each in streams)
            num = sum(began < at <= ended for each in streams for at in each.times)
            found.append((ended - began) * rows / num)
        return [*found, median([await _prompt_s(swarm, vocabulary) for _ in range(3)])]


async def _prompt_s(swarm: Swarm, vocabulary: int) -> float:
    began = asyncio.get_running_loop().time()
    async for _ in swarm.client.stream(random_prompt(LONG, vocabulary), max_tokens=1):
        return asyncio.get_running_loop().time() - began
    raise BenchError("no token came")


def lines_of(num_workers: int, rounds: list[tuple[list[float], list[float]]]) -> Iterator[dict[str, object]]:
    for index, what in enumerate(WHAT):
        said, took = (median(each[side][index] for each in rounds) for side in (0, 1))
        figures = [said, took] if index == len(ROWS) else [ROWS[index] / said, ROWS[index] / took]
        unit = "s" if index == len(ROWS) else "tokens/s"
        yield {
            "workers": num_workers,
            "of": what,
            "predicted": f"{figures[0]:.3g}",
            "measured": f"{figures[1]:.3g} {unit}",
            "took ÷ predicted": round(took / said, 2),
        }


async def measured(model: Path, counts: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    found: dict[int, list[tuple[list[float], list[float]]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            pair = await predicted(model, count), await taken(model, count)
            note(f"{count}: predicted {_ms(pair[0])}, took {_ms(pair[1])} ms")
            found[count].append(pair)
    return [line for count, pairs in found.items() for line in lines_of(count, pairs)]


def _ms(seconds: list[float]) -> str:
    return " ".join(f"{each * 1000:.3g}" for each in seconds)


def main() -> None:
    wait_passively()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--demo", action="store_true", help="the embedded demo model instead of the 200 M shape")
    parser.add_argument("--workers", type=numbers, default=(1, 2, 3), metavar="N,N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    try:
        model = model_path() if asked.demo else model_of(asked, "200m")
        lines = asyncio.run(measured(model, asked.workers, asked.rounds))
    except (BenchError, SwarmError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    tell_lines("forecast", lines, {"model": str(model), "rounds": asked.rounds}, as_json=asked.json)


if __name__ == "__main__":
    main()
