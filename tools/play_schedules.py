"""Play many schedules of the simulation over hours, in ranges of seeds; what was played is not played again.

    python tools/play_schedules.py LOG --first-seed 8000000 --schedules 100000 [--until 16:20]
    python tools/play_schedules.py LOG --sum

A line of JSON per range goes to LOG as soon as the range has been played: events, tokens, faults by kind, violations
with their seeds. Whoever starts it again with the same LOG goes on behind what is there; several processes may share
one LOG if their seeds differ. Begin a new LOG for another state of the code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

from swarm.cli.sim import SimTotals
from swarm.sim.run import run_many

RANGE = 50  # seeds: some seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--until", help="HH:MM of today, when no new range is begun any more")
    parser.add_argument("--sum", action="store_true", help="say what was played so far")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.sum:
        play(arguments.log, arguments.first_seed, arguments.schedules, arguments.until)
    print(summary(arguments.log))


def play(log: Path, first_seed: int, count: int, until: str | None) -> None:
    done = {int(line["first_seed"]) for line in lines(log)}
    for first in range(first_seed, first_seed + count, RANGE):
        if until is not None and datetime.now().strftime("%H:%M") >= until:
            return
        if first in done:
            continue
        began, tally = time.process_time(), SimTotals()
        for outcome in run_many(first, min(RANGE, first_seed + count - first)):
            tally.add(outcome)
        line = {"first_seed": first, **asdict(tally), "seconds": round(time.process_time() - began, 2)}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines(log: Path) -> Iterator[dict[str, object]]:
    if log.exists():
        yield from map(json.loads, log.read_text().splitlines())


def summary(log: Path) -> str:
    """Sum up all ranges, and list each violation."""
    total, seconds = SimTotals(), 0.0
    for line in lines(log):
        seconds += float(str(line["seconds"]))
        for field in fields(SimTotals):
            value = line[field.name]
            if isinstance(value, int):
                setattr(total, field.name, getattr(total, field.name) + value)
            elif isinstance(value, list):
                total.violations += [(int(seed), str(failure)) for seed, failure in value]
            elif isinstance(value, dict):
                for kind, num in value.items():
                    total.struck[kind] = total.struck.get(kind, 0) + int(num)
    text = [str(total), f"{seconds / max(1, total.num_schedules) * 1000:.0f} ms of processor time a schedule"]
    text.append("faults: " + ", ".join(f"{kind} {num}" for kind, num in sorted(total.struck.items())))
    return "\n".join(text + [f"seed {seed}: {failure}" for seed, failure in sorted(total.violations)])


if __name__ == "__main__":
    main()
