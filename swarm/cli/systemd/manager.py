"""Queries and commands for systemd."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from swarm.cli.systemd.files import SystemdError

PATTERNS: Final = ("swarm-*.service", "swarm-*.socket", "swarm.target")  # names of our units
_TIMEOUT_S: Final = 90.0


def systemctl(user: bool) -> tuple[str, ...]:
    return ("systemctl", "--user") if user else ("systemctl",)


def run_command(command: tuple[str, ...], *words: str, patience_s: float = _TIMEOUT_S) -> str:
    """Run a command to its end. Raises ``SystemdError`` with its error output."""
    try:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=patience_s, check=False)
    except FileNotFoundError:
        raise SystemdError(f"there is no {command[0]} here: this system is not run by systemd") from None
    except subprocess.TimeoutExpired:
        raise SystemdError(f"{command[0]} {words[0] if words else ''} takes longer than {patience_s:.0f} s") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise SystemdError(
            f"{' '.join([*command, *words[:1]])}: {output[0] if output else f'exit code {done.returncode}'}"
        )
    return done.stdout


def version() -> int:
    found = re.match(r"systemd (\d+)", run_command(("systemctl",), "--version"))
    return int(found[1]) if found else 0


def check_running(user: bool) -> None:
    """Raise ``SystemdError`` if systemd does not answer: then nothing may be started that it would have to end."""
    run_command(systemctl(user), "show", "--property", "Version")


def load_units(user: bool) -> None:
    """Make systemd load the new files."""
    if not user:
        run_command(("systemd-sysusers",), "swarm.conf")
        run_command(("systemd-tmpfiles",), "--create", "swarm.conf")
    reload(user)


def reload(user: bool) -> None:
    run_command(systemctl(user), "daemon-reload")


def stop_units(user: bool) -> None:
    """Stop and disable all of our units."""
    loaded = run_command(systemctl(user), "list-units", "--all", "--plain", "--no-legend", *PATTERNS)
    names = [line.split()[0] for line in loaded.splitlines() if line.split()]
    if names:
        run_command(systemctl(user), "stop", *names)
    enabled = run_command(systemctl(user), "list-unit-files", "--plain", "--no-legend", *PATTERNS)
    installed = [line.split()[0] for line in enabled.splitlines() if line.split()]
    if installed:
        run_command(systemctl(user), "disable", *installed)
        for name in names:
            if "@" in name:
                run_command(systemctl(user), "disable", name)
    if names:
        subprocess.run([*systemctl(user), "reset-failed", *names], capture_output=True, timeout=_TIMEOUT_S, check=False)


def unit_states(user: bool, *more: str, patience_s: float = _TIMEOUT_S) -> list[dict[str, str]]:
    """Return a row for each loaded unit; with ``--all`` in ``more``, also for units that are not running."""
    words = ("show", *more, "--property", "Id,ActiveState,SubState,StatusText,NRestarts", *PATTERNS)
    shown = run_command(systemctl(user), *words, patience_s=patience_s)
    parts = [part for part in shown.strip().split("\n\n") if part]
    return [dict(line.partition("=")[::2] for line in part.splitlines()) for part in parts]


def image_units(root: Path) -> list[dict[str, str]]:
    """Return a row for each unit that is installed in an image, with whether it starts at boot."""
    shown = run_command(("systemctl", f"--root={root}"), "list-unit-files", "--plain", "--no-legend", *PATTERNS)
    rows = [line.split() for line in shown.splitlines() if line.split()]
    return [{"Id": row[0], "UnitFileState": row[1] if len(row) > 1 else ""} for row in rows]
