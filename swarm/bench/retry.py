"""When a refused request is tried again. Pure."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from random import Random

AGAIN = (429, 503)  # "come again"; every other status is an answer
FIRST_S = 0.25
MOST_S = 20.0


def wait_s(attempt: int, retry_after: float | None, chance: Random) -> float:
    """How long to wait before attempt ``attempt + 1``. What the server asks for is kept; else the wait doubles, and
    half of it is chance, so that the refused do not come back all at once."""
    if retry_after is not None:
        return retry_after
    most = min(MOST_S, FIRST_S * 2 ** (attempt - 1))
    return float(most * (0.5 + 0.5 * chance.random()))


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Read a Retry-After header: seconds or a date. None if there is none that makes sense."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
        except (ValueError, TypeError):  # no date; or one without a zone
            return None
    return max(0.0, seconds) if seconds < 86400 else None
