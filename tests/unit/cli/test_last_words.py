"""Why a child of ``swarm up`` has ended, in words: for its terminal, and for who asked for it by ``swarmctl join``."""

from __future__ import annotations

import json

import pytest

from swarm.cli.up.processes import last_message
from swarm.cli.up.runner import CRASH_COLUMNS, CRASH_TEXT_COLUMNS, shorten_log_line


def logged(event: str, level: str = "info", **more: object) -> str:
    return json.dumps({"event": event, **more, "level": level, "timestamp": "2026-11-23T16:45:24Z"})


REFUSED = logged("worker_ends", "error", reason="the broker refuses it:\nthis swarm serves another model", code=78)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        ([logged("worker_began"), "swarm: the limit is too little", REFUSED], "the limit is too little"),
        ([REFUSED, logged("closed")], "worker ends: the broker refuses it: this swarm serves another model"),
        (["Traceback", "ImportError: torch"], "ImportError: torch"),
        ([logged("worker_began")], "worker began"),
        (['{"event": 1', "[1]"], "[1]"),
        ([logged("broker_does_not_greet", "error", note="it is older")], "broker does not greet: it is older"),
        ([REFUSED, "ImportError: torch"], "worker ends: the broker refuses it: this swarm serves another model"),
    ],
)
def test_last_words_are_words(lines: list[str], words: str) -> None:
    """The command's own line first, then the last error that was logged, then the last line."""
    assert last_message(lines) == words


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            logged("plan_loaded", module="swarm.stage", epoch=3, layers=[0, 2], reason="a\nnew plan"),
            "info plan_loaded epoch=3 layers=[0, 2] reason=a new plan",
        ),
        ('{"event": "cut"}', "cut"),
        ("ImportError: torch", "ImportError: torch"),
        ('{"event": 1', '{"event": 1'),
        (logged("long", text="x" * 200), f"info long text={'x' * 200}"[: CRASH_COLUMNS - 1] + "…"),
        ("y" * 700, "y" * (CRASH_TEXT_COLUMNS - 1) + "…"),
    ],
)
def test_a_crash_shows_its_log_as_text(line: str, text: str) -> None:
    """``swarm up`` prints the end of a dead child's log, whose events are JSON."""
    assert shorten_log_line(line) == text
