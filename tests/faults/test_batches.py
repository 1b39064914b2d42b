"""Batches through deaths: whoever dies, each line is answered once, with the answer of the request alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.demo import model_path
from tests.faults.bench import WAIT_S, Swarm
from tests.faults.zygote import Zygote
from tests.integration.gateway import MODEL, Gateway, request

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

COMPLETIONS = "/v1/completions"
NUM_LINES = 240
NUM_ALONE = 60  # lines that are asked again, one by one


@pytest.fixture
def swarm(zygote: Zygote, tmp_path: Path) -> Iterator[Swarm]:
    """Two workers with the embedded model, and a broker with a journal."""
    with Swarm(model_path(), tmp_path, zygote, state=tmp_path / "state") as swarm:
        swarm.start(2)
        yield swarm


@pytest.fixture
def gateway(swarm: Swarm, zygote: Zygote, tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(swarm.url, tmp_path, start=zygote, options={"SWARM_STATE_DIR": str(tmp_path / "gateway")})
    gateway.start()
    yield gateway
    gateway.stop()


def body_of(number: int) -> dict[str, Any]:
    """Half of the bodies have no seed of their own, but temperature 0."""
    odd = {"seed": number, "temperature": 1.0} if number % 2 else {"temperature": 0}
    return {"model": MODEL, "prompt": f"The {number}. house", "max_tokens": 24, "ignore_eos": True, **odd}


def lines() -> bytes:
    described = (
        {"custom_id": f"c{number}", "method": "POST", "url": COMPLETIONS, "body": body_of(number)}
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in described)


async def ask(url: str, body: Any = None) -> Any:
    code, _, content = await asyncio.to_thread(request, url, body)
    assert code == 200, content
    return json.loads(content)


async def test_each_line_is_answered_once_through_every_death(swarm: Swarm, gateway: Gateway, tmp_path: Path) -> None:
    """A worker, the broker thrice, and the gateway are killed while a batch runs; the command that follows the batch is
    killed and started again, too."""
    (tmp_path / "in.jsonl").write_bytes(lines())
    command = [sys.executable, "-m", "swarm", "batch", "run", str(tmp_path / "in.jsonl"), "--gateway", gateway.url]
    command += ["--output", str(tmp_path / "out.jsonl")]
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        await swarm.until_serving(client, 2)
        first = _start(command, tmp_path)

        def kill_worker() -> None:
            swarm.kill("w1")
            swarm.start_worker("w1")

        def kill_broker() -> None:
            swarm.broker.kill()
            swarm.broker.wait()
            swarm.start_broker(2)

        def kill_gateway() -> None:
            gateway.kill()
            gateway.start()

        deaths = [kill_worker, kill_broker, kill_gateway, kill_broker, first.kill, kill_gateway, kill_broker]
        for place, kill in enumerate(deaths):
            await _until_answered(gateway, (place + 1) * NUM_LINES // (len(deaths) + 2))
            await asyncio.to_thread(kill)
        second = _start(command, tmp_path)
        assert await asyncio.to_thread(second.wait, WAIT_S) == 0, (tmp_path / "command.log").read_text()
    first.wait()
    [batch] = (await ask(gateway.url + "/v1/batches"))["data"]
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in answers] == [f"c{number}" for number in range(NUM_LINES)]
    for number in range(0, NUM_LINES, NUM_LINES // NUM_ALONE):
        alone = await ask(gateway.url + COMPLETIONS, body_of(number))
        assert answers[number]["response"]["body"]["choices"] == alone["choices"], number


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "command.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"NO_COLOR": "1"})


async def _until_answered(gateway: Gateway, num: int) -> None:
    def is_reached(page: Any) -> bool:
        return bool(page["data"]) and page["data"][0]["request_counts"]["completed"] >= num

    await _until(gateway, is_reached)


async def _until(gateway: Gateway, condition: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            code, _, content = await asyncio.to_thread(request, gateway.url + "/v1/batches")
            if code == 200 and condition(json.loads(content)):
                return
            await asyncio.sleep(0.02)
