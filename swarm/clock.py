"""Where "now" comes from: a value that shells read and hand to the cores, so that tests can move it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow. Their zero means nothing; only differences do."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock: it does not jump when somebody sets the time."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
