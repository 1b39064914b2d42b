"""Traces of requests that a broker has not seen itself: it was killed since, and its journal has no times."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.broker.reports.ended_requests import NO_TIMES
from swarm.broker.reports.trace import PARTS, RESTORED
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

PROMPT = [1, 5, 9, 13]


@pytest.fixture(scope="module")
def swarm(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {"SWARM_STATE_DIR": str(tmp_path_factory.mktemp("state"))}
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=options, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 3)
        yield client


def swarmctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from swarm.ctl.main import main; main()", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("retained", "says"), [("60", RESTORED), ("0.1", NO_TIMES)], ids=["in memory", "in the journal"]
)
async def test_killed_after_the_end(swarm: Processes, client: AsyncClient, retained: str, says: str) -> None:
    """The next broker knows the request, and who held what, and says that the times are gone. For people, too."""
    request_id = f"ended-{retained}"
    await client.generate(PROMPT, max_tokens=20, ignore_eos=True, request_id=request_id, hops=True)
    before: Any = await client.trace(request_id)
    await swarm.restart_broker(client, 3, SWARM_BROKER__RETAIN_S=retained)
    after: Any = await client.trace(request_id)
    assert (after["times"], after["state"]) == (says, "ended")
    (was,), (found,) = before["sequences"], after["sequences"]
    assert [found[key] for key in ("reason", "num_prompt", "num_tokens")] == ["length", len(PROMPT), 20]
    held = [(stage["worker"], stage["layers"]) for stage in found["stages"]]
    assert held == [(stage["worker"], stage["layers"]) for stage in was["stages"]]
    assert len(held) == 3
    shown = await asyncio.to_thread(swarmctl, "trace", request_id, "--url", swarm.url)
    assert shown.returncode == 0, shown.stderr
    assert "only kept in memory" in shown.stdout


async def test_killed_in_the_middle(swarm: Processes, client: AsyncClient) -> None:
    """The tokens since are traced, whole; those of before are missing, and said to be."""
    request_id = await client.submit(PROMPT, max_tokens=900, ignore_eos=True)
    async for piece in client.attach(request_id, timeout=60):
        if piece.index >= 100:
            break
    await swarm.restart_broker(client, 3)
    async for piece in client.attach(request_id, 890, timeout=60):
        assert piece.index >= 890
    trace: Any = await client.trace(request_id)
    (sequence,) = trace["sequences"]
    tokens = sequence["tokens"]
    assert trace["times"] == RESTORED
    assert len(tokens) == sequence["num_traced"] <= 900 - 100
    assert tokens[-1]["index"] == 899
    for each in (*tokens, sequence["sums"]):
        assert sum(each[part] for part in PARTS) == pytest.approx(each["total_s"], abs=1e-4)
        assert each["compute_s"] > 0
        assert each["unaccounted_s"] > -1e-4
    assert sum(token["total_s"] for token in tokens) == pytest.approx(sequence["sums"]["total_s"], abs=1e-3)
    assert len(sequence["stages"]) == 3
