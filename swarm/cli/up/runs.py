"""Records of this user's ``swarm up`` processes, for ``swarm ps``, ``logs`` and ``down``: a file and a log for each.

A record names its process by number and start time. Another process with the same number is neither listed nor
signalled. Machines and containers that share a home directory have a folder each. Records of ended processes stay for
``swarm logs``; the next ``swarm up`` on the machine removes all but the latest. If the directory can't be written, a
``swarm up`` works without a record, but not in the background.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from swarm import private_files
from swarm.auth.memberships import default_state_dir
from swarm.cli.up.processes import LogFile
from swarm.cli.up.supervisor import GATEWAY
from swarm.errors import ConfigError, SwarmError

NUM_ENDED = 5  # records of ended processes that are kept
_START_TICKS = 19  # index of the start time in /proc/PID/stat, after the name


class RecordedSwarm(msgspec.Struct, frozen=True):
    """One swarm of a ``swarm up``: its model's name, and the broker's port for clients."""

    model: str
    url: str

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]


class Run(msgspec.Struct, frozen=True):
    """Record of one ``swarm up``."""

    pid: int
    started: str  # start time of the process, as ``start_time`` has it
    since: float  # time of the first record, in seconds since 1970
    swarms: tuple[RecordedSwarm, ...]
    state_dir: str
    is_ready: bool = False  # it has served, and its gateway, if there is one, has answered
    http: str = ""  # the gateway's address, once it has answered
    console: str = ""

    @property
    def is_alive(self) -> bool:
        return bool(self.started) and start_time(self.pid) == self.started

    @property
    def names(self) -> set[str]:
        """All names by which a user may choose it."""
        return {str(self.pid)}.union(*({swarm.model, swarm.port} for swarm in self.swarms))

    def describe(self) -> str:
        return " and ".join(f"{swarm.model} (port {swarm.port})" for swarm in self.swarms)


def runs_folder() -> Path:
    """Return the folder of this machine or container: of its name, and of its namespace of process numbers."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    try:
        return default_state_dir() / "up" / f"{os.uname().nodename}-{namespace}"
    except RuntimeError:  # a user without a home directory, as in some containers
        return Path(os.devnull, "up")  # nothing can be written or found there


def record_path(pid: int) -> Path:
    return runs_folder() / f"{pid}.json"


def log_path(pid: int) -> Path:
    return runs_folder() / f"{pid}.log"


def start_time(pid: int) -> str:
    """Return the start time of a running process: the boot's id and clock ticks since then. Empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {fields[_START_TICKS]}"


def read_runs() -> list[Run]:
    """Return the records of running and ended processes, the oldest first."""
    runs = filter(None, map(_read, runs_folder().glob("*.json")))
    return sorted(runs, key=lambda run: run.since)


def read_run(pid: int) -> Run | None:
    return _read(record_path(pid))


def _read(path: Path) -> Run | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        return None


def select_run(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run with this name: of a model, or a port or process number. Without a name, the only one.

    Raises SwarmError with the choices.
    """
    chosen = [run for run in runs if name is None or name in run.names]
    if len(chosen) == 1:
        return chosen[0]
    choices = ", ".join(run.describe() for run in runs)
    if not runs:
        raise SwarmError("no swarm up runs on this machine for this user; start one with: swarm up --detach")
    if chosen:
        raise SwarmError(f"several swarms run: {choices}; name one by its port")
    raise SwarmError(f"no swarm {name} runs here; these do: {choices}")


def stop_run(run: Run, timeout_s: float) -> bool:
    """Ask the process to end, and wait. Return whether it has ended. Raises SwarmError if it can't be asked."""
    try:
        descriptor = os.pidfd_open(run.pid)
        try:
            # Checked after the descriptor was opened: from here on, it can't become another process.
            if not run.is_alive:
                return True
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError) as error:  # an old kernel, or a sandbox without these calls
        raise SwarmError(f"{run.describe()} can't be signalled ({error}); kill {run.pid} ends it") from None


class RunRecorder:
    """Writes the record and the log of this process, from what it reports to its user."""

    def __init__(
        self, swarms: Iterable[RecordedSwarm], state_dir: Path, *, has_workers: bool, has_http: bool, is_logged: bool
    ) -> None:
        """``is_logged``: this process's output goes to the log already."""
        pid = os.getpid()
        self._run = Run(pid, start_time(pid), time.time(), tuple(swarms), str(state_dir))
        self._log = LogFile(log_path(pid))
        self._is_logged = is_logged
        self._has_workers = has_workers
        self._awaited = {"serving", "http"} if has_http else {"serving"}
        with suppress(OSError):  # a read-only home directory
            private_files.make_private_directory(runs_folder())
            remove_old()
            if not is_logged:
                self._log.path.unlink(missing_ok=True)
        self._write()

    def observe(self, lines: Sequence[str], data: Mapping[str, object]) -> None:
        """Handle a report: ``lines`` for people, ``data`` for programs."""
        if lines and not self._is_logged:
            self._append(lines)
        self._log.truncate_if_long()
        event = str(data.get("event"))
        self._awaited.discard("http" if data.get("given_up") == GATEWAY else event)
        changes: dict[str, object] = {}
        if event == "http":
            changes = {"http": str(data["url"]), "console": str(data.get("console") or "")}
        if not self._run.is_ready and (not self._awaited or (event == "progress" and not self._has_workers)):
            changes["is_ready"] = True
        if changes:
            self._run = msgspec.structs.replace(self._run, **changes)
            self._write()

    def _append(self, lines: Sequence[str]) -> None:
        descriptor = self._log.open()
        # The buffer is written at the end of the inner context.
        with suppress(OSError), os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def _write(self) -> None:
        if self._run.started:  # otherwise nobody could recognize the process
            with suppress(OSError):  # also a full disk
                private_files.write(record_path(self._run.pid), msgspec.json.encode(self._run))


def remove_old() -> None:
    """Remove what ended processes have left on this machine, but for the latest records and their logs."""
    runs = read_runs()
    ended = [run for run in runs if not run.is_alive]
    kept = {str(run.pid) for run in runs} - {str(run.pid) for run in ended[:-NUM_ENDED]}
    for path in runs_folder().iterdir():
        pid = path.name.removeprefix(".").partition(".")[0]  # temporary files begin with a dot
        is_starting = pid.isdecimal() and start_time(int(pid))  # it may have no record yet
        if pid not in kept and not is_starting:
            with suppress(OSError):
                path.unlink()


def redirect_output() -> None:
    """Send stdout and stderr of this process to its log. Raises ConfigError if it can't have a log and a record."""
    pid = os.getpid()
    path = log_path(pid)
    if not start_time(pid):
        raise ConfigError("a process in the background is found by /proc, which can't be read; run without --detach")
    try:
        private_files.make_private_directory(path.parent)
        remove_old()
        private_files.write(record_path(pid), b"{}")  # a full disk is noticed here, while stderr is the user's
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path.parent} can't be written ({error.strerror}); run without --detach") from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
