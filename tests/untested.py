"""What a run of the tests has skipped: which promises were not tested, and for want of what.

``note_skipped`` is called at the end of each run of pytest, and appends to the file that ``UNTESTED_FILE`` names.
``python -m tests.untested FILE`` says what several runs have noted there, a line for each file of tests and reason: the
first sentence of the file says what it promises.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VARIABLE = "UNTESTED_FILE"
ROOT = Path(__file__).parents[1]
_LONGEST = 200


def note_skipped(reports: Iterable[Any]) -> None:
    """Append the test and the reason of each report of a skip, where somebody wants to know."""
    if VARIABLE not in os.environ:
        return
    with Path(os.environ[VARIABLE]).open("a") as file:
        for report in reports:
            file.write(json.dumps([report.nodeid, reason_of(report.longrepr)]) + "\n")


def reason_of(longrepr: object) -> str:
    """The words of a skip: pytest has (path, line, "Skipped: reason")."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ")


def in_words(lines: Iterable[str], root: Path = ROOT) -> list[str]:
    """Say it, the files in their order. A test that several runs skipped counts once."""
    skips = {(nodeid, reason) for nodeid, reason in map(json.loads, lines)}
    counts = Counter((nodeid.partition("::")[0], reason) for nodeid, reason in skips)
    wholes = {nodeid for nodeid, _ in skips if "::" not in nodeid}  # files that were not even collected
    said = []
    for (path, reason), count in sorted(counts.items()):
        how_many = "all" if path in wholes else str(count)
        said.append(f"{how_many} of {path} ({_promise_of(root / path)}): {_cut(reason)}")
    return said


def _promise_of(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return _cut(text.partition(". ")[0].rstrip("."))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def main(path: Path) -> None:
    lines = in_words(path.read_text().splitlines())
    if lines:
        print("\nnot tested here:", *lines, sep="\n· ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
