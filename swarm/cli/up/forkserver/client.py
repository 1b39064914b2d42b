"""The supervisor's end of the fork server: sends requests to fork, manages the forked processes, and limits how often
the fork server is restarted."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarm import version
from swarm.cli.up.processes import PARENT_FD_VARIABLE, Lifeline, LogFile, Process, child_environment
from swarm.cli.up.supervisor import HEALTHY_S, describe_exit

CONTROL_VARIABLE = "SWARM_NURSERY_FD"
MAX_ORDER_BYTES = 64 << 10
FORK_TIMEOUT_S = 60.0  # limit of a fork: the imports come first, possibly from a slow disk
MAX_SHORT_RUNS = 3  # of the fork server in a row: each costs a core some seconds of imports

_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A worker process that the fork server was asked for. It becomes our child once it is forked.

    Has the same interface as ``Process``.
    """

    def __init__(self, start_process: Callable[[], Process]) -> None:
        self._start_process = start_process  # starts it as a separate process
        self._process: Process | None = None  # the separate process, if the fork server is gone
        self._pid: int | None = None  # its process id, once known
        self._exit_code: int | None = None  # its exit code, once it has ended
        self.problem = ""  # why the machine could not start it

    def on_started(self, number: int) -> None:
        """Record its process id. If it was ended before, kill it now."""
        self._pid = number
        if self._exit_code is not None:
            self._send(signal.SIGKILL)

    def start_separately(self) -> None:
        """Start the process directly, because the fork server cannot fork it. On failure, set ``problem`` and the exit
        code."""
        if self._exit_code is None:
            try:
                self._process = self._start_process()
            except OSError as error:
                self._exit_code, self.problem = os.EX_OSERR, str(error)

    @property
    def pid(self) -> int | None:
        return self._pid if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal); None while it runs or is not forked yet."""
        if self._process is not None:
            return self._process.poll()
        if self._pid is not None and self._exit_code is None:
            number, status = os.waitpid(self._pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if number else None
        return self._exit_code

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.kill() if number is signal.SIGKILL else self._process.terminate()
        elif self._pid is None:
            self._exit_code = -number
        elif self.poll() is None:
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        assert self._pid is not None
        os.kill(self._pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came within the time."""
        if self._process is not None:
            return self._process.wait(timeout_s)
        if self._pid is None or self.poll() is not None:
            return True
        descriptor = os.pidfd_open(self._pid)
        try:
            select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)
        return self.poll() is not None


class ForkServer:
    """The supervisor's connection to the fork server, and its process.

    ``command`` runs the fork server, which is started immediately, because its imports take time. It writes errors to
    ``log``. ``on_child_exit`` is called when a child may have ended; ``on_refused``, with the reason, when the fork
    server finds that no worker can serve the model, and before pending processes are started separately.
    """

    def __init__(
        self,
        command: Sequence[str],
        lifeline: Lifeline,
        log: LogFile,
        on_child_exit: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Start the fork server. Raises ``OSError`` if the machine can't."""
        self._lifeline, self._log, self._on_child_exit = lifeline, log, on_child_exit
        self._on_refused = on_refused
        self._pending: deque[ForkedProcess] = deque()  # processes that are not forked yet, in the order of the requests
        self._loop = asyncio.get_running_loop()
        self._timeout: asyncio.TimerHandle | None = None  # ends a fork server that does not answer in time
        self._problem = ""  # why it can never fork
        self._version_id = _installed_version_id()  # identifies the installed version at its start
        adopt_orphans()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self._process = self._start_process(command, theirs)
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._loop.add_reader(self._control.fileno(), self._on_readable)

    def _start_process(self, command: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
        log = self._log.open()
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **child_environment(),
                    PARENT_FD_VARIABLE: str(self._lifeline.read_fd),
                    CONTROL_VARIABLE: str(theirs.fileno()),
                },
                pass_fds=(self._lifeline.read_fd, theirs.fileno()),
                start_new_session=True,
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it is running and can fork."""
        return self._process.poll() is None and self._control.fileno() >= 0

    @property
    def exit_description(self) -> str:
        """Why or how it ended, once it has."""
        return self._problem or describe_exit(self._process.returncode)

    @property
    def is_hopeless(self) -> bool:
        """Whether a new fork server would end the same way: it can't fork, or does not answer."""
        return bool(self._problem)

    @property
    def is_outdated(self) -> bool:
        """Whether another version was installed after the fork server's start, so that its imports are outdated."""
        return self._version_id != _installed_version_id()

    @property
    def has_pending_forks(self) -> bool:
        """Whether there may be a child, running or dead, whose process id is not read yet."""
        return bool(self._pending)

    def check(self) -> None:
        """Check for the fork server's end, after some child has ended."""
        if self._process.poll() is not None:
            self.stop()

    def fork(self, command: Sequence[str], log: LogFile) -> ForkedProcess:
        """Request a fork that runs ``command``, a command of ``swarm``. Raises ``OSError`` if the request can't be
        sent."""
        child = ForkedProcess(lambda: Process(command, log, self._lifeline))
        descriptor = log.open()
        try:
            order = json.dumps(swarm_arguments(command)).encode()
            socket.send_fds(self._control, [order], [descriptor])
        finally:
            os.close(descriptor)
        self._pending.append(child)
        if self._timeout is None:
            self._timeout = self._loop.call_later(FORK_TIMEOUT_S, self._on_timeout)
        return child

    def _on_readable(self) -> None:
        """Handle a readable control socket: a child was forked, or the fork server has ended."""
        if self._read_messages():
            self.stop()

    def _read_messages(self) -> bool:
        """Read all available messages; return whether the stream has ended."""
        with suppress(BlockingIOError):
            while self._control.fileno() >= 0 and (message := self._next_message()):
                message_content = json.loads(message)
                if isinstance(message_content, str):
                    self._problem = message_content
                elif isinstance(message_content, dict):
                    self._problem = f"refuses the model: {message_content['refused']}"
                    self._on_refused(message_content["refused"])
                else:
                    self._pending.popleft().on_started(message_content)
                    self._restart_timeout()
            return True
        return False

    def _next_message(self) -> bytes:
        """Return the next message; empty at the end.

        A reset, which means that the fork server left requests unread, is raised once before its last messages.
        """
        with suppress(ConnectionResetError):
            return self._control.recv(MAX_ORDER_BYTES)
        return self._control.recv(MAX_ORDER_BYTES)

    def _restart_timeout(self) -> None:
        assert self._timeout is not None
        self._timeout.cancel()
        self._timeout = self._loop.call_later(FORK_TIMEOUT_S, self._on_timeout) if self._pending else None
        # The child may have ended before its id was read. Not immediately: this may run inside a call of ``check``.
        self._loop.call_soon(self._on_child_exit)

    def _on_timeout(self) -> None:
        self._problem = f"did not answer within {FORK_TIMEOUT_S:g} s"
        self.stop()

    def stop(self) -> None:
        """End the fork server. Processes that are not forked yet are started separately."""
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control.fileno())
        self._process.kill()
        self._process.wait()
        self._read_messages()  # only now is it certain that no more messages will come: each of these children lives on
        self._control.close()
        if self._timeout is not None:
            self._timeout.cancel()
        while self._pending:
            self._pending.popleft().start_separately()

    def close(self) -> None:
        """End the fork server and drop the pending requests."""
        for life in self._pending:
            life.kill()
        self.stop()


@dataclass(slots=True)
class RestartBudget:
    """Restart budget of the fork server: unlimited if it ran for ``HEALTHY_S``, else a few restarts in a row. Pure."""

    began_at: float = 0.0
    num_short: int = 0  # restarts in a row after a short run

    def record_start(self, now: float) -> None:
        """Record the start of a fork server."""
        self.began_at = now

    def record_end(self, now: float) -> bool:
        """Record its end; return whether another one may be started."""
        self.num_short = 0 if now - self.began_at >= HEALTHY_S else self.num_short + 1
        return self.num_short <= MAX_SHORT_RUNS


def _installed_version_id() -> tuple[int, int] | None:
    """Return a value that identifies the installed version; None while none is installed."""
    try:
        found = os.stat(version.__file__)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants. Raises ``OSError`` on systems that can't do it."""
    if sys.platform != "linux":
        raise OSError("no process takes orphans in here")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def swarm_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments after ``python … -m swarm``."""
    return list(command[command.index("-m") + 2 :])
