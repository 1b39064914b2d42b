"""Location of the settings and state of services on this machine.

Where systemd units are installed, their settings and state are used, unless others are named.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.auth.memberships import default_state_dir
from swarm.config import file_in_use
from swarm.systemd.install import InstallTarget

SERVICES: Final = ("broker", "workers", "gateway")  # the units' own directories; the one with the journal first


@dataclass(frozen=True, slots=True)
class ServicePaths:
    """Locations of settings and state; None where none is configured.

    ``is_of_units``: ``state`` contains the directories of the units.
    """

    settings: Path | None
    state: Path | None
    is_of_units: bool = False


def find_units(root: Path = Path("/"), home: Path | None = None) -> ServicePaths | None:
    """Return the locations of the system's units, else of this user's; None if none are installed."""
    for target in (InstallTarget(root), InstallTarget(root, is_user=True, home=home or Path.home())):
        if os.path.exists(target.units / "swarm-broker.service"):
            settings = target.settings / "swarm.toml"
            return ServicePaths(settings if settings.exists() else None, _unit_state_dir(target), is_of_units=True)
    return None


def _unit_state_dir(target: InstallTarget) -> Path:
    if not target.is_user:
        return target.root / "var/lib/swarm"
    # Before version 254, a user's systemd keeps state next to settings.
    return target.settings if len(list_state_dirs(target.settings)) > 1 else default_state_dir()


def choose_paths(config: Path | None, state_dir: Path | None) -> ServicePaths:
    """Return the locations that apply: the units' ones, unless a settings file or a state directory is named."""
    units, file = find_units(), file_in_use(config)
    if units is None or file not in (None, units.settings):
        return ServicePaths(config, state_dir)
    if state_dir is not None or os.environ.get("SWARM_STATE_DIR"):
        return ServicePaths(units.settings, state_dir)
    return units


def list_state_dirs(state: Path) -> list[Path]:
    """Return this state directory, and the subdirectories in which the systemd units keep their state."""
    return [state, *(state / name for name in SERVICES if os.path.isdir(state / name))]
