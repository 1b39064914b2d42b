"""``swarm doctor --url``: the way to a broker, tried by the door that workers knock at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from swarm.cli.doctor.reach import reach
from swarm.cli.main import run
from swarm.version import __version__
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.integration.test_versions import stranger

pytestmark = pytest.mark.usefixtures("own_cache")
LARGE = 8 << 10  # what gets lost: more than this at once


@pytest.fixture
def swarm(random_llama: Path, tmp_path: Path, zygote: Zygote) -> Iterator[Processes]:
    with Processes(random_llama, tmp_path, launch=zygote) as processes:
        yield processes


async def test_a_broker_that_is_well(swarm: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with its build, the time there and back, and what passes; it has no worker more for it."""
    swarm.start_broker()
    await asyncio.to_thread(run, ["doctor", "--url", swarm.url])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "broker"]
    assert f"{swarm.url}, swarm {__version__}: " in line
    assert "ms there and back" in line


async def test_nobody_is_there(swarm: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.cli.doctor.reach._PATIENCE_S", 0.3)
    found = await reach(swarm.url, None)
    assert found.wrong == "nobody answers within 0.3 s"
    assert "firewall" in found.remedy


async def test_a_broker_of_another_build(swarm: Processes) -> None:
    async with stranger(swarm.port + 1):
        found = await reach(swarm.url, None)
    assert "swarm 9.9.9" in found.wrong
    assert "install the same version on both" in found.wrong


async def test_large_messages_get_lost_on_the_way(swarm: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where packets are larger than a tunnel takes, and nobody tells: all seems well as long as little is said."""
    monkeypatch.setattr("swarm.stage.shell.probing._PATIENCE_S", 0.5)
    swarm.start_broker()
    straight = await reach(swarm.url, None)
    async with tunnel(swarm.port + 1) as port:
        found = await reach(f"tcp://127.0.0.1:{port - 1}", None)
    assert (straight.wrong, straight.loses_large) == ("", False)
    assert (found.wrong, found.loses_large) == ("", True)


@asynccontextmanager
async def tunnel(port: int) -> AsyncIterator[int]:
    """Pass on what comes; from the first large piece on, nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (piece := await reader.read(1 << 20)) and len(piece) < LARGE:
            writer.write(piece)

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((ours, writer))  # open to the end, whatever is passed
        with suppress(ConnectionError):
            await asyncio.gather(passed(reader, ours), passed(theirs, writer))

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
