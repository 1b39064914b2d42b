"""``swarm sim``: seeded fault schedules against the production cores, in simulation."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import JsonOption
from swarm.cli.output import EXIT_FAILED, ConsoleProgress, print_error, print_json

if TYPE_CHECKING:
    from swarm.sim.run import Outcome

MAX_PROCESSES = 16
CHUNK = 8  # seeds that a process runs before it reports: rarely enough to be cheap, often enough to show progress
MAX_SHOWN = 20  # violations that are listed for people; ``--json`` lists all


class Extra(StrEnum):
    """Further part of the simulated swarms: workers write keys and values to disk, callers ask for vectors and log
    probabilities of prompts, the broker has a draft model, the model is recurrent, adapters are loaded and dropped,
    the model reads images."""

    spills = "spills"
    answers = "answers"
    drafts = "drafts"
    states = "states"
    adapters = "adapters"
    images = "images"


def sim(
    *,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Run only this seed, and print its story.")
    ] = None,
    schedules: Annotated[
        int | None, typer.Option("--schedules", metavar="N", min=1, help="Number of seeds to run. [default: 200]")
    ] = None,
    first_seed: Annotated[int, typer.Option("--first-seed", metavar="K", min=0, help="First seed.")] = 0,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject no faults, and dismiss no worker.")] = False,
    extras: Annotated[
        list[Extra] | None, typer.Option("--with", help="Also simulate this part (may be repeated).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate whole swarms under virtual time: workers and broker die, workers freeze, hang and send wrong data,
    connections break.

    The deciding code is the production code; its invariants are checked at every event. A seed always gives the same
    run. Exit code 1 if an invariant was violated.
    """
    if seed is not None and schedules is not None:
        raise typer.BadParameter("--seed runs one schedule, --schedules many: choose one")
    if seed is not None:
        failed = _run_one(seed, not no_faults, extras or (), as_json)
    else:
        failed = _run_many(first_seed, schedules or 200, not no_faults, extras or (), as_json)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _run_one(seed: int, faults: bool, extras: Sequence[Extra], as_json: bool) -> bool:
    from swarm.sim.run import run

    outcome = run(seed, faults=faults, **dict.fromkeys(extras, True))
    if as_json:
        print_json(asdict(outcome))
        return outcome.failure is not None
    for line in outcome.story:
        print(line)
    print(
        f"seed {seed}: {outcome.num_events} events in {outcome.virtual_s:.1f} virtual seconds, "
        f"{outcome.num_tokens} tokens, {outcome.num_plans} plans, {outcome.num_lost_workers} lost workers, "
        f"{outcome.num_brokers - 1} restarts of the broker"
        + "".join(f", {kind}" + (f" ×{num}" if num > 1 else "") for kind, num in outcome.faults.items())
    )
    if outcome.failure is None:
        print("everything held")
        return False
    print_error("swarm sim", outcome.failure)
    return True


@dataclass(slots=True)
class SimTotals:
    """Totals of the schedules so far. Printed as JSON by its field names."""

    num_schedules: int = 0
    num_events: int = 0
    num_tokens: int = 0
    num_plans: int = 0
    num_lost_workers: int = 0
    num_replayed: int = 0  # layers times positions
    num_restarts: int = 0  # of brokers
    num_kept: int = 0  # positions that stages held across restarts and that were reused
    num_copied: int = 0  # parts of keys and values that workers stored for others
    num_adopted: int = 0  # layers times positions that stages took over from such copies
    struck: dict[str, int] = field(default_factory=dict)  # number of faults, by kind
    violations: list[tuple[int, str]] = field(default_factory=list)  # seed and violated invariant

    def add(self, outcome: Outcome) -> None:
        self.num_schedules += 1
        self.num_events += outcome.num_events
        self.num_tokens += outcome.num_tokens
        self.num_plans += outcome.num_plans
        self.num_lost_workers += outcome.num_lost_workers
        self.num_replayed += outcome.num_replayed
        self.num_restarts += outcome.num_brokers - 1
        self.num_kept += outcome.num_kept
        self.num_copied += outcome.num_copied
        self.num_adopted += outcome.num_adopted
        for kind, count in outcome.faults.items():
            self.struck[kind] = self.struck.get(kind, 0) + count
        if outcome.failure is not None:
            self.violations.append((outcome.seed, outcome.failure))

    def __str__(self) -> str:
        return (
            f"{self.num_schedules} schedules, {self.num_events} events, {self.num_tokens} tokens, "
            f"{self.num_plans} plans, {self.num_lost_workers} lost workers, "
            f"{self.num_restarts} restarts of the broker, {self.num_copied} copied parts, "
            f"{self.num_adopted} layer positions taken over from copies, {len(self.violations)} violations"
        )


def _run_many(first_seed: int, count: int, faults: bool, extras: Sequence[Extra], as_json: bool) -> bool:
    tally, progress = SimTotals(), ConsoleProgress(sys.stderr)
    for outcomes in run_seeds(first_seed, count, faults, extras):
        for outcome in outcomes:
            tally.add(outcome)
        if sys.stderr.isatty():
            progress.set_status(f"{tally} of {count}")
    progress.clear_status()
    tally.violations.sort()
    if as_json:
        violations = [{"seed": seed, "failure": failure} for seed, failure in tally.violations]
        print_json({**asdict(tally), "first_seed": first_seed, "faults": faults, "violations": violations})
        return bool(violations)
    print(tally)
    if tally.struck:
        print(f"faults: {', '.join(f'{kind} {num}' for kind, num in sorted(tally.struck.items()))}")
    for seed, failure in tally.violations[:MAX_SHOWN]:
        print_error("swarm sim", f"seed {seed}: {failure}")
    if tally.violations:
        again = f"swarm sim --seed {tally.violations[0][0]}{'' if faults else ' --no-faults'}"
        again += "".join(f" --with {extra}" for extra in extras)
        print_error(
            "swarm sim", f"{len(tally.violations)} of {count} schedules broke a rule: '{again}' shows the first"
        )
    return bool(tally.violations)


def run_seeds(first_seed: int, count: int, faults: bool, extras: Sequence[Extra] = ()) -> Iterator[list[Outcome]]:
    """Run these seeds and yield the outcomes in order, in chunks, on one process per core."""
    end = first_seed + count
    chunks = [(first, min(CHUNK, end - first), faults, tuple(extras)) for first in range(first_seed, end, CHUNK)]
    num_processes = min(MAX_PROCESSES, len(chunks), _num_cores())
    if num_processes == 1:
        yield from map(_run_chunk, chunks)
        return
    # "spawn" exists on every system, and a fresh process inherits no locks
    with multiprocessing.get_context("spawn").Pool(num_processes, _ignore_interrupts) as pool:
        yield from pool.imap(_run_chunk, chunks)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C here: it reaches the whole process group, and the parent ends the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_chunk(chunk: tuple[int, int, bool, tuple[Extra, ...]]) -> list[Outcome]:
    from swarm.sim.run import run_many

    first_seed, count, faults, extras = chunk
    return list(run_many(first_seed, count, faults=faults, **dict.fromkeys(extras, True)))
