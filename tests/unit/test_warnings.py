"""``docs/reference/warnings.md`` lists every event of level warning and above and every alert, with its level, and no
other event."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "warnings.md"
RULES = ROOT / "config" / "prometheus" / "swarm.rules.yml"

LEVELS = {"warning": "warning", "error": "error", "critical": "critical", "exception": "error"}
NOTES = ("note", "write_log", "_write_log", "WriteLog", "WriteStageLog")  # how cores hand an event to their shells
LOW = {"debug", "info"}


def _called(call: ast.Call) -> tuple[str, str]:
    """(whose method, which) of a call, or ("", function)."""
    match call.func:
        case ast.Attribute(ast.Name(whose), name):
            return whose, name
        case ast.Attribute(_, name):
            return "…", name
        case ast.Name(name):
            return "", name
    return "", ""


def _events(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, event, level) of what this source logs at warning or above. What can't be read has "?" in its place."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):  # the one line that is worded without a logger, of dropped lines
            values = dict(zip((_word(key) for key in node.keys), node.values, strict=True))
            if {"event", "module"} <= set(values):
                yield node.lineno, _word(values["event"]), "warning"
        if not isinstance(node, ast.Call):
            continue
        whose, name = _called(node)
        if name in LEVELS and whose in ("log", "logger", "_log"):
            yield node.lineno, _word(node.args[0] if node.args else None), LEVELS[name]
        elif name in NOTES:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            event = node.args[0] if node.args else given.get("event")
            level = node.args[1] if len(node.args) > 1 else given.get("level", ast.Constant("info"))
            found = _levels(level)
            if _word(event) == "?" in found:
                continue  # ``note`` itself, which passes on what it was told, or another method of that name
            yield from ((node.lineno, _word(event), one) for one in found - LOW)


def _word(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "?"


def _levels(node: ast.expr) -> set[str]:
    match node:
        case ast.Constant(value):
            return {str(value)}
        case ast.IfExp(_, one, other):
            return _levels(one) | _levels(other)
    return {"?"}


def logged() -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "swarm").rglob("*.py")):
        for line, event, level in _events(path.read_text()):
            assert "?" not in (event, level), f"{path}:{line} logs an event whose name or level can't be read"
            found[event].add(level)
    return dict(found)


def rows(heading: str) -> dict[str, list[str]]:
    """Tables of a section, by what is in their first cell; each cell says something."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^\| `.*$", section, re.MULTILINE):
        name, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        assert name not in found, f"{name} is there twice"
        assert len(cells) == 3, line
        assert all(cells), line
        found[name.strip("`")] = cells
    return found


@pytest.mark.slow
def test_every_warning_is_explained() -> None:
    told = {event: {cells[0]} for event, cells in rows("Events").items()}
    assert told == logged()


def test_every_alert_is_explained() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    assert {alert: cells[0] for alert, cells in rows("Alerts").items()} == alerts


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("log.warning('a', why=1)", [("a", "warning")]),
        ("log.exception('a')", [("a", "error")]),
        ("task.exception()", []),
        ("self.out.note('a', 'error')\nself.out.note('b')", [("a", "error")]),
        ("self._write_log('a', 'warning' if new else 'info')", [("a", "warning")]),
        ("WriteLog('a', level='critical')", [("a", "critical")]),
        ("self.out.note('a', level)", [("a", "?")]),
        ("self._write_log(request_id, tenant)", []),
        ("self.out.note(event, 'error')", [("?", "error")]),
        ("log.error(f'a{b}')", [("?", "error")]),
        ("line = {'event': 'a', 'module': __name__}", [("a", "warning")]),
    ],
)
def test_how_events_are_found(source: str, found: list[tuple[str, str]]) -> None:
    assert [(event, level) for _, event, level in _events(source)] == found
