"""Structured logging: an event name plus keys. Colour on a terminal, one JSON object per line elsewhere, always on
stderr.

Services call :func:`configure` once and then bind their context once, for example ``log =
get_logger(__name__).bind(stage=3)``; on such a bound logger a call below the level costs a tenth of a microsecond. If
nothing was configured (the client library in another program), warnings and errors go to stderr; a program that has
configured structlog itself keeps its configuration.

Logging never fails, even when the disk is full or the terminal is gone: lines that can't be written are dropped, and
counted in a line once writing works again.

Messages of other libraries, from the standard ``logging`` module, are handled the same way; unless the level is
``debug``, only their warnings are.
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
from swarm.safe_stream import SafeStream

if TYPE_CHECKING:
    from swarm.config import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OFF = logging.CRITICAL + 10  # Above every level of the standard module.


class _SilentLogger(structlog.make_filtering_bound_logger(logging.CRITICAL)):  # type: ignore[misc]
    """Logger that drops everything; structlog's own filters always let ``critical`` pass."""

    def critical(self, event: str, *args: object, **keys: object) -> None:
        """Do nothing."""

    async def acritical(self, event: str, *args: object, **keys: object) -> None:
        """Do nothing."""

    fatal = critical
    afatal = acritical


class _Handler(logging.StreamHandler[TextIO]):
    """Our handler on the root logger; a type of its own, so that we replace only handlers that we installed."""


def get_logger(name: str, **context: object) -> FilteringBoundLogger:
    """Return a logger for a module, with ``context`` in every line."""
    if not structlog.is_configured():
        sink = _safe_stream(sys.stderr)
        _configure_structlog(logging.WARNING, _renderers("auto", sink), sink)
    return cast(FilteringBoundLogger, structlog.get_logger(module=name, **context))


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send all log lines of this process to ``stream`` (stderr) as the settings require. May be called again.

    If stderr is systemd's journal and no format is set, events go there with fields.
    """
    sink = _safe_stream(sys.stderr if stream is None else stream)
    level = _LEVELS.get(settings.level, _OFF)
    renderer = _renderers(settings.format, sink)
    sink.format_dropped = _dropped_formatter(renderer)
    to_journal = settings.format == "auto" and journald.is_journal_stream(os.environ, sink.descriptor)
    _configure_structlog(level, _journal_renderers() if to_journal else renderer, sink)
    _configure_logging(level, renderer, sink)


class LogRateLimiter:
    """Rate limiter for log lines that any peer can cause: a short burst, then one per interval, with the number of
    suppressed lines."""

    def __init__(self, burst: int = 5, interval_s: float = 10.0) -> None:
        self._burst = burst
        self._interval_s = interval_s
        self._tokens = float(burst)
        self._updated_at = float("-inf")
        self._num_suppressed = 0

    def take(self, now: float) -> int | None:
        """Return None to suppress this line; otherwise the number of lines suppressed since the last one."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated_at) / self._interval_s)
        self._updated_at = now
        if self._tokens < 1:
            self._num_suppressed += 1
            return None
        self._tokens -= 1
        left_out, self._num_suppressed = self._num_suppressed, 0
        return left_out


def bind(**context: object) -> None:
    """Add keys to every line of the current task or thread, from any logger."""
    structlog.contextvars.bind_contextvars(**context)


def _safe_stream(stream: object) -> SafeStream:
    return stream if isinstance(stream, SafeStream) else SafeStream(cast(TextIO | None, stream))


def _dropped_formatter(renderer: Sequence[Processor]) -> Callable[[int, str], str]:
    """Return a function that formats the line about dropped lines like all others."""

    def tell(lines: int, reason: str) -> str:
        event: Any = {"event": "log_lines_dropped", "lines": lines, "reason": reason, "module": __name__}
        for process in (*_common_processors(), *renderer):
            event = process(None, "warning", event)
        return f"{event}\n"

    return tell


def _configure_structlog(level: int, renderer: Sequence[Processor], sink: SafeStream) -> None:
    structlog.configure(
        processors=[*_common_processors(), *renderer],
        wrapper_class=_SilentLogger if level == _OFF else structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, sink)),
        cache_logger_on_first_use=False,  # A module-level logger must follow a later configure.
    )


def _configure_logging(level: int, renderer: Sequence[Processor], sink: SafeStream) -> None:
    handler = _Handler(cast(TextIO, sink))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_module, *_common_processors()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    handler.setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(handler.level)


def _common_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _add_module(_: object, __: str, event: EventDict) -> EventDict:
    """Add the name of the foreign logger under the key of our own lines."""
    event["module"] = event["_record"].name
    return event


def _renderers(format: str, sink: SafeStream) -> list[Processor]:
    terminal = sink.isatty()
    if format == "json" or (format == "auto" and not terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=_to_text)]
    colours = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    # Plain tracebacks: the pretty ones print local variables, which may contain tensors or prompts.
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]


def _journal_renderers() -> list[Processor]:
    return [structlog.processors.format_exc_info, _JournalRenderer(journald.JournalSocket())]


class _JournalRenderer:
    """Sends events to the journal as fields; if it does not accept one, writes a line to stderr, which is the journal,
    too."""

    def __init__(self, to: journald.JournalSocket) -> None:
        self._to = to
        self._as_line = structlog.processors.JSONRenderer(default=_to_text)

    def __call__(self, logger: object, name: str, event: EventDict) -> str | bytes:
        if self._to.send(event):
            raise structlog.DropEvent
        return self._as_line(logger, name, event)


def _to_text(value: Any) -> str:
    """Return a text for a value that JSON can't represent."""
    return str(value)
