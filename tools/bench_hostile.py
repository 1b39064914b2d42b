#!/usr/bin/env python3
"""Measure how long others wait at a gateway that gets hostile bodies, and what it keeps of them.

    python tools/bench_hostile.py                 all bodies of tests/integration/hostile.py, each once
    python tools/bench_hostile.py "15 MB of emoji"

A real gateway before a stand-in for the broker. While a body is sent and answered, /health is asked without a pause:
the 99th percentile and the maximum of its times count against 50 ms. Run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import bench_lib  # noqa: F401  (makes the repository importable)

from tests.integration.hostile import BODIES, victim

AIM_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="bodies; all unless given")
    names = parser.parse_args().names or list(BODIES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWARM_CACHE"] = folder
        with victim(Path(folder)) as one:
            begun = one.process.memory_info().rss
            print("| body | answered after | others wait: p99 | longest | resident |\n|---|---|---|---|---|")
            every: list[float] = []
            for name in names:
                seen = one.suffer(BODIES[name])
                every += seen.waits_s
                resident = one.process.memory_info().rss - begun >> 20
                waits = f"{seen.p99_s * 1000:.0f} ms | {max(seen.waits_s) * 1000:.0f} ms"
                print(f"| {name} | {seen.took_s:.2f} s | {waits} | {resident:+} MiB |", flush=True)
            num_late = sum(wait_s > AIM_S for wait_s in every)
            print(
                f"\n{num_late} of {len(every)} waits above {AIM_S * 1000:g} ms; the longest {max(every) * 1000:.0f} ms"
            )


if __name__ == "__main__":
    main()
