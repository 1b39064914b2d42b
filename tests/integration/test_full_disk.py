"""A disk that is full costs log lines, and no process: real ones, on /dev/full and on a small file system."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.linux import fill, small_disk
from tests.integration.processes import Processes
from tests.integration.test_up import Up

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="it takes Linux's /dev/full")


def _launch(arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Its stderr is a disk that is full."""
    del log
    with open("/dev/full", "ab") as full:
        command = [sys.executable, "-m", "swarm", "--log-level", "debug", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=full, env=environment)


async def test_logs_that_can_not_be_written(random_llama: Path, tmp_path: Path) -> None:
    """Broker and worker serve, and end as they should when asked to."""
    with Processes(
        random_llama, tmp_path, options={"SWARM_STATE_DIR": str(tmp_path / "state")}, launch=_launch
    ) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
            done = await client.generate([5, 6, 7], max_tokens=5, ignore_eos=True)
            assert len(done.choices[0].tokens) == 5
        assert swarm.stop() == [128 + signal.SIGTERM, 0]


def test_a_failure_that_can_not_be_told(tmp_path: Path) -> None:
    """Whatever Python still has to write at its end: the exit code is the one that says what was wrong."""
    for arguments, code in ((["broker", "--port", "x"], 2), (["broker", "--state-dir", "/proc/nowhere"], 78)):
        assert _launch(arguments, dict(os.environ), tmp_path).wait(60) == code


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    with small_disk(tmp_path / "disk", "4m") as place:
        yield place


async def test_state_and_logs_on_one_disk(disk: Path, tmp_path: Path) -> None:
    """It is filled up under load: nobody ends, running answers do, and with room again the log says what it lacks."""
    os.environ["SWARM_LOG__LEVEL"] = "debug"
    try:
        swarm = Up(tmp_path, "--workers", "2", "--state-dir", str(disk / "state"))
    finally:
        del os.environ["SWARM_LOG__LEVEL"]
    try:
        await asyncio.to_thread(swarm.wait_for, "serving")
        before = {name: process.pid for name, process in swarm.children().items()}
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            async with client.stream([5, 6, 7], max_tokens=400, ignore_eos=True, timeout=60.0) as stream:
                await anext(stream)
                fill(disk / "ballast")
                num = 1 + len([piece async for piece in stream])
            assert num > 100
            await _until(client, lambda s: "full" in s["journal_problem"])
            assert {name: process.pid for name, process in swarm.children().items()} == before
            (disk / "ballast").unlink()
            await _until(client, lambda s: s["journal_problem"] == "")
            again = await client.generate([5, 6, 7], max_tokens=5, ignore_eos=True, timeout=60.0)
            assert len(again.choices[0].tokens) == 5
            assert {name: process.pid for name, process in swarm.children().items()} == before
        assert "log_lines_dropped" in (disk / "state" / "logs" / "broker.log").read_text()
        swarm.process.send_signal(signal.SIGTERM)
        assert (await asyncio.to_thread(swarm.end))[0] == 0
    finally:
        swarm.close()


async def _until(client: AsyncClient, holds: Callable[[dict[str, Any]], bool]) -> None:
    async with asyncio.timeout(30.0):
        while True:
            if holds(await client.query("status")):
                return
            await asyncio.sleep(0.02)
