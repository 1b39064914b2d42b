"""Traces of requests that a broker has not seen itself: it was killed since, and its journal has the times."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.broker.journal import steps
from swarm.broker.journal.database import FILE
from swarm.broker.reports.trace import PARTS
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

PROMPT = [1, 5, 9, 13]
WAIT_S = 20.0


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def swarm(
    random_llama: Path, zygote: Zygote, state: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    options = {"SWARM_STATE_DIR": str(state)}
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=options, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 3)
        yield client


def newest_position(state: Path) -> int:
    """Of the last steps that the journal has."""
    with sqlite3.connect(f"{(state / FILE).absolute().as_uri()}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT steps FROM steps ORDER BY number DESC LIMIT 1").fetchall()
    db.close()
    return max((row.position for (blob,) in rows for step in steps.unpacked(blob) for row in step.kv), default=0)


async def until_kept(state: Path, position: int) -> None:
    """Steps are in the journal about a second later."""
    give_up_at = time.monotonic() + WAIT_S
    while newest_position(state) < position:
        assert time.monotonic() < give_up_at, "the journal has no times of it"
        await asyncio.sleep(0.1)


def checked(trace: Any, num_traced: int) -> Any:
    """The one sequence of a trace, all of whose sums are right."""
    (sequence,) = trace["sequences"]
    tokens = sequence["tokens"]
    assert len(tokens) == sequence["num_traced"] >= num_traced
    assert "from the journal" in trace["times"]
    for each in (*tokens, sequence["sums"]):
        assert sum(each.get(part, 0.0) for part in PARTS) == pytest.approx(each["total_s"], abs=1e-4)
        assert each["compute_s"] > 0
        assert each["unaccounted_s"] > -1e-4
    assert sum(token["total_s"] for token in tokens) == pytest.approx(sequence["sums"]["total_s"], abs=1e-3)
    assert [stage["worker"] for stage in sequence["stages"]] == [s["worker"] for s in tokens[0]["stages"]]
    assert len(sequence["stages"]) == 3
    return sequence


@pytest.mark.parametrize("retained", ["60", "0.1"], ids=["in memory again", "in the journal only"])
async def test_killed_after_the_end(swarm: Processes, client: AsyncClient, state: Path, retained: str) -> None:
    """The next broker tells of (nearly) all tokens where their time went, as the one before it did."""
    done = await client.generate(PROMPT, max_tokens=100, ignore_eos=True, request_id=f"ended-{retained}")
    before: Any = await client.trace(done.request_id)
    await until_kept(state, len(PROMPT) + 99)
    await swarm.restart_broker(client, 3, SWARM_BROKER__RETAIN_S=retained)
    found = checked(await client.trace(done.request_id), 99)
    assert (found["reason"], found["num_tokens"]) == ("length", 100)
    known = {token["index"]: token for token in before["sequences"][0]["tokens"]}
    for token in found["tokens"][1:]:  # the first one began a moment later: when it was in the journal
        was = known[token["index"]]
        assert token["total_s"] == pytest.approx(was["total_s"] - was["broker_s"], abs=1e-4)
        assert token["compute_s"] == pytest.approx(was["compute_s"], abs=1e-4)


async def test_killed_in_the_middle(swarm: Processes, client: AsyncClient, state: Path) -> None:
    """Both brokers' steps count. What the first one had in its memory only, about a second's, is missing, and said to
    be; the pause between them is no token's time twice."""
    request_id = await client.submit(PROMPT, max_tokens=900, ignore_eos=True)
    await until_kept(state, 100)
    await swarm.restart_broker(client, 3)
    async for piece in client.attach(request_id, 890, timeout=60):
        assert piece.index >= 890
    body = await client.trace(request_id)
    (sequence,) = body["sequences"]  # type: ignore[misc]
    assert sequence["num_traced"] > 100  # type: ignore[index]
    assert sequence["tokens"][0]["index"] == 0  # type: ignore[index]
    assert sequence["tokens"][-1]["index"] == 899  # type: ignore[index]
    checked(body, 100)


def swarmctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from swarm.ctl.main import main; main()", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


async def test_an_orderly_stop_loses_nothing(swarm: Processes, client: AsyncClient) -> None:
    """What came since the last second is written before the process ends. For people, too."""
    done = await client.generate(PROMPT, max_tokens=50, ignore_eos=True, request_id="orderly")
    swarm.broker.terminate()
    assert swarm.broker.wait() == 0
    swarm.start_broker(3, SWARM_BROKER__RETAIN_S="0.1")
    await swarm.until_serving(client, 3)
    checked(await client.trace(done.request_id), 50)
    shown = await asyncio.to_thread(swarmctl, "trace", "orderly", "--url", swarm.url)
    assert shown.returncode == 0, shown.stderr
    assert "from the journal" in shown.stdout
    assert "compute" in shown.stdout
