"""Where what runs here keeps its settings and its state. Where units of systemd's are installed, that is theirs, unless
somebody names another place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.config import file_in_use
from swarm.lock.known import default_state_dir
from swarm.service.install import Target

SERVICES: Final = ("broker", "workers", "gateway")  # units' own directories, the one with the journal first


@dataclass(frozen=True, slots=True)
class Places:
    """``settings``, ``state``: None where nobody names them. ``is_of_units``: the directories of units are in
    ``state``."""

    settings: Path | None
    state: Path | None
    is_of_units: bool = False


def of_units(root: Path = Path("/"), home: Path | None = None) -> Places | None:
    """Those of the system's units, else of this user's; None: none are installed."""
    for target in (Target(root), Target(root, is_user=True, home=home or Path.home())):
        if os.path.exists(target.units / "swarm-broker.service"):
            settings = target.settings / "swarm.toml"
            return Places(settings if settings.exists() else None, _state(target), is_of_units=True)
    return None


def _state(target: Target) -> Path:
    if not target.is_user:
        return target.root / "var/lib/swarm"
    # Before its version 254 a user's systemd keeps state beside settings.
    return target.settings if len(state_dirs(target.settings)) > 1 else default_state_dir()


def meant(config: Path | None, state_dir: Path | None) -> Places:
    """Those of units, if there are any, as far as no others are named: by a file of settings, or a state directory."""
    units, file = of_units(), file_in_use(config)
    if units is None or file not in (None, units.settings):
        return Places(config, state_dir)
    if state_dir is not None or os.environ.get("SWARM_STATE_DIR"):
        return Places(units.settings, state_dir)
    return units


def state_dirs(state: Path) -> list[Path]:
    """This directory, and those of units that are in it."""
    return [state, *(state / name for name in SERVICES if os.path.isdir(state / name))]
