"""Clock of the shells. They pass the time to the cores as a value, so that tests can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Clock in seconds that only increases. Its zero point is arbitrary; only differences matter."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock: unaffected by changes of the system time."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
