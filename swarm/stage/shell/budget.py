"""Division of a worker's memory limit, which covers the whole process, between the model and the activation log."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ConfigError

MIN_BYTES = 16 << 20  # for weights, KV and log together; with less, not even the demonstration model fits


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Shares of a worker's memory."""

    model_bytes: int  # for weights and KV
    log_bytes: int  # for the activation log


def split_memory(limit_bytes: int, base_bytes: int, log_bytes: int, spill_bytes: int = 0) -> MemoryBudget:
    """Divide the memory that the limit leaves beyond ``base_bytes``, the process's size before anything is loaded, and
    ``spill_bytes``, which are reserved for chunks on their way to the disk and back.

    The log gets its configured size, but at most an eighth of the limit and a quarter of the remainder: a position
    missing in the log is computed again, while a sequence without KV memory can't be computed at all. Raises
    ConfigError if too little remains.
    """
    reserved = base_bytes + spill_bytes
    remaining = limit_bytes - reserved
    if remaining < MIN_BYTES:
        spilling = f", and {spill_bytes / 2**20:.0f} MiB for worker.spill" if spill_bytes else ""
        raise ConfigError(
            f"a memory limit of {limit_bytes / 2**20:.0f} MiB is too small: it covers the whole process, which takes "
            f"{base_bytes / 2**20:.0f} MiB before it loads anything{spilling}; the minimum is "
            f"{_min_limit_mib(reserved)} MiB (worker.memory_limit, --memory-limit)"
        )
    log_share = min(log_bytes, limit_bytes // 8, remaining // 4)
    return MemoryBudget(remaining - log_share, log_share)


def _min_limit_mib(reserved: int) -> int:
    """Return the smallest workable limit, rounded up with a margin: the base differs a little between starts."""
    return -(-(reserved + MIN_BYTES) * 33 // (32 << 20))
