"""Logging: one line per event, where it goes, and what it costs when it is off."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from swarm import log
from swarm.config import LogSettings


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """Leave logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(stream: io.StringIO, **settings: str) -> None:
    log.configure(LogSettings(**settings), stream)


def test_json_lines_with_context() -> None:
    """Off a terminal every event is one JSON object with its keys, its level, its time and what was bound."""
    stream = io.StringIO()
    configured(stream)
    logger = log.get_logger("swarm.test").bind(stage=3)
    log.bind(epoch=7)
    logger.info("ready", layers=[0, 4], where=ValueError("odd"))
    (line,) = lines(stream)
    assert str(line.pop("timestamp")).endswith("Z")
    assert line == {
        "event": "ready",
        "level": "info",
        "module": "swarm.test",
        "stage": 3,
        "epoch": 7,
        "layers": [0, 4],
        "where": "odd",
    }


def test_exceptions_stay_on_one_line() -> None:
    """A traceback is a value of the JSON object, so that a line stays an event."""
    stream = io.StringIO()
    configured(stream)
    try:
        raise ValueError("why")
    except ValueError:
        log.get_logger("x").exception("bad")
    (line,) = lines(stream)
    assert "ValueError: why" in str(line["exception"])


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets colours unless NO_COLOR is set; format=console elsewhere is plain text."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, quiet, pipe = Terminal(), Terminal(), io.StringIO()
    configured(terminal)
    log.get_logger("x").info("ready")
    configured(pipe, format="console")
    log.get_logger("x").info("ready")
    monkeypatch.setenv("NO_COLOR", "1")
    configured(quiet)
    log.get_logger("x").info("ready")
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in pipe.getvalue() + quiet.getvalue()
    assert "ready" in pipe.getvalue()
    assert "ready" in quiet.getvalue()


def test_what_is_below_the_level_is_not_written() -> None:
    """What is below the level is not written."""
    stream = io.StringIO()
    configured(stream, level="warning")
    logger = log.get_logger("x")
    logger.info("no")
    logger.warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_off_is_off() -> None:
    """With level off nothing is written, not even what is critical, by us or by a library."""
    stream = io.StringIO()
    configured(stream, level="off")
    log.get_logger("x").critical("no")
    logging.getLogger("library").critical("no")
    assert stream.getvalue() == ""


def test_below_the_level_nothing_is_computed() -> None:
    """A call below the level runs no processor: it costs a function call."""
    configured(io.StringIO(), level="info")
    ran: list[str] = []
    structlog.configure(processors=[lambda *_: ran.append("ran") or "text"])
    logger = log.get_logger("x").bind()
    logger.debug("no")
    assert ran == []
    logger.info("yes")
    assert ran == ["ran"]


def test_module_loggers_follow_a_later_configure() -> None:
    """A logger made before configure() obeys it, also when it has been used."""
    logger = log.get_logger("x")
    first, second = io.StringIO(), io.StringIO()
    configured(first)
    logger.info("one")
    configured(second)
    logger.info("two")
    assert [line["event"] for line in lines(first)] == ["one"]
    assert [line["event"] for line in lines(second)] == ["two"]


def test_other_libraries_take_the_same_way() -> None:
    """The standard module's warnings become our lines once, however often we configure; its chatter is left out."""
    stream = io.StringIO()
    configured(io.StringIO())
    configured(stream)
    logging.getLogger("library").warning("disk %s", "full")
    logging.getLogger("library").info("chatter")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["module"]) == ("disk full", "warning", "library")


def test_a_program_keeps_its_own_structlog() -> None:
    """Without configure() we don't touch what a program has set up, and are quiet on stderr if nobody has."""
    log.get_logger("x")
    assert structlog.is_configured()
    mine = [structlog.processors.JSONRenderer()]
    structlog.configure(processors=mine)
    log.get_logger("x")
    assert structlog.get_config()["processors"] is mine


def test_unconfigured_only_warnings_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The client library in somebody's program writes nothing to stdout, and only warnings to stderr."""
    logger = log.get_logger("x")
    logger.info("no")
    logger.warning("yes")
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["yes"]


def test_lines_that_anybody_can_cause_are_few() -> None:
    """Some at once, then one every ten seconds, each with the number of those left out: none is lost count of."""
    damper = log.LogRateLimiter(burst=3, interval_s=10.0)
    asked = [damper.take(now / 100) for now in range(10_000)]  # a hundred seconds, a hundred a second
    told = [left_out for left_out in asked if left_out is not None]
    assert told[:3] == [0, 0, 0]
    assert 12 <= len(told) <= 13
    assert sum(told) + len(told) == 1 + max(index for index, left_out in enumerate(asked) if left_out is not None)
    assert log.LogRateLimiter().take(0.0) == 0
