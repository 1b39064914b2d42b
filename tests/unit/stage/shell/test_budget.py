"""What a memory limit leaves for the model."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError
from swarm.stage.shell.budget import MIN_BYTES, MemoryBudget, split_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "base", "log", "model_share", "log_share"),
    [
        (8192, 392, 256, 7544, 256),  # room for all
        (1024, 392, 256, 504, 128),  # the log shrinks to an eighth of the limit
        (448, 392, 256, 42, 14),  # and to a quarter of what is left
        (8192, 392, 0, 7800, 0),
    ],
)
def test_a_limit_is_shared_out(limit: int, base: int, log: int, model_share: int, log_share: int) -> None:
    """All figures in MiB."""
    assert split_memory(limit * MIB, base * MIB, log * MIB) == MemoryBudget(model_share * MIB, log_share * MIB)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(0, 1 << 32), st.integers(0, 1 << 30))
def test_nothing_is_promised_twice(limit: int, base: int, log: int, spill: int) -> None:
    """Process, model, log and what spilling reserves are within the limit together, and the model has a share; or the
    limit is refused, with one that works."""
    try:
        budget = split_memory(limit, base, log, spill)
    except ConfigError as error:
        assert limit < base + spill + MIN_BYTES
        found = re.search(r"the minimum is (\d+) MiB", str(error))
        assert found is not None
        split_memory(int(found[1]) * MIB, base, log, spill)
    else:
        assert base + spill + budget.model_bytes + budget.log_bytes == limit
        assert budget.model_bytes > budget.log_bytes >= 0


def test_a_limit_that_is_too_small_names_what_spilling_takes() -> None:
    with pytest.raises(ConfigError, match=r"before it loads anything, and 300 MiB for worker\.spill; the minimum is 7"):
        split_memory(512 * MIB, 392 * MIB, 0, 300 * MIB)
