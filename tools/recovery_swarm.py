"""Run a swarm whose processes ``bench_recovery`` starts, stops and kills one by one; read what the broker says."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self, cast

from bench_lib import random_prompt
from bench_swarm import START_S, Body, Processes

from swarm import AsyncClient

STAGES = 3


def names() -> list[str]:
    return [f"w{number}" for number in range(STAGES)]


def pins(num_layers: int) -> str:
    """Write a settings file's text that gives each of the workers its third of the layers, and nobody else any."""
    cuts = [num_layers * number // STAGES for number in range(STAGES + 1)]
    lines = [f'{name} = "{cuts[i]}-{cuts[i + 1] - 1}"' for i, name in enumerate(names())]
    return "[plan.pins]\n" + "\n".join(lines) + "\n"


class Parts(Processes):
    """``async with Parts(model) as parts``: broker and workers ``w0`` … are there, and serve with all of them.

    ``config``: text of a settings file for the broker. ``settings``: environment for all. ``spares``: workers that no
    plan needs as long as all others live. ``journal``: the broker has a state directory.
    """

    def __init__(
        self,
        model: Path,
        config: str = "",
        settings: Mapping[str, str] | None = None,
        spares: tuple[str, ...] = (),
        journal: bool = False,
    ) -> None:
        super().__init__({"SWARM_LOG__FORMAT": "json", **(settings or {})})
        self.model = model
        self.config = config
        self.spares = spares
        self.journal = journal

    async def begin(self) -> None:
        (self.folder / "swarm.toml").write_text(self.config)
        self.start_broker()
        for name in names():
            self.start(name)
        await self.until_serving(STAGES)
        for name in self.spares:
            self.start(name)
        await self.whole()

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """Start the broker's process, in the place of one that has ended."""
        journal = ["--state-dir", str(self.folder / "state")] if self.journal else []
        self.launch_broker("--min-workers", str(STAGES), "--config", str(self.folder / "swarm.toml"), *journal)

    def start(self, name: str, **environment: str) -> None:
        """Start a worker's process, in the place of one that has ended."""
        self.launch_worker(name, self.model, max(1, (os.cpu_count() or 1) // STAGES), environment)

    def signal(self, name: str, number: signal.Signals) -> float:
        """Send a signal; return when that was, by the clock that the broker's times are of."""
        sent_at = time.monotonic()
        self.processes[name].send_signal(number)
        return sent_at

    async def ended(self, name: str) -> None:
        await asyncio.wait_for(asyncio.to_thread(self.processes[name].wait), 60.0)

    async def kill(self, name: str) -> None:
        """End it for good: it may be stopped, hung or gone already."""
        self.processes[name].kill()
        await self.ended(name)

    # --- what the broker says ----------------------------------------------------------------------------------------

    async def whole(self) -> None:
        """Wait until all workers are there, the plan needs just those that it should, and what is to be warm is so."""
        alive = STAGES + len(self.spares)
        await self.until("status", lambda s: s["state"] == "serving" and s["num_workers"] == alive and not s["loading"])
        await self.until("plan", lambda plan: sorted(stage["worker"] for stage in plan["stages"]) == names())
        if self.settings.get("SWARM_PLAN__STANDBY", "none") != "none":
            middle = await self.stage(1)
            await self.until("nodes", lambda nodes: _is_warm(nodes, middle), 120.0)

    async def recovery(self, since: float, within_s: float = START_S) -> Body:
        """Read what the broker recorded of the loss that it noticed since then, once all sequences have gone on."""

        def found(report: Body) -> list[Body]:
            return [entry for entry in report["recoveries"] if (entry["detected_at"] or 0.0) >= since]

        def is_over(report: Body) -> bool:
            return any(entry["resumed_all_at"] is not None for entry in found(report)[-1:])

        return found(await self.until("recoveries", is_over, within_s))[0]

    async def detected_at(self, since: float) -> float:
        """Tell when the broker noticed the loss that happened since then."""
        report = await self.until(
            "recoveries", lambda r: any((e["detected_at"] or 0.0) >= since for e in r["recoveries"]), 60.0
        )
        return float(next(e["detected_at"] for e in report["recoveries"] if (e["detected_at"] or 0.0) >= since))

    async def stage(self, number: int) -> str:
        stages = cast(Body, await self.client.query("plan"))["stages"]
        return str(stages[number]["worker"])

    def logged(self, name: str, event: str) -> list[Body]:
        """Read lines of a process's log, of one kind."""
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line.get("event") == event]


def _is_warm(report: Body, name: str) -> bool:
    """Whether others hold the layers of this one, too."""
    rows = [row for row in report["workers"] if row["state"] == "member"]
    warm = {layer for row in rows for first, stop in row.get("standby") or [] for layer in range(first, stop)}
    return all(set(range(*row["layers"])) <= warm for row in rows if row["name"] == name)


class Work:
    """``async with RunningStep(parts.client, …)``: short answers, one after the other, so that every stage computes."""

    def __init__(self, client: AsyncClient, vocabulary: int, sequences: int = 2, tokens: int = 48) -> None:
        self._client, self._vocabulary, self._sequences, self._tokens = client, vocabulary, sequences, tokens
        self._stopped = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._answer()) for _ in range(self._sequences)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _answer(self) -> None:
        while not self._stopped:
            prompt = random_prompt(random.randrange(4, 24), self._vocabulary)
            await self._client.generate(prompt, max_tokens=self._tokens, ignore_eos=True, timeout=START_S)


def percentile(values: list[float], percent: float) -> float:
    """Find the smallest value that is not below so many percent of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100) - 1).__int__())]
