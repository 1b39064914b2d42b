"""How a worker's memory limit, which is for the whole process, is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ConfigError

LEAST_BYTES = 16 << 20  # for weights, KV and log together: below, not even the demonstration model fits


@dataclass(frozen=True, slots=True)
class Budget:
    """``model_bytes``: for weights and KV. ``log_bytes``: for the log of what was sent on."""

    model_bytes: int
    log_bytes: int


def share_out(limit_bytes: int, base_bytes: int, log_bytes: int) -> Budget:
    """Share out what the process itself, which takes ``base_bytes`` before it loads anything, leaves of the limit.

    The log takes what it is allowed to, but at most an eighth of the limit, and at most a quarter of what remains: what
    isn't in it is computed again, what has no room in the model's share can't be computed at all. Raises ConfigError if
    nothing useful remains.
    """
    rest = limit_bytes - base_bytes
    if rest < LEAST_BYTES:
        raise ConfigError(
            f"a memory limit of {limit_bytes / 2**20:.0f} MiB is too little: it is for the whole process, which takes "
            f"{base_bytes / 2**20:.0f} MiB before it loads anything; the least is {_least_mib(base_bytes)} MiB "
            "(worker.memory_limit, --memory-limit)"
        )
    log_share = min(log_bytes, limit_bytes // 8, rest // 4)
    return Budget(rest - log_share, log_share)


def _least_mib(base_bytes: int) -> int:
    """Round up, and a little more: the base differs a little from one start to the next."""
    return -(-(base_bytes + LEAST_BYTES) * 33 // (32 << 20))
