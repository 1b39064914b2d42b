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
_LOCAL_PORTS: Final = 2  # of the broker for its own machine: clients, workers' control
_PUBLIC_PORTS: Final = 5  # with other machines: also heartbeats, finished steps and the relay
_SLACK_BYTES: Final = 512 << 20  # above a worker's limit; from half of it on, the kernel reclaims memory
# Options that a user's own manager may not set, or applies to other directories.
_SYSTEM_ONLY: Final = re.compile(
    r"^(User|Group|OOMScoreAdjust|CapabilityBoundingSet|AmbientCapabilities|LoadCredential|RemoveIPC|Private\w+"
    r"|Protect\w+|ProcSubset|RestrictNamespaces|LimitNOFILE)=.*\n",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class InstallTarget:
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
class InstallOptions:
    """Options of an installation."""

    program: Path  # this installation's ``swarm``
    version: int  # of systemd; 0: unknown, as in an image
    memory_bytes: int | None = None  # for each worker; None: no limit
    gpu: bool = False  # workers have access to GPUs
    addresses: tuple[str, ...] = ()  # listening addresses of the broker, see :func:`listen_addresses`


def plan_files(target: InstallTarget, options: InstallOptions) -> dict[Path, str]:
    """Return every file except the settings, with its content."""
    contents = {target.units / name: _adapt_unit(_read_shipped(name), target, options) for name in (*UNITS, TARGET)}
    for name, text in _drop_ins(options).items():
        contents[target.units / name] = _adapt_unit(text, target, options)
    if not target.is_user:
        contents[target.root / "etc/sysusers.d/swarm.conf"] = _read_shipped("swarm.sysusers")
        contents[target.root / "etc/tmpfiles.d/swarm.conf"] = _read_shipped("swarm.tmpfiles")
    return contents


def settings_file(target: InstallTarget) -> tuple[Path, str]:
    """Return the settings file, with every setting commented out."""
    return target.settings / "swarm.toml", template()


def possible_files(target: InstallTarget) -> list[Path]:
    """Return every file that an installation with any options may have written, except the settings."""
    return list(plan_files(target, InstallOptions(Path(_PROGRAM), _BACKOFF, memory_bytes=1, gpu=True, addresses=("",))))


def listen_addresses(host: str, port: int, others: Sequence[str]) -> tuple[str, ...]:
    """Return the broker's listening addresses, in systemd's notation.

    ``host`` serves its own machine, ``others`` other machines; the latter need more ports at every address.
    """
    ports = range(port, port + (_PUBLIC_PORTS if others else _LOCAL_PORTS))
    return tuple(f"{_bracket(address)}:{number}" for address in (host, *others) for number in ports)


def _bracket(address: str) -> str:
    bare = address.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def _drop_ins(options: InstallOptions) -> dict[str, str]:
    contents: dict[str, str] = {}
    services = [name for name in UNITS if name.endswith(".service")]
    if options.version >= _NOTIFY_RELOAD:
        contents |= {f"{name}.d/10-reload.conf": _read_shipped("notify-reload.conf") for name in services}
    if options.version >= _BACKOFF:
        contents |= {f"{name}.d/10-backoff.conf": _read_shipped("backoff.conf") for name in services}
    if options.gpu:
        contents["swarm-worker@.service.d/10-gpu.conf"] = _read_shipped("gpu.conf")
    if options.memory_bytes is not None:
        contents["swarm-worker@.service.d/10-memory.conf"] = _memory_drop_in(options.memory_bytes)
    if options.addresses and options.addresses != _shipped_addresses():
        contents["swarm-broker.socket.d/10-doors.conf"] = _socket_drop_in(options.addresses)
    return contents


def _shipped_addresses() -> tuple[str, ...]:
    return tuple(re.findall(r"^ListenStream=(.+)$", _read_shipped("swarm-broker.socket"), re.MULTILINE))


def _socket_drop_in(addresses: tuple[str, ...]) -> str:
    """Return the drop-in with these addresses. An address that is missing at boot must not keep the other sockets
    closed."""
    lines = "".join(f"ListenStream={door}\n" for door in addresses)
    return (
        "# The broker's addresses in the settings, as read by swarm systemd install.\n"
        f"[Socket]\nListenStream=\n{lines}FreeBind=yes\n"
    )


def _memory_drop_in(limit: int) -> str:
    """Return the drop-in with a worker's memory limits. The worker keeps its own limit; the kernel's is a little above
    it."""
    return (
        "# Of each worker, in line with its own memory limit.\n[Service]\n"
        f"Environment=SWARM_WORKER__MEMORY_LIMIT={limit}\n"
        f"MemoryHigh={limit + _SLACK_BYTES // 2}\nMemoryMax={limit + _SLACK_BYTES}\n"
    )


def _adapt_unit(text: str, target: InstallTarget, options: InstallOptions) -> str:
    adapted = text.replace(_PROGRAM, _quote(options.program))
    if target.is_user:
        adapted = _SYSTEM_ONLY.sub("", adapted).replace("multi-user.target", "default.target")
        adapted = adapted.replace("systemctl ", "systemctl --user ")
    return adapted


def _quote(program: Path) -> str:
    """Quote a path for a unit file: it may contain spaces and special characters."""
    escaped = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if re.search(r"[^\w/.@%+-]", escaped) else escaped


def _read_shipped(name: str) -> str:
    return (files("swarm.systemd") / "units" / name).read_text()
