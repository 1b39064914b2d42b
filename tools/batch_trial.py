"""A batch of many lines on the demonstration model while its broker is killed: each line must be answered once, and
equal to the request alone. Prints counts as JSON.

    python tools/batch_trial.py --lines 10000 --kills 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

PATH = "/v1/completions"
START_S = 120.0
POLL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=3, help="deaths of the broker, evenly over the batch")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--alone", type=int, default=300, help="lines that are asked again, one at a time")
    parser.add_argument("--compare", type=int, default=None, help="lines that are asked again beside others; all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _swarm(Path(folder)) as (up, port):
        print(json.dumps(_trial(options, Path(folder), up, port), indent=2))


def _trial(options: argparse.Namespace, folder: Path, up: subprocess.Popen[bytes], port: int) -> dict[str, Any]:
    bodies = [_body(number, options.tokens) for number in range(options.lines)]
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for number, body in enumerate(bodies):
            line = {"custom_id": str(number), "method": "POST", "url": PATH, "body": body}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "swarm", "batch", "run", str(source), "--output", str(output)]
    began = time.monotonic()
    runner = subprocess.Popen([*command, "--gateway", f"http://127.0.0.1:{port}"], stdout=subprocess.DEVNULL)
    killed_at = []
    for kill in range(options.kills):
        _wait_until_answered(port, options.lines * (kill + 1) // (options.kills + 1))
        broker = _child(up, "broker")
        broker.kill()
        broker.wait()
        killed_at.append(_answered(port))
    code = runner.wait()
    took_s = time.monotonic() - began
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    by_line = Counter(answer["custom_id"] for answer in answers)
    choices = {int(answer["custom_id"]): answer["response"]["body"]["choices"] for answer in answers}
    chance = random.Random(1)
    alone = sorted(chance.sample(range(options.lines), min(options.alone, options.lines)))
    num_alone = sum(_ask(port, bodies[number]) == choices.get(number) for number in alone)
    compared = range(options.lines if options.compare is None else options.compare)
    with ThreadPoolExecutor(32) as threads:
        again = threads.map(lambda number: _ask(port, bodies[number]) == choices.get(number), compared)
        num_equal = sum(again)
    return {
        "exit_code": code,
        "lines": options.lines,
        "answers": len(answers),
        "lines_answered_once": sum(count == 1 for count in by_line.values()),
        "brokers_killed": len(killed_at),
        "answers_at_the_kills": killed_at,
        "equal_to_the_request_alone": f"{num_alone} of {len(alone)}",
        "equal_to_the_request_beside_others": f"{num_equal} of {len(compared)}",
        "seconds": round(took_s, 1),
    }


def _body(number: int, tokens: int) -> dict[str, Any]:
    prompt = f"House {number} in the village"
    return {"prompt": prompt, "model": "village", "max_tokens": tokens, "seed": number, "temperature": 1.0}


@contextmanager
def _swarm(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port, http = _free_port(), _free_port()
    command = ["up", "--workers", "2", "--port", str(port), "--http", str(http), "--state-dir", str(folder / "state")]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([sys.executable, "-m", "swarm", *command], stdout=log, stderr=log, env=os.environ)
    try:
        until = time.monotonic() + START_S
        while _get(http, "/ready") is None:
            if time.monotonic() > until or up.poll() is not None:
                raise SystemExit((folder / "up.log").read_text())
            time.sleep(POLL_S)
        yield up, http
    finally:
        up.terminate()
        up.wait()


def _free_port() -> int:
    """Return a free port with a free one behind it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _child(up: subprocess.Popen[bytes], name: str) -> psutil.Process:
    while True:
        for process in psutil.Process(up.pid).children(recursive=True):
            try:
                if name in process.cmdline():
                    return process
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_S)


def _wait_until_answered(port: int, num: int) -> None:
    while _answered(port) < num:
        time.sleep(POLL_S)


def _answered(port: int) -> int:
    page = _get(port, "/v1/batches") or {"data": []}
    return int(page["data"][0]["request_counts"]["completed"]) if page["data"] else 0


def _get(port: int, path: str) -> Any:
    return _send(port, "GET", path, None)


def _ask(port: int, body: dict[str, Any]) -> Any:
    answer = _send(port, "POST", PATH, json.dumps(body).encode())
    return None if answer is None else answer["choices"]


def _send(port: int, method: str, path: str, body: bytes | None) -> Any:
    """Return a JSON answer; None for another status, or if nothing answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except OSError:
        return None
    finally:
        connection.close()
    return json.loads(content) if response.status == 200 else None


if __name__ == "__main__":
    main()
