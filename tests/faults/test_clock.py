"""The wall clock jumps by an hour, forth and back, under every process of a swarm: nobody notices."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from swarm import AsyncClient
from tests.faults.bench import CASES, Answers, Bench, Swarm, ask
from tests.faults.zygote import Zygote

HOUR_S = 3600
DEADLINE_S = 300.0  # of every request: minutes in truth, and less than an hour
FILE_VARIABLE = "TEST_CLOCK_FILE"

# Loaded before libc, in the process that all others are forked from; the file holds by how many seconds to lie.
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("TEST_CLOCK_FILE"), O_RDONLY);
  offset = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += *offset;
  return status;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
Step = Callable[[int], None]


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """``step(3600)``: from now on it is an hour later than it is."""
    file = tmp_path / "clock"
    file.write_bytes(struct.pack("q", 0))

    def set_to(offset_s: int) -> None:
        with file.open("r+b") as clock:
            clock.write(struct.pack("q", offset_s))

    return set_to


@pytest.fixture
def swarm(model: Path, tmp_path: Path, step: Step, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """Broker and three workers whose wall clock can be stepped."""
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv(FILE_VARIABLE, str(tmp_path / "clock"))
        zygote = Zygote(model)
    with zygote, Swarm(model, tmp_path, zygote, state=tmp_path / "state") as swarm:
        swarm.start(3)
        yield swarm


async def test_the_clock_steps(swarm: Swarm, step: Step, expected: Answers) -> None:
    """An hour ahead, then an hour back, then right again; and a broker that starts while it is wrong. No worker is out,
    no plan is made, no deadline passes, and the answers are the same."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.serving()
        plans = (await bench.figures())["plans"]
        for offset_s in (HOUR_S, -HOUR_S, 0):
            drawn = (await bench.figures()).get("tokens", 0.0)
            answers = [asyncio.create_task(ask(client, index, deadline_s=DEADLINE_S)) for index in range(len(CASES))]
            await bench.until(lambda s, drawn=drawn: s.get("tokens", 0.0) >= drawn + 30)  # type: ignore[misc]
            step(offset_s)
            assert await asyncio.gather(*answers) == [expected[index] for index in range(len(CASES))]
        figures = await bench.figures()
        assert figures["plans"] == plans
        assert figures.get("workers_lost", 0) == 0
        for offset_s in (HOUR_S, -HOUR_S):
            answers = [asyncio.create_task(ask(client, index, deadline_s=DEADLINE_S)) for index in range(len(CASES))]
            await bench.until(lambda s: s.get("running", 0) >= len(CASES))
            swarm.kill_broker()
            step(offset_s)
            swarm.start_broker(3)
            assert await asyncio.gather(*answers) == [expected[index] for index in range(len(CASES))]
    assert _last_line_at(swarm) < -HOUR_S / 2, "the processes did see the clock step"


def _last_line_at(swarm: Swarm) -> float:
    """Compare the broker's clock, by its log's last line, with the true one."""
    lines = [json.loads(line) for line in swarm.log("broker").splitlines() if line.startswith("{")]
    return datetime.fromisoformat(lines[-1]["timestamp"]).timestamp() - time.time()
