"""Clients that come and go by the thousand, that are stuck, that say nothing: they cost the broker nothing that lasts.

``TEST_CONNECTIONS`` says how many come and go; the default is enough to see a leak of one descriptor each.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest
import zmq
import zmq.asyncio

from swarm import AsyncClient
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.messages import Attach, Describe, Description, Query
from swarm.wire.tensors import Bytes
from tests.integration.processes import Processes

CONNECTIONS = int(os.environ.get("TEST_CONNECTIONS", "2000"))
WAVE = 100
ANSWER_S = 20.0
FEW_DESCRIPTORS = 120


class Dealer:
    """A client that is nothing but a socket."""

    def __init__(self, url: str, context: zmq.asyncio.Context | None = None) -> None:
        self._own = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, secrets.token_bytes(16))
        self._socket.connect(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, frames: Sequence[Bytes]) -> None:
        """Queued, if there is no connection yet."""
        self._socket.send_multipart(frames)

    async def receive(self, within_s: float = ANSWER_S) -> list[memoryview]:
        async with asyncio.timeout(within_s):
            return [memoryview(frame) for frame in await self._socket.recv_multipart()]

    def close(self) -> None:
        self._socket.close()
        if self._own:
            self._context.term()


@pytest.fixture
def swarm(random_llama: Path, tmp_path: Path) -> Iterator[Processes]:
    """A broker alone, with a journal: nobody computes here."""
    logs = tmp_path / "logs"
    logs.mkdir()
    options = {"SWARM_STATE_DIR": str(tmp_path / "state"), "SWARM_LOG__LEVEL": "warning"}
    with Processes(random_llama, logs, options=options) as processes:
        processes.start_broker()
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await client.query("status")
        yield client


async def wave(url: str, number: int) -> None:
    """Make so many connections at once, each with a word, all gone at the end; some are gone before the answer."""
    context = zmq.asyncio.Context()
    try:
        dealers = [Dealer(url, context) for _ in range(WAVE)]
        for place, dealer in enumerate(dealers):
            about = Attach(request_id=f"r{number}-{place}", next_index=(0,)) if place % 3 else Describe()
            dealer.send(CLIENT.encode(about))
        await asyncio.gather(*(dealer.receive() for place, dealer in enumerate(dealers) if place % 2))
        for dealer in dealers:
            dealer.close()
    finally:
        context.term()


async def settled(process: psutil.Process, most: int) -> int:
    """The number of its descriptors, once no more than so many are left or patience is."""
    for _ in range(100):
        if process.num_fds() <= most:
            break
        await asyncio.sleep(0.1)
    return process.num_fds()


async def num_tasks(client: AsyncClient) -> int:
    """Count the broker's tasks, a moment ago."""
    await asyncio.sleep(1.5)  # it looks at itself every second
    broker: Any = (await client.query("stats"))["broker"]
    return int(broker["tasks"])


async def test_connections_come_and_go(swarm: Processes, client: AsyncClient, record_property: object) -> None:
    """Descriptors and threads are those of before; memory has stopped growing."""
    process = psutil.Process(swarm.broker.pid)
    for number in range(4):  # once around, so that pools and tables have their size
        await wave(swarm.url, number)
    before = await settled(process, 0 if CONNECTIONS == 0 else 64)
    threads, resident = process.num_threads(), process.memory_info().rss
    tasks = await num_tasks(client)
    for number in range(CONNECTIONS // WAVE):
        await wave(swarm.url, number)
    after = await settled(process, before)
    grown = process.memory_info().rss - resident
    print(f"{CONNECTIONS} connections: {before} -> {after} descriptors, {resident >> 20} MiB + {grown >> 10} KiB")
    assert after <= before
    assert process.num_threads() == threads
    assert await num_tasks(client) == tasks
    assert grown < (4 << 20) + 400 * CONNECTIONS  # a leak of a socket's state would be kilobytes each
    assert (await client.query("status"))["num_requests"] == 0


async def test_a_client_that_never_reads_is_not_waited_for(swarm: Processes, client: AsyncClient) -> None:
    """It asks for thousands of reports and takes none: what it can't be sent is dropped, memory is bounded by the
    socket's queue, and others are answered as ever."""
    process = psutil.Process(swarm.broker.pid)
    with Dealer(swarm.url) as stuck:
        stuck._socket.set(zmq.RCVHWM, 1)
        ask = CLIENT.encode(Query(what="stats"))
        grown = []
        for _ in range(4):
            for _ in range(2000):
                stuck.send(ask)
            await client.query("status")
            grown.append(process.memory_info().rss)
        assert grown[-1] - grown[1] < 16 << 20
        assert (await client.query("status"))["uptime_s"] > 0


async def test_a_client_that_says_nothing_costs_its_connection(swarm: Processes, client: AsyncClient) -> None:
    """Also one that isn't even ZeroMQ: it is let go after the handshake's time limit."""
    process = psutil.Process(swarm.broker.pid)
    await client.query("status")  # its connection is open from here on
    before = process.num_fds()
    silent = [socket.create_connection(("127.0.0.1", swarm.port)) for _ in range(50)]
    try:
        await client.query("status")
        assert await settled(process, before) <= before  # HANDSHAKE_IVL is 3 s
    finally:
        for each in silent:
            each.close()


def launch_poor(arguments: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that may open only a few files."""

    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm", *arguments], stdout=file, stderr=file, env=environment
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    return process


async def test_no_descriptors_left(random_llama: Path, tmp_path: Path) -> None:
    """New connections are shed, the old ones are served, the processor is not kept busy by it; and when there is room
    again, whoever comes gets in. What was wrong is told: once in the log, and in the status."""
    options = {"SWARM_STATE_DIR": str(tmp_path / "state")}
    with Processes(random_llama, tmp_path, options=options, launch=launch_poor) as swarm:
        swarm.start_broker()
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await client.query("status")
            process = psutil.Process(swarm.broker.pid)
            context = zmq.asyncio.Context()
            crowd = [Dealer(swarm.url, context) for _ in range(2 * FEW_DESCRIPTORS)]
            for dealer in crowd:
                dealer.send(CLIENT.encode(Describe()))
            status = await swarm.until(client, "status", lambda s: s["connections_problem"])
            assert f"all {FEW_DESCRIPTORS} descriptors" in status["connections_problem"]
            busy = process.cpu_times()
            await asyncio.sleep(2.0)
            spent = sum(process.cpu_times()[:2]) - sum(busy[:2])
            print(f"{process.num_fds()} descriptors, {spent:.2f} s of computing in 2 s")
            assert swarm.broker.poll() is None, swarm.log("broker")
            assert (await client.query("status"))["state"] == "waiting"
            for dealer in crowd:
                dealer.close()
            context.term()
            with Dealer(swarm.url) as late:
                late.send(CLIENT.encode(Describe()))
                message, _ = SERVER.decode(await late.receive())
                assert isinstance(message, Description)
            status = await client.query("status")
            assert not status["connections_problem"]
            assert "LimitNOFILE" in status["connections_notes"][0]
        warnings = [line for line in swarm.log("broker").splitlines() if '"newcomers_wait", "level": "warning"' in line]
        assert len(warnings) == 1, swarm.log("broker")
        assert spent < 0.5, "it spins"


def knock(ports: Sequence[int], times: int) -> list[socket.socket]:
    """At all of these doors in turn, without waiting for an answer."""
    knocking = []
    for _ in range(times):
        for port in ports:
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
            knocking.append(each)
    return knocking


async def test_a_crowd_at_every_door(random_llama: Path, tmp_path: Path) -> None:
    """Also where workers send their beats and finished steps: whoever is connected is answered as ever while far more
    knock than can be let in, the processor is not kept busy, and the broker's loop does not stand still."""
    with Processes(random_llama, tmp_path, launch=launch_poor) as swarm:
        swarm.start_broker()
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await client.query("status")
            process = psutil.Process(swarm.broker.pid)
            ports = sorted(c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            assert len(ports) == 4
            busy, waits = sum(process.cpu_times()[:2]), []
            crowd = knock(ports, FEW_DESCRIPTORS)
            loop = asyncio.get_running_loop()
            began = loop.time()
            while loop.time() < began + 5.0:
                asked_at = loop.time()
                status = await client.query("status")
                waits.append(loop.time() - asked_at)
                await asyncio.sleep(0.05)
            spent = sum(process.cpu_times()[:2]) - busy
            print(f"{len(waits)} answers, the slowest after {max(waits):.3f} s; {spent:.2f} s of computing in 5 s")
            assert any("descriptors" in str(status[name]) for name in ("connections_problem", "connections_notes"))
            for each in crowd:
                each.close()
            async with AsyncClient(swarm.url, connect_timeout_s=60) as late:
                assert (await late.query("status"))["state"] == "waiting"
        assert max(waits) < 1.5
        assert spent < 2.5, "it spins"
