"""A swarm with a gateway, as processes, for tests of what it speaks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm import AsyncClient
from swarm.demo import model_path
from tests.faults.zygote import Zygote
from tests.integration.processes import START_S, Processes, free_ports

ROOT = Path(__file__).parents[2]


@contextmanager
def http_swarm(logs: Path, zygote: Zygote, model: Path | None = None) -> Iterator[str]:
    """Two workers that serve a model (the demo's), a broker with a journal, and a gateway: its URL."""
    with Processes(
        model or model_path(), logs, launch=zygote, options={"SWARM_STATE_DIR": str(logs / "state")}
    ) as swarm:
        swarm.start(2)
        asyncio.run(_until_serving(swarm))
        with gateway(swarm.url, logs / "gateway.log") as url:
            yield url


async def _until_serving(swarm: Processes) -> None:
    async with AsyncClient(swarm.url, connect_timeout_s=30.0) as client:
        await swarm.until_serving(client, 2)


@contextmanager
def gateway(broker: str, log: Path) -> Iterator[str]:
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "swarm", "gateway", "--url", broker, "--http", str(port)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        _until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"the gateway is not ready: {log.read_text()[-2000:]}")
