"""Location of the settings and state of services on this machine.

Where systemd units are installed, their settings and state are used, unless others are named.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.config import file_in_use
from swarm.lock.known import default_state_dir
from swarm.service.install import Target

SERVICES: Final = ("broker", "workers", "gateway")  # the units' own directories; the one with the journal first


@dataclass(frozen=True, slots=True)
class Places:
    """Locations of settings and state; None where none is configured.

    ``is_of_units``: ``state`` contains the directories of the units.
    """

    settings: Path | None
    state: Path | None
    is_of_units: bool = False


def of_units(root: Path = Path("/"), home: Path | None = None) -> Places | None:
    """Return the locations of the system's units, else of this user's; None if none are installed."""
    for target in (Target(root), Target(root, is_user=True, home=home or Path.home())):
        if os.path.exists(target.units / "swarm-broker.service"):
            settings = target.settings / "swarm.toml"
            return Places(settings if settings.exists() else None, _state(target), is_of_units=True)
    return None


def _state(target: Target) -> Path:
    if not target.is_user:
        return target.root / "var/lib/swarm"
    # Before version 254, a user's systemd keeps state next to settings.
    return target.settings if len(state_dirs(target.settings)) > 1 else default_state_dir()


def meant(config: Path | None, state_dir: Path | None) -> Places:
    """Return the locations that apply: the units' ones, unless a settings file or a state directory is named."""
    units, file = of_units(), file_in_use(config)
    if units is None or file not in (None, units.settings):
        return Places(config, state_dir)
    if state_dir is not None or os.environ.get("SWARM_STATE_DIR"):
        return Places(units.settings, state_dir)
    return units


def state_dirs(state: Path) -> list[Path]:
    """Return this directory, and the units' directories in it."""
    return [state, *(state / name for name in SERVICES if os.path.isdir(state / name))]
