"""``swarm up``'s gateway: it is said to serve only once it answers itself."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from swarm.cli.output import ConsoleProgress, JsonProgress
from swarm.cli.up.http import GatewayPoller, is_alive
from swarm.config import GatewaySettings
from tests.unit.growing import Growing

ALIVE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"status":"ok"}'


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
        b"HTTP/1.1 200 OK\r\n\r\n<html>hello</html>",
        b'HTTP/1.1 200 OK\r\n\r\n{"status":"up"}',
        ALIVE.replace(b"200 OK", b"503 Service Unavailable"),
        ALIVE[:-3],
    ],
)
def test_others_are_not_taken_for_it(answer: bytes) -> None:
    assert is_alive(ALIVE)
    assert not is_alive(answer)


class Told(io.StringIO):
    """A stream that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = Growing[str]()

    def write(self, text: str) -> int:
        self.lines.append(text)
        return super().write(text)


async def test_it_is_told_once_it_answers_and_not_while_somebody_else_has_its_port(tmp_path: Path) -> None:
    """At first the port is open, and what is there says something else; the next time it is the gateway."""
    answers, asked = [b"\xff\x00\x01", ALIVE], []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(answers[len(asked) - 1])
        writer.close()
        await writer.wait_closed()

    shown = Told()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        door = GatewayPoller(GatewaySettings(host="127.0.0.1", port=port), tmp_path, JsonProgress(shown))
        door.on_started()
        running = asyncio.create_task(door.run())
        await shown.lines.has(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert asked == [b"GET /health HTTP/1.1"] * 2
    event = json.loads(shown.getvalue())
    assert event["url"] == f"http://127.0.0.1:{port}"
    assert event["console"] == f"http://127.0.0.1:{port}/"


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        (GatewaySettings(host="127.0.0.1", port=8001), "http://127.0.0.1:8001/"),
        (GatewaySettings(host="0.0.0.0", port=8001), "http://127.0.0.1:8001/"),
        (GatewaySettings(host="::", port=8001), "http://[::1]:8001/"),
        (GatewaySettings(host="10.77.0.1", port=80), "http://10.77.0.1:80/"),
        (GatewaySettings(port=8001, console=False), None),
    ],
)
async def test_the_console_s_address_has_a_line(
    settings: GatewaySettings, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is one that a browser on this machine can open, and has no line where the console is off."""

    async def fetch(host: str, port: int) -> bytes:
        return ALIVE

    monkeypatch.setattr("swarm.cli.up.http._fetch_health", fetch)
    shown = Told()
    poller = GatewayPoller(settings, tmp_path, ConsoleProgress(shown))
    poller.on_started()
    running = asyncio.create_task(poller.run())
    await shown.lines.has(1 if address is None else 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("http: ")
    assert lines[1:] == ([] if address is None else [f"console: {address}"])
