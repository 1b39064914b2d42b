"""Play simulated schedules until one breaks a rule. A mutant's schedules run in a process of their own.

    python play.py FOLDER FIRST COUNT [KIND,KIND…] [EXTRA,EXTRA…]

FOLDER is the copy that ``swarm`` must be imported from. Exit code: 0, all rules held; 3, the violation is on stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.sim import run
from swarm.sim.schedules import draw

NOTICED = 3


def main(folder: str, first: str, count: str, kinds: str = "", extras: str = "") -> int:
    assert run.__file__ is not None
    assert Path(run.__file__).is_relative_to(folder), f"{run.__file__} is not the mutant's"
    if kinds:
        draw.FAULT_KINDS = tuple(kinds.split(","))  # type: ignore[assignment]
    wanted = dict.fromkeys(extras.split(","), True) if extras else {}
    for outcome in run.run_many(int(first), int(count), **wanted):
        if outcome.failure is not None:
            print(f"seed {outcome.seed}: {outcome.failure}")
            return NOTICED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
