"""Logs read backwards, in pages, with bounds; no name leads out of the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.gateway.console import logs
from swarm.gateway.console.logs import MAX_SCAN, PAGE_LINES, LogLine, lines_before, list_logs, parse_line, read_page
from swarm.gateway.errors import ApiError


def lines_in(content: bytes, end: int | None = None, search: str = "") -> tuple[list[LogLine], int | None]:
    return lines_before(lambda a, b: content[a:b], len(content) if end is None else end, search)


def all_pages(folder: Path, name: str, search: str = "") -> list[str]:
    """Page by page to the beginning; oldest first."""
    found: list[str] = []
    before, num = None, 0
    while True:
        body = read_page(folder, name, before, search)
        found = [line["text"] for line in body["lines"]] + found
        before, num = body["before"], num + 1
        if before is None:
            return found
        assert num < 10_000


@pytest.mark.parametrize("chunk", [7, 64, 1 << 16])
def test_pages_together_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Whatever the pieces in which it is read, each line comes once; the part that was cut off comes first."""
    monkeypatch.setattr(logs, "_CHUNK", chunk)
    older, newer = [f"old line {n}" for n in range(150)], [f"new line {n}" for n in range(450)]
    (tmp_path / "w0.log.1").write_text("\n".join(older) + "\n")
    (tmp_path / "w0.log").write_text("\n".join(newer) + "\nunfinished")
    assert all_pages(tmp_path, "w0") == [*older, *newer, "unfinished"]
    assert len(read_page(tmp_path, "w0", None, "")["lines"]) == PAGE_LINES


def test_offsets_are_where_lines_begin() -> None:
    content = b"one\n\ntwo\nthree\n"
    found, rest = lines_in(content)
    assert [(line.at, line.content) for line in found] == [(9, b"three"), (5, b"two"), (0, b"one")]
    assert rest is None
    assert lines_in(content, 9)[0] == found[1:]


def test_a_search_finds_lines_whatever_their_case() -> None:
    content = "Ärger mit w0\nalles gut\näRGER vorbei\n".encode()
    assert [line.content.decode() for line in lines_in(content, search="ärger")[0]] == ["äRGER vorbei", "Ärger mit w0"]


def test_a_page_looks_through_so_much_and_says_where_to_go_on(tmp_path: Path) -> None:
    line = b"x" * 99 + b"\n"
    (tmp_path / "w0.log").write_bytes(b"the needle\n" + line * (2 * MAX_SCAN // 100))
    first = read_page(tmp_path, "w0", None, "needle")
    assert first["lines"] == []
    assert 0 < first["before"] < 2 * MAX_SCAN
    assert all_pages(tmp_path, "w0", "needle") == ["the needle"]


def test_lines_without_end_are_cut() -> None:
    found, rest = lines_in(b"first\n" + b"x" * (1 << 20) + b"\nlast\n")
    assert [len(line.content) for line in found] == [4, logs.MAX_LINE, 5]
    assert rest is None


def test_names_are_compared_and_lead_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "secret.log").write_text("secret\n")
    (folder / "w0.log").write_text("fine\n")
    (folder / "link.log").symlink_to(tmp_path / "secret.log")
    (folder / "keys.json").write_text("secret\n")
    os.mkfifo(folder / "pipe.log")
    for name in (
        "../secret",
        "link",
        "keys",
        "keys.json",
        "pipe",
        "",
        ".",
        "w0.log",
        "w0\0",
        "/etc/passwd",
        "w0/../../secret",
    ):
        with pytest.raises(ApiError) as refused:
            read_page(folder, name, None, "")
        assert refused.value.status == 404
    assert [row["name"] for row in list_logs(folder, ())] == ["w0"]


def test_the_dead_are_listed_too(tmp_path: Path) -> None:
    for name, size in (("w0.log", 3), ("w1.log", 5), ("w1.log.1", 7)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert list_logs(tmp_path, {"w0"}) == [
        {"name": "w0", "alive": True, "bytes": 3},
        {"name": "w1", "alive": False, "bytes": 12},
    ]
    assert list_logs(tmp_path / "nowhere", ()) == []


@pytest.mark.parametrize("before", [-5, 0, 3, 10**9])
def test_any_offset_is_answered(tmp_path: Path, before: int) -> None:
    (tmp_path / "w0.log").write_text("one\ntwo\n")
    assert read_page(tmp_path, "w0", before, "")["before"] is None


def test_lines_are_told_with_what_is_known_of_them() -> None:
    entry = {
        "module": "m",
        "worker": "w0",
        "n": 3,
        "event": "worker_out",
        "level": "warning",
        "timestamp": "2026-01-01T00:00:00Z",
    }
    assert parse_line(LogLine(7, json.dumps(entry).encode())) == {
        "at": 7,
        "time": "2026-01-01T00:00:00Z",
        "level": "warning",
        "event": "worker_out",
        "text": "worker_out worker=w0 n=3",
        "fields": {"worker": "w0", "n": 3, "module": "m"},
    }
    shown: dict[str, Any] = parse_line(
        LogLine(0, b"2026-01-01T00:00:00.1Z [info     ] worker_out                     n=3 worker=w0")
    )
    assert (shown["time"], shown["level"], shown["event"]) == ("2026-01-01T00:00:00.1Z", "info", "worker_out")
    assert shown["text"] == "worker_out n=3 worker=w0"
    for raw in (b"swarm: no room", b"[1, 2]", b'{"a": 1}', b"\xff\xfe", b"[" * 5000):
        assert parse_line(LogLine(0, raw))["event"] is None
