"""``swarm systemd install | uninstall | status``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.asking import YesOption, ask_first
from swarm.cli.options import JsonOption, MemoryOption, read_size
from swarm.cli.output import EXIT_FAILED, complain, print_json
from swarm.cli.systemd import files, manager
from swarm.cli.systemd.files import Failed

if TYPE_CHECKING:
    from swarm.service.install import Target

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
    """Put units, their users and commented settings in place; what was installed before is replaced, settings that
    are there stay. Nothing is started or enabled: the last lines say how.

    Again with other options changes what they say; after an upgrade, again, then systemctl restart what runs. The
    broker's doors are held open where the settings have them (broker.host, port, listen). When those change, again,
    then systemctl stop swarm-broker.socket swarm-broker and systemctl start swarm-broker.
    """
    from swarm.service import install as plan

    target = _target(root, user)
    memory = None if memory_limit is None else read_size(memory_limit)
    try:
        program, to_do = _program(root, user)
        doors, not_yet = _doors(target, is_live=root is None)
        if root is None:
            manager.check_it_answers(user)
        wanted = plan.Wanted(program, manager.version() if root is None else 0, memory, gpu, doors)
        planned = plan.planned(target, wanted)
        for path in [path for path in plan.may_be_there(target) if path not in planned]:
            files.remove(path)
        for path, text in planned.items():
            files.write(path, text)
        settings, text = plan.settings_file(target)
        if not settings.exists():
            files.write(settings, text)
        if root is None:
            manager.settle(user)
    except Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    if not_yet:
        to_do.append(f"{', '.join(not_yet)}: an address that only the machine itself knows; install again there")
    if as_json:
        paths = [str(path) for path in planned]
        print_json({"files": paths, "settings": str(settings), "doors": doors, "to_do": to_do})
        return
    print(f"installed in {target.units}; settings: {settings}")
    for each in to_do:
        print(each)
    own = " --user" if user else ""
    print(
        "start a broker, a worker and a gateway here, now and at every boot:\n"
        f"  systemctl{own} enable --now swarm.target swarm-broker swarm-worker@w0 swarm-gateway"
    )


@app.command(epilog="Example: swarm systemd uninstall --purge")
def uninstall(
    *,
    root: RootOption = None,
    user: UserOption = False,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Settings, state, caches and the units' users, too: keys are gone."),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop and disable what runs, and take away all that install has put there. Settings and state stay, unless
    --purge, which asks first on a terminal. What can't be taken away is said, with exit code 1, and the rest goes all
    the same."""
    from swarm.service import install as plan

    target = _target(root, user)
    if purge:
        ask_first(f"Remove {target.settings} and all state, with its keys and requests?", yes=yes, program="swarm")
    try:
        left = _stopped(user) if root is None else []
        there = [path for path in plan.may_be_there(target) if path.exists()]
        for path in there:
            files.remove(path)
        if root is None and not left:
            manager.reload(user)
    except Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    if purge:
        left += files.purge(target)
        if root is None and not user:
            for name in plan.USERS:
                with contextlib.suppress(Failed):  # somebody else has removed it
                    manager.run(("userdel",), name)
    if as_json:
        print_json({"removed": [str(path) for path in there], "purged": purge, "left": left})
    else:
        kept = "" if purge else f"; {target.settings} and the state stay"
        print(f"nothing of Swarm is left in {target.units}{kept}")
    if left:
        raise typer.Exit(complain("swarm", "; ".join(left), EXIT_FAILED))


@app.command(epilog="Example: swarm systemd status --json")
def status(*, root: RootOption = None, user: UserOption = False, as_json: JsonOption = False) -> None:
    """How the units are, each in a line, in its own words; of an image, which there are, and whether they start at
    boot. Exit code 1 if one has failed."""
    _target(root, user)
    try:
        rows = manager.how_they_are(user) if root is None else manager.what_an_image_has(root)
    except Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    if as_json:
        print_json(rows)
    else:
        print("\n".join(_line(row) for row in rows) or _NOTHING)
    if any(row.get("ActiveState") == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)


_NOTHING = "no unit of Swarm is loaded: swarm systemd install, then systemctl enable --now …"


def _line(row: dict[str, str]) -> str:
    if "UnitFileState" in row:
        return f"{row['Id']:<28} {row['UnitFileState']}"
    state = f"{row.get('ActiveState')} ({row.get('SubState')})"
    restarts = f"  started again {row['NRestarts']} times" if row.get("NRestarts", "0") not in ("0", "") else ""
    return f"{row.get('Id', ''):<28} {state:<22} {row.get('StatusText', '')}{restarts}"


def _target(root: Path | None, user: bool) -> Target:
    from swarm.service.install import Target

    if root is not None and user:
        raise typer.BadParameter("--root is for an image, --user for this user here: give one of them")
    if root is not None and not root.is_dir():
        raise typer.BadParameter(f"{root} is no directory: --root takes an image's root")
    return Target(root or Path("/"), user, Path.home())


def _program(root: Path | None, user: bool) -> tuple[Path, list[str]]:
    """What units start, and what is still to be done for that."""
    if root is not None:
        program, to_do = files.program_in(root)
        return program, [to_do] if to_do else []
    return files.program_here() if user else files.program_for_all(), []


def _doors(target: Target, *, is_live: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where the broker listens by its settings, if there are any yet; and what of it is known on the machine alone:
    interfaces of an image have no address."""
    from swarm.config import load_file
    from swarm.errors import ConfigError
    from swarm.service.install import doors
    from swarm.wire.addresses import is_address, own

    settings = target.settings / "swarm.toml"
    if not settings.exists():
        return (), ()
    try:
        broker = load_file(settings).broker
        listened = broker.listen if is_live else tuple(filter(is_address, broker.listen))
        return doors(broker.host, broker.port, own(listened)), tuple(set(broker.listen) - set(listened))
    except ConfigError as error:
        raise Failed(str(error)) from None


def _stopped(user: bool) -> list[str]:
    """Stop and disable all that is ours. Where systemd does not answer, nothing is left running by it as far as can be
    told, and that is said. Raises Failed if it answers, and could not stop something: then all stays in place."""
    try:
        manager.check_it_answers(user)
    except Failed as error:
        return [f"{error}: it was not asked to stop anything"]
    manager.stop(user)
    return []
