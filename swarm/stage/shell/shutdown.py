"""Orderly shutdown of a worker after a signal: it notifies the broker, so that its end counts as no failure, and waits
a moment to be released. It ends immediately if there is no broker, if the connection breaks, or at a second signal.

The exit code tells a supervisor what to do. 0: an operator asked the broker to release the worker, so it stays away.
128 plus the signal's number, as in shells: a supervisor that wants a worker here starts it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Well within the time that supervisors allow; by then its layers' keys and values have usually moved to other workers.
RELEASE_TIMEOUT_S = 8.0


class ShutdownAction(Enum):
    """Next step of a shutdown."""

    NOTIFY_BROKER = "tell the broker, and end after PATIENCE_S at the latest"
    END = "end at once"


@dataclass(slots=True)
class ShutdownSequence:
    """State of a shutdown."""

    exit_code: int | None = None  # None until a signal has arrived

    def on_signal(self, number: int, *, is_member: bool) -> ShutdownAction:
        """Handle a signal. ``is_member``: a broker has welcomed this worker."""
        is_second = self.exit_code is not None
        self.exit_code = 128 + number
        return ShutdownAction.NOTIFY_BROKER if is_member and not is_second else ShutdownAction.END

    def on_release(self) -> ShutdownAction | None:
        """Handle a release by the broker; return None if this worker has not asked for it."""
        return ShutdownAction.END if self.exit_code is not None else None

    def on_disconnected(self) -> ShutdownAction | None:
        """Handle the loss of the broker, which can't release the worker any more."""
        return ShutdownAction.END if self.exit_code is not None else None
