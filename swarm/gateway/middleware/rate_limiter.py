"""Rate limiter: what each key may use, and has used. Pure: the time is passed in.

The rate is a token bucket that fills evenly and holds one minute's worth, at least one request. The daily token limit
follows the calendar day in UTC; a request that arrives while some tokens are left is served completely, so a day can
end a few answers above its limit. All counts are kept in one process: each gateway grants the limits separately, and a
restarted gateway starts from zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.api_keys.keys import ApiKey, KeyLimits
from swarm.gateway.errors import ApiError

DAY_S = 86_400
_BUSY_S = 1.0  # seconds after which one of several answers is likely to have ended; an estimate


@dataclass(slots=True)
class KeyUsage:
    """Usage of a key. Stored by the key's name, so that a rotated key inherits the usage of the old one."""

    tokens_left: float  # requests left in the bucket
    filled_at: float  # time at which the bucket was last refilled
    running: int = 0  # requests in progress
    day: int = 0  # days since 1970 in UTC
    tokens_today: int = 0


@dataclass(slots=True)
class RateLimiter:
    """Rate limiter of a gateway."""

    used: dict[str, KeyUsage] = field(default_factory=dict)

    def admit(self, key: ApiKey, now: float) -> ApiError | None:
        """Admit a request, or return the error. ``now``: seconds since 1970. An admitted request must be released."""
        limits = key.limits
        used = self._usage_of(key.name, limits, now)
        problem = _limit_error(key.name, limits, used, now)
        if problem is not None:
            return problem
        if limits.rate_per_min:
            used.tokens_left -= 1
        used.running += 1
        return None

    def check_day(self, key: ApiKey, now: float) -> ApiError | None:
        """Return the error if the key has used its tokens of today."""
        return _daily_limit_error(key.name, key.limits, self._usage_of(key.name, key.limits, now), now)

    def release(self, name: str) -> None:
        self.used[name].running -= 1

    def charge(self, name: str, num_tokens: int, now: float) -> None:
        """Charge an answer's tokens, including its prompt's."""
        used = self.used.get(name)
        if used is not None:
            _start_new_day(used, now)
            used.tokens_today += num_tokens

    def usage(self, name: str, now: float) -> tuple[int, int]:
        """Return the tokens used today, and the requests in progress."""
        used = self.used.get(name)
        if used is None:
            return 0, 0
        _start_new_day(used, now)
        return used.tokens_today, used.running

    def retain(self, names: set[str]) -> None:
        """Forget keys that no longer exist, except those with requests in progress."""
        for name in [name for name, used in self.used.items() if name not in names and not used.running]:
            del self.used[name]

    def _usage_of(self, name: str, limits: KeyLimits, now: float) -> KeyUsage:
        used = self.used.get(name)
        if used is None:
            used = self.used[name] = KeyUsage(_bucket_capacity(limits), now, day=int(now // DAY_S))
        _start_new_day(used, now)
        passed_s = max(0.0, now - used.filled_at)
        used.tokens_left = min(_bucket_capacity(limits), used.tokens_left + passed_s * limits.rate_per_min / 60)
        used.filled_at = now
        return used


def _bucket_capacity(limits: KeyLimits) -> float:
    return max(1.0, limits.rate_per_min)


def _start_new_day(used: KeyUsage, now: float) -> None:
    day = int(now // DAY_S)
    if day != used.day:
        used.day, used.tokens_today = day, 0


def _daily_limit_error(name: str, limits: KeyLimits, used: KeyUsage, now: float) -> ApiError | None:
    if limits.tokens_per_day and used.tokens_today >= limits.tokens_per_day:
        text = f"the key {name!r} has used its {limits.tokens_per_day} tokens of today; the next day begins at 0:00 UTC"
        return ApiError(429, text, code="tokens_per_day", retry_after_s=DAY_S - now % DAY_S)
    return None


def _limit_error(name: str, limits: KeyLimits, used: KeyUsage, now: float) -> ApiError | None:
    if (problem := _daily_limit_error(name, limits, used, now)) is not None:
        return problem
    if limits.concurrency and used.running >= limits.concurrency:
        text = f"{used.running} requests of the key {name!r} are in progress, which is its limit"
        return ApiError(429, text, code="concurrency", retry_after_s=_BUSY_S)
    if limits.rate_per_min and used.tokens_left < 1:
        text = f"the key {name!r} may make {limits.rate_per_min:g} requests a minute"
        wait_s = (1 - used.tokens_left) * 60 / limits.rate_per_min
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
    return None
