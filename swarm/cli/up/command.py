"""``swarm up``: a whole swarm on this machine, in one command."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.meta.packages import require_packages
from swarm.cli.options import (
    AdapterOption,
    ConfigOption,
    DeviceOption,
    DiscoverableOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    ListenOption,
    MemoryOption,
    ModeOption,
    PortOption,
    StateDirOption,
    ThreadsOption,
    WeightsOption,
    load_settings,
)
from swarm.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConsoleProgress,
    JsonProgress,
    Observer,
    ignore_report,
    print_error,
)
from swarm.cli.up.devices import gpu_memory_share, with_device, with_gpus, worker_memory_share
from swarm.cli.up.http import GatewayPoller, unavailable_reason
from swarm.cli.up.processes import DETACHED_VARIABLE, PARENT_FD_VARIABLE, die_with_parent, export_source_path
from swarm.cli.up.supervisor import BROKER, EX_CONFIG, GATEWAY, MAX_WORKERS, SWARM_PREFIX, is_worker
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import Settings

NUM_WORKERS = 2  # the smallest number with communication between workers
# with other machines, the ports of heartbeats and finished steps are fixed, too, for the sake of firewalls
NUM_AUTH_PORTS = 4
NUM_PORTS = 2  # ports for clients and for workers' control; the broker chooses the others itself
_ATTACHED = "Ctrl-C stops it"
_DETACHED = "it runs in the background: swarm ps, swarm logs, swarm down"


def up(
    context: typer.Context,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The model: DIR, FILE.gguf, or owner/name[:QUANTIZATION][@revision] on the hub, of which each worker "
            "fetches what its layers need. Several: a swarm for each, behind one gateway. [default: the embedded demo "
            "model]",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            max=MAX_WORKERS,
            help="Workers to start for each model; with fewer than two, nothing is distributed. 0: only the broker; "
            "workers join later (swarm worker, swarmctl join).",
        ),
    ] = NUM_WORKERS,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Start one worker, gpu0, gpu1 and so on, on each GPU of this machine.")
    ] = False,
    listen: ListenOption = None,
    discoverable: DiscoverableOption = False,
    port: PortOption = None,
    http: Annotated[
        int | None, typer.Option("--http", metavar="PORT", help="Port of the HTTP gateway. [default: 8000]")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Run no HTTP gateway.")] = False,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    adapter: AdapterOption = None,
    mode: ModeOption = None,
    draft: DraftOption = None,
    state_dir: StateDirOption = None,
    memory_limit: MemoryOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    config: ConfigOption = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return when it serves; it runs on (swarm ps, swarm logs, swarm down)."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the log lines of the broker and the workers.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a broker, workers and an HTTP gateway on this machine, and keep them running.

    Processes that die are restarted. Ctrl-C (or SIGTERM) stops all within 5 seconds with exit code 0; a second Ctrl-C
    kills them immediately, with exit code 130. Without --state-dir, state and logs are in a private temporary directory
    that is removed at the end. With --json, each line is an object whose "event" is starting, progress, serving (with
    url, model, epoch and stages; once per plan), http (with url, keys and console: the gateway answers there) or note.
    There is no gateway, and a line says so, if its packages are missing, or if port 8000 is in use and was not chosen
    explicitly. Several models divide the free memory in proportion to their weights; each has two ports (four with
    --listen), from --port on.
    """
    from swarm.auth.memberships import default_state_dir
    from swarm.cli.up.models import resolve_draft, resolve_models, with_adapters
    from swarm.cli.up.runs import RecordedSwarm, RunRecorder, redirect_output
    from swarm.cli.up.statedir import state_directory
    from swarm.safe_stream import guard_stdout
    from swarm.wire.addresses import resolve_own

    is_child = PARENT_FD_VARIABLE in os.environ  # of a swarm up with several models
    die_with_parent()
    guard_stdout()  # a closed stdout must not end the swarm

    # Until the runner installs its handlers, SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_detached = os.environ.pop(DETACHED_VARIABLE, None) is not None
    if detach and not is_detached:
        from swarm.cli.up.detached import start_detached

        raise typer.Exit(start_detached())
    overrides = {
        "model": model[0] if model else None,
        "broker.port": port,
        "broker.listen": listen or None,
        "broker.discoverable": discoverable or None,
        "broker.mode": mode.value if mode else None,
        "broker.draft": draft,
        "broker.dtype": dtype.value if dtype else None,
        "gateway.port": http,
        "worker.dtype": dtype.value if dtype else None,
        "worker.weights": weights.value if weights else None,
        "worker.adapters": adapter or None,
        "worker.memory_limit": memory_limit,
        "worker.threads": threads,
        "worker.device": device,
        "state_dir": str(state_dir) if state_dir else None,
    }
    _refuse_contradictions(context)
    settings = load_settings(context, config, overrides)
    several = model if model and len(model) > 1 else []
    if several:
        _refuse_parts_of_one_model(settings)
    require_packages("broker", *(["worker"] if workers else []))
    if is_detached:
        redirect_output()  # from here on, an error has exit code 1; a wrong command line has 2
    models, draft_path = resolve_models(settings, several), resolve_draft(settings)
    settings = with_adapters(settings, models[0].name) if workers or gpu else settings
    addresses = resolve_own(settings.broker.listen)
    num_ports = NUM_AUTH_PORTS if addresses else NUM_PORTS
    ports = range(settings.broker.port, settings.broker.port + num_ports * len(models))
    check_ports(settings.broker.host, ports.start, len(ports) if several else NUM_PORTS)
    for address in addresses:
        check_ports(address, ports.start, len(ports))
    no_gateway = "" if no_http else unavailable_reason(settings.gateway, ports)
    export_source_path()
    settings, gpus = with_gpus(settings) if gpu else (with_device(settings), ())
    workers = len(gpus) or workers
    # Keys must outlive this process.
    state_path = settings.state_dir or (default_state_dir() if addresses else None)
    with state_directory(state_path) as directory:
        num_swarms = len(models)
        share = gpu_memory_share(gpus, num_swarms) if gpus else worker_memory_share(settings, workers, num_swarms)
        shares = divide_memory(share, [each.num_bytes for each in models])
        others = tuple(
            OtherSwarm(SWARM_PREFIX + each.name, each.location, ports.start + number * num_ports, shares[number])
            for number, each in enumerate(models)
        )[1:]
        commands = ChildCommands(
            settings,
            config,
            models[0].location,
            directory,
            workers,
            shares[0],
            verbose,
            addresses,
            draft_path,
            others,
            model_folder=models[0].folder,
            gpus=tuple(gpu.device for gpu in gpus),
        )
        has_http = not no_http and not no_gateway
        all_ports = (ports.start, *(other.port for other in others))
        swarms = [RecordedSwarm(each.name, commands.url_at(port)) for each, port in zip(models, all_ports, strict=True)]
        observe = (
            ignore_report
            if is_child
            else RunRecorder(
                swarms, directory, has_workers=workers > 0, has_http=has_http, is_logged=is_detached
            ).observe
        )
        plan = _UpPlan(
            workers,
            http=has_http,
            notes=[
                *(f"gpu{number} computes on {gpu.device}: {gpu.name}" for number, gpu in enumerate(gpus)),
                *(f"{each.name}: {each.limits}" for each in models if each.limits),
                no_gateway,
            ],
            observe=observe,
            how_to_stop=_DETACHED if is_detached else _ATTACHED,
            example=models[0].example,
        )
        code = asyncio.run(_run(commands, directory, plan, verbose, as_json))
    raise typer.Exit(EX_CONFIG if is_child and code == EXIT_FAILED else code)


@dataclass(frozen=True, slots=True)
class _UpPlan:
    """Processes to run in addition to the broker. ``notes`` and ``how_to_stop`` are lines for the user; ``observe``
    gets every report."""

    num_workers: int
    http: bool
    notes: Sequence[str]
    observe: Observer
    how_to_stop: str
    example: str  # a command that uses the model, if there is one


async def _run(commands: ChildCommands, directory: Path, plan: _UpPlan, verbose: bool, as_json: bool) -> int:
    from swarm.cli.up.runner import BrokerHost, Runner

    progress = (JsonProgress if as_json else ConsoleProgress)(sys.stdout, plan.observe)
    count = "1 worker" if plan.num_workers == 1 else f"{plan.num_workers} workers"
    progress.report(
        [f"starting a broker at {commands.url} and {count}; logs: {directory / 'logs'}"],
        {"event": "starting", "url": commands.url, "num_workers": plan.num_workers, "logs": str(directory / "logs")},
    )
    for other in commands.others:
        url, log = commands.url_at(other.port), directory / "logs" / f"{other.name}.log"
        progress.print_line(f"{other.name}: a swarm of {other.model} at {url}; its log: {log}")
    for note in filter(None, plan.notes):
        progress.print_line(note)
    if commands.addresses:
        progress.print_line(
            f"other machines are served at {' and '.join(commands.addresses)}, by keys; to let one in, run here: "
            "swarmctl invite --role worker"
        )

    def link() -> BrokerHost:
        from swarm.cli.up.host import HostConnection

        return HostConnection(commands.url, progress, plan.how_to_stop, plan.example)

    gateway_watch = GatewayPoller(commands.settings.gateway, directory, progress) if plan.http else None
    forkserver = commands.forkserver_command()
    runner = Runner(
        commands,
        directory / "logs",
        progress,
        link,
        gateway_watch=gateway_watch,
        forkserver=forkserver,
        verbose=verbose,
    )
    others = tuple(other.name for other in commands.others)
    error = await runner.run(plan.num_workers, commands.settings.worker.device, others, commands.gpus)
    progress.clear_status()
    if error is not None:
        plan.observe((f"swarm: {error}",), {"event": "error"})
        return print_error("swarm", error)
    return EXIT_INTERRUPTED if runner.was_interrupted_twice else 0


def _refuse_contradictions(context: typer.Context) -> None:
    """Raise ``BadParameter`` for options that exclude each other."""

    def is_given(option: str) -> bool:
        source = context.get_parameter_source(option)
        return source is not None and source.name != "DEFAULT"

    if is_given("http") and is_given("no_http"):
        raise typer.BadParameter("--http and --no-http contradict each other: give one")
    if is_given("gpu") and (is_given("device") or is_given("workers")):
        raise typer.BadParameter("--gpu starts one worker on each GPU: give no --device and no --workers with it")


def _refuse_parts_of_one_model(settings: Settings) -> None:
    """Raise ``BadParameter`` for settings that go with one model."""
    if settings.worker.adapters:
        raise typer.BadParameter("adapters go with one model: give one --model, or no adapter")
    if settings.broker.draft:
        raise typer.BadParameter("a draft model goes with one model: give one --model, or no draft model")


def check_ports(host: str, first: int, count: int = NUM_PORTS) -> None:
    """Raise ``ConfigError`` with the port if one of ours is in use.

    The broker checks again; this check gives a clear error before any process is started.
    """
    for port in range(first, first + count):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the broker does: closed connections in TIME_WAIT do not count
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(_port_error(host, port, range(first, first + count), error)) from None


def _port_error(host: str, port: int, all_ports: range, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        span = " and ".join(map(str, all_ports))
        return f"port {port} is in use (a swarm needs {span}): stop what listens there, or choose others with --port"
    return f"can't listen on port {port} of {host} ({error.strerror}); choose others with --port"


@dataclass(frozen=True, slots=True)
class OtherSwarm:
    """A further swarm: the name of its child, its model, its first port, and the bytes of each worker's process."""

    name: str
    model: str
    port: int
    memory_share: int | None


@dataclass(frozen=True, slots=True)
class ChildCommands:
    """Command lines of the children: flags for what differs from child to child; file and environment are inherited."""

    settings: Settings
    config: Path | None
    model: str
    directory: Path  # state directory
    num_workers: int
    memory_share: int | None  # bytes of each worker's process; None: no limit
    verbose: bool
    addresses: tuple[str, ...] = ()  # where other machines are served
    draft: str | None = None  # draft model
    others: tuple[OtherSwarm, ...] = ()
    model_folder: Path | None = None  # of the model's configuration, which the fork server checks
    gpus: tuple[str, ...] = ()  # devices that have one worker each; empty: all workers are on ``worker.device``

    @property
    def url(self) -> str:
        return self.url_at(self.settings.broker.port)

    def url_at(self, port: int) -> str:
        host = self.settings.broker.host
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def __call__(self, name: str, memory_limit: int | None = None, device: str = "") -> list[str]:
        """Return the command line of child ``name``; of a worker with this limit and device, by default the common
        ones."""
        if name in (BROKER, GATEWAY):
            flags = self._broker_flags() if name == BROKER else self._gateway_flags()
        elif not is_worker(name):
            flags = self._swarm_flags(next(other for other in self.others if other.name == name))
        else:
            flags = self._worker_flags(name, memory_limit, device)
        if self.config is not None:
            flags += ["--config", str(self.config.expanduser().absolute())]
        return [sys.executable, "-P", "-m", "swarm", *self._log_flags(), *flags]

    def forkserver_command(self) -> list[str] | None:
        """Return the command line of the fork server; None if workers can't be forked."""
        if sys.platform != "linux" or self.settings.worker.device != "cpu":
            return None  # a GPU's driver does not survive a fork
        return [sys.executable, "-P", "-m", "swarm.cli.up.forkserver.process", str(self.model_folder or self.model)]

    def _log_flags(self) -> list[str]:
        log = self.settings.log
        form = "console" if self.verbose and log.format == "auto" else log.format
        return ["--log-level", log.level, "--log-format", form]

    def _broker_flags(self) -> list[str]:
        broker = self.settings.broker
        # Unless configured otherwise, the first plan waits for all requested workers.
        min_workers = broker.min_workers if broker.min_workers > 1 else max(1, self.num_workers)
        return [
            BROKER,
            *("--port", str(broker.port)),
            *("--mode", broker.mode),
            *("--dtype", self.settings.worker.dtype if broker.dtype == "auto" else broker.dtype),
            *("--min-workers", str(min_workers)),
            *(part for address in self.addresses for part in ("--listen", address)),
            *(["--discoverable"] if broker.discoverable else []),
            *(["--draft", self.draft] if self.draft else []),
            *("--state-dir", str(self.directory)),
        ]

    def _gateway_flags(self) -> list[str]:
        from swarm.config import is_loopback

        gateway = self.settings.gateway
        is_demo = not self.addresses and is_loopback(gateway.host)  # no other machine depends on this swarm
        return [
            GATEWAY,
            *("--url", self.url),
            *(part for other in self.others for part in ("--url", self.url_at(other.port))),
            *("--host", gateway.host),
            *("--http", str(gateway.port)),
            *("--state-dir", str(self.directory)),
            *("--logs", str(self.directory / "logs")),
            *(["--demo"] if is_demo else []),
        ]

    def _swarm_flags(self, other: OtherSwarm) -> list[str]:
        worker = self.settings.worker
        limit = worker.memory_limit or other.memory_share
        return [
            *("up", "--no-http"),
            *("--model", other.model),
            *(["--gpu"] if self.gpus else ["--workers", str(self.num_workers)]),
            *("--port", str(other.port)),
            *("--mode", self.settings.broker.mode),
            *([] if self.gpus else ["--device", worker.device]),
            *("--dtype", worker.dtype),
            *("--weights", worker.weights),
            *("--threads", str(worker.threads or self._share_of_cores())),
            *("--state-dir", str(self.directory / other.name)),
            *(part for address in self.addresses for part in ("--listen", address)),
            *(("--memory-limit", str(int(limit))) if limit else ()),
            *(["--verbose"] if self.verbose else []),
        ]

    def _worker_flags(self, name: str, memory_limit: int | None, device: str) -> list[str]:
        worker = self.settings.worker
        # The common limit and the share of the memory are for the common device.
        is_common = device in ("", worker.device, *self.gpus)
        common_limit = worker.memory_limit or self.memory_share if is_common else None
        limit = memory_limit or common_limit
        return [
            "worker",
            *("--url", self.url),
            *("--model", self.model),
            *("--name", name),
            *("--device", device or worker.device),
            *("--dtype", worker.dtype),
            *("--weights", worker.weights),
            *(part for adapter in worker.adapters for part in ("--adapter", adapter)),
            *("--threads", str(worker.threads or self._share_of_cores())),
            *(("--host", self.addresses[0]) if self.addresses and worker.host == "auto" else ()),
            *(("--memory-limit", str(int(limit))) if limit else ()),
        ]

    def _share_of_cores(self) -> int:
        return max(1, num_cores() // max(1, self.num_workers * (1 + len(self.others))))


def num_cores() -> int:
    """Return the number of cores that this process may use; containers and ``taskset`` reduce the machine's number."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def divide_memory(share: int | None, sizes: Sequence[int]) -> list[int | None]:
    """Return each model's part of a worker's memory, in proportion to the bytes of its weights; for a single model, all
    of it. Then room for keys and values is in proportion, too."""
    if share is None or not sum(sizes):
        return [share] * max(1, len(sizes))
    return [share * size // sum(sizes) for size in sizes]
