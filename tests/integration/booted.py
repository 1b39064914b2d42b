"""A system of its own, run by a real systemd in namespaces, on an overlay of this one: what is done there is gone
afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
PROGRAMS = Path("/opt/swarm/bin")
# Where they are in there: units see neither homes nor another's /tmp, where the checkout may lie.
PLACES = {ROOT: "/opt/checkout", Path(sysconfig.get_path("purelib")): "/opt/packages"}
SOON_S = 90.0
_HALT = signal.SIGRTMIN + 4


class NoSystem(Exception):
    """This machine lets none be booted; why."""


def why_not() -> str | None:
    """Why none can be booted here; None if one can."""
    if os.geteuid() != 0:
        return "booting a system takes root"
    missing = [name for name in ("systemd-nspawn", "nsenter", "systemctl") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: systemd-container, util-linux, systemd)"
    if not PYTHON.exists():
        return f"no {PYTHON}: units run as a user that sees no Python in somebody's home"
    for place in PLACES:
        if not place.stat().st_mode & stat.S_IXOTH:
            return f"{place} is not for every user, and units run as one of their own"
    return None


class Booted:
    """``root``: its files, as seen from outside. ``leader``: the process that is the first one in there."""

    def __init__(self, root: Path, leader: int) -> None:
        self.root, self.leader = root, leader

    def run(self, *words: str, within_s: float = SOON_S) -> subprocess.CompletedProcess[str]:
        """Run something there, to its end."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=within_s, check=False, env=environment()
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.leader), "-a", "--", *words]

    def systemctl(self, *words: str) -> str:
        done = self.run("systemctl", *words)
        assert done.returncode == 0, f"systemctl {words}: {done.stderr}\n{self.journal()}"
        return done.stdout

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit).strip()

    def swarmctl(self, *words: str) -> str:
        return self.run(str(PROGRAMS / "swarmctl"), *words).stdout

    def journal(self, *words: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", *words).stdout[-8000:]

    def outside(self, pid: int) -> int:
        """The number by which this system knows a process of that one."""
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):
                numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if numbers[-1] == str(pid) and _space(status.parent.name) == _space(self.leader):
                    return int(numbers[1])
        raise ProcessLookupError(pid)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        give_up_at = time.monotonic() + SOON_S
        while not (found := holds()):
            assert time.monotonic() < give_up_at, f"{what}\n{self.journal('-n', '40')}"
            time.sleep(0.1)
        return found


def _space(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def environment() -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@contextmanager
def booted(folder: Path, prepare: Callable[[Path], None] = lambda root: None) -> Iterator[Booted]:
    """Boot one, with this checkout installed for everybody; halt it at the end. ``prepare``: is given the root of its
    files before it boots."""
    root, places = folder / "root", [folder / name for name in ("upper", "work", "root")]
    for place in places:
        place.mkdir()
    layers = f"lowerdir=/,upperdir={places[0]},workdir={places[1]}"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", layers, str(root)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        raise NoSystem(mounted.stderr.strip())
    try:
        _install(root)
        quiet = ["systemctl", f"--root={root}", "set-default", "multi-user.target"]
        subprocess.run(quiet, check=True, capture_output=True)
        prepare(root)
        with _nspawn(root, folder / "console.log") as leader:
            yield Booted(root, leader)
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def _install(root: Path) -> None:
    """A virtual environment of the system's Python, with the packages of the one that runs this, and the checkout."""
    home = root / PROGRAMS.parent.relative_to("/")
    subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", str(home)], check=True)
    packages = next((home / "lib").glob("python*/site-packages"))
    (packages / "checkout.pth").write_text("\n".join(PLACES.values()))
    for name, room in (("swarm", "cli"), ("swarmctl", "ctl")):
        script = home / "bin" / name
        script.write_text(f"#!{PROGRAMS}/python\nfrom swarm.{room}.main import main\nmain()\n")
        script.chmod(0o755)


@contextmanager
def _nspawn(root: Path, console: Path) -> Iterator[int]:
    how = ["-q", "-D", str(root), "-M", f"swarm-{os.getpid()}", "--register=no", "--keep-unit", "--link-journal=no"]
    how += [f"--bind-ro={_escaped(place)}:{inside}" for place, inside in PLACES.items()]
    with console.open("w") as log:
        nspawn = subprocess.Popen(
            ["systemd-nspawn", *how, "--private-network", "-b"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        leader = _leader(nspawn, console)
        _until_up(leader)
        yield leader
    finally:
        children = _children(nspawn.pid)
        for child in children:
            os.kill(child, _HALT)
        try:
            nspawn.wait(20.0)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace(":", "\\:")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _leader(nspawn: subprocess.Popen[bytes], console: Path) -> int:
    give_up_at = time.monotonic() + SOON_S
    while True:
        found = [child for child in _children(nspawn.pid) if _is_first(child)]
        if found:
            return found[0]
        if nspawn.poll() is not None or time.monotonic() > give_up_at:
            raise NoSystem(console.read_text()[-500:])
        time.sleep(0.1)


def _is_first(pid: int) -> bool:
    """Is it the first process of a namespace of its own?"""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return len(numbers) > 1 and numbers[-1] == "1"


def _until_up(leader: int) -> None:
    """Until it takes orders, and what starts at a boot has started."""
    give_up_at = time.monotonic() + SOON_S
    while True:
        command = ["nsenter", "-t", str(leader), "-a", "--", "systemctl", "is-system-running"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SOON_S).stdout.strip()
        if said in ("running", "degraded"):  # some unit of the host's finds no hardware in there
            return
        if time.monotonic() > give_up_at:
            raise NoSystem(f"it is {said or 'silent'} after {SOON_S:.0f} s")
        time.sleep(0.2)
