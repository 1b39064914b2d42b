"""A temporary swarm for one command, by the machinery of ``swarm up``."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.cli.meta.packages import require_packages
from swarm.cli.options import Dtype, Mode, Weights, load_settings
from swarm.cli.output import ConsoleProgress
from swarm.cli.up.command import ChildCommands, check_ports
from swarm.cli.up.devices import with_device, worker_memory_share
from swarm.cli.up.host import HostConnection
from swarm.cli.up.models import resolve_models
from swarm.cli.up.processes import export_source_path
from swarm.cli.up.runner import Runner
from swarm.cli.up.statedir import state_directory
from swarm.cli.up.supervisor import StopRequested
from swarm.errors import ConfigError, SwarmError

if TYPE_CHECKING:
    import typer

    from swarm.config import Settings

_T = TypeVar("_T")
_PORTS = range(10_000, 19_000, 2)  # below the ephemeral ports of most systems
_NUM_TRIES = 50


@dataclass(frozen=True, slots=True)
class OwnSwarmOptions:
    """Settings of the temporary swarm; None where file, environment and defaults decide."""

    context: typer.Context
    model: str | None
    num_workers: int
    device: str | None = None
    dtype: Dtype | None = None
    weights: Weights | None = None
    mode: Mode | None = None
    threads: int | None = None
    config: Path | None = None

    def settings(self, port: int) -> Settings:
        overrides = {
            "model": self.model,
            "broker.port": port,
            "broker.mode": self.mode.value if self.mode else None,
            "broker.dtype": self.dtype.value if self.dtype else None,
            "worker.dtype": self.dtype.value if self.dtype else None,
            "worker.weights": self.weights.value if self.weights else None,
            "worker.device": self.device,
            "worker.threads": self.threads,
        }
        return load_settings(self.context, self.config, overrides)


def run_with_own_swarm(
    wanted: OwnSwarmOptions, progress: ConsoleProgress, use: Callable[[str], Coroutine[Any, Any, _T]]
) -> _T:
    """Start a swarm on free ports, run ``use`` (the swarm may not serve yet), and stop the swarm in any case.

    Raises ``KeyboardInterrupt`` after a signal, ``SwarmError`` if the swarm can't run.
    """
    settings = wanted.settings(_free_port(wanted.settings(_PORTS[0]).broker.host))
    require_packages("broker", "worker")
    (model,) = resolve_models(settings)
    export_source_path()
    settings = with_device(settings)
    with state_directory(None) as directory:
        share = worker_memory_share(settings, wanted.num_workers)
        commands = ChildCommands(
            settings,
            wanted.config,
            model.location,
            directory,
            wanted.num_workers,
            share,
            verbose=False,
            model_folder=model.folder,
        )
        progress.set_status(f"starting a swarm of {wanted.num_workers} at {commands.url}")
        return asyncio.run(_run(commands, directory / "logs", progress, use))


async def _run(
    commands: ChildCommands, logs: Path, progress: ConsoleProgress, use: Callable[[str], Coroutine[Any, Any, _T]]
) -> _T:
    quiet = ConsoleProgress(io.StringIO())  # the caller of ``use`` reports what the swarm waits for
    runner = Runner(commands, logs, progress, lambda: HostConnection(commands.url, quiet, ""))
    running = asyncio.create_task(runner.run(commands.num_workers, commands.settings.worker.device))
    using = asyncio.create_task(use(commands.url))
    try:
        await asyncio.wait({running, using}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return await using
        if error := await running:
            raise SwarmError(error)
        raise KeyboardInterrupt
    finally:
        using.cancel()
        if not running.done():
            runner.feed(StopRequested())
        await _wait_ended(running, using)


async def _wait_ended(*tasks: Awaitable[object]) -> None:
    """Wait for these tasks and ignore their errors: a relevant one is raised already."""
    await asyncio.gather(*tasks, return_exceptions=True)


def _free_port(host: str) -> int:
    for port in random.sample(_PORTS, _NUM_TRIES):
        try:
            check_ports(host, port)
        except ConfigError:
            continue
        return port
    span = f"{_PORTS.start} to {_PORTS.stop}"
    raise ConfigError(f"{_NUM_TRIES} ports of {host} from {span} were tried and none is free: free some of them")
