"""``swarm systemd install | uninstall | status``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.confirm import YesOption, confirm_or_exit
from swarm.cli.options import JsonOption, MemoryOption, read_size
from swarm.cli.output import EXIT_FAILED, make_console, print_error, print_json
from swarm.cli.systemd import files, manager
from swarm.cli.systemd.files import SystemdError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.systemd.install import InstallTarget

app = typer.Typer(
    help="Run Swarm by systemd: units for a broker, workers and a gateway.",
    epilog="Example: swarm systemd install && systemctl enable --now swarm-broker swarm-worker@w0 swarm.target",
)

RootOption = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="An image's root directory; nothing is started there.")
]
UserOption = Annotated[bool, typer.Option("--user", help="For this user's own systemd, without root.")]


@app.command(epilog="Example: swarm systemd install --memory-limit 8GiB")
def install(
    *,
    root: RootOption = None,
    user: UserOption = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Workers see this machine's GPUs.")] = False,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install units, their users and commented settings. Files of an earlier installation are replaced, existing
    settings stay. Nothing is started or enabled: the last lines show how.

    To change options, run it again. After an upgrade, run it again, then systemctl restart the running units. systemd
    listens on the broker's ports by the settings (broker.host, port, listen). When those change, run it again, then
    systemctl stop swarm-broker.socket swarm-broker and systemctl start swarm-broker.
    """
    from swarm.systemd import install as plan

    target = _target(root, user)
    memory = None if memory_limit is None else read_size(memory_limit)
    try:
        program, to_do = _program(root, user)
        addresses, not_yet = _listen_addresses(target, is_live=root is None)
        if root is None:
            manager.check_running(user)
        wanted = plan.InstallOptions(program, manager.version() if root is None else 0, memory, gpu, addresses)
        planned = plan.plan_files(target, wanted)
        for path in [path for path in plan.possible_files(target) if path not in planned]:
            files.remove_file(path)
        for path, text in planned.items():
            files.write_file(path, text)
        settings, text = plan.settings_file(target)
        if not settings.exists():
            files.write_file(settings, text)
        if root is None:
            manager.load_units(user)
    except SystemdError as error:
        raise typer.Exit(print_error("swarm", str(error), EXIT_FAILED)) from None
    if not_yet:
        to_do.append(f"{', '.join(not_yet)}: an address that only the machine itself can resolve; install again there")
    if as_json:
        paths = [str(path) for path in planned]
        print_json({"files": paths, "settings": str(settings), "doors": addresses, "to_do": to_do})
        return
    print(f"installed in {target.units}; settings: {settings}")
    for each in to_do:
        print(each)
    own = " --user" if user else ""
    print(
        "start a broker, a worker and a gateway here, now and at every boot:\n"
        f"  systemctl{own} enable --now swarm.target swarm-broker swarm-worker@w0 swarm-gateway"
    )


@app.command(short_help="Stop, disable and remove the units.", epilog="Example: swarm systemd uninstall --purge")
def uninstall(
    *,
    root: RootOption = None,
    user: UserOption = False,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Also remove settings, state, caches and the units' users; keys are lost."),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop and disable the units, and remove everything that install has created. Settings and state stay, unless
    --purge is given, which asks first on a terminal. Whatever can't be removed is reported with exit code 1; the rest
    is removed."""
    from swarm.systemd import install as plan

    target = _target(root, user)
    if purge:
        confirm_or_exit(
            f"Remove {target.settings} and all state, with its keys and requests?", yes=yes, program="swarm"
        )
    try:
        left = _stop_units(user) if root is None else []
        there = [path for path in plan.possible_files(target) if path.exists()]
        for path in there:
            files.remove_file(path)
        if root is None and not left:
            manager.reload(user)
    except SystemdError as error:
        raise typer.Exit(print_error("swarm", str(error), EXIT_FAILED)) from None
    if purge:
        left += files.purge(target)
        if root is None and not user:
            for name in plan.USERS:
                with contextlib.suppress(SystemdError):  # the user was already removed
                    manager.run_command(("userdel",), name)
    if as_json:
        print_json({"removed": [str(path) for path in there], "purged": purge, "left": left})
    else:
        kept = "" if purge else f"; {target.settings} and the state stay"
        print(f"removed Swarm's files from {target.units}{kept}")
    if left:
        raise typer.Exit(print_error("swarm", "; ".join(left), EXIT_FAILED))


@app.command(short_help="Show the units' states.", epilog="Example: swarm systemd status --json")
def status(*, root: RootOption = None, user: UserOption = False, as_json: JsonOption = False) -> None:
    """Show the units' states, one line each, in systemd's words; for an image, the units and whether they start at
    boot. Exit code 1 if a unit has failed."""
    _target(root, user)
    try:
        rows = manager.unit_states(user) if root is None else manager.image_units(root)
    except SystemdError as error:
        raise typer.Exit(print_error("swarm", str(error), EXIT_FAILED)) from None
    if as_json:
        print_json(rows)
    else:
        make_console().print(_render_units(rows))
    if any(row.get("ActiveState") == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)


_NO_UNITS = "no unit of Swarm is loaded: swarm systemd install, then systemctl enable --now …"


def _render_units(rows: Sequence[Mapping[str, str]]) -> RenderableType:
    from rich.text import Text

    from swarm.screen import ReportTable

    table = ReportTable("unit", "state", "status", show_header=False, box=None, pad_edge=False)
    for row in rows:
        if "UnitFileState" in row:
            cells = (row["Id"], row["UnitFileState"], "")
        else:
            restarts = f"restarted {row['NRestarts']} times" if row.get("NRestarts", "0") not in ("0", "") else ""
            status = "  ".join(filter(None, (row.get("StatusText"), restarts)))
            cells = (row.get("Id", ""), f"{row.get('ActiveState')} ({row.get('SubState')})", status)
        table.add_row(*map(Text, cells))
    return table if rows else Text(_NO_UNITS)


def _target(root: Path | None, user: bool) -> InstallTarget:
    from swarm.systemd.install import InstallTarget

    if root is not None and user:
        raise typer.BadParameter("--root is for an image, --user for this user here: give one of them")
    if root is not None and not root.is_dir():
        raise typer.BadParameter(f"{root} is no directory: --root takes an image's root")
    return InstallTarget(root or Path("/"), user, Path.home())


def _program(root: Path | None, user: bool) -> tuple[Path, list[str]]:
    """Return the program that units start, and the remaining steps for the user."""
    if root is not None:
        program, to_do = files.image_program(root)
        return program, [to_do] if to_do else []
    return files.own_program() if user else files.shared_program(), []


def _listen_addresses(target: InstallTarget, *, is_live: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the broker's listening addresses by its settings, and the ones that only the machine itself can resolve.

    An image's network interfaces have no addresses here. Both are empty if there are no settings yet.
    """
    from swarm.config import load_file
    from swarm.errors import ConfigError
    from swarm.systemd.install import listen_addresses
    from swarm.wire.addresses import is_address, resolve_own

    settings = target.settings / "swarm.toml"
    if not settings.exists():
        return (), ()
    try:
        broker = load_file(settings).broker
        listened = broker.listen if is_live else tuple(filter(is_address, broker.listen))
        return listen_addresses(broker.host, broker.port, resolve_own(listened)), tuple(
            set(broker.listen) - set(listened)
        )
    except ConfigError as error:
        raise SystemdError(str(error)) from None


def _stop_units(user: bool) -> list[str]:
    """Stop and disable all of our units; return the problems.

    If systemd does not answer, it presumably runs nothing, and that is reported. Raises ``SystemdError`` if it answers
    but could not stop a unit: then nothing is removed.
    """
    try:
        manager.check_running(user)
    except SystemdError as error:
        return [f"{error}: it was not asked to stop anything"]
    manager.stop_units(user)
    return []
