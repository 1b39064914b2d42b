"""A swarm under load, and the means to harm it: what every test of a fault does in the same way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient, Completion
from swarm.failpoints import FROM_VARIABLE, TRACE_VARIABLE, VARIABLE
from swarm.params import SpeculationMode
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, stages_of

TOKENS = 120
SETTLED_S = 2.0
# For an answer, whatever happens meanwhile. Generous: a wait that succeeds costs nothing, and machines are shared.
WAIT_S = 120.0
PREFIX = [3 + (11 * j) % 450 for j in range(100)]  # three blocks that two requests have in common


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    options: dict[str, Any]


def _prompt(length: int, start: int) -> tuple[int, ...]:
    return tuple(3 + (7 * start + j * (start + 1)) % 400 for j in range(length))


# Greedy, drawn, with penalties, two continuations, logprobs (compared bit by bit), a bias; prompts of one row, of
# several chunks, and with a beginning in common.
CASES = (
    Case(_prompt(5, 0), {"temperature": 0.0, "logprobs": 3}),
    Case(_prompt(40, 1), {"temperature": 0.9, "seed": 11}),
    Case(_prompt(90, 2), {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.2, "logprobs": 0}),
    Case(_prompt(150, 3), {"temperature": 1.1, "top_k": 40, "seed": 13, "n": 2, "logprobs": 2}),
    Case((*PREFIX, 7, 9), {"temperature": 1.0, "seed": 14, "presence_penalty": 0.6, "frequency_penalty": 0.3}),
    Case((*PREFIX, 8), {"temperature": 0.8, "min_p": 0.02, "seed": 15, "logit_bias": {17: 2.5, 30: -4.0}}),
)

# ``SWARM_BROKER__MODE=overlapped pytest tests/faults``: all of it with a step per stage in flight. On one machine it is
# one at a time else, and that is what undisturbed answers are computed with in any case.
MODE_VARIABLE = "SWARM_BROKER__MODE"
# ``SWARM_BROKER__SPECULATION=suffix pytest tests/faults``: all of it with proposed tokens. Undisturbed answers are
# computed without them in any case.
SPECULATION_VARIABLE = "SWARM_BROKER__SPECULATION"
# ``FAULTS_ON=hosts pytest tests/faults``: every process on a machine of its own, let in by keys. Takes root.
IS_ON_HOSTS = os.environ.get("FAULTS_ON") == "hosts"


def long(*cases: Any) -> tuple[Any, ...]:
    """Mark cases that only ``tools/check --long`` runs: much like others, and each takes seconds."""
    return tuple(
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases
    )


Answer = list[tuple[tuple[int, ...], str, tuple[Any, ...]]]
Answers = dict[int, Answer]


def answer_of(done: Completion) -> Answer:
    """Take of an answer what must be the same: tokens, why it ended, logprobs to the last bit."""
    return [(choice.tokens, choice.finish_reason, choice.logprobs) for choice in done.choices]


async def ask(client: AsyncClient, index: int, tokens: int = TOKENS, **more: Any) -> Answer:
    case = CASES[index]
    done = await client.generate(
        list(case.prompt), max_tokens=tokens, ignore_eos=True, timeout=WAIT_S, **(case.options | more)
    )
    return answer_of(done)


def _beginning(
    tokens: tuple[int, ...], reason: str, logprobs: tuple[Any, ...], *, num: int
) -> tuple[tuple[int, ...], str, tuple[Any, ...]]:
    """Return what a choice is if its answer has only so many tokens."""
    return tokens[:num], reason, logprobs[:num]


async def undisturbed(swarm: Swarm) -> Answers:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
        await swarm.until_serving(client, 3)
        return dict(enumerate(await asyncio.gather(*(ask(client, index) for index in range(len(CASES))))))


# oneDNN keeps up to 1,024 kernels by default, a quarter of a MiB and more each, one for every number of rows that came:
# it takes hundreds of deaths until a worker's memory is level. With few it is at once.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "64"}


class Swarm(Processes):
    """Processes forked from the zygote. ``options``: the environment of all. ``state``: where the broker keeps its
    journal; without it, it has none."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        zygote: Zygote,
        options: dict[str, str] | None = None,
        state: Path | None = None,
    ) -> None:
        super().__init__(model, logs, options=FEW_KERNELS | (options or {}), launch=zygote)
        self.state = state
        self.is_overlapped = (os.environ | self._options).get(MODE_VARIABLE) == "overlapped"
        self.trace = logs / "faults.trace"
        self.faults = ""  # of those that are started again, while a test wants that
        self.own: dict[str, dict[str, str]] = {}  # variables of each worker alone, by its name
        self.harmed: set[str] = set()  # workers that were started with failpoints, or that hang

    def start_broker(self, min_workers: int = 1, **environment: str) -> None:
        kept = {} if self.state is None else {"SWARM_STATE_DIR": str(self.state)}
        super().start_broker(min_workers, **kept, **environment)

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.wait()

    def start_worker(self, name: str, *more: str, faults: str = "", **environment: str) -> None:
        """``faults``: failpoints of this process."""
        armed = {VARIABLE: faults, TRACE_VARIABLE: str(self.trace)} if faults else {}
        super().start_worker(name, *more, **(self.own.get(name, {}) | armed | environment))
        (self.harmed.add if faults else self.harmed.discard)(name)

    def start_again(self, name: str, faults: str = "", **environment: str) -> None:
        """A fresh process under this name."""
        if name in self.workers:
            self.kill(name)
        self.start_worker(name, faults=faults, **environment)

    def happened(self) -> list[Fault]:
        """The failpoints that struck so far."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [Fault(int(pid), place, action, float(at)) for pid, place, action, _, at in map(str.split, lines)]


@dataclass(frozen=True)
class Fault:
    pid: int
    place: str
    action: str
    at: float


@dataclass
class Bench:
    """One test's view of a swarm."""

    swarm: Swarm
    client: AsyncClient
    expected: Answers
    asleep: list[Any] = field(default_factory=list)

    # --- the load ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def under_load(
        self,
        *,
        cases: Sequence[int] = range(len(CASES)),
        warm: float = 30,
        tokens: int = TOKENS,
        speculation: SpeculationMode | None = None,
    ) -> AsyncIterator[None]:
        """Inside, all requests run, again and again, so that no machine is too quick for what a test waits for; before,
        at least ``warm`` tokens are drawn. At the end, each answer is as undisturbed, as far as its ``tokens``.
        ``speculation``: "off" for a test that needs sequences of a certain age: those that were answered before are
        guessed, and end after a few steps."""
        before = (await self.figures()).get("tokens", 0.0)
        inside = True

        async def answered(index: int) -> list[Answer]:
            found = [await ask(self.client, index, tokens, speculation=speculation)]
            while inside:
                found.append(await ask(self.client, index, tokens, speculation=speculation))
            return found

        answers = [asyncio.create_task(answered(index)) for index in cases]
        try:
            if warm:
                await self.until(lambda s: s.get("tokens", 0.0) >= before + warm)
                if self.swarm.is_overlapped and len(cases) > 1:
                    await self.until(lambda s: s["in_flight"] > 1)
            yield
            inside = False
            found = await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()
        for index, many in zip(cases, found, strict=True):
            expected = [_beginning(*choice, num=tokens) for choice in self.expected[index]]
            assert all(answer == expected for answer in many), f"case {index} had other answers"

    async def right(self, cases: Sequence[int] = range(len(CASES))) -> None:
        """Check that all requests, asked now, answer as undisturbed."""
        async with self.under_load(cases=cases, warm=0):
            pass

    # --- what the broker says ----------------------------------------------------------------------------------------

    async def figures(self) -> dict[str, float]:
        pipeline = (await self.client.query("stats"))["pipeline"]
        assert isinstance(pipeline, dict)
        return {name: float(value) for name, value in pipeline.items() if isinstance(value, int | float)}

    async def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until the pipeline's counters are as wished."""
        report = await self.swarm.until(self.client, "stats", lambda report: holds(report["pipeline"]), within_s)
        pipeline: dict[str, Any] = report["pipeline"]
        return pipeline

    async def order(self) -> list[str]:
        """The workers' names in the order of the pipeline, when one serves: between two plans there is none."""
        while True:
            before = await self.swarm.until(self.client, "status", lambda status: status["state"] == "serving")
            names = stages_of(await self.client.query("nodes"))
            after = await self.client.query("status")
            if (after["state"], after["epoch"]) == ("serving", before["epoch"]):
                return names

    async def nodes(self) -> list[dict[str, Any]]:
        nodes: Any = (await self.client.query("nodes"))["workers"]
        return list(nodes)

    async def node(self, name: str, pid: int | None = None) -> dict[str, Any]:
        """Read what is said of the latest process of that name (or of the one with this number)."""
        found = [n for n in await self.nodes() if n["name"] == name and pid in (None, n["pid"])]
        return found[-1] if found else {}

    async def until_out(self, name: str, within_s: float = 60.0) -> dict[str, Any]:
        """Wait until this worker is out (or forgotten); return what is said of it."""
        pid = self.swarm.workers[name].pid

        def is_out(report: dict[str, Any]) -> bool:
            nodes = [n for n in report["workers"] if n["pid"] == pid]
            return not nodes or nodes[-1]["state"] == "out"

        await self.swarm.until(self.client, "nodes", is_out, within_s)
        return await self.node(name, pid)

    # --- harm --------------------------------------------------------------------------------------------------------

    async def arm(self, place: int, faults: str) -> str:
        """Start the worker at this place of the pipeline (-1: the last) again with failpoints, which count from now on;
        return its name. The plan may give the new process another place. Then the worker that is there instead is
        started again, too, and so on: at the latest when all have failpoints, the right one has. Those of the others
        never count."""
        begun: dict[str, Path] = {}  # by worker: file whose presence makes its failpoints count
        while (there := (await self.settled_order())[place]) not in begun:
            begun[there] = self.swarm.trace.with_name(f"begun.{time.monotonic_ns()}")
            self.swarm.start_again(there, faults, **{FROM_VARIABLE: str(begun[there])})
        begun[there].touch()
        return there

    async def settled_order(self) -> list[str]:
        """The order once it serves. Where fewer stages do, too, whoever comes later may yet be given a part: then once
        all are members, and no other order has followed for a while."""
        await self.serving()
        found = await self.order()
        if self.swarm.is_overlapped:
            await self.members(*self.swarm.workers)
            since = time.monotonic()
            while time.monotonic() - since < SETTLED_S:
                await asyncio.sleep(0.1)
                if (now := await self.order()) != found:
                    found, since = now, time.monotonic()
        return found

    def struck_so_far(self) -> list[Fault]:
        """The failpoints that struck in this swarm's life."""
        return self.swarm.happened()

    async def struck(self, times: int, within_s: float = WAIT_S) -> Fault:
        """Wait until failpoints have struck so many times in this swarm's life; return the last."""
        give_up_at = time.monotonic() + within_s
        while len(found := self.swarm.happened()) < times:
            if time.monotonic() > give_up_at:
                raise AssertionError(f"the fault never happened; before: {found}")
            await asyncio.sleep(0.01)
        return found[times - 1]

    async def struck_or_in_the_middle(self, times: int, within_s: float = 5.0) -> str | None:
        """Wait until failpoints have struck so many times. If they don't, return who is in the middle of the pipe."""
        give_up_at = time.monotonic() + within_s
        while len(self.swarm.happened()) < times:
            if time.monotonic() > give_up_at:
                await self.serving()
                return (await self.order())[1]
            await asyncio.sleep(0.01)
        return None

    def stop(self, process: Any) -> None:
        """SIGSTOP; it will be woken at the end of the test if nobody does so before."""
        process.send_signal(signal.SIGSTOP)
        self.asleep.append(process)

    def wake(self) -> None:
        for process in self.asleep:
            process.send_signal(signal.SIGCONT)
        self.asleep.clear()

    # --- and back ----------------------------------------------------------------------------------------------------

    async def serving(self, num_stages: int = 3) -> None:
        """Wait until so many stages serve, and they are the processes that were started last. With several steps in
        flight, a plan of one stage less may be as quick on one machine."""
        fewest = min(num_stages, 2) if self.swarm.is_overlapped else num_stages

        def is_serving(report: dict[str, Any]) -> bool:
            return report["state"] == "serving" and fewest <= report["num_stages"] <= num_stages

        await self.swarm.until(self.client, "status", is_serving)
        pids = {process.pid for process in self.swarm.workers.values()}

        def are_these(report: dict[str, Any]) -> bool:
            return {n["pid"] for n in report["workers"] if n["layers"] is not None} <= pids

        await self.swarm.until(self.client, "nodes", are_these)
        await self.swarm.until(self.client, "status", is_serving)

    async def members(self, *names: str) -> None:
        """Wait until the processes that were started last under these names are members, with layers or without."""
        pids = {self.swarm.workers[name].pid for name in names}

        def are_here(report: dict[str, Any]) -> bool:
            return pids <= {row["pid"] for row in report["workers"] if row["state"] == "member"}

        await self.swarm.until(self.client, "nodes", are_here)

    async def make_well(self) -> None:
        """Three workers without faults serve, and nothing runs. A broker with a journal may have died."""
        self.wake()
        if self.swarm.state is not None and self.swarm.broker.poll() is not None:
            self.swarm.start_broker(3)
        names = ("w0", "w1", "w2")
        for name in names:
            process = self.swarm.workers.get(name)
            if process is None or process.poll() is not None or name in self.swarm.harmed:
                self.swarm.start_again(name)
        await self.members(*names)
        await self.serving()
        await self.until(lambda s: s["running"] == s["queued"] == s["in_flight"] == 0)
