"""A worker's end shows at once, whatever memory it has to give back, and nothing of it remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swarm import AsyncClient
from swarm.stage import native
from swarm.stage.shell import fast_exit
from tests.faults.bench import Swarm
from tests.faults.zygote import Zygote
from tests.integration.processes import KEEPER

PATIENCE_S = 20.0


def _absence() -> str:
    with fast_exit.keep_memory() as pid:
        return "" if pid else native.open_library()[1] or "no such system calls"


pytestmark = pytest.mark.skipif(bool(_absence()), reason=f"no keeper: {_absence()}")

# Processes with a GiB in small pages and three threads, killed in turns with a keeper and without: after how long the
# other end of their socket says so, and how the parent sees that they ended.
KILLS = """
import json, mmap, os, signal, socket, sys, threading, time
from swarm.stage.shell import fast_exit

def be(end, with_keeper):
    if with_keeper:
        kept = fast_exit.keep_memory()
        kept.__enter__()
    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, 1 << 30, mmap.PAGESIZE):
        memory[page] = 1
    for _ in range(2):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    end.send(b"x")
    signal.pause()

def took_s(with_keeper):
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        be(theirs, with_keeper)
    theirs.close()
    ours.settimeout(60)
    assert ours.recv(1) == b"x"
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert ours.recv(1) == b""
    took = time.monotonic() - began
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return took

print(json.dumps([[took_s(with_keeper) for _ in range(3)] for with_keeper in (True, False) * 2]))
"""


def test_sockets_are_closed_before_memory_is_given_back() -> None:
    """Three times sooner than without, or within 20 ms: the best of each, for the machine may be busy."""
    done = subprocess.run([sys.executable, "-c", KILLS], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third, fourth = json.loads(done.stdout)
    with_keeper, without = min(first + third), min(second + fourth)
    assert with_keeper < max(without / 3, 0.020), (with_keeper, without)


def test_it_holds_nothing_but_the_memory() -> None:
    """No descriptor, no folder, no signal of the process; its own end is not the process's; and it goes in order."""
    before = os.listdir("/proc/self/fd")
    with fast_exit.keep_memory() as pid:
        assert pid is not None
        process = psutil.Process(pid)
        _until(lambda: process.num_fds() == 1 and os.getsid(pid) == pid, process)  # the one by which it sees the end
        assert process.name() == fast_exit.NAME == KEEPER
        assert process.cwd() == "/"
        assert os.listdir("/proc/self/fd") == before
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
        assert process.is_running()
        assert process.status() != psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(pid)


def test_a_keeper_that_was_killed_is_not_missed() -> None:
    """The process lives on, and ends in order."""
    with fast_exit.keep_memory() as pid:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_its_number_stays_its_own(handler: signal.Handlers) -> None:
    """Whoever waits for all children, or for none, takes no keeper with it: what is killed in the end is no stranger.
    In a process of its own, which has no other children."""
    script = f"""
import os, signal
from swarm.stage.shell import fast_exit
signal.signal(signal.SIGCHLD, signal.Handlers({handler.value}))
with fast_exit.keep_memory() as pid:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | fast_exit._WAIT_ALL)
    for wait in (os.wait, lambda: os.waitpid(-1, 0), lambda: os.waitpid(pid, 0)):
        try:
            print(wait())
        except ChildProcessError:
            pass
    assert os.path.exists(f"/proc/{{pid}}")
assert not os.path.exists(f"/proc/{{pid}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGSEGV, -signal.SIGSEGV),
        (signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
async def test_nothing_remains_of_a_worker(
    model: Path, zygote: Zygote, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """However it ends: its exit code is its own, and its keeper goes with it."""
    with Swarm(model, tmp_path, zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
        worker = swarm.workers.pop("w0")
        (kept,) = psutil.Process(worker.pid).children(recursive=True)
        assert kept.name() == fast_exit.NAME
        worker.send_signal(number)
        assert worker.wait(PATIENCE_S) == code
        _gone(kept)


def _gone(process: psutil.Process) -> None:
    """Whether it has ended. When somebody notices is up to the system's first process."""

    def ended() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    _until(ended, process)


def _until(holds: Callable[[], bool], process: psutil.Process) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < give_up_at, process
        time.sleep(0.01)
