"""When the write-ahead log is folded into the journal's file.

SQLite would do it by itself, every so many pages. But if a sync fails in that, it tells nobody: and what was to be
synced then is not on the disk, while all later syncs succeed. So it is done here, and failures are heard of. How long
the log is SQLite tells only when it folds it; in between it is reckoned by the rows that were changed, and by the pages
that these took before. Where that is far off, the log outgrows its file's usual size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
_FRAME = PAGE + 24  # as it stands in the log
_LEAST, _MOST = 1 / 8, 64.0  # pages per change


@dataclass(slots=True)
class LogLength:
    """``pages``: that it may have, about. Changes are counted by the connection, from its opening on."""

    path: Path
    pages: int
    _pages_per_change: float = 4.0
    _folded_at: int = 0
    _outgrown: int = 0  # bytes that it had when it was folded last, if that was much

    def is_due(self, changes: int) -> bool:
        if (changes - self._folded_at) * self._pages_per_change >= self.pages:
            return True
        return self._num_bytes() > max(2 * self.pages * _FRAME, 2 * self._outgrown)

    def folded(self, changes: int, pages: int | None) -> None:
        """It had so many; None: that could not be found out, and is tried again after as many changes."""
        new = changes - self._folded_at
        if pages is not None and new:
            self._pages_per_change = min(_MOST, max(_LEAST, pages / new))
        self._folded_at, self._outgrown = changes, self._num_bytes()

    def _num_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
