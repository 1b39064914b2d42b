"""Verdicts on real processes that are stopped, go on, or lose their connection: who is out, who is not, and what the
answers are: the same tokens in any case."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, free_ports, some_tokens, stages_of

PROMPTS = [[3 + (11 * i + j) % 400 for j in range(length)] for i, length in enumerate((7, 60))]
TOKENS = 150


@pytest.fixture(scope="module")
def processes(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One swarm for several tests: each leaves it whole."""
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), launch=zygote) as started:
        started.start(3)
        yield started


@pytest_asyncio.fixture
async def swarm(processes: Processes) -> AsyncIterator[tuple[Processes, AsyncClient]]:
    async with AsyncClient(processes.url, connect_timeout_s=60.0) as client:
        await serving(processes, client, 3)
        yield processes, client


async def answers(client: AsyncClient) -> list[list[int]]:
    """One greedy, one drawn."""
    found = await asyncio.gather(
        client.generate(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True, timeout=120.0, temperature=0.0),
        client.generate(PROMPTS[1], max_tokens=TOKENS, ignore_eos=True, timeout=120.0, temperature=0.9, seed=3),
    )
    return [list(done.tokens) for done in found]


async def serving(processes: Processes, client: AsyncClient, num_stages: int) -> None:
    """Processes that start beside others' tests take their time."""

    def holds(status: dict[str, Any]) -> bool:
        return bool(status["state"] == "serving" and status["num_stages"] == num_stages)

    await processes.until(client, "status", holds, within_s=90.0)


async def node(client: AsyncClient, name: str) -> dict[str, Any]:
    workers = (await client.query("nodes"))["workers"]
    assert isinstance(workers, list)
    return next(worker for worker in reversed(workers) if worker["name"] == name)


async def middle(client: AsyncClient) -> str:
    return stages_of(await client.query("nodes"))[1]


def node_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(worker for worker in reversed(report["workers"]) if worker["name"] == name)


async def test_a_stopped_worker_is_out_and_joins_anew_when_it_goes_on(swarm: tuple[Processes, AsyncClient]) -> None:
    """Frozen in the middle of answers: out for its silence, with that evidence; the answers end without it, the same.
    When it goes on, the same process finds itself fenced, joins anew and gets its part again."""
    processes, client = swarm
    expected = await answers(client)
    under_way = asyncio.create_task(answers(client))
    await some_tokens(processes, client, 60)
    name = await middle(client)
    before = await node(client, name)
    process = processes.workers[name]
    process.send_signal(signal.SIGSTOP)
    try:
        await processes.until(client, "nodes", lambda nodes: node_of(nodes, name)["state"] == "out")
        found = await node(client, name)
        assert found["verdict"] == "silent"
        assert found["evidence"].startswith("no heartbeat for")
        assert found["beat_age_s"] > 0.4
        assert await under_way == expected
    finally:
        process.send_signal(signal.SIGCONT)
    await processes.until(client, "nodes", lambda nodes: node_of(nodes, name)["layers"] is not None)
    await serving(processes, client, 3)
    after = await node(client, name)
    assert (after["pid"], after["incarnation"]) == (before["pid"], before["incarnation"])
    assert after["state"] == "member"
    assert await answers(client) == expected


async def test_short_freezes_give_no_verdict(swarm: tuple[Processes, AsyncClient]) -> None:
    """Beats that come a quarter of a second late, again and again, while answers run: nobody is out."""
    processes, client = swarm
    expected, before = await answers(client), await figures(client)
    under_way = asyncio.create_task(answers(client))
    await some_tokens(processes, client, 20)
    process = processes.workers[await middle(client)]
    longest_s = 0.0
    for _ in range(4):
        stopped_at = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        longest_s = max(longest_s, time.monotonic() - stopped_at)
        await asyncio.sleep(0.3)
    assert await under_way == expected
    if longest_s < 0.25:  # else this machine made longer ones of them
        assert (await figures(client)).get("workers_lost", 0) == before.get("workers_lost", 0)


async def test_a_broker_that_stood_still_blames_nobody(swarm: tuple[Processes, AsyncClient]) -> None:
    """Stopped for two and a half seconds in the middle of answers: no worker is out for it, no step counts as lost."""
    processes, client = swarm
    expected, before = await answers(client), await figures(client)
    under_way = asyncio.create_task(answers(client))
    await some_tokens(processes, client, 40)
    assert processes.broker is not None
    processes.broker.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(2.5)
    finally:
        processes.broker.send_signal(signal.SIGCONT)
    assert await under_way == expected
    after = await figures(client)
    assert after["own_pauses"] > before.get("own_pauses", 0)
    for name in ("workers_lost", "steps_lost", "plans"):
        assert after.get(name, 0) == before.get(name, 0), name


async def test_a_cut_connection_is_a_death_and_the_worker_comes_back(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """The control connection of a living worker is cut, its beats go on: out at once, by the connection; it says Hello
    over the next one and has its part again. That is one loss, not two, and changes no token."""
    with Processes(random_llama, tmp_path, launch=zygote) as processes:
        processes.start_broker(2)
        async with Door(processes.port + 1) as door:
            processes.start_worker("w0")
            processes.start_worker("w1", "--url", f"tcp://127.0.0.1:{door.port - 1}")
            async with AsyncClient(processes.url, connect_timeout_s=60.0) as client:
                await serving(processes, client, 2)
                expected = await answers(client)
                under_way = asyncio.create_task(answers(client))
                await some_tokens(processes, client, 60)
                incarnation = (await node(client, "w1"))["incarnation"]
                door.cut()
                lost = await processes.until(client, "stats", lambda r: r["pipeline"].get("workers_lost", 0) > 0)
                assert lost["pipeline"]["workers_lost"] == 1
                assert await under_way == expected
                await serving(processes, client, 2)
                assert (await node(client, "w1"))["incarnation"] == incarnation
                assert (await figures(client))["workers_lost"] == 1
                assert "its connection closed" in processes.log("broker")


async def test_a_hung_worker_is_out_and_ends_itself(
    random_llama: Path, zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compute thread stands still for ever in the middle of a step; it beats on. It is hung, with that evidence;
    the answers are the same; and since it can't answer the call to join anew, its process ends, for a new one."""
    with Processes(random_llama, tmp_path, launch=zygote) as processes:
        processes.start_broker(2)
        processes.start_worker("w0")
        monkeypatch.setenv("SWARM_FAILPOINTS", "step.computes=hang@60")
        processes.start_worker("w1")
        monkeypatch.delenv("SWARM_FAILPOINTS")
        async with AsyncClient(processes.url, connect_timeout_s=60.0) as client:
            await serving(processes, client, 2)
            first = await answers(client)  # it hangs in the middle of these
            found = await processes.until(client, "nodes", lambda nodes: node_of(nodes, "w1")["state"] == "out")
            assert node_of(found, "w1")["verdict"] == "hung"
            assert "computing, but none of its threads has run for" in node_of(found, "w1")["evidence"]
            assert await answers(client) == first
            process = processes.workers.pop("w1")
            assert await asyncio.to_thread(process.wait, 60.0) == 1
            assert "worker_is_stuck" in processes.log("w1")
            processes.start_worker("w1")
            await serving(processes, client, 2)
            assert await answers(client) == first


class Door:
    """Stands between one worker and the broker's control port, and can cut what goes through it."""

    def __init__(self, broker_port: int) -> None:
        self.port = free_ports() + 1
        self._broker_port = broker_port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Door:
        self._server = await asyncio.start_server(self._open, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._broker_port)
            self._writers += [writer, other_writer]
            for source, sink in ((reader, other_writer), (other_reader, writer)):
                task = asyncio.create_task(self._carry(source, sink))
                self._tasks.add(task)

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()
