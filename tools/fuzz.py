#!/usr/bin/env python3
"""Fuzz every parser that a peer's bytes reach, guided by coverage (libFuzzer, by way of atheris).

Each target of ``tests/unit/fuzz/targets.py`` in a process of its own, one after the other, beginning with what real
peers send: what it raises that it does not document, a promise that breaks, an input that takes half a second or 64 MiB
is a finding, written to a file and printed in hexadecimal digits.

    tools/fuzz.py --minutes 60
    tools/fuzz.py --minutes 5 --target data --target curve --corpus /tmp/corpus   # goes on there the next time
    tools/fuzz.py --target client --again findings/client-0123456789ab            # one input, with its traceback

Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.fuzz.run import WHY_NOT, Outcome, all_lines, fuzz, lines_covered
from tests.unit.fuzz.targets import TARGETS


def main() -> int:
    options = _options()
    names = options.target or list(TARGETS)
    if options.again is not None:
        TARGETS[names[0]].run(options.again.read_bytes())
        print("nothing was found by it")
        return 0
    if WHY_NOT is not None:
        print(WHY_NOT, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="swarm-fuzz-") as made:
        outcomes = _all(names, options, options.corpus or Path(made))
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(any(outcome.findings for outcome in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="in all (default: %(default)s)")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="which; may be repeated (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: another each time)")
    parser.add_argument("--corpus", type=Path, help="a directory in which to keep inputs that reach something new")
    parser.add_argument("--findings", type=Path, default=Path("findings"), help="a directory (default: %(default)s)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run this input, and nothing else")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    return parser.parse_args()


def _all(names: list[str], options: argparse.Namespace, corpus: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    covered: defaultdict[str, set[int]] = defaultdict(set)
    give_up_at = time.monotonic() + options.minutes * 60
    out = sys.stderr if options.json else sys.stdout
    print(
        f"{'target':16} {'executions':>11} {'per second':>11} {'places':>7} {'corpus':>7} {'MiB':>5}  findings",
        file=out,
    )
    for number, name in enumerate(names):
        left = sum(TARGETS[each].weight for each in names[number:])
        seconds = max(1.0, (give_up_at - time.monotonic()) * TARGETS[name].weight / left)
        outcome = fuzz(name, seconds, options.findings, seed=options.seed, corpus=corpus / name)
        outcomes.append(outcome)
        for file, lines in lines_covered(name, corpus / name).items():
            covered[file] |= lines
        _tell(outcome, out)
    print(f"{'all':16} {sum(outcome.executions for outcome in outcomes):11}", file=out)
    for file, reached in sorted(covered.items()):
        shown = Path(file).relative_to(Path(__file__).resolve().parents[1])
        print(f"  {len(reached):4} of {len(all_lines(file)):4} lines  {shown}", file=out)
    return outcomes


def _tell(outcome: Outcome, out: object) -> None:
    per_second = outcome.executions / max(1.0, outcome.seconds)
    print(
        f"{outcome.target:16} {outcome.executions:11} {per_second:11.0f} {outcome.places:7} {outcome.corpus:7}"
        f" {outcome.peak_mib:5}  {len(outcome.findings)}",
        file=out,  # type: ignore[arg-type]
        flush=True,
    )
    for finding in outcome.findings:
        print(f"  {finding['kind']}: {finding['file']}\n{finding['story']}\n  {finding['hex'][:2000]}", file=out)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
