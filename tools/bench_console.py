#!/usr/bin/env python3
"""Measure what the console costs.

    gateway   streamed tokens for a second of the gateway's processor time, with no console open and with one, in turns
              (A B A B …): answers come from a stand-in for the client library that is as fast as it is taken from, so
              that the gateway is always busy; reports come over real sockets from a stand-in for the broker that has
              as many requests under way as there are streams, and workers, all of which move
    broker    the broker's processor time in a real swarm of the embedded model that is idle: with the gateway's console
              left out, with nobody who looks, and with one open console, in turns
    crowd     the gateway's and the broker's processor time for each token of a real swarm that is asked for so many
              answers at once (``--requests``), without and with the page in Debian's Chromium, its list of requests in
              sight, in turns; and how the page keeps up: time between frames, long tasks, elements

Prints the machine, its processor and the command; on a shared machine the processor time of one process counts, not
how much came in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop
from bench_http import FastClient, end, read_all
from bench_lib import ROOT, free_port, machine, wait_for

from swarm import AsyncClient
from swarm.config import Settings
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.console.local_swarm import NO_LOCAL_SWARM
from swarm.gateway.middleware.connection import bounded_protocol
from swarm.gateway.middleware.gateway_app import GatewayApp
from swarm.wire.messages import ClientMessage, Query, Report
from tests.browser.chromium import launched
from tests.browser.console import Console
from tests.integration.fake_broker import FakeBroker

SETTLE_S = 2.0
READY_S = 120.0


# --- a broker that is asked for reports -------------------------------------------------------------------------------


class ReportingBroker(FakeBroker):
    """Has reports that move each time that it is asked, of ``num_requests`` requests and ``num_workers`` workers."""

    num_requests = 64
    num_workers = 4
    num_asked = 0

    def _report(self, peer: bytes, message: ClientMessage) -> None:
        assert isinstance(message, Query)
        self.num_asked += 1
        body = getattr(self, f"_{message.what}")(self.num_asked)
        self._say(peer, Report(what=message.what, ok=True, body=body))

    def _status(self, n: int) -> dict[str, Any]:
        return {
            "state": "serving",
            "waits_for": "",
            "epoch": 1,
            "model": "tiny",
            "uptime_s": round(time.monotonic(), 1),
            "num_workers": self.num_workers,
            "num_stages": self.num_workers,
            "num_running": self.num_requests,
            "num_queued": 0,
            "num_requests": self.num_requests,
            "tokens_total": n * 640,
            "loading": [],
        }

    def _nodes(self, n: int) -> dict[str, Any]:
        row = {
            "host": "h",
            "pid": 7,
            "state": "member",
            "verdict": "well",
            "evidence": f"idle, last heartbeat {n % 99} ms ago",
        }
        row |= {"device": "cpu", "dtype": "float32", "kernels": "linears native avx512bf16; attention native; exact"}
        row |= {"round_trip_s": 0.0002, "bytes_per_s": 6e8, "beat_age_s": 0.1, "pace": 1 + n % 7 / 10, "kv_used": n}
        return {"workers": [{"name": f"w{i}", "incarnation": f"w{i}-1", **row} for i in range(self.num_workers)]}

    def _plan(self, n: int) -> dict[str, Any]:
        row = {"weight_bytes": 2018304, "predicted_s": 0.0026, "seen_steps": n, "seen_s": 0.0019, "kv_capacity": 854144}
        stages = [{"worker": f"w{i}", "layers": [3 * i, 3 * i + 3], **row} for i in range(self.num_workers)]
        return {"state": "serving", "epoch": 1, "stages": stages, "why": ["because"] * 10}

    def _stats(self, n: int) -> dict[str, Any]:
        pipeline = {"tokens": n * 640, "steps": n * 10, "positions": n * 650, "running": self.num_requests, "queued": 0}
        spread = {"bounds": [0.01 * 2**i for i in range(18)], "counts": [n * 3] * 19, "total": 1.0}
        names = ("queue_s", "first_token_s", "between_tokens_s", "request_s", "step_rows", "step_s")
        figures = {f"figure_{i}": float(n) for i in range(60)}
        stages = {f"w{i}": figures for i in range(self.num_workers)}
        return {"pipeline": pipeline, "histograms": dict.fromkeys(names, spread), "stages": stages}

    def _requests(self, n: int) -> dict[str, Any]:
        row = {"state": "running", "reasons": [None], "num_prompt": 30, "max_tokens": 900, "n": 1}
        row |= {
            "class": "normal",
            "tenant": "http",
            "deadline_s": None,
            "preempted": 0,
            "age_s": n / 10,
            "attached": True,
        }
        row |= {"num_tokens": n, "ended_age_s": None, "detached": False, "sequences": [7]}
        return {"requests": [{"request_id": f"{i:032x}", **row} for i in range(self.num_requests)], "kept": []}

    def _recoveries(self, _: int) -> dict[str, Any]:
        return {"recoveries": []}


def be_broker(port: int, num_requests: int) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        broker = ReportingBroker(lambda submit, _: [5] * submit.params.max_tokens, port=port)
        broker.num_requests = num_requests
        async with broker:
            await stop.wait()

    uvloop.run(main())


def be_gateway(port: int, broker: str) -> None:
    async def main() -> None:
        settings, answers = Settings(), FastClient()
        doors = GatewayApp(settings, [CompletionService(answers, ("*",))], NO_LOCAL_SWARM, lambda: AsyncClient(broker))  # type: ignore[arg-type]
        http = bounded_protocol(settings.gateway)
        config = uvicorn.Config(doors.app, port=port, http=http, log_config=None, access_log=False)
        await uvicorn.Server(config).serve()

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    uvloop.run(main())


# --- an open page -----------------------------------------------------------------------------------------------------


class Page:
    """An open console, read as it comes."""

    def __init__(self, port: int) -> None:
        self.num_events = self.num_bytes = 0
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._link.request("GET", "/console/live")
        self._answer = self._link.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while line := self._answer.readline():
                self.num_bytes += len(line)
                self.num_events += line.startswith(b"event: ")
        except (OSError, ValueError, AttributeError):  # hung up from here
            return

    def close(self) -> None:
        if self._link.sock is not None:
            self._link.sock.shutdown(2)
        self._thread.join(5)
        self._link.close()


# --- measuring --------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)], cwd=ROOT)


def told_of(name: str, runs: Sequence[float], unit: str) -> str:
    return f"{name:>22}  {statistics.median(runs):>12,.4g} {unit}   ({min(runs):,.4g} to {max(runs):,.4g})"


def gateway(rounds: int, num_streams: int, num_tokens: int) -> None:
    port, broker_port = free_port(), free_port()
    made = [start("--be-broker", broker_port, num_streams)]
    made.insert(0, start("--be-gateway", port, f"tcp://127.0.0.1:{broker_port}"))
    runs: dict[str, list[float]] = {"no console": [], "one console": []}
    events: list[float] = []
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", made[0])
        load(port, made[0].pid, num_streams, num_tokens)
        for turn in range(2 * rounds):
            name = ("no console", "one console")[turn % 2]
            page = Page(port) if turn % 2 else None
            time.sleep(SETTLE_S / 4)
            load(port, made[0].pid, num_streams, num_tokens // 8)  # so that every run finds it as warm
            before, began = page.num_events if page else 0, time.monotonic()
            runs[name].append(load(port, made[0].pid, num_streams, num_tokens))
            if page is not None:
                events.append((page.num_events - before) / (time.monotonic() - began))
                page.close()
        own, alone = itself(port, made[0].pid, rounds)
    finally:
        end(made)
    print(f"the gateway, {num_streams} streams, {num_tokens} tokens a run, {rounds} runs each way, in turns:")
    for name, each in runs.items():
        print(told_of(name, each, "tokens for a second of its processor time"))
    without, with_one = (statistics.median(each) for each in runs.values())
    print(f"{'':>22}  an open console takes {100 * (1 - with_one / without):.2f} %")
    print(f"{'':>22}  and gets {statistics.median(events):.1f} events a second")
    print(f"by itself, beside no answers, of {num_streams} requests that move:")
    for name, each in own.items():
        print(told_of(name, each, "ms of the gateway's processor time a second"))
    a_look = (statistics.median(own["one console"]) - statistics.median(own["no console"])) / alone
    share = a_look * statistics.median(events) / 10
    print(f"{'':>22}  {a_look:.2f} ms for each of {alone:.1f} looks a second, which tell one event")
    print(f"{'':>22}  so of a gateway that streams at most {share:.2f} % of its time")


def itself(port: int, pid: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of the gateway's time for a second, while it streams nothing; and the events of a second."""
    runs: dict[str, list[float]] = {"no console": [], "one console": []}
    events = []
    for turn in range(2 * rounds):
        page = Page(port) if turn % 2 else None
        time.sleep(SETTLE_S / 4)
        num_before = page.num_events if page else 0
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(2 * SETTLE_S)
        runs[("no console", "one console")[turn % 2]].append(1000 * (cpu_s(pid) - before) / (time.monotonic() - began))
        if page is not None:
            events.append((page.num_events - num_before) / (2 * SETTLE_S))
            page.close()
    return runs, statistics.median(events)


def load(port: int, pid: int, num_streams: int, num_tokens: int) -> float:
    """Streamed tokens for a second of the gateway's time."""
    before = cpu_s(pid)
    each = num_tokens // num_streams
    if ask_at_once(port, num_streams, each) < num_streams * each:
        raise SystemExit("not all tokens came")
    return num_streams * each / (cpu_s(pid) - before)


def ask_at_once(*arguments: object) -> int:
    command = [sys.executable, __file__, "--be-reader", *map(str, arguments)]
    return int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


class Swarm:
    """A real one, whose broker is watched."""

    def __init__(self, folder: Path, *, console: bool) -> None:
        self.port, self.http = free_port(), free_port()
        command = [sys.executable, "-m", "swarm", "up", "--port", str(self.port), "--http", str(self.http)]
        command += ["--state-dir", str(folder)]
        environment = os.environ | {"SWARM_GATEWAY__CONSOLE": str(console).lower()}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        wait_for(f"http://127.0.0.1:{self.http}/ready", self.process)
        children = [(child.pid, child.cmdline()) for child in psutil.Process(self.process.pid).children()]
        self.broker = next(pid for pid, words in children if "broker" in words)
        self.gateway = next(pid for pid, words in children if "gateway" in words)

    def broker_s(self, seconds: float) -> float:
        """Milliseconds of its processor time for a second."""
        time.sleep(SETTLE_S)
        before, began = cpu_s(self.broker), time.monotonic()
        time.sleep(seconds)
        return 1000 * (cpu_s(self.broker) - before) / (time.monotonic() - began)


def broker(rounds: int, seconds: float) -> None:
    made: list[subprocess.Popen[bytes]] = []
    runs: dict[str, list[float]] = {"no console in gateway": [], "nobody looks": [], "one looks": []}
    with tempfile.TemporaryDirectory() as folder:
        try:
            without = Swarm(Path(folder) / "a", console=False)
            made.append(without.process)
            with_it = Swarm(Path(folder) / "b", console=True)
            made.append(with_it.process)
            for _ in range(rounds):
                runs["no console in gateway"].append(without.broker_s(seconds))
                runs["nobody looks"].append(with_it.broker_s(seconds))
                page = Page(with_it.http)
                runs["one looks"].append(with_it.broker_s(seconds))
                page.close()
        finally:
            end(made)
    print(f"the broker of an idle swarm of two workers, {rounds} times {seconds:g} s each way, in turns:")
    for name, each in runs.items():
        print(told_of(name, each, "ms of its processor time a second"))


WATCHING = """
window.seen = { frames: [], tasks: [] };
new PerformanceObserver((told) => seen.tasks.push(...told.getEntries().map((each) => each.duration))).observe({
  type: "longtask",
});
let last = 0;
requestAnimationFrame(function frame(now) {
  if (last) seen.frames.push(now - last);
  last = now;
  requestAnimationFrame(frame);
});
"""


def crowd(rounds: int, num_requests: int, each: int) -> None:
    runs: dict[str, list[list[float]]] = {"no console": [], "one console": []}
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), console=True)
        pids = (swarm.gateway, swarm.broker)

        def turn() -> list[float]:
            before, began = [cpu_s(pid) for pid in pids], time.monotonic()
            num_ended = ask_at_once(swarm.http, num_requests, each, "village", "data: [DONE]")
            if num_ended < num_requests:
                raise SystemExit(f"{num_requests - num_ended} of {num_requests} answers did not come to their end")
            took = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
            num = num_requests * each
            return [*(1e6 * used_s / num for used_s in took), num / (time.monotonic() - began)]

        try:
            turn()
            for _ in range(rounds):
                runs["no console"].append(turn())
                with launched() as browser:
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    console = Console(page, f"http://127.0.0.1:{swarm.http}")
                    console.open()
                    console.tab("Requests").scroll_into_view_if_needed()
                    page.evaluate(WATCHING)
                    runs["one console"].append(turn())
                    nodes = page.evaluate("document.querySelectorAll('*').length")
                    seen.append({**page.evaluate("seen"), "nodes": nodes})
        finally:
            end([swarm.process])
    print(f"{num_requests} requests at once of a real swarm, {each} tokens each, {rounds} times each way, in turns:")
    for at, what in enumerate(("μs of the gateway a token", "μs of the broker a token", "tokens/s")):
        for name, all_of in runs.items():
            print(told_of(name, [run[at] for run in all_of], what))
    frames = sorted(frame for run in seen for frame in run["frames"])
    tasks = sorted(task for run in seen for task in run["tasks"])
    share = [frames[min(len(frames) - 1, int(part * len(frames)))] for part in (0.5, 0.95, 0.99, 1)]
    print(f"{'':>22}  ms between frames: median, 95 %, 99 %, longest: {', '.join(f'{ms:.0f}' for ms in share)}")
    longest, all_s = max(tasks, default=0), sum(frames) / 1e3
    print(f"{'':>22}  tasks of the page over 50 ms: {len(tasks)} in {all_s:.0f} s, longest {longest:.0f}")
    print(f"{'':>22}  elements in the page: {', '.join(str(run['nodes']) for run in seen)}")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "gateway": lambda options: gateway(options.rounds, options.streams, options.tokens),
    "broker": lambda options: broker(options.rounds, options.seconds),
    "crowd": lambda options: crowd(options.rounds, options.requests, options.each),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=196608, help="of all streams together, in each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="of a crowd")
    parser.add_argument("--each", type=int, default=16, help="tokens of each request of a crowd")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each look at the broker")
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--be-broker", port, num_requests]:
            be_broker(int(port), int(num_requests))
        case ["--be-gateway", port, broker_url]:
            be_gateway(int(port), broker_url)
        case ["--be-reader", port, streams, tokens]:
            print(uvloop.run(read_all(int(port), int(streams), int(tokens))))
        case ["--be-reader", port, streams, tokens, model, mark]:
            print(uvloop.run(read_all(int(port), int(streams), int(tokens), model, mark.encode())))
        case _:
            main()
