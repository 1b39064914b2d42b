#!/usr/bin/env python3
"""Measure how long a machine that boots takes to a serving swarm: a real systemd, booted in namespaces on an overlay of
this machine (it takes root and systemd-nspawn), with a broker, two workers of the demo model and a gateway enabled.

Told, in seconds from the start of the machine's first process: when the broker's doors were open, when a plan with both
workers was served, and when systemd itself had nothing more to do. The kernel's own boot is not in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench_lib import tell_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swarm.systemd.install import InstallOptions, InstallTarget, plan_files, settings_file
from tests.integration.booted import PROGRAMS, Booted, NoSystem, booted, why_not

UNITS = ("swarm.target", "swarm-broker", "swarm-worker@w0", "swarm-worker@w1", "swarm-gateway")


def prepare(root: Path) -> None:
    """Install and enable, as an image would be made."""
    target = InstallTarget(root)
    files = plan_files(target, InstallOptions(PROGRAMS / "swarm", 0, memory_bytes=1 << 30))
    for path, text in [*files.items(), settings_file(target)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for command in ("systemd-sysusers",), ("systemctl", "enable", *UNITS):
        subprocess.run([command[0], f"--root={root}", *command[1:]], check=True, capture_output=True)


def one_boot() -> dict[str, float]:
    with TemporaryDirectory(dir="/var/tmp") as folder, booted(Path(folder), prepare) as system:
        system.until(lambda: serving_at(system), "both workers serve")
        began, finished = (
            int(system.systemctl("show", "--value", "--property", f"{name}TimestampMonotonic"))
            for name in ("Userspace", "Finish")
        )
        seen = {
            "doors open": int(system.shown("swarm-broker", "ActiveEnterTimestampMonotonic")),
            "serving": serving_at(system),
            "systemd idle": finished,
        }
        return {what: (at - began) / 1e6 for what, at in seen.items()}


def serving_at(system: Booted) -> int:
    """When a plan of two stages was first served; 0: not yet."""
    return next((at for at, stages in plans(system) if stages == 2), 0)


def plans(system: Booted) -> Iterator[tuple[int, int]]:
    done = system.run("journalctl", "-u", "swarm-broker", "SWARM_EVENT=plan_serving", "-o", "json", "--no-pager")
    for line in done.stdout.splitlines():
        event = json.loads(line)
        yield int(event["__MONOTONIC_TIMESTAMP"]), event["MESSAGE"].count("–")  # w0 0–4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="boots")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no system can be booted here: {reason}")
    try:
        rounds = [one_boot() for _ in range(asked.rounds)]
    except NoSystem as error:
        sys.exit(f"no system can be booted here: {error}")
    found: list[dict[str, object]] = [
        {"until": what, "median_s": round(median(each[what] for each in rounds), 1), "of": len(rounds)}
        for what in rounds[0]
    ]
    tell_lines("boot", found, as_json=asked.json)


if __name__ == "__main__":
    main()
