#!/usr/bin/env python3
"""Measure what it costs when workers die, and to be ready for that. Three measurements, and
five more of copies; one, several or all of them:

detection  from the fault until the broker knows, of each class: crash (SIGKILL), freeze (SIGSTOP), hang (the compute
           thread stands still, by a failpoint) and terminate (SIGTERM: the worker says that it wishes to go).
stall      the longest gap between two tokens of running answers when the middle one of three workers is killed, less
           the 99th percentile of the undisturbed gaps, by where the layers come back: ``standby`` (the neighbours hold
           them warm), ``spare`` (a fourth worker loads them), ``restart`` (nobody else may take them, and the dead
           one's process is started again), ``tokens`` (as standby, rebuilt from the tokens instead of the logs). The
           tokens must be those of the undisturbed run.
overhead   decoding with logs and beats against the same without, in turns.

Five more compare a swarm with copies of keys and values (`plan.standby_kv = neighbours`) with one without, in turns.
Each row has its goal, and is shown on stderr as soon as it is measured; the table comes at the end.

copies     the stall after a kill, and by how much it grows with each further position.
cost       the part of the throughput that copies take, for each of `--decoding` sequences.
drain      the longest gap while the middle stage is drained under the largest case, and the positions computed again.
deaths     two deaths within a second: the longest gap, and what was replayed.
newcomer   the gain of a second worker: predicted, achieved, and the time to reach it. Needs root and two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench_lib import BenchError, add_model_options, model_of, note, numbers, report
from recovery_changes import change_rows, newcomer_rows
from recovery_copies import both_sides, cost_rows, stall_rows, with_context
from recovery_detection import CLASSES, detection
from recovery_goals import COLUMNS, Figure, Figures
from recovery_overhead import Paired, halves, overhead
from recovery_stall import PARTS, WAYS, Case, Outcome, stall
from recovery_swarm import STAGES, Parts, percentile
from rich.table import Table

from swarm.demo import model_path
from swarm.errors import SwarmError

SEQUENCES, CONTEXTS = (1, 8), (64, 256, 1024)
# Sequences and contexts of the goals for copies. The 1.1 B shape needs minutes for 8 prompts of 8,192 positions.
SIZES = ((1, 256), (1, 1024), (1, 8192), (8, 256), (8, 1024))
DEMO_SIZES = ((1, 256), (1, 1024), (8, 256), (8, 1024))
WHAT = ("detection", "stall", "overhead", "copies", "cost", "drain", "deaths", "newcomer")


# --- tables -----------------------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str]) -> Table:
    drawn = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left")
    return drawn


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def detection_table(samples: dict[str, list[float]]) -> Table:
    drawn = table("from the fault until it is noticed, ms", ("class", "times", "p50", "p99", "worst"))
    for name, values in samples.items():
        figures = (percentile(values, 50), percentile(values, 99), max(values))
        drawn.add_row(name, str(len(values)), *map(ms, figures))
    return drawn


def stall_table(outcomes: list[Outcome]) -> Table:
    """Medians over the repetitions of a case."""
    columns = ("way, sequences × context", "stall", *PARTS, "predicted", "usual gap", "replayed ÷ least")
    drawn = table("stall after a kill, ms", columns)
    for way, case in dict.fromkeys((outcome.way, outcome.case) for outcome in outcomes):
        same = [outcome for outcome in outcomes if (outcome.way, outcome.case) == (way, case)]
        split = [ms(middle([outcome.split[part] for outcome in same])) for part in PARTS]
        ratio = middle([outcome.ratio for outcome in same])
        drawn.add_row(
            f"{way}, {case}",
            ms(median(outcome.stall_s for outcome in same)),
            *split,
            ms(middle([outcome.predicted_s for outcome in same])),
            ms(same[0].usual_s),
            "–" if ratio is None else f"{ratio:.3f}",
        )
    return drawn


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def goals_table(rows: list[Figure]) -> Table:
    drawn = table("copies of keys and values", COLUMNS)
    for row in rows:
        drawn.add_row(*row.cells())
    return drawn


def overhead_table(found: Paired) -> Table:
    drawn = table("logs and beats, on against off", ("", "on", "off", "cost", "half of the pairs between"))
    sides = (found.on, found.off)
    rates = [f"{median(side.rates):,.1f}" for side in sides]
    computed = [f"{median(side.computed) * 1e6:,.0f}" for side in sides]
    for name, figures, costs in (
        ("tokens/s", rates, found.costs),
        ("processor time of a token, µs", computed, found.computed),
    ):
        low, high = halves(costs)
        drawn.add_row(name, *figures, f"{median(costs):.1%}", f"{low:.1%} and {high:.1%}")
    return drawn


# --- the program ------------------------------------------------------------------------------------------------------


async def measured(arguments: argparse.Namespace, model: Path) -> tuple[list[Table], dict[str, Any]]:
    tables: list[Table] = []
    results: dict[str, Any] = {}
    if "detection" in arguments.what:
        samples = await detection(model, arguments.classes, arguments.times)
        tables.append(detection_table(samples))
        results["detection_s"] = samples
    if "stall" in arguments.what:
        sequences, contexts = arguments.sequences or SEQUENCES, arguments.contexts or CONTEXTS
        cases = [Case(num, context) for num in sequences for context in contexts]
        outcomes = await stall(model, arguments.ways, cases, arguments.rounds)
        tables.append(stall_table(outcomes))
        results["stall"] = [asdict(outcome) for outcome in outcomes]
    if "overhead" in arguments.what:
        found = await overhead(model, arguments.pairs or 10, arguments.decodes, arguments.tokens or 64)
        tables.append(overhead_table(found.pairs))
        results["overhead"] = asdict(found.pairs) | {"costs": found.pairs.costs, "computed": found.pairs.computed}
        results["log_bytes_per_token"] = found.log_bytes_per_token
    rows, raw = await copies_measured(arguments, model)
    if rows:
        tables.append(goals_table(rows))
        results |= {"copies": raw, "rows": [row.cells() for row in rows]}
    return tables, results


async def copies_measured(arguments: argparse.Namespace, model: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Make the measurements that compare a swarm with copies with one without."""
    figures = Figures(note)
    raw: dict[str, Any] = {}
    cases, rounds, demo = copy_cases(arguments), arguments.rounds, arguments.demo
    largest = max(cases, key=lambda case: (case.sequences, case.context))
    pairs, tokens = arguments.pairs or (6 if demo else 2), arguments.tokens or (480 if demo else 64)
    measurements: dict[str, Callable[[dict[str, Parts]], Awaitable[dict[str, Any]]]] = {
        "cost": lambda swarms: cost_rows(swarms, arguments.decoding, pairs, tokens, figures, demo=demo),
        "copies": lambda swarms: stall_rows(swarms, cases, rounds, figures, demo=demo),
        "drain": lambda swarms: change_rows(swarms, "drain", largest, rounds, figures),
        "deaths": lambda swarms: change_rows(swarms, "deaths", largest, rounds, figures),
    }
    chosen = {name: measure for name, measure in measurements.items() if name in arguments.what}
    if chosen:
        async with both_sides(with_context(model, max(map(longest, cases)))) as swarms:
            for name, measure in chosen.items():
                raw[name] = await measure(swarms)
    if "newcomer" in arguments.what:
        raw["newcomer"] = await newcomer_rows(model, rounds, figures)
    return figures.rows, raw


def copy_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases in which copies are measured: those of the goals, unless others are named."""
    if arguments.sequences or arguments.contexts:
        sizes = [
            (num, context) for num in arguments.sequences or SEQUENCES for context in arguments.contexts or CONTEXTS
        ]
    else:
        sizes = list(DEMO_SIZES if arguments.demo else SIZES)
    return [Case(num, context, arguments.before, arguments.after) for num, context in sizes]


def longest(case: Case) -> int:
    return case.context + case.before + case.after


def listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        parts = text.split(",")
        if unknown := [part for part in parts if part not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return parts

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--demo", action="store_true", help="the embedded demo model instead of the 1.1 B shape")
    parser.add_argument("--what", type=listed(WHAT), default=list(WHAT), metavar="A,B", help=f"of {', '.join(WHAT)}")
    parser.add_argument(
        "--classes", type=listed(list(CLASSES)), default=list(CLASSES), metavar="A,B", help="of faults to be noticed"
    )
    parser.add_argument("--times", type=int, default=20, help="faults of each class")
    parser.add_argument("--ways", type=listed(list(WAYS)), default=list(WAYS), metavar="A,B", help="ways back")
    parser.add_argument("--sequences", type=numbers, metavar="N,N", help="default: 1,8")
    parser.add_argument("--contexts", type=numbers, metavar="N,N", help="default: 64,256,1024; copies: the goals'")
    parser.add_argument("--rounds", type=int, default=1, help="kills of each case and way")
    parser.add_argument("--pairs", type=int, help="turns with logs and beats or copies, and as many without")
    parser.add_argument("--decodes", type=int, default=4, metavar="N", help="sequences that decode in these turns")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each sequence in these turns")
    parser.add_argument(
        "--decoding", type=numbers, default=(1, 16), metavar="N,N", help="sequences that pay for copies"
    )
    parser.add_argument("--before", type=int, default=32, metavar="N", help="tokens of an answer before a change")
    parser.add_argument(
        "--after", type=int, default=600, metavar="N", help="most tokens after it, where copies are measured"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    try:
        model = model_path() if arguments.demo else model_of(arguments)
        tables, results = asyncio.run(measured(arguments, model))
    except (BenchError, SwarmError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    about: dict[str, object] = {"model": str(model), "stages": STAGES}
    if "log_bytes_per_token" in results:
        about["log bytes per token"] = round(results["log_bytes_per_token"])
    report("recovery", results, tables, about, as_json=arguments.json)


if __name__ == "__main__":
    main()
