"""``swarm broker``, ``swarm worker``, ``swarm gateway``, ``swarm config``: one process each, in the foreground."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.meta.packages import missing_packages, require_packages
from swarm.cli.options import (
    AdapterOption,
    ConfigOption,
    DeviceOption,
    DiscoverableOption,
    DraftOption,
    DtypeOption,
    JoinOption,
    JsonOption,
    ListenOption,
    MemoryOption,
    ModeOption,
    PortOption,
    StateDirOption,
    ThreadsOption,
    UrlOption,
    WeightsOption,
    load_settings,
    settings_readers,
)
from swarm.cli.output import EXIT_FAILED, print_error, print_json
from swarm.cli.up.processes import PARENT_FD_VARIABLE, die_with_parent, disable_core_dumps
from swarm.cli.up.supervisor import EX_CONFIG, EX_UNSERVED
from swarm.errors import ConfigError, JournalError, ModelError, UnservedModel

if TYPE_CHECKING:
    from swarm.auth.rotation import CredentialStore
    from swarm.config import Settings

config_app = typer.Typer(help="Show and check the settings.", epilog="Example: swarm config check config/swarm.toml")


def broker(
    context: typer.Context,
    *,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="Address for this machine itself. [default: 127.0.0.1]"),
    ] = None,
    listen: ListenOption = None,
    discoverable: DiscoverableOption = False,
    port: PortOption = None,
    state_dir: StateDirOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    draft: DraftOption = None,
    min_workers: Annotated[
        int | None, typer.Option("--min-workers", metavar="N", help="Workers to wait for before the first plan.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Run the broker: it accepts requests, assigns layers to workers, and needs no model itself.

    SIGTERM and Ctrl-C shut it down cleanly. Exit code 78 means that it can't work with these settings, and that a
    restart does not help; 1, that a restart may help (for example after a full disk).
    """
    die_with_parent()
    disable_core_dumps()
    overrides = {
        "broker.host": host,
        "broker.listen": listen or None,
        "broker.discoverable": discoverable or None,
        "broker.port": port,
        "broker.mode": mode.value if mode else None,
        "broker.dtype": dtype.value if dtype else None,
        "broker.draft": draft,
        "broker.min_workers": min_workers,
        "state_dir": str(state_dir) if state_dir else None,
    }
    with _exit_on_config_error():
        load, origins = settings_readers(context, config, overrides)
        settings = load()
        if settings.broker.listen and settings.state_dir is None:
            from swarm.auth.memberships import default_state_dir

            settings = settings.model_copy(update={"state_dir": default_state_dir()})  # keys must outlive the broker
        require_packages("broker")
        from swarm import log
        from swarm.broker.service import run
        from swarm.systemd.service_context import ServiceContext

        log.configure(settings.log)
        with _lock_state(settings):
            code = run(settings, ServiceContext.from_environment(settings, load, origins))
    _exit_with(code)


def worker(
    context: typer.Context,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The model: DIR, FILE.gguf, or owner/name[:QUANTIZATION][@revision] on the hub, of which the worker "
            "fetches what its layers need. [default: the embedded demo model]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name in lists and plans. [default: machine and process]"),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address for steps from other workers. [default: the one that reaches the broker]",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    adapter: AdapterOption = None,
    memory_limit: MemoryOption = None,
    threads: ThreadsOption = None,
    state_dir: StateDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Run a worker: it offers one device and the model's files to a broker, and computes the layers it is assigned.

    SIGTERM and Ctrl-C make it leave cleanly, within 3 seconds; a second signal ends it immediately. Exit codes: 0, the
    broker dismissed it (swarmctl stop), and it shall not be started again; 143 or 130, it left because of SIGTERM or
    Ctrl-C; 78, it can't work (the model or a setting is wrong, or the broker refuses it), and a restart does not help.
    """
    is_child = PARENT_FD_VARIABLE in os.environ  # of a supervisor, which need not try the other workers then
    die_with_parent()
    disable_core_dumps()
    overrides = {
        "client.url": url,
        "model": model,
        "worker.name": name,
        "worker.host": host,
        "state_dir": str(state_dir) if state_dir else None,
        "worker.device": device,
        "worker.dtype": dtype.value if dtype else None,
        "worker.weights": weights.value if weights else None,
        "worker.adapters": adapter or None,
        "worker.memory_limit": memory_limit,
        "worker.threads": threads,
    }
    with _exit_on_config_error(unserved_code=EX_UNSERVED if is_child else EX_CONFIG):
        load, origins = settings_readers(context, config, overrides)
        settings = load()
        require_packages("worker")
        from swarm.stage.model.kinds import check_folder
        from swarm.stage.shell.openmp import configure_openmp

        if settings.model:
            check_folder(Path(settings.model).expanduser())  # before torch, whose import takes seconds
        configure_openmp(settings.worker.threads)
        from swarm import log
        from swarm.cli.joining import resolve_worker
        from swarm.stage.shell.service import run
        from swarm.systemd.service_context import ServiceContext

        log.configure(settings.log)
        unit = ServiceContext.from_environment(settings, load, origins)
        settings, known = resolve_worker(settings, join)
        if known is not None:
            from swarm.auth.memberships import default_state_dir
            from swarm.auth.rotation import CredentialStore

            home = CredentialStore(settings.state_dir or default_state_dir(), known)
            _exit_with(run(settings, known.pair, home, _rotate_key, unit))
        _exit_with(run(settings, unit=unit))


def _rotate_key(home: CredentialStore) -> str:
    from swarm.cli.key_rotation import rotate_on_order

    return rotate_on_order(home)


def gateway(
    context: typer.Context,
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The broker's port for clients; several: one gateway for several swarms, as [[swarm]] in a file. "
            "[default: SWARM_URL or tcp://127.0.0.1:5700]",
        ),
    ] = None,
    join: JoinOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on; others than this machine's own need API keys. [default: 127.0.0.1]",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option("--http", metavar="PORT", help="Port to serve. [default: 8000]")] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="DIR", help="Directory of keys.json and of batches."),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="DIR", help="Directory of swarm up's logs: the console shows them to admins."),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Let admins kill workers from the console; set by swarm up.", hidden=True),
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Serve HTTP: any OpenAI or Anthropic client can use the swarm.

    A gateway has no state but its batches: there may be several, and a restarted one serves immediately. SIGTERM and
    Ctrl-C shut it down cleanly: answers get 3 seconds to finish, and longer streams can be resumed at another gateway.
    Exit code 78 means that it can't work with these settings.
    """
    die_with_parent()
    disable_core_dumps()
    overrides = {
        "client.url": url[0] if url else None,
        "swarm": [{"url": each} for each in url] if url and len(url) > 1 else None,
        "gateway.host": host,
        "gateway.port": port,
        "state_dir": str(state_dir) if state_dir else None,
    }
    with _exit_on_config_error():
        load, origins = settings_readers(context, config, overrides)
        settings = load()
        if lacking := missing_packages("gateway"):
            raise ConfigError(lacking)
        from swarm import log
        from swarm.cli.joining import resolve_client
        from swarm.gateway.console.local_swarm import LocalSwarm
        from swarm.gateway.service import run
        from swarm.systemd.service_context import ServiceContext

        log.configure(settings.log)
        unit = ServiceContext.from_environment(settings, load, origins)
        _exit_with(run(settings, resolve_client(settings, join), unit, LocalSwarm(logs, demo)))


@config_app.command(
    "check",
    short_help="Check the settings of file and environment.",
    epilog="Example: swarm config check config/swarm.toml",
)
def check(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Settings file (TOML), as with --config."),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the settings of file and environment together, and the options before the command's name.

    Exit code 1 if something is wrong: the line on stderr has the setting, its value, its origin and the remedy. With
    --json, print the resulting settings.
    """
    if file is not None and config is not None:
        raise typer.BadParameter(f"two settings files are named, {file} and {config}: name one")
    chosen = file or config
    settings = load_settings(context, chosen, {})
    if as_json:
        print_json(settings.model_dump(mode="json"))
    else:
        from swarm.config import file_in_use

        print(f"the settings are right ({file_in_use(chosen) or 'no file'}, and the environment)")


def _exit_with(code: int) -> None:
    if code != 0:
        raise typer.Exit(code)


@contextmanager
def _lock_state(settings: Settings) -> Iterator[None]:
    """Lock the state directory for this broker. If none is configured, nothing is kept."""
    if settings.state_dir is None:
        yield
        return
    from swarm.cli.up.statedir import BROKER_LOCK, hold_lock

    with hold_lock(settings.state_dir, BROKER_LOCK, "swarm broker"):
        yield


@contextmanager
def _exit_on_config_error(unserved_code: int = EX_CONFIG) -> Iterator[None]:
    """Exit with code 78 on errors that a restart can't fix, so that supervisors (ours, systemd) do not restart the
    process; with ``unserved_code`` if no process can serve the model."""
    try:
        yield
    except UnservedModel as error:
        raise typer.Exit(print_error("swarm", str(error), unserved_code)) from None
    except (ConfigError, ModelError, JournalError, typer.BadParameter) as error:
        code = EXIT_FAILED if _is_temporary(error) else EX_CONFIG
        raise typer.Exit(print_error("swarm", str(error), code)) from None


def _is_temporary(error: Exception) -> bool:
    """Whether a restart may help: a full disk may have free space again."""
    from swarm.broker.journal.database import FullDisk
    from swarm.cli.up.statedir import StateDirFull

    return isinstance(error, FullDisk | StateDirFull)
