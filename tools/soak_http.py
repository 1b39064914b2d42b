#!/usr/bin/env python3
"""Keep many HTTP streams open for minutes, hang up on many of them at random, and see that nothing grows.

A swarm of the embedded model, a gateway, and ``--streams`` readers in this process. Each asks and reads, and more often
than not hangs up somewhere: at once, before the first byte, or under way. The gateway's memory, descriptors and threads
are read all the while. At the end, when everybody has left, the stages must hold nothing, and the gateway what it held
in the first quarter, within ``--more-mib``. A task that is left behind holds a connection, or memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from swarm import AsyncClient  # noqa: E402
from swarm.demo import model_path  # noqa: E402

READ_S = 120.0
START_S = 90.0


@dataclass
class Soak:
    port: int
    seed: int
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)

    async def reader(self, number: int) -> None:
        """One after another, until the time is over."""
        chance = random.Random(f"{self.seed}/{number}")
        while time.monotonic() < self.until:
            try:
                outcome = await self.one(chance)
            except (OSError, TimeoutError) as error:
                outcome = type(error).__name__
                await asyncio.sleep(0.2)
            self.outcomes[outcome] += 1
            await asyncio.sleep(chance.random() * 0.2)

    async def one(self, chance: random.Random) -> str:
        """Ask for a stream; read it, or hang up somewhere."""
        body: dict[str, Any] = {
            "model": "village",
            "messages": [{"role": "user", "content": "Who lives in the village?" * chance.randrange(1, 8)}],
            "max_tokens": chance.randrange(4, 96),
            "seed": chance.randrange(1000),
            "stream": True,
            "ignore_eos": True,
        }
        if chance.random() < 0.1:
            body["keep_s"] = 1
        if chance.random() < 0.1:
            body["n"] = 2
        content = json.dumps(body).encode()
        patience = chance.choice([None, None, 0.0, chance.random(), 3 * chance.random()])
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            writer.write(head.encode() + b"\r\n" + content)
            await writer.drain()
            if patience == 0.0:
                return "left at once"
            try:
                taken = await asyncio.wait_for(reader.read(-1), patience or READ_S)
            except TimeoutError:
                return "hung up" if patience is not None else "too slow"
            if b"data: [DONE]" in taken and b'"error"' not in taken:
                return "whole"
            at = max(0, taken.find(b'"error"'))
            return taken[at : at + 160].decode(errors="replace") or "cut off"
        finally:
            writer.close()


@dataclass(frozen=True)
class Figures:
    mib: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss / (1 << 20), process.num_fds(), process.num_threads())


async def held(client: AsyncClient) -> dict[str, Any]:
    """What runs, and what the stages hold."""
    report: Any = await client.query("stats")
    running = {name: report["pipeline"][name] for name in ("running", "queued", "in_flight")}
    return {**running, "kv_used": report["scheduler"]["kv_used"]}


async def soak(pid: int, url: str, port: int, options: argparse.Namespace) -> int:
    began = time.monotonic()
    work = Soak(port, options.seed, began + 60 * options.minutes)
    readers = [asyncio.ensure_future(work.reader(number)) for number in range(options.streams)]
    seen: list[tuple[float, Figures]] = []
    async with AsyncClient(url) as client:
        before = Figures.of(pid)
        while time.monotonic() < work.until:
            await asyncio.sleep(min(5.0, max(0.1, work.until - time.monotonic())))
            seen.append(((time.monotonic() - began) / 60, Figures.of(pid)))
            minute, now = seen[-1]
            told = ", ".join(f"{count} {name}" for name, count in sorted(work.outcomes.items()))
            print(
                f"{minute:5.1f} min  {now.mib:7.1f} MiB  {now.descriptors:4} fds  {now.threads:3} threads  {told}",
                flush=True,
            )
        await asyncio.gather(*readers)
        empty = await until_empty(client)
        await asyncio.sleep(3.0)
        after = Figures.of(pid)
    quarters = [[f.mib for minute, f in seen if part <= minute / options.minutes * 4 < part + 1] for part in range(4)]
    level = [statistics.median(part) for part in quarters if part]
    print(f"memory by quarter: {', '.join(f'{mib:.1f}' for mib in level)} MiB; before {before}, after {after}; {empty}")
    wrong = []
    if after.descriptors > before.descriptors + 4:
        wrong.append(f"{after.descriptors - before.descriptors} descriptors more than before")
    if after.threads > before.threads + 16:  # of the pool for long prompts
        wrong.append(f"{after.threads - before.threads} threads more than before")
    if level[-1] > level[0] + options.more_mib:
        wrong.append(f"memory grew from {level[0]:.1f} to {level[-1]:.1f} MiB")
    if any(empty.values()):
        wrong.append(f"something is left: {empty}")
    if work.outcomes["whole"] == 0 or set(work.outcomes) - {"whole", "hung up", "left at once"}:
        wrong.append(f"outcomes: {dict(work.outcomes)}")
    print("; ".join(wrong) or "all is flat, nothing is left")
    return 1 if wrong else 0


async def until_empty(client: AsyncClient) -> dict[str, Any]:
    give_up_at = time.monotonic() + 60
    while True:
        now = await held(client)
        if not any(now.values()) or time.monotonic() > give_up_at:
            return now
        await asyncio.sleep(0.2)


async def until_serving(port: int) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        await asyncio.sleep(0.3)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            continue
        writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if b" 200 " in answer[:20]:
            return
    raise SystemExit("the swarm does not serve")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--more-mib", type=float, default=16.0)
    parser.add_argument("--port", type=int, default=5890, help="of the broker")
    parser.add_argument("--http", type=int, default=8890, help="of the gateway")
    options = parser.parse_args()
    url, port = f"tcp://127.0.0.1:{options.port}", options.http
    swarm = [sys.executable, "-m", "swarm"]
    up = [
        *swarm,
        "up",
        "--port",
        str(options.port),
        "--workers",
        "2",
        "--no-http",
        "--json",
        "--model",
        str(model_path()),
    ]
    made = [
        subprocess.Popen(up, cwd=ROOT, stdout=subprocess.DEVNULL),
        subprocess.Popen([*swarm, "gateway", "--url", url, "--http", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL),
    ]
    try:
        asyncio.run(until_serving(port))
        return asyncio.run(soak(made[1].pid, url, port, options))
    finally:
        for process in made:
            process.terminate()
        for process in made:
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
