"""Where nothing can keep a worker's memory, the worker does without."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.stage import native
from swarm.stage.shell import fast_exit


class Lines:
    """Stands for the log."""

    def __init__(self) -> None:
        self.debug_lines: list[tuple[str, str]] = []

    def debug(self, event: str, *, reason: str, note: str) -> None:
        self.debug_lines.append((event, reason))


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        ((None, "it was not built"), "it was not built"),
        ((SimpleNamespace(swarm_keeper_start=lambda: -errno.ENOSYS), ""), "Function not implemented"),
    ],
    ids=["no library", "no such system calls"],
)
def test_without_a_keeper(built: tuple[ctypes.CDLL | None, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done, and one debug line says why."""
    lines: Any = Lines()
    monkeypatch.setattr(native, "open_library", lambda: built)
    monkeypatch.setattr(fast_exit, "log", lines)
    with fast_exit.keep_memory() as pid:
        assert pid is None
    assert lines.debug_lines == [("no_keeper", reason)]


def test_it_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what it was kept for fails."""
    with subprocess.Popen(["sleep", "60"]) as process:
        library = SimpleNamespace(swarm_keeper_start=lambda: process.pid)
        monkeypatch.setattr(native, "open_library", lambda: (library, ""))
        with contextlib.suppress(RuntimeError), fast_exit.keep_memory() as pid:
            assert pid == process.pid
            raise RuntimeError
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_worker_without_kernels_has_a_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a processor that can't run the kernels nor a wish to do without them takes it away."""
    started: list[int] = []
    library = SimpleNamespace(swarm_keeper_start=lambda: started.append(1) or -errno.EPERM)
    monkeypatch.setattr(native, "_refusals", ["worker.kernels is torch"])
    monkeypatch.setattr(native, "open_library", lambda: (library, ""))
    with fast_exit.keep_memory():
        pass
    assert started == [1]
