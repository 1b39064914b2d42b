#!/usr/bin/env python3
"""Register many members with a broker, and see what they cost it: processor time and memory.

The members are fakes: they have no memory for layers, so no plan takes them. All else is real: a broker's process,
connections of their own, greetings, beats ten times a second and, with ``--keys``, a key of each that was invited, and
CURVE. First ``--crowd`` of them come at the same moment, then all ``--members``; then the broker is watched for
``--seconds``. Whoever is lost without a reason is counted. ``--keys`` needs an address of this machine that is not
loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq
from bench_lib import BenchError, note, tell_lines

from swarm import AsyncClient
from swarm.auth.enrol import enrol
from swarm.auth.invitation import Invitation, decode
from swarm.demo import model_path
from swarm.stage.model.checkpoint import Checkpoint
from swarm.wire.codec import HEARTBEAT, ORDER, WORKER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import encode_greeting, read_greeting
from swarm.wire.messages import PROTOCOL_VERSION, Heartbeat, Hello, Manifest, Rejoin, Welcome
from swarm.wire.push import PushChannel
from swarm.wire.schema import schema
from swarm.wire.transport.keys import KeyPair, new_pair, with_host, with_key

PROCESSES = 4
AT_ONCE = 16  # enrolments under way in one process
START_S = 60.0
JOIN_S = 300.0


@dataclass(frozen=True)
class Swarm:
    """The broker that is measured. ``control``: where workers knock, with its key if it has one."""

    pid: int
    port: int
    host: str
    invitation: str | None

    @property
    def control(self) -> str:
        address = f"tcp://{self.host}:{self.port + 1}"
        return address if self.invitation is None else with_key(address, decode(self.invitation).broker.encode())


class Member:
    """One that says Hello and beats."""

    def __init__(self, swarm: Swarm, context: zmq.Context[Any], manifest: Manifest, number: int, pair: KeyPair) -> None:
        self._swarm, self._context, self._manifest, self._pair = swarm, context, manifest, pair
        self._name = f"member-{number}"
        self._incarnation = f"{self._name}-0"
        self.welcomed_at = 0.0
        self.num_welcomes = 0
        self._push: PushChannel | None = None
        self._interval_s = 0.1
        has_lock = swarm.invitation is not None
        self._channel = DealerChannel(
            context, swarm.control, self._incarnation.encode(), ORDER.frame_limit_bytes, pair if has_lock else None
        )

    async def hear(self) -> None:
        async for event in self._channel:
            if event is ConnectionEvent.CONNECTED:
                self._channel.send(encode_greeting(schema()))
            elif event is ConnectionEvent.AUTH_REJECTED:
                raise BenchError(f"{self._name} was turned away")
            elif not isinstance(event, ConnectionEvent):
                if read_greeting(event) is not None:
                    self._channel.send(WORKER.encode(self._hello()))
                    continue
                order, _ = ORDER.decode(event)
                if isinstance(order, Welcome):
                    self._welcome(order)
                elif isinstance(order, Rejoin):
                    self._channel.send(WORKER.encode(self._hello()))

    def _welcome(self, order: Welcome) -> None:
        self.num_welcomes += 1
        self.welcomed_at = self.welcomed_at or time.monotonic()
        self._interval_s = order.beat_interval_s
        if self._push is None:
            pair = self._pair if self._swarm.invitation is not None else None
            self._push = PushChannel(self._context, with_host(order.beat_endpoint, self._swarm.host), pair=pair)

    async def beat(self) -> None:
        while True:
            if self._push is not None:
                self._push.send(HEARTBEAT.encode(self._beat()))
            await asyncio.sleep(self._interval_s)

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            incarnation=self._incarnation,
            progress=0,
            state="idle",
            blocked_on="",
            since_s=0.0,
            asleep_s=0.0,
            loop_lag_s=0.0,
            memory_bytes=0,
            kv_used=0,
            kv_capacity=0,
        )

    def _hello(self) -> Hello:
        return Hello(
            name=self._name,
            incarnation=self._incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            wire_versions=(PROTOCOL_VERSION,),
            schema=schema(),
            device="cpu",
            dtype="float32",
            cores=1,
            endpoint="tcp://127.0.0.1:9",  # nobody's: no plan takes who has no memory
            memory_bytes=0,
            costs=(),
            manifest=self._manifest,
            held_layers=None,
            held=(),
            logs=(),
            key=self._pair.public,
        )


async def _serve(swarm: Swarm, manifest: Manifest, numbers: range, orders: Connection) -> None:
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8 * len(numbers) + 64)
    pairs = [new_pair() for _ in numbers]
    if swarm.invitation is not None:
        await _enrol(decode(swarm.invitation), numbers, pairs)
    orders.send("enrolled")
    await asyncio.to_thread(orders.recv)
    began = time.monotonic()
    members = [Member(swarm, context, manifest, number, pair) for number, pair in zip(numbers, pairs, strict=True)]
    tasks = [asyncio.create_task(work) for member in members for work in (member.hear(), member.beat())]
    while any(not member.welcomed_at for member in members):
        if time.monotonic() - began > JOIN_S:
            raise BenchError("some were not welcomed in time")
        await asyncio.sleep(0.01)
    orders.send([member.welcomed_at - began for member in members])
    await asyncio.to_thread(orders.recv)
    orders.send(sum(member.num_welcomes - 1 for member in members))
    for task in tasks:
        task.cancel()
    os._exit(0)  # closing thousands of sockets in order takes longer than all the rest


async def _enrol(invitation: Invitation, numbers: range, pairs: list[KeyPair]) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, pair: KeyPair) -> None:
        async with turns:
            await enrol(invitation, pair.public, f"member-{number}", timeout_s=JOIN_S)

    await asyncio.gather(*(one(number, pair) for number, pair in zip(numbers, pairs, strict=True)))


def _process(swarm: Swarm, manifest: Manifest, numbers: range, orders: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(_serve(swarm, manifest, numbers, orders))


class Crowd:
    """Members in processes of their own."""

    def __init__(self, swarm: Swarm, manifest: Manifest, first: int, count: int) -> None:
        share = -(-count // PROCESSES)
        starts = range(first, first + count, share)
        self._ways = []
        for start in starts:
            ours, theirs = multiprocessing.Pipe()
            numbers = range(start, min(start + share, first + count))
            process = multiprocessing.get_context("spawn").Process(
                target=_process, args=(swarm, manifest, numbers, theirs), daemon=True
            )
            process.start()
            self._ways.append(ours)
        self.enrolled_s = self._timed()

    def _timed(self) -> float:
        began = time.monotonic()
        for way in self._ways:
            way.recv()
        return time.monotonic() - began

    def join(self) -> list[float]:
        """Let all come now; how long it took each to be welcome."""
        for way in self._ways:
            way.send("join")
        return sorted(took for way in self._ways for took in way.recv())

    def leave(self) -> int:
        """How often one of them was welcomed again."""
        for way in self._ways:
            way.send("leave")
        return sum(way.recv() for way in self._ways)


@contextlib.contextmanager
def running(folder: Path, *, keys: bool) -> Iterator[Swarm]:
    port = 23_700
    host = own_address() if keys else "127.0.0.1"
    words = ["broker", "--port", str(port), "--state-dir", str(folder / "state")]
    words += ["--listen", host] if keys else []
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "swarm", *words], stdout=log, stderr=log)
    try:
        invitation = None
        for _ in range(int(START_S / 0.5)):
            if process.poll() is not None:
                raise BenchError((folder / "broker.log").read_text())
            url = f"tcp://127.0.0.1:{port}"
            words = ["invite", "--role", "worker", "--uses", "1024", "--json", "--url", url]
            if not keys:
                words = ["status", "--json", "--url", url]
            made = subprocess.run(
                [str(Path(sys.executable).parent / "swarmctl"), *words], capture_output=True, text=True, check=False
            )
            if made.returncode == 0:
                invitation = json.loads(made.stdout)["invitation"] if keys else None
                break
            time.sleep(0.5)
        else:
            raise BenchError(f"the broker does not answer: {made.stderr}")
        yield Swarm(process.pid, port, host, invitation)
    finally:
        process.terminate()
        process.wait(30)


def own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    raise BenchError("this machine has no address but loopback: without --keys it can be measured")


async def lost(swarm: Swarm) -> int:
    async with AsyncClient(f"tcp://127.0.0.1:{swarm.port}") as client:
        pipeline: Any = (await client.query("stats"))["pipeline"]
        return int(pipeline.get("workers_lost", 0))


def measure(arguments: argparse.Namespace, *, keys: bool) -> dict[str, float]:
    manifest = Checkpoint(model_path()).manifest("float32")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), keys=keys) as swarm:
        process = psutil.Process(swarm.pid)
        before = process.memory_info().rss
        few = Crowd(swarm, manifest, 0, arguments.crowd)
        few_took = few.join()
        many = Crowd(swarm, manifest, arguments.crowd, arguments.members - arguments.crowd)
        note(f"{'with' if keys else 'without'} keys: {arguments.crowd} welcome in {few_took[-1]:.2f} s")
        took = many.join()
        note(f"{'with' if keys else 'without'} keys: all welcome after {took[-1]:.2f} s")
        time.sleep(5.0)
        began, cpu = time.monotonic(), process.cpu_times()
        time.sleep(arguments.seconds)
        passed, now = time.monotonic() - began, process.cpu_times()
        busy = (now.user + now.system - cpu.user - cpu.system) / passed
        found = {
            "crowd_welcome_s": few_took[-1],
            "all_enrolled_s": many.enrolled_s,
            "all_welcome_s": took[-1],
            "broker_cores": round(busy, 3),
            "broker_mib": process.memory_info().rss / 2**20,
            "kib_each": (process.memory_info().rss - before) / 1024 / arguments.members,
            "lost": asyncio.run(lost(swarm)),
        }
        found["welcomed_again"] = few.leave() + many.leave()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--crowd", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", choices=["both", "with", "without"], default="both")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ways = {"both": (False, True), "with": (True,), "without": (False,)}[arguments.keys]
    try:
        lines: list[dict[str, object]] = [{"keys": keys, **measure(arguments, keys=keys)} for keys in ways]
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    tell_lines("what members cost", lines, {"members": arguments.members}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
