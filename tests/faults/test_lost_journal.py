"""The journal's files are deleted, replaced or damaged under a broker that runs: it notices at once, says so, and goes
on with a new one that has all it knows. Killed after that, it takes up everything from there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.broker.journal.database import FILE
from swarm.broker.journal.store import JournalStore
from tests.faults.bench import Bench, Swarm

NOTICED_S = 1.0
SLACK_S = 2.0  # a machine that is busy with other tests


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place") / "state"


def _deleted(state: Path) -> None:
    for path in state.glob(f"{FILE}*"):
        path.unlink()


def _removed(state: Path) -> None:
    state.rename(state.parent / f"removed-{time.time_ns()}")


def _replaced(state: Path) -> None:
    """Something else is put in its place, as by somebody who takes the broker for stopped."""
    JournalStore(state / "backup").close()
    os.replace(state / "backup" / FILE, state / FILE)
    shutil.rmtree(state / "backup")


def _garbled(state: Path) -> None:
    """Garble all pages but the first, and the log."""
    for name, start in ((FILE, 4096), (f"{FILE}-wal", 0)):
        size = (state / name).stat().st_size
        with (state / name).open("r+b") as file:
            file.seek(start)
            file.write(os.urandom(max(0, size - start)))


@pytest.mark.parametrize("loss", [_deleted, _removed, _replaced, _garbled], ids=lambda loss: loss.__name__.strip("_"))
async def test_lost_under_load(bench: Bench, swarm: Swarm, loss: Callable[[Path], None]) -> None:
    """Answers go on to their right ends, also those that the broker has forgotten when it is killed a moment later."""
    assert swarm.state is not None
    async with bench.under_load(warm=60, speculation="off"):  # so that answers last until the broker is killed
        before = len((await bench.client.query("status"))["journal_notes"])  # type: ignore[arg-type]
        loss(swarm.state)
        lost_at = time.monotonic()
        await swarm.until(
            bench.client, "status", lambda s: len(s["journal_notes"]) > before and not s["journal_problem"]
        )
        took_s = time.monotonic() - lost_at
        assert "journal_begun_anew" in swarm.log("broker")
        assert took_s < NOTICED_S + SLACK_S
        swarm.kill_broker()
        swarm.start_broker(3)
        found = await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)
        assert found.get("replayed_layer_positions", 0) == 0, "nothing was lost of what workers hold"
