"""What a run of the tests has not decided: tests that were skipped, left to ``tools/check --long`` or quarantined.

``note_reports`` and ``note_long`` append to the file that ``UNTESTED_FILE`` names. ``python -m tests.untested FILE``
prints what several runs have noted there, one line for each file of tests and reason, with what the file covers: the
first sentence of its docstring.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests import quarantine

VARIABLE = "UNTESTED_FILE"
LONG = "long: tools/check --long runs it"
ROOT = Path(__file__).parents[1]
_LONGEST = 200


def note_reports(stats: Mapping[str, Iterable[Any]]) -> None:
    """Note the skipped and the quarantined tests of a run."""
    notes = [(report.nodeid, reason_of(report.longrepr)) for report in stats.get("skipped", [])]
    for kind, outcome in (("xfailed", "failed"), ("xpassed", "passed")):
        for report in stats.get(kind, []):
            if quarantine.is_reason(report.wasxfail):
                notes.append((report.nodeid, f"{outcome}, {report.wasxfail}"))
    _append(notes)


def note_long(items: Iterable[Any]) -> None:
    """Note the tests that ``-m "not long"`` has deselected. All processes of a parallel run deselect the same tests, so
    only the first one notes them."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        left_out = [item for item in items if "not long" in item.config.option.markexpr]
        _append([(item.nodeid, LONG) for item in left_out if item.get_closest_marker("long")])


def _append(notes: list[tuple[str, str]]) -> None:
    if VARIABLE in os.environ and notes:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write("".join(json.dumps(note) + "\n" for note in notes))


def reason_of(longrepr: object) -> str:
    """Return the reason of a skip. pytest stores (path, line, "Skipped: reason")."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ")


def describe(lines: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return a line for each file and reason, sorted by file. A test that several runs skipped counts once."""
    skips = {(nodeid, reason) for nodeid, reason in map(json.loads, lines)}
    counts = Counter((nodeid.partition("::")[0], reason) for nodeid, reason in skips)
    wholes = {nodeid for nodeid, _ in skips if "::" not in nodeid}  # files that were not even collected
    result = []
    for (path, reason), count in sorted(counts.items()):
        how_many = "all" if path in wholes else str(count)
        result.append(f"{how_many} of {path} ({_promise_of(root / path)}): {_cut(reason)}")
    return result


def _promise_of(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return _cut(text.partition(". ")[0].rstrip("."))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def main(path: Path) -> None:
    lines = describe(path.read_text().splitlines())
    if lines:
        print("\nnot decided here:", *lines, sep="\n· ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
