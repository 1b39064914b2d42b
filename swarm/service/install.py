"""The files that ``swarm systemd install`` writes, as plain values: units adapted to this installation and this systemd
version.

The command itself writes and removes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from swarm.config.template import template

UNITS: Final = ("swarm-broker.service", "swarm-broker.socket", "swarm-gateway.service", "swarm-worker@.service")
TARGET: Final = "swarm.target"
USERS: Final = ("swarm", "swarm-broker", "swarm-gateway")  # of workers, of the broker, of gateways
_NOTIFY_RELOAD: Final = 253  # systemd version that introduced Type=notify-reload
_BACKOFF: Final = 254  # … and RestartSteps=
_PROGRAM: Final = "/usr/local/bin/swarm"  # the path in the shipped units
_PORTS: Final = 2  # of the broker for its own machine: clients, workers' control
_PORTS_FOR_OTHERS: Final = 5  # with other machines: also heartbeats, finished steps and the relay
_SLACK_BYTES: Final = 512 << 20  # above a worker's limit; from half of it on, the kernel reclaims memory
# Options that a user's own manager may not set, or applies to other directories.
_SYSTEM_ONLY: Final = re.compile(
    r"^(User|Group|OOMScoreAdjust|CapabilityBoundingSet|AmbientCapabilities|LoadCredential|RemoveIPC|Private\w+"
    r"|Protect\w+|ProcSubset|RestrictNamespaces|LimitNOFILE)=.*\n",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of the files."""

    root: Path = Path("/")  # directory below which everything is installed
    is_user: bool = False  # for one user's own manager
    home: Path = Path("/root")  # that user's home

    @property
    def units(self) -> Path:
        return self.settings.parent / "systemd/user" if self.is_user else self.root / "etc/systemd/system"

    @property
    def settings(self) -> Path:
        base = self.home / ".config" if self.is_user else self.root / "etc"
        return base / "swarm"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of an installation."""

    program: Path  # this installation's ``swarm``
    version: int  # of systemd; 0: unknown, as in an image
    memory_bytes: int | None = None  # for each worker; None: no limit
    gpu: bool = False  # workers have access to GPUs
    doors: tuple[str, ...] = ()  # listening addresses of the broker, see :func:`listen_addresses`


def planned(target: Target, wanted: Wanted) -> dict[Path, str]:
    """Return every file except the settings, with its content."""
    found = {target.units / name: _fitted(_shipped(name), target, wanted) for name in (*UNITS, TARGET)}
    for name, text in _drop_ins(wanted).items():
        found[target.units / name] = _fitted(text, target, wanted)
    if not target.is_user:
        found[target.root / "etc/sysusers.d/swarm.conf"] = _shipped("swarm.sysusers")
        found[target.root / "etc/tmpfiles.d/swarm.conf"] = _shipped("swarm.tmpfiles")
    return found


def settings_file(target: Target) -> tuple[Path, str]:
    """Return the settings file, with every setting commented out."""
    return target.settings / "swarm.toml", template()


def may_be_there(target: Target) -> list[Path]:
    """Return every file that an installation with any options may have written, except the settings."""
    return list(planned(target, Wanted(Path(_PROGRAM), _BACKOFF, memory_bytes=1, gpu=True, doors=("",))))


def doors(host: str, port: int, others: Sequence[str]) -> tuple[str, ...]:
    """Return the broker's listening addresses, in systemd's notation.

    ``host`` serves its own machine, ``others`` other machines; the latter need more ports at every address.
    """
    ports = range(port, port + (_PORTS_FOR_OTHERS if others else _PORTS))
    return tuple(f"{_bracketed(address)}:{each}" for address in (host, *others) for each in ports)


def _bracketed(address: str) -> str:
    bare = address.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def _drop_ins(wanted: Wanted) -> dict[str, str]:
    found: dict[str, str] = {}
    services = [name for name in UNITS if name.endswith(".service")]
    if wanted.version >= _NOTIFY_RELOAD:
        found |= {f"{name}.d/10-reload.conf": _shipped("notify-reload.conf") for name in services}
    if wanted.version >= _BACKOFF:
        found |= {f"{name}.d/10-backoff.conf": _shipped("backoff.conf") for name in services}
    if wanted.gpu:
        found["swarm-worker@.service.d/10-gpu.conf"] = _shipped("gpu.conf")
    if wanted.memory_bytes is not None:
        found["swarm-worker@.service.d/10-memory.conf"] = _memory(wanted.memory_bytes)
    if wanted.doors and wanted.doors != _shipped_doors():
        found["swarm-broker.socket.d/10-doors.conf"] = _held_open(wanted.doors)
    return found


def _shipped_doors() -> tuple[str, ...]:
    return tuple(re.findall(r"^ListenStream=(.+)$", _shipped("swarm-broker.socket"), re.MULTILINE))


def _held_open(doors: tuple[str, ...]) -> str:
    """Return the drop-in with these addresses. An address that is missing at boot must not keep the other sockets
    closed."""
    lines = "".join(f"ListenStream={door}\n" for door in doors)
    return (
        "# The broker's addresses in the settings, as read by swarm systemd install.\n"
        f"[Socket]\nListenStream=\n{lines}FreeBind=yes\n"
    )


def _memory(limit: int) -> str:
    """Return the drop-in with a worker's memory limits. The worker keeps its own limit; the kernel's is a little above
    it."""
    return (
        "# Of each worker, in line with its own memory limit.\n[Service]\n"
        f"Environment=SWARM_WORKER__MEMORY_LIMIT={limit}\n"
        f"MemoryHigh={limit + _SLACK_BYTES // 2}\nMemoryMax={limit + _SLACK_BYTES}\n"
    )


def _fitted(text: str, target: Target, wanted: Wanted) -> str:
    fitted = text.replace(_PROGRAM, _quoted(wanted.program))
    if target.is_user:
        fitted = _SYSTEM_ONLY.sub("", fitted).replace("multi-user.target", "default.target")
        fitted = fitted.replace("systemctl ", "systemctl --user ")
    return fitted


def _quoted(program: Path) -> str:
    """Quote a path for a unit file: it may contain spaces and special characters."""
    escaped = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if re.search(r"[^\w/.@%+-]", escaped) else escaped


def _shipped(name: str) -> str:
    return (files("swarm.service") / "units" / name).read_text()
