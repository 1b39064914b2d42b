#!/usr/bin/env python3
"""Run real processes for long, harmed at random, under load, with every answer compared.

A broker and four workers with a small model of random weights. Two of the workers always carry a fault that will strike
at a certain moment (a failpoint: the 17th step, the second replay, while loading …); whoever dies is started again at
once, with the fault of the table's emptiest cell. Meanwhile requests of all kinds run, whose answers are known from
an undisturbed run: each must be the same to the last bit of its logprobs, token after token, without a gap. At the
end: what happened, fault by phase, and whether the broker and the workers that lived on have grown.

    tools/soak.py --minutes 35 --injections 1000
    tools/soak.py --minutes 60 --injections 100000 --broker-every 30   # the broker dies, too
    tools/soak.py --minutes 1 --faults kill,stop --seed 7 --json
    tools/soak.py --minutes 3 --kernels avx2,avx512,portable           # unlike kernels, with portable bits

Exit code 1 if anything was violated; the logs are kept then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swarm import AsyncClient
from tests.faults.bench import Swarm
from tests.faults.soak import NAMES, OPTIONS, Soak, SoakResult
from tests.faults.soak_load import Known, known_answers
from tests.faults.soak_table import FAULTS, PHASES, possible
from tests.faults.zygote import Zygote
from tests.model.models import llama_config, random_model


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="swarm-soak-"))
    with _Model(folder) as model, Zygote(model) as zygote:
        result = asyncio.run(_run(model, folder, zygote, options))
    print(json.dumps(result.body(), indent=1) if options.json else _text(result))
    if not result.violations:
        shutil.rmtree(folder)
        return 0
    print(f"the logs are in {folder}", file=sys.stderr)
    return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=35.0, help="end after so long (default: %(default)s)")
    parser.add_argument("--injections", type=int, default=1000, help="or after so many faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of the load (default: %(default)s)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--broker-every", type=float, default=0.0, metavar="S", help="seconds between deaths of the broker, on average"
    )
    parser.add_argument(
        "--kernels",
        metavar="NAMES",
        help="of the workers in turn, with portable bits; what they answer is compared with portable C alone",
    )
    parser.add_argument("--requests", type=int, default=6, help="at a time (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    options.faults = tuple(options.faults.split(","))
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; the faults are {', '.join(FAULTS)}")
    return options


class _Model:
    """A folder with eight layers of random weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "model"

    def __enter__(self) -> Path:
        random_model(llama_config()).save_pretrained(self._folder)
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def _with_kernels(name: str) -> dict[str, str]:
    return {"SWARM_WORKER__KERNELS": name, "SWARM_WORKER__BITS": "portable"}


async def _answers_of_portable_c(model: Path, folder: Path, zygote: Zygote) -> Known:
    """What one worker answers, whose kernels are plain C."""
    with Swarm(model, folder, zygote, OPTIONS) as swarm:
        swarm.start_broker()
        swarm.start_worker("alone", **_with_kernels("portable"))
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
            return await known_answers(client)


async def _run(model: Path, folder: Path, zygote: Zygote, options: argparse.Namespace) -> SoakResult:
    state = folder / "state" if options.broker_every else None
    kernels = options.kernels.split(",") if options.kernels else []
    known = await _answers_of_portable_c(model, folder, zygote) if kernels else None
    with Swarm(model, folder, zygote, OPTIONS, state) as swarm:
        if kernels:
            swarm.own = {name: _with_kernels(kernels[at % len(kernels)]) for at, name in enumerate(NAMES)}
        swarm.start_broker(4)
        soak = Soak(swarm, options.seed, options.faults, broker_every_s=options.broker_every)
        for name in soak.names:
            swarm.start_worker(name)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=120.0) as client:
            await swarm.until_serving(client, len(soak.names))
            answers = known or await known_answers(client)
            say = (lambda _line: None) if options.json else (lambda line: print(line, flush=True))
            return await soak.run(
                client,
                answers,
                minutes=options.minutes,
                injections=options.injections,
                requests=options.requests,
                say=say,
            )


def _text(result: SoakResult) -> str:
    lines = [f"{result.injections} faults in {result.took_s / 60:.1f} minutes, {result.answers} answers compared"]
    lines.append("fault      " + "".join(f"{phase:>10}" for phase in PHASES))
    for fault in result.faults:
        cells = [str(result.table[fault, phase]) if possible(fault, phase) else "–" for phase in PHASES]
        lines.append(f"{fault:<11}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append(f"the broker was killed {result.brokers} times")
    lines.append(f"quarantined after three deaths, as promised: {result.quarantined}")
    lines.append(f"longest time without any token: {result.longest_gap_s:.1f} s")
    lines.extend(f"{name}: {text}" for name, text in result.slopes.items())
    lines.append(f"violations: {len(result.violations)} (95 % upper bound of the rate: {result.upper_bound:.2e})")
    lines.extend(f"  {violation}" for violation in result.violations[:50])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
