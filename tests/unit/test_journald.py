"""Events as the journal's own protocol has them."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from swarm.journald import JournalSocket, encode_entry, is_journal_stream


def test_each_key_is_a_field() -> None:
    event = {"event": "plan_serving", "level": "warning", "module": "m", "timestamp": "t", "epoch": 3, "why not?": "x"}
    assert encode_entry(event).decode().splitlines() == [
        "MESSAGE=plan_serving epoch=3 why not?=x",
        "PRIORITY=4",
        "SYSLOG_IDENTIFIER=swarm",
        "SWARM_EVENT=plan_serving",
        "SWARM_MODULE=m",
        "SWARM_EPOCH=3",
        "SWARM_WHY_NOT_=x",
    ]


def test_lines_within_a_value_are_kept() -> None:
    said = encode_entry({"event": "failed", "exception": "a\nb"})
    message = b"failed\na\nb"
    assert said.startswith(b"MESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\nPRIORITY=6\n")
    assert b"EXCEPTION" not in said


def test_it_is_found_by_the_stream_and_never_waited_for(tmp_path: Path) -> None:
    found = os.fstat(sys.__stdout__.fileno()) if sys.__stdout__ else os.stat("/")
    here = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    assert sys.__stdout__ is None or is_journal_stream(here, sys.__stdout__.fileno())
    assert not is_journal_stream({"JOURNAL_STREAM": "1:2"}, 0)
    assert not is_journal_stream({}, 0)
    assert not is_journal_stream(here, None)
    nobody = JournalSocket(str(tmp_path / "nobody"))
    assert not nobody.send({"event": "x"})
    nobody.close()
    listens = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listens.bind(str(tmp_path / "journal"))
    journal = JournalSocket(str(tmp_path / "journal"))
    assert journal.send({"event": "x"})
    assert listens.recv(100).startswith(b"MESSAGE=x\n")
    for _ in range(100000):
        if not journal.send({"event": "y" * 1000}):
            break
    else:
        raise AssertionError("it waits, or never says no")
    journal.close()
    listens.close()
