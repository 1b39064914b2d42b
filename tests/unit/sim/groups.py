"""Groups of schedules that tests of further parts play: the first in every check, the others with many schedules."""

import pytest

NUM = 20  # schedules of a group

in_groups = pytest.mark.parametrize(
    "first_seed", [0, *(pytest.param(first, marks=pytest.mark.schedules) for first in (20, 40, 60, 80))]
)
with_and_without_disks = pytest.mark.parametrize("spills", [False, pytest.param(True, marks=pytest.mark.schedules)])
