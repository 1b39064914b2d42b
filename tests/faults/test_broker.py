"""The broker dies, too: at any moment, with workers, with everything; and its disk fails it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from swarm import AsyncClient, failpoints
from swarm.broker.actions import WriteEpoch
from swarm.broker.journal.database import FILE, VERSION
from swarm.broker.journal.disk import RESERVE_BYTES, RESERVE_FILE
from swarm.broker.journal.salvage import ASIDE
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.errors import SwarmError
from tests.faults.bench import Answers, Bench, Swarm, ask, long
from tests.faults.linux import Cgroup, fill, needs_cgroup, small_disk
from tests.faults.zygote import Zygote


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def _restart(swarm: Swarm, faults: str = "") -> None:
    swarm.kill_broker()
    armed = {"SWARM_FAILPOINTS": faults, "SWARM_FAILPOINTS_TRACE": str(swarm.trace)} if faults else {}
    swarm.start_broker(3, **armed)


async def _ended(swarm: Swarm) -> None:
    await asyncio.wait_for(asyncio.to_thread(swarm.broker.wait), 60)


async def test_a_broker_is_killed(bench: Bench, swarm: Swarm) -> None:
    """Clients see a pause. What every stage held goes on without anything being computed again; and so twice."""
    async with bench.under_load(warm=60, speculation="off"):
        for _ in range(2):
            _restart(swarm)
            found = await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)
            assert found.get("replayed_layer_positions", 0) == 0
            await bench.until(lambda s: s.get("tokens", 0) > 20)


@pytest.mark.parametrize(
    "fault",
    [
        "broker.tokens=kill@25",
        "broker.dispatch=kill@30",
        "broker.step_done=kill@20",
        "journal.writes=kill@20",
        "journal.written=kill@20",
        *long(
            "journal.written=kill@3",
            "broker.tokens=kill@3",
            "broker.tick=kill@30",
            "broker.epoch=kill@1",
            "journal.writes=kill@2",
        ),
    ],
)
async def test_at_a_place(bench: Bench, swarm: Swarm, fault: str) -> None:
    """Before and after tokens are written, sent, a step is dispatched or taken: each token is seen once, and none is
    missing."""
    _restart(swarm, fault)
    await bench.serving()
    async with bench.under_load(warm=0):
        await _ended(swarm)
        swarm.start_broker(3)


@needs_cgroup("memory")
async def test_the_broker_is_killed_for_its_memory(bench: Bench, swarm: Swarm) -> None:
    """The kernel ends it, in the middle of answers: a death like others."""
    _restart(swarm, "broker.tokens=devour:200@40")
    await bench.serving()
    with Cgroup("memory") as group:
        group.set("memory.limit_in_bytes", 60 << 20)
        group.add(swarm.broker.pid)
        async with bench.under_load(warm=0):
            assert await asyncio.to_thread(swarm.broker.wait, 60.0) == -signal.SIGKILL
            swarm.start_broker(3)


@pytest.mark.parametrize("place", [*long(0), 1, *long(-1)], ids=["first", "middle", "last"])
async def test_with_a_worker(bench: Bench, swarm: Swarm, place: int) -> None:
    """The survivors' layers stay where they are; what the dead one held is replayed."""
    async with bench.under_load(warm=60):
        name = (await bench.order())[place]
        swarm.kill_broker()
        swarm.kill(name)
        swarm.start_broker(3)
        swarm.start_worker(name)


async def test_everything_is_killed(bench: Bench, swarm: Swarm) -> None:
    """Nothing is left but the journal. All processes are started again, and accepted requests finish."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        swarm.kill_broker()
        for name in names:
            swarm.kill(name)
        swarm.start_broker(3)
        for name in names:
            swarm.start_worker(name)


async def test_on_the_way_back(bench: Bench, swarm: Swarm) -> None:
    """A worker dies, and while its layers are taken over the broker does; and the other way round."""
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        swarm.kill(name)
        await bench.until(lambda s: s.get("workers_lost", 0) > 0)
        _restart(swarm)
        await bench.until(lambda s: s.get("tokens", 0) > 10)
        swarm.kill((await bench.order())[0])
        swarm.start_worker(name)


async def test_an_old_journal(bench: Bench, swarm: Swarm, tmp_path: Path) -> None:
    """Somebody puts a backup in its place: its epochs were used before, but in another life, as workers know."""
    backup = tmp_path / "backup"
    assert swarm.state is not None
    swarm.kill_broker()
    shutil.copytree(swarm.state, backup)
    swarm.start_broker(3)
    await bench.serving()
    swarm.kill(name := (await bench.order())[0])
    swarm.start_worker(name)
    await bench.serving()
    swarm.kill_broker()
    shutil.rmtree(swarm.state)
    shutil.copytree(backup, swarm.state)
    swarm.start_broker(3)
    await bench.serving()
    await bench.right()


async def test_a_damaged_journal(bench: Bench, swarm: Swarm) -> None:
    """What can be read is used, the file is kept beside it, and the swarm serves."""
    await bench.right()
    swarm.kill_broker()
    assert swarm.state is not None
    path = swarm.state / FILE
    with sqlite3.connect(path) as db:  # what is in the write-ahead log goes into the file
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 5] = os.urandom(8192)
    path.write_bytes(data)
    swarm.start_broker(3)
    await bench.serving()
    await bench.right()
    assert list(swarm.state.glob(f"{ASIDE}-*"))
    assert "journal_was_damaged" in swarm.log("broker")


def _broker(swarm: Swarm, state: Path) -> tuple[int, str]:
    """Another broker on this directory: how it ends, and what it says."""
    arguments = [sys.executable, "-m", "swarm", "broker", "--port", str(swarm.port + 7), "--state-dir", str(state)]
    done = subprocess.run(arguments, check=False, timeout=60, capture_output=True, text=True)
    return done.returncode, done.stderr


async def test_a_second_broker_is_refused(bench: Bench, swarm: Swarm) -> None:
    """One journal, one writer."""
    assert swarm.state is not None
    code, said = _broker(swarm, swarm.state)
    assert code == 78
    assert "in use by another swarm broker" in said
    await bench.right(cases=(0,))


def test_a_journal_of_a_newer_version(swarm: Swarm, tmp_path: Path) -> None:
    """It is left alone, and starting again would not help."""
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    code, said = _broker(swarm, tmp_path)
    assert code == 78
    assert "written by a newer Swarm" in said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")


@needs_root
def test_a_directory_that_can_not_be_written(swarm: Swarm, tmp_path: Path) -> None:
    """One clear sentence, and the exit code that says that starting again will not help."""
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, said = _broker(swarm, disk)
    assert code == 78
    assert "can't be written" in said


def _slow_swarm(model: Path, logs: Path, zygote: Zygote, disk: Path) -> Swarm:
    """Answers last longer than a disk takes to be filled."""
    return Swarm(model, logs, zygote, {failpoints.VARIABLE: "step.computes=stall:0.02@1+"}, disk / "state")


@needs_root
async def test_a_full_disk(model: Path, zygote: Zygote, tmp_path: Path, expected: Answers) -> None:
    """New requests are refused with the reason, those that run go on to their right end; with room again, all is as
    before, and what was held back is written."""
    with small_disk(tmp_path / "disk") as disk, _slow_swarm(model, tmp_path, zygote, disk) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
            running = [asyncio.create_task(ask(client, index)) for index in (0, 1)]
            await swarm.until(client, "stats", lambda s: s["pipeline"].get("tokens", 0) > 20)
            ballast = disk / "ballast"
            fill(ballast)
            await swarm.until(client, "status", lambda s: "full" in s["journal_problem"])
            with pytest.raises(SwarmError, match="no request can be accepted"):
                await ask(client, 2)
            assert await asyncio.gather(*running) == [expected[0], expected[1]]
            ballast.unlink()
            await swarm.until(client, "status", lambda s: not s["journal_problem"])
            assert await ask(client, 2) == expected[2]


@needs_root
async def test_a_death_while_the_disk_is_full(model: Path, zygote: Zygote, tmp_path: Path, expected: Answers) -> None:
    """Room is set aside for epochs: the answers under way don't wait for the disk."""
    with small_disk(tmp_path / "disk", "6m") as disk, _slow_swarm(model, tmp_path, zygote, disk) as swarm:
        swarm.start(3)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 3)
            running = [asyncio.create_task(ask(client, index)) for index in (0, 1)]
            await swarm.until(client, "stats", lambda s: s["pipeline"].get("tokens", 0) > 20)
            fill(disk / "ballast")
            await swarm.until(client, "status", lambda s: "full" in s["journal_problem"])
            swarm.kill("w1")
            assert await asyncio.gather(*running) == [expected[0], expected[1]]
            status = await client.query("status")
            assert "full" in status["journal_problem"]
            assert (await client.query("stats"))["pipeline"]["workers_lost"] == 1


@needs_root
@pytest.mark.parametrize("is_room_made", [False, *long(True)], ids=["stays-full", "room-is-made"])
async def test_the_broker_dies_while_the_disk_is_full(
    model: Path, zygote: Zygote, tmp_path: Path, expected: Answers, is_room_made: bool
) -> None:
    """The next one opens the journal on what was set aside; what ran goes on to its right end, with room or without,
    and so for a worker's death on top of it."""
    with small_disk(tmp_path / "disk", "6m") as disk, _slow_swarm(model, tmp_path, zygote, disk) as swarm:
        swarm.start(3)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 3)
            running = [asyncio.create_task(ask(client, index)) for index in (0, 1)]
            await swarm.until(client, "stats", lambda s: s["pipeline"].get("tokens", 0) > 20)
            fill(disk / "ballast")
            await swarm.until(client, "status", lambda s: "full" in s["journal_problem"])
            swarm.kill_broker()
            fill(disk / "more")
            swarm.start_broker(3)
            await swarm.until_serving(client, 3)
            if is_room_made:
                (disk / "ballast").unlink()
            swarm.kill("w1")
            assert await asyncio.gather(*running) == [expected[0], expected[1]]
            if not is_room_made:
                assert "full" in (await client.query("status"))["journal_problem"]
                (disk / "ballast").unlink()
            reserve = disk / "state" / RESERVE_FILE
            await swarm.until(
                client, "status", lambda s: not s["journal_problem"] and reserve.stat().st_size == RESERVE_BYTES
            )
            assert await ask(client, 2) == expected[2]


@needs_root
def test_a_disk_without_any_room(swarm: Swarm, tmp_path: Path) -> None:
    """There never was room for a journal: somebody shall start the broker again later, so it is not code 78."""
    with small_disk(tmp_path / "disk") as disk:
        fill(disk / "ballast")
        code, said = _broker(swarm, disk)
        assert code == 1
        assert "full" in said or "No space left" in said
        (disk / "ballast").write_bytes(b"")
        store = JournalStore(disk)
        store.close()


@needs_root
def test_a_journal_that_can_not_grow(tmp_path: Path) -> None:
    """What is in the write-ahead log finds no room in the file: it stays where it is, and counts."""
    with small_disk(tmp_path / "disk", "6m") as disk:
        first = JournalStore(disk)
        first.reserve.fill()
        for number in range(8):
            first.write([WriteEpoch(number, (f"w{'0' * 4096 * number}",))], Timestamp.now())
        fill(disk / "ballast")
        second = JournalStore(disk)
        assert second.read_snapshot(Timestamp.now(), retained_s=60.0).epoch == 7
        assert second.reserve.num_bytes > RESERVE_BYTES // 2, "most is left for epochs"
        assert (disk / f"{FILE}-wal").stat().st_size
        for store in (first, second):
            store.close()


@needs_root
def test_the_log_leaves_room_on_a_small_disk(tmp_path: Path) -> None:
    """What is folded into the file every so often is little there."""
    with small_disk(tmp_path / "disk", "6m") as disk:
        store = JournalStore(disk)
        for number in range(1000):
            store.write([WriteEpoch(number, ("w0",) * 200)], Timestamp.now())
        assert (disk / f"{FILE}-wal").stat().st_size < 1 << 19
        store.close()
