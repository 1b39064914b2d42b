"""Log an event name plus keys. Colour on a terminal, one JSON object per line elsewhere, always on stderr.

Services call :func:`configure` once and then bind their context once, for example
``log = get_logger(__name__).bind(stage=3)``; on such a bound logger a call below the level costs a tenth of a
microsecond. Where nobody configures anything (the client library in somebody's program), warnings and errors go to
stderr, and a program that has set up structlog itself keeps its own set-up.

Whatever becomes of stderr (the disk is full, the terminal is gone), nothing fails by it: lines that can't be written
are dropped, and counted in a line once writing works again.

Messages of other libraries, through the standard ``logging`` module, take the same way; below ``debug`` only their
warnings do.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from swarm import journald
from swarm.sink import Sink

if TYPE_CHECKING:
    from swarm.config import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OFF = logging.CRITICAL + 10  # above every level of the standard module


class _SilentLogger(structlog.make_filtering_bound_logger(logging.CRITICAL)):  # type: ignore[misc]
    """A logger that is off altogether; structlog's own filters always let ``critical`` pass."""

    def critical(self, event: str, *args: object, **keys: object) -> None:
        """Say nothing."""

    async def acritical(self, event: str, *args: object, **keys: object) -> None:
        """Say nothing."""

    fatal = critical
    afatal = acritical


class _Handler(logging.StreamHandler[TextIO]):
    """Our handler on the root logger; a type of its own so that we replace only what we have put there."""


def get_logger(name: str, **context: object) -> FilteringBoundLogger:
    """Return a logger for a module, with ``context`` in every line."""
    if not structlog.is_configured():
        sink = _sink(sys.stderr)
        _configure_structlog(logging.WARNING, _renderer("auto", sink), sink)
    return cast(FilteringBoundLogger, structlog.get_logger(module=name, **context))


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send all log lines of this process to ``stream`` (stderr) as the settings say. May be called again. Where
    stderr is systemd's journal, they go there as events with fields, if no format is asked for."""
    sink = _sink(sys.stderr if stream is None else stream)
    level = _LEVELS.get(settings.level, _OFF)
    renderer = _renderer(settings.format, sink)
    sink.tell_dropped = _tell_dropped(renderer)
    to_journal = settings.format == "auto" and journald.is_there(os.environ, sink.descriptor)
    _configure_structlog(level, _ends_in_journal() if to_journal else renderer, sink)
    _configure_logging(level, renderer, sink)


class Damper:
    """Thin out lines that anybody can cause: a few at once, then one every so often, with the number left out."""

    def __init__(self, at_once: int = 5, every_s: float = 10.0) -> None:
        self._at_once = at_once
        self._every_s = every_s
        self._left = float(at_once)
        self._looked_at = float("-inf")
        self._left_out = 0

    def asks(self, now: float) -> int | None:
        """Ask to write a line: how many were left out since the last one; None: leave this one out, too."""
        self._left = min(self._at_once, self._left + (now - self._looked_at) / self._every_s)
        self._looked_at = now
        if self._left < 1:
            self._left_out += 1
            return None
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out


def bind(**context: object) -> None:
    """Add keys to every line of the current task or thread, whichever logger writes it."""
    structlog.contextvars.bind_contextvars(**context)


def _sink(stream: object) -> Sink:
    return stream if isinstance(stream, Sink) else Sink(cast(TextIO | None, stream))


def _tell_dropped(renderer: Sequence[Processor]) -> Callable[[int, str], str]:
    """Word dropped lines in the form of the others."""

    def tell(lines: int, reason: str) -> str:
        event: Any = {"event": "log_lines_dropped", "lines": lines, "reason": reason, "module": __name__}
        for process in (*_common(), *renderer):
            event = process(None, "warning", event)
        return f"{event}\n"

    return tell


def _configure_structlog(level: int, renderer: Sequence[Processor], sink: Sink) -> None:
    structlog.configure(
        processors=[*_common(), *renderer],
        wrapper_class=_SilentLogger if level == _OFF else structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, sink)),
        cache_logger_on_first_use=False,  # a logger at module level must follow a later configure
    )


def _configure_logging(level: int, renderer: Sequence[Processor], sink: Sink) -> None:
    handler = _Handler(cast(TextIO, sink))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_module, *_common()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    handler.setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(handler.level)


def _common() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _add_module(_: object, __: str, event: EventDict) -> EventDict:
    """Say which library writes, under the key that our own lines use."""
    event["module"] = event["_record"].name
    return event


def _renderer(format: str, sink: Sink) -> list[Processor]:
    terminal = sink.isatty()
    if format == "json" or (format == "auto" and not terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=_plain)]
    colours = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    # Plain tracebacks: the pretty ones print local variables, which can be tensors or somebody's prompt.
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]


def _ends_in_journal() -> list[Processor]:
    return [structlog.processors.format_exc_info, _ToJournal(journald.Journal())]


class _ToJournal:
    """Hands events to the journal, field by field; as a line to stderr, which is the journal too, if it has no room."""

    def __init__(self, to: journald.Journal) -> None:
        self._to = to
        self._as_line = structlog.processors.JSONRenderer(default=_plain)

    def __call__(self, logger: object, name: str, event: EventDict) -> str | bytes:
        if self._to.sends(event):
            raise structlog.DropEvent
        return self._as_line(logger, name, event)


def _plain(value: Any) -> str:
    """Turn what JSON has no word for into text."""
    return str(value)
