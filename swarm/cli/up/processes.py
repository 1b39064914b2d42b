"""Child processes: started, watched, ended, and never outliving their parent.

Three mechanisms end the children, however the parent ends:

* the parent's own ``finally`` kills the children that still run;
* on Linux the kernel kills the child when its parent dies (``PR_SET_PDEATHSIG``). The signal follows the *thread* that
  started the child, so children are started from the main thread only;
* on all systems, a child holds the read end of a pipe whose only write end is the parent's: end of file means that the
  parent is gone. This also covers the time between a child's start and its call of ``prctl``.

Children get sessions of their own, so Ctrl-C in a terminal reaches only the supervisor, which then stops them in order.
Their output goes directly into a file: no pipe fills up, and nothing is lost with the supervisor. Neither a child nor
the supervisor fails because of its log: a full or broken disk only costs lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from swarm.cli.options import INVITATION_VARIABLE

PARENT_FD_VARIABLE = "SWARM_PARENT_FD"
DETACHED_VARIABLE = "SWARM_DETACHED"  # set for the process that ``swarm up --detach`` leaves behind
MAX_LOG_BYTES = 32 << 20  # per child; one older part of the same size is kept
TAIL_BYTES = 16 << 10  # bytes of a log that are searched for its last lines

_PR_SET_PDEATHSIG = 1
_COMMON_KEYS = ("event", "level", "timestamp", "module")  # of each log event; the first two come first in a text


def die_with_parent() -> None:
    """Make this process end, by SIGKILL, when its parent is gone. Without ``SWARM_PARENT_FD``, do nothing.

    To be called at the very start of the child. SIGKILL, because a parent that is gone can't make sure that a hanging
    child ends. Everything that must survive a sudden end is designed for it anyway.
    """
    text = os.environ.pop(PARENT_FD_VARIABLE, None)
    if text is None:
        return
    end_with_starter()
    fd = int(text)
    os.set_inheritable(fd, False)  # children of this process must not inherit it
    watcher = threading.Thread(target=_die_at_end_of_file, args=(fd,), name="parent-watch", daemon=True)
    watcher.start()


def end_with_starter() -> None:
    """Make the kernel kill this process when the thread that started it ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def disable_core_dumps() -> None:
    """Prevent a core dump when this process crashes, because its memory contains keys, prompts and answers.

    The hard limit stays, so that the process's owner can enable core dumps (``prlimit --core=unlimited --pid PID``).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _die_at_end_of_file(fd: int) -> None:
    while os.read(fd, 64):  # nothing is ever written: it returns when the last write end is closed
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def reap_orphans(own: Collection[int]) -> None:
    """Reap children that have ended and are not in ``own``.

    They are orphans of processes that ended before them: a killed worker, for example, leaves the process that keeps
    its memory.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        # WNOWAIT leaves the child in place. Stop at one of our own children: its owner gets the same signal and reaps
        # it, and this function is called again.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


class Lifeline:
    """The parent's end of the pipe that children watch."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # neither is inherited unless passed explicitly

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class LogFile:
    """Log file of a child, over all its restarts. Its size is limited: it is cut, and one older part is kept."""

    def __init__(self, path: Path, shown_offset: int = 0) -> None:
        self.path = path
        self._start_offset = 0  # offset at which the current process's output begins
        self._shown_offset = shown_offset  # offset up to which ``new_lines`` has returned lines

    def open(self) -> int:
        """Open a descriptor for a new process to append to; the caller closes it. If the file can't be opened, output
        is discarded."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._start_offset = os.fstat(fd).st_size
        return fd

    def tail(self, num_lines: int) -> list[str]:
        """Return the last lines of the current (or last) process."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start_offset, size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-num_lines:]

    def last_error(self) -> str:
        """Return the line in which a command reports its failure, or else the last line, as text for people."""
        return last_message(self.tail(200))

    def new_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._shown_offset:
                    self._shown_offset = 0  # another process has cut it
                file.seek(self._shown_offset)
                whole, end, _ = file.read(1 << 20).rpartition(b"\n")
        except OSError:
            return []
        self._shown_offset += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines()

    def truncate_if_long(self) -> None:
        """Cut the file if it is too long. The writer appends, so it continues at the new end."""
        with contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > MAX_LOG_BYTES:
                self._keep_older(self.path.with_suffix(".log.1"))
                os.truncate(self.path, 0)
                self._start_offset = self._shown_offset = 0

    def _keep_older(self, older: Path) -> None:
        """Keep the older part, unless the disk is full: cutting frees its space."""
        try:
            shutil.copyfile(self.path, older)
        except OSError:
            older.unlink(missing_ok=True)


def export_source_path() -> None:
    """Make children import Swarm from our sources if it is not installed.

    The option -P removes the working directory from the import path, so the sources must be named explicitly.
    """
    root = Path(__file__).resolve().parents[3]
    if str(root) not in site.getsitepackages():
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def child_environment() -> dict[str, str]:
    """Return this process's environment without an invitation: a child serves the swarm that started it, and joins
    none."""
    return {name: value for name, value in os.environ.items() if name != INVITATION_VARIABLE}


class Process:
    """A running or ended process of a child."""

    def __init__(self, command: Sequence[str], log: LogFile, lifeline: Lifeline) -> None:
        """Start the process. Raises ``OSError`` if the machine can't."""
        fd = log.open()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                env={**child_environment(), PARENT_FD_VARIABLE: str(lifeline.read_fd)},
                pass_fds=(lifeline.read_fd,),
                start_new_session=True,
            )
        finally:
            os.close(fd)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal); None while it runs."""
        return self._popen.poll()

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came within the time."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def describe_line(line: str) -> str:
    """Return a line of a log as text for people: an event of JSON becomes its name and its values."""
    if not (entry := _parse_entry(line)):
        return line
    values = (f"{key}={_describe_value(value)}" for key, value in entry.items() if key not in _COMMON_KEYS)
    return " ".join((str(entry.get("level", "")), str(entry["event"]), *values)).strip()


def _describe_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def last_message(lines: Sequence[str]) -> str:
    """Return a process's last message about its end, as text for people.

    That is the line of its command (``swarm: …``), else the last error in its log, else its last line. A line of JSON
    is converted to text.
    """
    messages = [line.removeprefix("swarm: ") for line in lines if line.startswith("swarm: ")]
    if messages:
        return messages[-1]
    entries = [_parse_entry(line) for line in lines]
    errors = [entry for entry in entries if entry.get("level") in ("error", "critical")]
    last = (errors or entries or [{}])[-1]
    return _describe_entry(last) if last else (lines[-1] if lines else "")


def _parse_entry(line: str) -> dict[str, object]:
    """Parse an entry of the log; empty if the line is not one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and "event" in entry else {}


def _describe_entry(entry: Mapping[str, object]) -> str:
    event = str(entry["event"]).replace("_", " ")
    reason = next((entry[key] for key in ("reason", "error", "problem", "note") if entry.get(key)), "")
    return " ".join((f"{event}: {reason}" if reason else event).split())
