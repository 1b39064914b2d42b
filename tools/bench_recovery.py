#!/usr/bin/env python3
"""What a killed worker costs: the longest gap between two tokens, less the longest of an undisturbed run.

``swarm up`` with three workers, started anew for every kill. Answers run until each has the context that is asked for;
then the worker of the middle stage is killed (SIGKILL), and the rest of the tokens is waited for. They must be those of
the undisturbed run. ``logs`` rebuilds the lost layers from what the stage before them sent, ``tokens`` from the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from bench_lib import BenchError, Row, Swarm, add_model_options, model_of, note, random_prompt, run, tell, vocabulary_of

from swarm import AsyncClient

STAGES = 3
AFTER = 24  # tokens of each answer after the kill
PROMPT_PART = 0.75  # of the context; the rest is generated before the kill
SOURCES = ("logs", "tokens")
WAIT_S = 600.0


@dataclass(frozen=True)
class Case:
    sequences: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.sequences} sequence{'s' if self.sequences > 1 else ''}, {self.context} tokens"

    @property
    def num_prompt(self) -> int:
        return max(1, int(self.context * PROMPT_PART))

    @property
    def num_before(self) -> int:
        return self.context - self.num_prompt


@dataclass
class Stream:
    """One answer: its tokens, and when each came."""

    tokens: list[int]
    times: list[float]

    def gaps(self, start: int) -> list[float]:
        return [after - before for before, after in zip(self.times[start:], self.times[start + 1 :], strict=False)]


async def read(client: AsyncClient, prompt: list[int], case: Case, reached: asyncio.Event) -> Stream:
    found = Stream([], [])
    num = case.num_before + AFTER
    async for piece in client.stream(prompt, max_tokens=num, ignore_eos=True, timeout=WAIT_S):
        found.tokens.append(piece.token)
        found.times.append(time.perf_counter())
        if len(found.tokens) >= case.num_before:
            reached.set()
    return found


async def answers(client: AsyncClient, prompts: list[list[int]], case: Case, kill: bool) -> list[Stream]:
    events = [asyncio.Event() for _ in prompts]
    tasks = [asyncio.create_task(read(client, p, case, e)) for p, e in zip(prompts, events, strict=True)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), WAIT_S)
    if kill:
        stages = (await client.query("plan"))["stages"]
        workers = (await client.query("nodes"))["workers"]
        assert isinstance(stages, list)
        assert isinstance(workers, list)
        middle = stages[1]["worker"]
        pid = next(int(w["pid"]) for w in workers if w["name"] == middle and w["verdict"] not in ("dead", "left"))
        os.kill(pid, signal.SIGKILL)
    return list(await asyncio.gather(*tasks))


async def figures(client: AsyncClient) -> dict[str, float]:
    pipeline = (await client.query("stats"))["pipeline"]
    assert isinstance(pipeline, dict)
    return {name: float(value) for name, value in pipeline.items() if isinstance(value, int | float)}


async def one_kill(model: Path, case: Case, source: str) -> dict[str, float]:
    """Seconds of stall, and how much was replayed for what was lost."""
    vocabulary = vocabulary_of(model)
    prompts = [random_prompt(case.num_prompt, vocabulary) for _ in range(case.sequences)]
    settings = {"SWARM_RECOVERY__SOURCE": source, "SWARM_BROKER__PREFIX_CACHE": "false"}
    async with Swarm(model, STAGES, settings=settings) as swarm:
        calm = await answers(swarm.client, prompts, case, kill=False)
        killed = await answers(swarm.client, prompts, case, kill=True)
        if [stream.tokens for stream in calm] != [stream.tokens for stream in killed]:
            raise BenchError(f"{case.name}, {source}: the tokens differ from those of the undisturbed run")
        counted = await figures(swarm.client)
    start = case.num_before // 2
    usual = max(gap for stream in calm for gap in stream.gaps(start))
    longest = max(gap for stream in killed for gap in stream.gaps(start))
    lost = counted.get("lost_layer_positions", 0.0)
    return {
        "stall": longest - usual,
        "usual": usual,
        "ratio": counted.get("replayed_layer_positions", 0.0) / lost if lost else 0.0,
    }


async def recovery(
    model: Path, cases: list[Case], sources: list[str], rounds: int
) -> tuple[list[Row], dict[str, object]]:
    rows, facts = [], {"model": str(model), "stages": STAGES}
    for case in cases:
        samples: dict[str, list[float]] = {source: [] for source in sources}
        for number in range(rounds):
            for source in sources if number % 2 == 0 else sources[::-1]:
                note(f"{case.name}, from {source} …")
                found = await one_kill(model, case, source)
                samples[source].append(found["stall"] * 1e3)
                facts[f"{case.name}, {source}: replayed ÷ lost"] = round(found["ratio"], 3)
                facts[f"{case.name}: longest gap undisturbed"] = f"{found['usual'] * 1e3:.0f} ms"
        rows.append(Row(case.name, "ms", samples, baseline=sources[-1] if len(sources) > 1 else None))
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--sequences", default="1,8", metavar="N,N")
    parser.add_argument("--contexts", default="64,256,1024", metavar="N,N")
    parser.add_argument("--sources", default="logs,tokens", metavar="A,B", help="of logs, tokens")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each case and source")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    numbers = [[int(part) for part in text.split(",")] for text in (arguments.sequences, arguments.contexts)]
    cases = [Case(sequences, context) for sequences in numbers[0] for context in numbers[1]]
    sources = arguments.sources.split(",")
    if unknown := set(sources) - set(SOURCES):
        parser.error(f"--sources: {', '.join(unknown)} is none of {', '.join(SOURCES)}")
    rows, facts = run(recovery(model_of(arguments), cases, sources, arguments.rounds))
    tell(rows, "stall after a kill", facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
