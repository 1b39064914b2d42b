"""What the supervisor keeps on a disk may be lost when that is full; the swarm may not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from swarm.cli.up import processes
from swarm.cli.up.processes import LogFile
from swarm.cli.up.statedir import StateDirFull, hold_lock
from swarm.errors import ConfigError


def no_room(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_lock_without_its_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is for people: it is held without it, too; and what was there is not lost by trying."""
    with hold_lock(tmp_path, "lock", "swarm up"):
        before = (tmp_path / "lock").read_text()
        assert before.strip() == str(os.getpid())
    monkeypatch.setattr(os, "pwrite", no_room)
    with hold_lock(tmp_path, "lock", "swarm up"):
        assert (tmp_path / "lock").read_text() == before
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"), hold_lock(tmp_path, "lock", "swarm up"):
            raise AssertionError("held twice")


def test_a_longer_pid_of_another_time_goes(tmp_path: Path) -> None:
    """What an older version wrote is written over."""
    (tmp_path / "lock").write_text("123456789012345678901234567890\n")
    with hold_lock(tmp_path, "lock", "swarm up"):
        assert (tmp_path / "lock").read_text().strip() == str(os.getpid())


def test_no_room_for_a_lock_can_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a directory that may not be written."""
    monkeypatch.setattr(os, "open", no_room)
    with pytest.raises(StateDirFull, match="No space left"), hold_lock(tmp_path, "lock", "swarm broker"):
        raise AssertionError("held nothing")


def test_a_child_without_a_log(tmp_path: Path) -> None:
    """Its file can't be made: it lives, and what it writes goes nowhere."""
    log = LogFile(tmp_path / "nowhere" / "w0.log")
    fd = log.open()
    assert os.write(fd, b"a line\n") == 7
    os.close(fd)
    assert log.tail(5) == log.new_lines() == []


def test_a_long_log_is_cut_though_its_older_part_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting is what makes room."""
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 10)
    monkeypatch.setattr(shutil, "copyfile", no_room)
    log = LogFile(tmp_path / "w0.log")
    fd = log.open()
    os.write(fd, b"x" * 20)
    log.truncate_if_long()
    assert (tmp_path / "w0.log").stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["w0.log"]
    os.close(fd)
