"""``swarm profile``: the speed of a swarm by phase, and where the time goes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import (
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModeOption,
    ThreadsOption,
    WeightsOption,
    load_settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarm.cli.profile.measure import ProfilePlan
    from swarm.wire.messages import Json

    Say = Callable[[str], None]


def profile(
    context: typer.Context,
    *,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Profile the swarm at this URL. [default: SWARM_URL; without it, a swarm is started here]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Start a swarm with this model: DIR, FILE.gguf or owner/name[:QUANTIZATION][@revision]. "
            "[default: the embedded demo model]",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Workers of a swarm that is started here.")
    ] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: seconds instead of a minute.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="For the random prompts.")] = 1,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    mode: ModeOption = None,
    threads: ThreadsOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a swarm: warm-up, output and prompt lengths, a sustained run, batches, caches, communication.

    The figures go to stdout, progress to stderr. Do not use the swarm for other requests meanwhile. Ctrl-C ends the
    command, and a swarm that it started, with exit code 130.
    """
    from swarm.cli.output import ConsoleProgress, print_json
    from swarm.cli.profile.measure import ProfilePlan
    from swarm.cli.profile.table import print_profile

    if url is not None and model is not None:
        raise typer.BadParameter("--url profiles a swarm that runs, --model starts one: give one of them")
    own = {"device": device, "dtype": dtype, "weights": weights, "mode": mode, "threads": threads, "config": config}
    running = url or (os.environ.get("SWARM_URL") if model is None else None)
    if running is not None and any(value is not None for value in own.values()):
        named = next(name for name, value in own.items() if value is not None)
        raise typer.BadParameter(f"--{named} is for a swarm that is started here; the one at {running} runs already")
    plan = ProfilePlan.quick() if quick else ProfilePlan()
    progress = ConsoleProgress(sys.stderr)
    if running is not None:
        at = load_settings(context, None, {"client.url": running}).client
        result = asyncio.run(measure(at.url, plan, seed, progress.set_status, connect_timeout_s=at.connect_timeout_s))
    else:
        from swarm.cli.up.own_swarm import OwnSwarmOptions, run_with_own_swarm

        # until the runner installs its handlers, SIGTERM cleans up like Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        wanted = OwnSwarmOptions(context, model, workers, device, dtype, weights, mode, threads, config)
        result = run_with_own_swarm(
            wanted, progress, lambda at: measure(at, plan, seed, progress.set_status, fresh=True)
        )
    progress.clear_status()
    result = {**result, "quick": quick, "seed": seed}
    if as_json:
        print_json(result)
    else:
        print_profile(result)


async def measure(
    url: str, plan: ProfilePlan, seed: int, on_phase: Say, *, fresh: bool = False, connect_timeout_s: float = 30.0
) -> Json:
    """Run all phases against the swarm at ``url``."""
    from swarm.cli.profile.measure import Profiler
    from swarm.client.client import AsyncClient

    async with AsyncClient(url, connect_timeout_s=connect_timeout_s) as client:
        return await Profiler(client, plan, on_phase, seed).run(fresh=fresh)
