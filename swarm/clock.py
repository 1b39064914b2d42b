"""Read "now" for the shells, which hand it to the cores as a value, so that tests can move it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Count seconds, which only grow. Their zero means nothing; only differences do."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock: it does not jump when somebody sets the time."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
