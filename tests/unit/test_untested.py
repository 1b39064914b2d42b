"""What was skipped is said at the end of a check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import untested

ROOT = Path(__file__).parents[2]
PART = '''"""A part of it."""
import pytest


@pytest.mark.skip(reason="not installed: nft")
def test_a(): ...


def test_b(): ...
'''
SKIPPED = ("tests/x.py", 3, "Skipped: not installed: nft")


def test_each_file_and_reason_is_said_once(tmp_path: Path) -> None:
    """With what the file promises; however many of its tests, and of runs, skipped it."""
    (tmp_path / "a.py").write_text('"""What machines do\nto each other. And more."""')
    (tmp_path / "b.py").write_text("")
    lines = [
        json.dumps([nodeid, reason])
        for nodeid, reason in (
            ("b.py", "no package"),
            ("a.py::test_one", "no nft"),
            ("a.py::test_one", "no nft"),
            ("a.py::test_two", "no nft"),
            ("a.py::test_two[3]", "x" * 300),
        )
    ]
    assert untested.describe(lines, tmp_path) == [
        "2 of a.py (What machines do to each other): no nft",
        f"1 of a.py (What machines do to each other): {'x' * 199}…",
        "all of b.py (): no package",
    ]


def test_a_run_notes_its_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After those of the runs before it; and only if it is asked to."""
    report = SimpleNamespace(nodeid="tests/x.py::test_x", longrepr=SKIPPED)
    monkeypatch.delenv(untested.VARIABLE, raising=False)
    untested.note_reports({"skipped": [report]})
    file = tmp_path / "skipped"
    monkeypatch.setenv(untested.VARIABLE, str(file))
    untested.note_reports({"skipped": [report]})
    untested.note_reports({"skipped": [report]})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        ["tests/x.py::test_x", "not installed: nft"]
    ] * 2


@pytest.mark.slow
def test_a_run_notes_the_outcomes_of_quarantined_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other expected failures."""
    monkeypatch.setenv(untested.VARIABLE, str(tmp_path / "notes"))
    quarantined = SimpleNamespace(nodeid="a.py::test_x", wasxfail="quarantined since 2026-11-26: a race")
    expected = SimpleNamespace(nodeid="a.py::test_y", wasxfail="not yet possible")
    untested.note_reports({"xfailed": [quarantined, expected], "xpassed": [quarantined]})
    assert [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()] == [
        ["a.py::test_x", "failed, quarantined since 2026-11-26: a race"],
        ["a.py::test_x", "passed, quarantined since 2026-11-26: a race"],
    ]


@pytest.mark.parametrize(
    ("expression", "worker", "is_noted"),
    [("not long", "gw0", True), ("not long", "gw1", False), ("faults", "gw0", False)],
)
def test_a_run_notes_the_long_tests_that_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, worker: str, is_noted: bool
) -> None:
    """Once, and only if they were left out for being long."""
    monkeypatch.setenv(untested.VARIABLE, str(tmp_path / "notes"))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    item = SimpleNamespace(nodeid="a.py::test_x", config=config, get_closest_marker=lambda name: name == "long")
    untested.note_long([item])
    assert (tmp_path / "notes").exists() == is_noted


def test_a_check_says_what_nothing_has_tested(tmp_path: Path) -> None:
    """A whole run: of a file that is skipped as a whole, and of one test. ``tools/check`` ends with these lines."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    (tmp_path / "test_whole.py").write_text('"""All of it."""\nimport pytest\npytest.importorskip("no_such_thing")\n')
    (tmp_path / "test_part.py").write_text(PART)
    file = tmp_path / "skipped"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), untested.VARIABLE: str(file)}
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout
    part, whole = untested.describe(file.read_text().splitlines(), tmp_path)
    assert part == "1 of test_part.py (A part of it): not installed: nft"
    assert whole.startswith("all of test_whole.py (All of it): could not import 'no_such_thing'")
    text = (ROOT / "tools" / "check").read_text()
    assert f"export {untested.VARIABLE}=" in text
    assert f'python -m tests.untested "${untested.VARIABLE}"' in text


def test_nothing_skipped_nothing_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "skipped").touch()
    untested.main(tmp_path / "skipped")
    assert capsys.readouterr().out == ""
