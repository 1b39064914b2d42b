#!/usr/bin/env python3
"""Measure what the HTTP gateway costs.

    one stream            time to the first token and between tokens, over HTTP and with the Python client, in turns
                          (A B A B), on a swarm of the embedded model
    many streams          streamed tokens a second through one gateway process, with a swarm that is as fast as it is
                          taken from: "client", a stand-in for the client library, so that only HTTP's part counts, one
                          token at a time; "broker", a stand-in for the broker with the real client library before it.
                          A second, and a second of the gateway's processor time: on a shared machine the latter counts

Both sides speak over real sockets, in processes of their own. ``--profile`` says where the gateway's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import uvicorn
import uvloop
from bench_lib import ROOT, free_port, wait_for

from swarm import AsyncClient
from swarm.client.results import Piece
from swarm.client.text.tokenizer import TextModel
from swarm.config import Settings
from swarm.demo import model_path
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.middleware.connection import KEEP_ALIVE_S, bounded_protocol
from swarm.gateway.middleware.gateway_app import GatewayApp
from tests.integration.fake_broker import FakeBroker, manifest_of, say, tokenizer_files

STREAMS = (1, 16, 64, 256)
WORDS = (" the", " village", " baker", " and", " 🙂", " fisher", ".", " Anna")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"


# --- a swarm as fast as it is taken from ------------------------------------------------------------------------------


class FastStream:
    """Stands in for the client library's stream: a token each time, and a turn for the others in between."""

    def __init__(self, num_tokens: int) -> None:
        self._left, self._num = num_tokens, num_tokens

    async def take_ready(self) -> list[Piece]:
        if not self._left:
            return []
        await asyncio.sleep(0)
        self._left -= 1
        at = self._num - self._left - 1
        return [Piece(3 + at % 200, WORDS[at % len(WORDS)], at, 0, None if self._left else "length")]

    @property
    def completion(self) -> Any:
        return (
            None
            if self._left
            else SimpleNamespace(usage=SimpleNamespace(num_prompt=3, num_tokens=self._num, num_cached=0), choices=())
        )

    def close(self, *, cancel: bool = False) -> None:
        pass


class FastClient:
    """Stands in for the client library."""

    def __init__(self) -> None:
        files = tokenizer_files()
        self._text, self._manifest = TextModel.load(files), manifest_of(files)

    async def describe(self) -> Any:
        return SimpleNamespace(manifest=self._manifest, state="serving", waits_for="", max_context=4096)

    async def text_model(self) -> TextModel | None:
        return self._text

    def stream(self, _ids: object, params: Any, **_: object) -> FastStream:
        return FastStream(params.max_tokens)

    async def words(self) -> None:
        return None

    async def trace(self, _: str) -> Any:
        return {}

    async def aclose(self) -> None:
        pass


def serve(source: str, port: int, profile: str) -> None:
    """Be the gateway: of the stand-in, or of the broker at this URL."""

    async def main() -> None:
        client: Any = FastClient() if source == "client" else AsyncClient(source)
        settings = Settings()
        app, connections = (
            GatewayApp(settings, [CompletionService(client, ("*",))]).app,
            bounded_protocol(settings.gateway),
        )
        config = uvicorn.Config(
            app,
            port=port,
            http=connections,
            log_config=None,
            access_log=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=1,
        )
        await uvicorn.Server(config).serve()

    signal.signal(signal.SIGTERM, lambda *_: None)  # the server raises it again when it has ended
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    uvloop.run(main())
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler).dump_stats(profile)


def be_broker(port: int, chunk: int) -> None:
    """Be the broker: words without end, so many in a message."""

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        words = say("the quick brown fox jumps over the lazy dog. ")
        async with FakeBroker(lambda submit, _: (words * 1000)[: submit.params.max_tokens], port=port, chunk=chunk):
            await stop.wait()

    uvloop.run(main())


# --- the load ---------------------------------------------------------------------------------------------------------


async def read_stream(port: int, num_tokens: int, model: str = "tiny", mark: bytes = b"\ndata: ") -> int:
    """Ask for a stream and count its events, or another mark in it, as cheaply as can be."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{HEAD}Content-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    num, rest = 0, b""
    while more := await reader.read(1 << 18):
        more = rest + more
        num += more.count(mark)
        rest = more[1 - len(mark) :]
    writer.close()
    return num


async def read_all(port: int, num_streams: int, *asked: Any) -> int:
    return sum(await asyncio.gather(*(read_stream(port, *asked) for _ in range(num_streams))))


def be_reader(port: int, num_streams: int, num_tokens: int) -> None:
    """Be the clients: prints what it took."""
    began, own = time.perf_counter(), time.process_time()
    num = uvloop.run(read_all(port, num_streams, num_tokens))
    print(json.dumps({"events": num, "s": time.perf_counter() - began, "cpu_s": time.process_time() - own}))


# --- processes --------------------------------------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)], cwd=ROOT)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


# --- many streams -----------------------------------------------------------------------------------------------------


def many_streams(
    source: str, streams: Sequence[int], num_tokens: int, chunk: int, profile: bool
) -> list[dict[str, Any]]:
    """One row for each number of streams; all have ``num_tokens`` together."""
    port, broker_port, made = free_port(), free_port(), []
    dump = f"/tmp/bench_http_{source}.prof" if profile else ""
    if source == "broker":
        made.append(start("--be-broker", broker_port, chunk))
    made.insert(0, start("--serve", f"tcp://127.0.0.1:{broker_port}" if made else "client", port, dump))
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", made[0])
        rows = [one_load(source, port, made[0].pid, number, num_tokens // number) for number in (1, *streams)][1:]
    finally:
        end(made)
    if profile:
        pstats.Stats(dump).sort_stats("tottime").print_stats(28)
    return rows


def one_load(source: str, port: int, pid: int, num_streams: int, each: int) -> dict[str, Any]:
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    command = [sys.executable, __file__, "--be-reader", str(port), str(num_streams), str(each)]
    told = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    busy_s = sum(process.cpu_times()[:2]) - before
    num = num_streams * each
    if told["events"] < num:
        raise SystemExit(f"{told['events']} events came of {num} tokens")
    row = {"from": source, "streams": num_streams, "tokens": num, "tokens_s": num / told["s"]}
    row |= {
        "tokens_s_a_core": num / busy_s,
        "gateway_core": busy_s / told["s"],
        "reader_core": told["cpu_s"] / told["s"],
    }
    print(
        f"{source:>7} {num_streams:>4} streams  {row['tokens_s']:>9,.0f} tokens/s, "
        f"{row['tokens_s_a_core']:>9,.0f} a core"
        f"   gateway {row['gateway_core']:.0%}, readers {row['reader_core']:.0%} of a core",
        flush=True,
    )
    return row


# --- one stream -------------------------------------------------------------------------------------------------------

PROMPT = list(range(40, 72))
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def over_http(link: Link, num_tokens: int) -> list[float]:
    """When each event came, since the request was sent, on a connection that is kept, as clients do."""
    body = {"model": "village", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    content, (reader, writer) = json.dumps(body).encode(), link
    began, times = time.perf_counter(), []
    writer.write(f"{HEAD.replace('close', 'keep-alive')}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    while (line := await reader.readline()) != b"0\r\n":  # the last chunk; each begins and ends with whole events
        if not line:
            raise SystemExit("the gateway hung up")
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - began)
    await reader.readline()
    return times[:num_tokens]


async def by_client(client: AsyncClient, num_tokens: int) -> list[float]:
    began, times = time.perf_counter(), []
    async for _ in client.stream(PROMPT, max_tokens=num_tokens, temperature=1.0, ignore_eos=True):
        times.append(time.perf_counter() - began)
    return times


def figures(runs: Sequence[list[float]]) -> dict[str, float]:
    """In milliseconds."""
    gaps = [1e3 * (b - a) for times in runs for a, b in pairwise(times)]
    first = [1e3 * times[0] for times in runs]
    return {
        "ttft_p50": statistics.median(first),
        "ttft_p95": statistics.quantiles(first, n=20)[-1],
        "gap_p50": statistics.median(gaps),
        "gap_p95": statistics.quantiles(gaps, n=20)[-1],
        "end_p50": statistics.median(1e3 * times[-1] for times in runs),
    }


async def take_turns(url: str, port: int, rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[list[float]]] = {"python": [], "http": []}
    async with AsyncClient(url) as client:
        await client.generate(PROMPT, max_tokens=4)
        link = await asyncio.open_connection("127.0.0.1", port)
        await over_http(link, 4)
        for _ in range(rounds):
            runs["python"].append(await by_client(client, num_tokens))
            runs["http"].append(await over_http(link, num_tokens))
        link[1].close()
    return {name: figures(each) for name, each in runs.items()}


def one_stream(rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    broker_port, port = free_port(), free_port()
    url = f"tcp://127.0.0.1:{broker_port}"
    command = [sys.executable, "-m", "swarm", "up", "--port", str(broker_port), "--workers", "1", "--no-http", "--json"]
    command += ["--model", str(model_path())]
    made = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), start("--serve", url, port, "")]
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", made[1])
        found = uvloop.run(take_turns(url, port, rounds, num_tokens))
    finally:
        end(made)
    for name, row in found.items():
        print(f"{name:>7}  " + "  ".join(f"{key} {value:6.2f} ms" for key, value in row.items()), flush=True)
    more = {key: found["http"][key] - found["python"][key] for key in ("ttft_p50", "gap_p50")}
    print(f"HTTP adds {more['ttft_p50']:.2f} ms to the first token and {more['gap_p50']:.2f} ms between tokens (p50)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["one", "client", "broker"], help="of: one, client, broker")
    parser.add_argument("--streams", type=int, nargs="*", default=list(STREAMS))
    parser.add_argument("--tokens", type=int, default=32768, help="of all streams together")
    parser.add_argument("--rounds", type=int, default=40, help="of one stream, each way")
    parser.add_argument("--chunk", type=int, default=1, help="tokens of a message of the stand-in for the broker")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if "one" in options.parts:
        found["one_stream"] = one_stream(options.rounds, 64)
    for source in ("client", "broker"):
        if source in options.parts:
            found[source] = many_streams(source, options.streams, options.tokens, options.chunk, options.profile)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", source, port, profile]:
            serve(source, int(port), profile)
        case ["--be-broker", port, chunk]:
            be_broker(int(port), int(chunk))
        case ["--be-reader", port, streams, tokens]:
            be_reader(int(port), int(streams), int(tokens))
        case _:
            main()
