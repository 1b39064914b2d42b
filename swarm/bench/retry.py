"""Time until a rejected request is sent again. Pure."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from random import Random

RETRY_STATUSES = (429, 503)  # rejections that ask for a retry; every other status is an answer
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 20.0


def backoff_s(attempt: int, retry_after: float | None, chance: Random) -> float:
    """Return the seconds to wait before attempt ``attempt + 1``.

    The server's own value counts. Without one, the wait doubles each time, and half of it is random, so that rejected
    requests do not return simultaneously.
    """
    if retry_after is not None:
        return retry_after
    most = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
    return float(most * (0.5 + 0.5 * chance.random()))


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Parse a Retry-After header: seconds or a date. Return None if it is missing or invalid."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
        except (ValueError, TypeError):  # not a date, or one without a time zone
            return None
    return max(0.0, seconds) if seconds < 86400 else None
