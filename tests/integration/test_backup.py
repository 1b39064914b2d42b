"""A copy of a live broker's state directory, made as ``docs/how-to/operations.md`` says, and put back; requests
continue."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, some_tokens

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "operations.md"
PROMPT, LONG = [1, 5, 9, 13], 400
SLOW = "broker.dispatch=stall:0.005@1+"  # no request ends between two looks, on any machine


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def swarm(random_llama: Path, zygote: Zygote, tmp_path: Path, state: Path) -> Iterator[Processes]:
    options = {"SWARM_STATE_DIR": str(state), "SWARM_FAILPOINTS": SLOW}
    (tmp_path / "logs").mkdir()
    with Processes(random_llama, tmp_path / "logs", options=options, launch=zygote) as processes:
        processes.start(2)
        yield processes


def as_told(what: str, state: Path, copy: Path) -> None:
    """Run the script of the page's section, with these folders in the place of its own."""
    (script,) = re.findall(rf"^```bash\n# {what}.*?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert "/var/lib/swarm/broker" in script
    script = script.replace("/var/lib/swarm/broker", str(state)).replace("/backup/swarm", str(copy))
    script = script.replace("python3 ", f"{sys.executable} ")
    done = subprocess.run(["bash", "-euc", script], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def is_private(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o77 == 0 for path in (folder, folder / "journal.db"))


async def known(client: AsyncClient) -> dict[str, tuple[int, list[str | None]]]:
    """By each request's id how many tokens were drawn of it, and why it has ended, if it has: by memory or journal. The
    oldest first."""
    told: Any = await client.query("requests")
    rows = sorted((*told["requests"], *told["kept"]), key=lambda row: row["age_s"], reverse=True)
    return {row["request_id"]: (row["num_tokens"], row["reasons"]) for row in rows}


async def test_a_copy_of_a_live_brokers_state_is_put_back(swarm: Processes, state: Path, tmp_path: Path) -> None:
    """The copy is made while a request is under way, which waits for workers, so that it can't end meanwhile; then the
    broker is lost with all that it had. From the copy all requests are known as they were, also one that had ended; the
    other goes on to the same tokens, without a complaint."""
    copy = tmp_path / "copy"
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 2)
        expected = await client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=7, timeout=90)
        running = asyncio.create_task(
            client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=7, timeout=90)
        )
        await some_tokens(swarm, client, 40)
        for name in ("w0", "w1"):
            swarm.kill(name)
        await asyncio.to_thread(as_told, "copy", state, copy)
        assert not running.done()
        before = await known(client)
        assert before[expected.request_id] == (LONG, ["length"])
        assert [reasons for _, reasons in before.values()] == [["length"], [None]]
        swarm.broker.kill()
        swarm.broker.wait()
        shutil.rmtree(state)
        await asyncio.to_thread(as_told, "put back", state, copy)
        assert is_private(state)
        swarm.start_broker(2)
        assert await known(client) == before
        for name in ("w0", "w1"):
            swarm.start_worker(name)
        await swarm.until_serving(client, 2)
        assert (await running).tokens == expected.tokens
    log = swarm.log("broker")
    assert "requests_restored" in log
    for complaint in ("journal_was_damaged", "journal_touched", "journal_broke"):
        assert complaint not in log
