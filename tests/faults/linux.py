"""Do harm by means of the kernel: control groups, network namespaces, packet filters. For root on Linux."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.zygote import enter, set_namespace

CGROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNET = 0x40000000
_count = itertools.count()


def has_cgroup(controller: str) -> bool:
    """Whether control groups (version 1) of this kind can be made here."""
    return os.geteuid() == 0 and os.access(CGROUPS / controller / "cgroup.procs", os.W_OK)


def needs_cgroup(controller: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has_cgroup(controller), reason=f"no control groups of kind {controller} for us here")


class Cgroup:
    """A control group of one kind; gone at the end, its processes back where they were."""

    def __init__(self, controller: str) -> None:
        self.folder = CGROUPS / controller / f"swarm-faults-{os.getpid()}-{next(_count)}"
        self.folder.mkdir()

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            try:
                (self.folder.parent / "cgroup.procs").write_text(pid)
            except OSError:
                continue  # it has ended
        give_up_at = time.monotonic() + 5.0
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.02)

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def set(self, name: str, value: object) -> None:
        (self.folder / name).write_text(str(value))


def why_no_namespaces() -> str | None:
    """Why there can be no network of our own; None if there can."""
    if os.geteuid() != 0:
        return "a network of our own needs root"
    missing = [name for name in ("ip", "nft", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: nftables, iproute2)"
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-c", "ip link set lo up && nft add table inet swarm"],
        check=False,
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"no network of our own: {tried.stderr.strip()[:200]}"


@contextmanager
def own_network() -> Iterator[None]:
    """Give this thread, and every thread and process that it starts meanwhile, a loopback device of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            call("ip", "link", "set", "lo", "up")
            yield
        finally:
            if libc.setns(home, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(home)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread, and what it starts meanwhile, to the network namespace of that name."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace)
        try:
            yield
        finally:
            set_namespace(home)
    finally:
        os.close(home)


def call(*command: str, text: str = "") -> str:
    """Run a command of the system; what it says."""
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}{text}")
    return done.stdout


class Firewall:
    """Rules on what leaves and what arrives, all of one kind at a time."""

    def set(self, leaving: list[str], arriving: list[str] | None = None) -> None:
        """These rules instead of those before."""
        self.clear()
        rules = "table inet swarm {\n"
        for name, hook, lines in (("leaving", "output", leaving), ("arriving", "input", arriving or [])):
            rules += f"chain {name} {{ type filter hook {hook} priority 0; policy accept;\n"
            rules += "\n".join(lines) + "\n}\n"
        call("nft", "-f", "-", text=rules + "}\n")

    def clear(self) -> None:
        call("nft", "flush", "ruleset")


@contextmanager
def small_disk(place: Path, size: str = "3m") -> Iterator[Path]:
    """Mount a file system of its own there. Takes root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Fill a disk to the last byte."""
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
