"""A real swarm of the embedded model with a gateway before it, as processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm import AsyncClient
from swarm.demo import model_path
from tests.integration.processes import Launch, Processes, free_ports, launch

MODEL = "village"
LONG: dict[str, Any] = {"ignore_eos": True}  # beside max_tokens: an answer that takes its time
READY_S = 40.0


class Gateway:
    """One process."""

    def __init__(
        self,
        broker_url: str,
        logs: Path,
        name: str = "gateway",
        start: Launch = launch,
        options: dict[str, str] | None = None,
    ) -> None:
        """``options``: variables of its environment."""
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.broker_url, self.log, self._start = broker_url, logs / f"{name}.log", start
        self.process: Any = None
        self._options = options or {}

    def start(self) -> None:
        """Returns when it answers."""
        arguments = ["gateway", "--url", self.broker_url, "--http", str(self.port)]
        self.process = self._start(arguments, os.environ | {"SWARM_LOG__FORMAT": "json"} | self._options, self.log)
        give_up_at = time.monotonic() + READY_S
        while status(self.url + "/health") != 200:
            if time.monotonic() > give_up_at or self.process.poll() is not None:
                raise AssertionError(f"the gateway doesn't answer: {self.log.read_text()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As by the kernel: no last words."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None


class Served:
    """A broker, workers and a gateway, until the end of a ``with``."""

    def __init__(self, logs: Path, start: Launch, options: dict[str, str] | None = None) -> None:
        self.swarm = Processes(model_path(), logs, options=options, launch=start)
        self.gateway = Gateway(self.swarm.url, logs, start=start, options=options)

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    def __enter__(self) -> Self:
        try:
            self.swarm.start(2)
            asyncio.run(self._until_serving())
            self.gateway.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    async def _until_serving(self) -> None:
        async with AsyncClient(self.swarm.url, connect_timeout_s=30.0) as client:
            await self.swarm.until_serving(client, 2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gateway.stop()
        self.swarm.stop()

    async def until_empty(self, client: AsyncClient, within_s: float = 20.0) -> None:
        """Wait until nothing runs or waits, and no stage holds anything of a request."""
        await self.swarm.until(client, "stats", is_empty, within_s)


def is_empty(report: dict[str, Any]) -> bool:
    """Does nothing run or wait, by the broker's statistics, and is nothing held but by the prefix cache?"""
    pipeline = report["pipeline"]
    return (
        all(pipeline[name] == 0 for name in ("running", "queued", "in_flight")) and not report["scheduler"]["kv_used"]
    )


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    id: str
    event: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def left_after(url: str, body: Any, num_events: int, timeout_s: float = 60.0) -> list[Event]:
    """The first events of a stream whose reader then hangs up."""
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body | {"stream": True}).encode(), headers)
    text = ""
    with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
        while len(events_in(text)) < num_events:
            text += answer.readline().decode()
    return events_in(text)[:num_events]


def events_in(text: str) -> list[Event]:
    """The events of a stream; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append(Event(fields.get("id", ""), fields.get("event", ""), fields["data"]))
    return found


def request(
    url: str, body: Any = None, headers: Sequence[tuple[str, str]] = (), method: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request, whatever its status. A body that is no bytes goes as JSON."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    asked = urllib.request.Request(url, content, {"content-type": "application/json", **dict(headers)}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def status(url: str) -> int:
    """The status of an answer; 0: nobody is there."""
    try:
        return request(url)[0]
    except OSError:
        return 0
