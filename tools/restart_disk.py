"""Measure the first token after a restart of everything, with keys and values on disk and without."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any, cast

from bench_lib import BenchError, Row, note, random_prompt, vocabulary_of
from bench_swarm import START_S, answers, check_tokens
from recovery_copies import with_context
from recovery_swarm import STAGES, Parts, names

from swarm.stage.actions import CHUNK

TOKENS = 8  # of each answer
SIDES = {"with spill": "8GiB", "without": "0"}


class Restarted(Parts):
    """A swarm with a folder of its own for what it caches."""

    async def begin(self) -> None:
        self.settings["SWARM_CACHE"] = str(self.folder / "cache")
        await super().begin()

    async def restart(self) -> float:
        """End all processes with SIGKILL and start them again. Return the seconds until they serve."""
        began = time.monotonic()
        for name in ("broker", *names()):
            self.signal(name, signal.SIGKILL)
        for name in ("broker", *names()):
            await self.ended(name)
        self.start_broker()
        for name in names():
            self.start(name)
        await self.until_serving(STAGES)
        return time.monotonic() - began

    async def figure(self, name: str) -> float:
        pipeline = cast(dict[str, Any], (await self.client.query("stats"))["pipeline"])
        return float(pipeline.get(name) or 0)


async def one_restart(model: Path, positions: int, limit: str) -> dict[str, float]:
    """Measure the first answer to a prompt, and that to the same one after the restart; both in seconds."""
    settings = {"SWARM_WORKER__SPILL": limit, "SWARM_WORKER__SPILL_FROM": str(CHUNK)}
    prompts = [random_prompt(positions, vocabulary_of(model))]
    async with Restarted(model, settings=settings) as parts:
        began = time.monotonic()
        computed = await answers(parts.client, prompts, TOKENS, 0)
        computed_s = computed[0].times[0] - began
        if limit != "0":
            num_chunks = positions // CHUNK
            await parts.until("nodes", lambda nodes: _are_written(nodes, num_chunks), START_S)
        start_s = await parts.restart()
        began = time.monotonic()
        again = await answers(parts.client, prompts, TOKENS, 0)
        check_tokens(again, computed, f"after a restart with worker.spill = {limit}")
        restored = await parts.figure("restored_positions")
        if (restored > 0) != (limit != "0"):
            raise BenchError(f"{restored:.0f} positions were restored with worker.spill = {limit}")
        return {
            "first_s": computed_s,
            "again_s": again[0].times[0] - began,
            "restored": restored,
            "start_s": start_s,
        }


def _are_written(nodes: dict[str, Any], num_chunks: int) -> bool:
    spilled = [row["spill"] for row in nodes["workers"] if row["state"] == "member"]
    return len(spilled) == STAGES and all(spill["chunks_written"] >= num_chunks for spill in spilled)


async def disk(model: Path, positions: int, rounds: int) -> tuple[list[Row], dict[str, object]]:
    """Measure both sides in turns. A round gives one sample of each."""
    model = with_context(model, positions + TOKENS)
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            note(f"{side}, restart {number + 1} …")
            samples[side].append(await one_restart(model, positions, SIDES[side]))

    def row(case: str, unit: str, name: str) -> Row:
        figures = {side: [sample[name] for sample in taken] for side, taken in samples.items()}
        return Row(case, unit, figures, baseline="without")

    rows = [
        row(f"first token of {positions:,} after the restart", "s", "again_s"),
        row("before it", "s", "first_s"),
        row("from the kill until the swarm serves", "s", "start_s"),
    ]
    return rows, {"restored positions": [sample["restored"] for sample in samples["with spill"]], "stages": STAGES}
