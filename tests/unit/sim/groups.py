"""Groups of schedules that tests of further parts play: the first among the fast tests, the second in every check, the
others with all that is long."""

import pytest

NUM = 20  # schedules of a group

in_groups = pytest.mark.parametrize(
    "first_seed",
    [
        0,
        pytest.param(20, marks=pytest.mark.schedules),
        *(pytest.param(first, marks=[pytest.mark.schedules, pytest.mark.long]) for first in (40, 60, 80)),
    ],
)
with_and_without_disks = pytest.mark.parametrize("spills", [False, pytest.param(True, marks=pytest.mark.schedules)])
