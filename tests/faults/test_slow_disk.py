"""Each sync of the disk takes its time, under load: answers come later and right, and nobody is judged for it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import AsyncClient
from tests.faults.bench import Answers, Bench, Swarm
from tests.faults.zygote import Zygote

SYNC_S = 0.4
LOOK_S = 2.0  # in which the broker answers a question, whatever its disk does

# Loaded before libc, in the process that all others are forked from.
SHIM = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void) {
  double seconds = atof(getenv("TEST_SYNC_S"));
  struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&left, NULL);
}
int fsync(int file) { wait_for_the_disk(); return syscall(SYS_fsync, file); }
int fdatasync(int file) { wait_for_the_disk(); return syscall(SYS_fdatasync, file); }
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A broker with a journal, on a disk on which every sync takes a while."""
    folder = tmp_path_factory.mktemp("slow")
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("TEST_SYNC_S", str(SYNC_S))
        zygote = Zygote(model)
        with zygote, Swarm(model, folder, zygote, state=folder / "state") as swarm:
            swarm.start(3)
            yield swarm


async def test_a_slow_disk_delays_answers_and_nothing_else(swarm: Swarm, expected: Answers) -> None:
    """Tokens wait until they are written. Questions do not, no worker is out, and no plan is made."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.serving()
        before = await bench.figures()
        looks: list[float] = []
        async with bench.under_load(warm=0):
            for _ in range(20):
                asked_at = time.monotonic()
                await client.query("status")
                looks.append(time.monotonic() - asked_at)
                await asyncio.sleep(0.1)
        figures = await bench.figures()
        assert max(looks) < LOOK_S
        assert figures["plans"] == before["plans"]
        assert figures.get("workers_lost", 0) == 0
        status = await client.query("status")
        assert not status["journal_problem"]


async def test_a_stage_dies_while_the_disk_is_slow(swarm: Swarm, expected: Answers) -> None:
    """The epoch waits for the disk, and then everything goes on."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.serving()
        async with bench.under_load():
            swarm.kill("w1")
            await bench.serving(2)
            swarm.start_worker("w1")
