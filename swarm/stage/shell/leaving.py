"""How a worker ends that a signal asks to end: it tells the broker, so that its end is nobody's fault, and waits a
moment to be let go. It ends at once if there is no broker to tell, if the broker goes away, or at a second signal.

The exit code says who wanted it. 0: the broker let it go because somebody asked the broker for that; it shall stay
away. 128 plus a signal's number, as shells count: a supervisor that wants a worker here starts it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PATIENCE_S = 3.0  # well within the time that supervisors give; a plan without this worker is usually made by then


class Farewell(Enum):
    """What is to be done now."""

    TELL = "tell the broker, and end after PATIENCE_S at the latest"
    END = "end at once"


@dataclass(slots=True)
class Departure:
    """See the module's text. ``exit_code`` is None until a signal has come."""

    exit_code: int | None = None

    def signalled(self, number: int, *, is_member: bool) -> Farewell:
        """``is_member``: there is a broker that knows this worker."""
        is_second = self.exit_code is not None
        self.exit_code = 128 + number
        return Farewell.TELL if is_member and not is_second else Farewell.END

    def released(self) -> Farewell | None:
        """The broker lets the worker go; None if that was not the worker's own wish."""
        return Farewell.END if self.exit_code is not None else None

    def disconnected(self) -> Farewell | None:
        """Note that nobody is left who could let it go."""
        return Farewell.END if self.exit_code is not None else None
