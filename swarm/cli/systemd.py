"""``swarm systemd``: put the units in place, take them away, tell how they are."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from swarm.cli.options import JsonOption, MemoryOption
from swarm.cli.output import EXIT_FAILED, complain, print_json

if TYPE_CHECKING:
    from swarm.service.install import Target

app = typer.Typer(
    help="Run Swarm by systemd: units for a broker, workers and a gateway.",
    epilog="Example: swarm systemd install && systemctl enable --now swarm-broker swarm-worker@w0 swarm.target",
)
_PATIENCE_S: Final = 90.0
_REFUSED: Final = frozenset("'\"\\")  # by systemd, in the path of what it starts
_HIDDEN: Final = ("/home", "/root", "/run/user")

RootOption = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="An image's root directory; nothing is started there.")
]
UserOption = Annotated[bool, typer.Option("--user", help="For this user's own systemd, without root.")]


class _Failed(Exception):
    """What could not be done, in words."""


@app.command(epilog="Example: swarm systemd install --memory-limit 8GiB")
def install(
    *,
    root: RootOption = None,
    user: UserOption = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Workers see this machine's GPUs.")] = False,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put units, the user swarm and commented settings in place; what was installed before is replaced, settings that
    are there stay. Nothing is started or enabled: the last lines say how.

    Again with other options changes what they say; after an upgrade, again, then systemctl restart what runs. The
    broker's doors are held open where the settings have them (broker.host, port, listen). When those change, again,
    then systemctl stop swarm-broker.socket swarm-broker and systemctl start swarm-broker.
    """
    from swarm.service import install as plan

    try:
        target = _target(root, user)
        memory = None if memory_limit is None else _bytes(memory_limit)
        program = _program()
        if not user:
            _check_reach(program)
        doors, not_yet = _doors(target, is_live=root is None)
        wanted = plan.Wanted(program, _version() if root is None else 0, memory, gpu, doors)
        files = plan.planned(target, wanted)
        for path in [path for path in plan.may_be_there(target) if path not in files]:
            _remove(path)
        for path, text in files.items():
            _write(path, text)
        settings, text = plan.settings_file(target)
        if not settings.exists():
            _write(settings, text)
        if root is None:
            _settle(user)
    except _Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    if as_json:
        print_json({"files": [str(path) for path in files], "settings": str(settings), "doors": doors})
        return
    print(f"installed in {target.units}; settings: {settings}")
    own = " --user" if user else ""
    if not_yet:
        print(f"{', '.join(not_yet)}: an address that only the machine itself knows; install again there")
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
        typer.Option("--purge", help="Settings, state, caches and the user swarm, too: keys are gone."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop and disable what runs, and take away all that install has put there. Settings and state stay, unless
    --purge."""
    from swarm.service import install as plan

    try:
        target = _target(root, user)
        if root is None:
            _stop(user)
        there = [path for path in plan.may_be_there(target) if path.exists()]
        for path in there:
            _remove(path)
        if root is None:
            _run(_systemctl(user), "daemon-reload")
        if purge:
            _purge(target, is_live=root is None)
    except _Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    if as_json:
        print_json({"removed": [str(path) for path in there], "purged": purge})
        return
    print(f"nothing of Swarm is left in {target.units}" + ("" if purge else f"; {target.settings} and the state stay"))


@app.command(epilog="Example: swarm systemd status --json")
def status(*, user: UserOption = False, as_json: JsonOption = False) -> None:
    """How the units are, each in a line, in its own words. Exit code 1 if one has failed."""
    try:
        shown = _run(
            _systemctl(user), "show", "--property", "Id,ActiveState,SubState,StatusText,NRestarts", *_patterns()
        )
    except _Failed as error:
        raise typer.Exit(complain("swarm", str(error), EXIT_FAILED)) from None
    rows = [
        dict(line.partition("=")[::2] for line in part.splitlines()) for part in shown.strip().split("\n\n") if part
    ]
    if as_json:
        print_json(rows)
    for row in [] if as_json else rows:
        state = f"{row.get('ActiveState')} ({row.get('SubState')})"
        restarts = f"  started again {row['NRestarts']} times" if row.get("NRestarts", "0") not in ("0", "") else ""
        print(f"{row.get('Id', ''):<28} {state:<22} {row.get('StatusText', '')}{restarts}")
    if not rows and not as_json:
        print("no unit of Swarm is loaded: swarm systemd install, then systemctl enable --now …")
    if any(row.get("ActiveState") == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _patterns() -> tuple[str, ...]:
    return ("swarm-*.service", "swarm-*.socket", "swarm.target")


def _target(root: Path | None, user: bool) -> Target:
    from swarm.service.install import Target

    if root is not None and user:
        raise _Failed("--root is for an image, --user for this user here: give one of them")
    if root is not None and not root.is_dir():
        raise _Failed(f"{root} is no directory: --root takes an image's root")
    return Target(root or Path("/"), user, Path.home())


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
        raise _Failed(str(error)) from None


def _program() -> Path:
    """This installation's ``swarm``, by which the units start."""
    beside = Path(sys.executable).parent / "swarm"
    found = beside if beside.exists() else shutil.which("swarm")
    if found is None:
        raise _Failed("there is no program swarm beside this Python: install the package with pip")
    program = Path(found).absolute()
    if set(str(program)) & _REFUSED:
        raise _Failed(
            f"systemd starts no program with quotes or backslashes in its path: install elsewhere than {program}"
        )
    return program


def _check_reach(program: Path) -> None:
    """Units run as a user of their own, to whom homes are hidden."""
    for path in (program, Path(sys.base_prefix)):
        if any(path.resolve().is_relative_to(home) for home in _HIDDEN):
            raise _Failed(
                f"{path} is in somebody's home, which the units don't see: install Swarm into /opt or /usr/local, by a "
                "Python of the system, or use --user"
            )


def _version() -> int:
    found = re.match(r"systemd (\d+)", _run(("systemctl",), "--version"))
    return int(found[1]) if found else 0


def _systemctl(user: bool) -> tuple[str, ...]:
    return ("systemctl", "--user") if user else ("systemctl",)


def _run(command: tuple[str, ...], *words: str) -> str:
    """Run it to its end. Raises _Failed with what it said."""
    try:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError:
        raise _Failed(f"there is no {command[0]} here: this system is not run by systemd") from None
    except subprocess.TimeoutExpired:
        raise _Failed(f"{command[0]} {words[0] if words else ''} takes longer than {_PATIENCE_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise _Failed(f"{' '.join([*command, *words[:1]])}: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _settle(user: bool) -> None:
    """Have systemd see what is new."""
    if not user:
        _run(("systemd-sysusers",), "swarm.conf")
        _run(("systemd-tmpfiles",), "--create", "swarm.conf")
    _run(_systemctl(user), "daemon-reload")


def _stop(user: bool) -> None:
    loaded = _run(_systemctl(user), "list-units", "--all", "--plain", "--no-legend", *_patterns())
    names = [line.split()[0] for line in loaded.splitlines() if line.split()]
    if names:
        _run(_systemctl(user), "stop", *names)
    enabled = _run(_systemctl(user), "list-unit-files", "--plain", "--no-legend", *_patterns())
    installed = [line.split()[0] for line in enabled.splitlines() if line.split()]
    if installed:
        _run(_systemctl(user), "disable", *installed)
        for name in names:
            if "@" in name:
                _run(_systemctl(user), "disable", name)
    if names:
        subprocess.run(
            [*_systemctl(user), "reset-failed", *names], capture_output=True, timeout=_PATIENCE_S, check=False
        )


def _purge(target: Target, *, is_live: bool) -> None:
    base = target.home / ".local" if target.is_user else target.root
    places = [target.settings]
    if target.is_user:
        places += [base / "state/swarm", target.home / ".cache/swarm"]
    else:
        places += [base / "var/lib/swarm", base / "var/cache/swarm", base / "run/swarm"]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    if is_live and not target.is_user:
        with contextlib.suppress(_Failed):  # somebody else has removed it
            _run(("userdel",), "swarm")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    except OSError as error:
        raise _Failed(f"{path} can't be written ({error.strerror}): root can, or use --user") from None


def _remove(path: Path) -> None:
    """And the directory of drop-ins that it was in, if that is empty then."""
    try:
        path.unlink(missing_ok=True)
        if path.parent.name.endswith(".d") and path.parent.name.startswith("swarm") and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _Failed(f"{path} can't be removed ({error.strerror}): root can, or use --user") from None


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise _Failed(f"{text!r} is no amount of memory: write it as 8GiB, say") from None
