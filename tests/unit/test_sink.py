"""A stream that nobody fails by: what it can't write it drops, and says later how much that was."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest

from swarm import log
from swarm.cli.output import JsonProgress
from swarm.config import LogSettings
from swarm.safe_stream import SafeStream
from tests.unit import test_log

_restore = test_log._restore  # leave logging as it was


class Full(io.StringIO):
    """A file on a disk that is full, until it is not."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_are_dropped_counted_and_told_once() -> None:
    """Nothing is raised; with room again one line says how many are missing, then all is as before."""
    stream = Full()
    sink = SafeStream(stream)
    for _ in range(3):
        print("a line", file=sink, flush=True)
    stream.full = False
    print("again", file=sink)
    print("and again", file=sink)
    assert stream.getvalue().splitlines() == [
        "swarm: 3 lines could not be written here (No space left on device)",
        "again",
        "and again",
    ]


@pytest.mark.parametrize("way", ["structlog", "logging"])
def test_a_log_on_a_full_disk(way: str) -> None:
    """No caller hears of it, and the log says what it lacks in its own form."""
    stream = Full()
    log.configure(LogSettings(format="json"), stream)
    logger = log.get_logger("x")
    if way == "structlog":
        logger.info("lost")
    else:
        logging.getLogger("somebody").warning("lost")
    stream.full = False
    logger.info("there")
    told, line = map(json.loads, stream.getvalue().splitlines())
    assert (told["event"], told["lines"], told["level"]) == ("log_lines_dropped", 1, "warning")
    assert "No space" in told["reason"]
    assert line["event"] == "there"


def test_what_programs_read_stays_json() -> None:
    """The line that tells of others is an event like them."""
    stream = Full()
    progress = JsonProgress(cast(TextIO, SafeStream(stream)))
    progress.print_line("lost")
    stream.full = False
    progress.print_line("there")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["note", "note"]
    assert "1 lines could not be written" in stream.getvalue()


def test_nobody_reads_any_more() -> None:
    """Then nothing is counted for anybody."""

    class Gone(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    sink = SafeStream(stream)
    for _ in range(3):
        print("a line", file=sink)
    assert stream.writes == 1


def test_there_is_no_stream_or_no_more() -> None:
    """A process that was started without stderr, or whose stderr somebody closed."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        sink = SafeStream(stream)
        print("a line", file=sink, flush=True)
        assert not sink.isatty()


def test_a_line_that_was_torn_is_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk takes a beginning of a line and no more: what comes later begins with a line of its own."""
    file = (tmp_path / "log").open("w+")
    monkeypatch.setattr(sys, "__stderr__", file)
    sink = SafeStream(file)
    real = os.write
    room = 4

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        count = real(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(os, "write", write)
    print("torn here", file=sink)
    room = 1000
    print("whole", file=sink)
    monkeypatch.undo()
    assert (tmp_path / "log").read_text().splitlines() == [
        "torn",
        "swarm: 1 lines could not be written here (Disk quota exceeded)",
        "whole",
    ]
    file.close()
