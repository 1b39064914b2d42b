"""Play schedules with the package that is found first, until one notices something; a process of its own for a mutant.

    python play.py FOLDER FIRST COUNT [KIND,KIND…]

FOLDER must be where ``swarm`` comes from. Exit code: 0, everything held; 3, the violation is on stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.sim import run
from swarm.sim.schedules import draw

NOTICED = 3


def main(folder: str, first: str, count: str, kinds: str = "") -> int:
    assert run.__file__ is not None
    assert Path(run.__file__).is_relative_to(folder), f"{run.__file__} is not the mutant's"
    if kinds:
        draw.FAULT_KINDS = tuple(kinds.split(","))  # type: ignore[assignment]
    for outcome in run.run_many(int(first), int(count)):
        if outcome.failure is not None:
            print(f"seed {outcome.seed}: {outcome.failure}")
            return NOTICED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
