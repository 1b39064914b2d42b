"""Reads logs of the local swarm's processes, dead ones included, backwards and in pages.

A log is a file that is appended to. A log that grows too long is rotated once (``.log.1``). Both files are read as one,
by byte offsets. The cost of a page is bounded: it scans at most ``MAX_SCAN`` bytes, and a search that has found too
little by then returns where to continue. Names are compared with those in the folder and never made into paths. All of
it blocks, so it must not run on the event loop.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from swarm.gateway.console.patch import Tree
from swarm.gateway.errors import ApiError

PAGE_LINES: Final = 200  # lines per page
MAX_SCAN: Final = 4 << 20  # bytes that one page scans
MAX_LINE: Final = 16 << 10  # bytes; longer lines are cut
MAX_SEARCH: Final = 200
MAX_FILES: Final = 1024
_CHUNK: Final = 64 << 10
_END: Final = ".log"
_OLDER: Final = ".log.1"
_CONSOLE: Final = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?) \[(\w+) *\] (\S+)(.*)")  # lines formatted for terminals
_ABOUT: Final = ("event", "level", "timestamp", "module")

Read = Callable[[int, int], bytes]  # returns the bytes between two offsets


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, and its byte offset in the log."""

    at: int
    content: bytes


def list_logs(folder: Path, alive: Collection[str]) -> list[Tree]:
    """List all processes that have a log, by name."""
    sizes = _sizes(folder)
    logs = []
    for name in sorted({file.removesuffix(_OLDER).removesuffix(_END) for file in sizes}):
        size = sizes.get(name + _END, 0) + sizes.get(name + _OLDER, 0)
        logs.append({"name": name, "alive": name in alive, "bytes": size})
    return logs


def read_page(folder: Path, name: str, before: int | None, search: str) -> Tree:
    """Return the lines before an offset (None: the end) that contain the text, ignoring case. Raises ApiError if there
    is no such log."""
    sizes = _sizes(folder)
    if name + _END not in sizes:
        raise ApiError(404, f"there is no log of {name[:80]!r}", code="not_found")
    with ExitStack() as stack:
        parts = []
        for file in (name + _OLDER, name + _END):
            if file in sizes and (opened := _open_log(folder / file)) is not None:
                parts.append((stack.enter_context(opened), sizes[file]))
        size = sum(size for _, size in parts)
        end = size if before is None else max(0, min(before, size))
        lines, rest = lines_before(lambda start, stop: _read_between(parts, start, stop), end, search[:MAX_SEARCH])
    return {"lines": [parse_line(line) for line in reversed(lines)], "before": rest}


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of log files. Only regular files count: the target of a link is no log of ours."""
    sizes: dict[str, int] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((_END, _OLDER)) and entry.is_file(follow_symlinks=False) and len(sizes) < MAX_FILES:
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _open_log(path: Path) -> BinaryIO | None:
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except OSError:
        return None  # rotated or removed meanwhile


def _read_between(parts: list[tuple[BinaryIO, int]], start: int, stop: int) -> bytes:
    """Read from several files as if they were one."""
    read, begins = bytearray(), 0
    for file, size in parts:
        first, last = max(start, begins), min(stop, begins + size)
        if first < last:
            file.seek(first - begins)
            read += file.read(last - first).ljust(last - first)  # the file was cut meanwhile: pad to keep the offsets
        begins += size
    return bytes(read)


def lines_before(read: Read, end: int, search: str = "") -> tuple[list[LogLine], int | None]:
    """Return lines that end before ``end``, the last first, and the end of the next page; None if nothing is left."""
    lines: list[LogLine] = []
    search_text = search.lower()
    position, rest = end, b""  # bytes after ``position``, up to the end of the first complete line
    while position > 0:
        if end - position >= MAX_SCAN:
            return lines, position + len(rest)
        start = max(0, position - _CHUNK)
        block = read(start, position) + rest
        first, *pieces = block.split(b"\n")
        at = start + len(first) + 1
        whole = []
        for piece in pieces:
            whole.append(LogLine(at, piece[:MAX_LINE]))
            at += len(piece) + 1
        for line in reversed(whole):
            if line.content.strip() and search_text in line.content.decode(errors="replace").lower():
                lines.append(line)
                if len(lines) == PAGE_LINES:
                    return lines, line.at
        position, rest = start, first[:MAX_LINE]
    if rest.strip() and search_text in rest.decode(errors="replace").lower():
        lines.append(LogLine(0, rest))
    return lines, None


def parse_line(line: LogLine) -> Tree:
    """Return a line with its parsed fields."""
    text = line.content.decode(errors="replace")
    for read in (_parse_json, _parse_console):
        if (body := read(text)) is not None:
            return {"at": line.at, **body}
    return {"at": line.at, "time": None, "level": None, "event": None, "text": text, "fields": {}}


def _parse_json(text: str) -> Tree | None:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "event" not in entry:
        return None
    fields = {key: value for key, value in entry.items() if key not in _ABOUT}
    words = " ".join(f"{key}={value}" for key, value in fields.items())
    return {
        "time": entry.get("timestamp"),
        "level": entry.get("level"),
        "event": str(entry["event"]),
        "text": f"{entry['event']} {words}".strip(),
        "fields": fields | ({"module": entry["module"]} if "module" in entry else {}),
    }


def _parse_console(text: str) -> Tree | None:
    match = _CONSOLE.fullmatch(text)
    if match is None:
        return None
    when, level, event, rest = match.groups()
    return {"time": when, "level": level, "event": event, "text": f"{event} {rest.strip()}".strip(), "fields": {}}
