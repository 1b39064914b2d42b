"""The supervisor's end of the fork server: sends requests to fork, and manages the forked processes."""

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

from swarm import version
from swarm.cli.up.processes import PARENT_FD_VARIABLE, Lifeline, LogFile, Process, environment_of_child
from swarm.cli.up.supervisor import describe_exit

CONTROL_VARIABLE = "SWARM_NURSERY_FD"
MAX_ORDER_BYTES = 64 << 10
BIRTH_S = 60.0  # limit of a fork: the imports come first, possibly from a slow disk

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A worker process that the fork server was asked for. It becomes our child once it is forked.

    Has the same interface as ``Process``.
    """

    def __init__(self, plainly: Callable[[], Process]) -> None:
        self._plainly = plainly  # starts it as a separate process
        self._plain: Process | None = None  # the separate process, if the fork server is gone
        self._number: int | None = None  # its process id, once known
        self._code: int | None = None  # its exit code, once it has ended
        self.problem = ""  # why the machine could not start it

    def born(self, number: int) -> None:
        """Record its process id. If it was ended before, kill it now."""
        self._number = number
        if self._code is not None:
            self._send(signal.SIGKILL)

    def start_plainly(self) -> None:
        """Start it as a separate process, since it will not be forked. If that fails, it ends with ``problem``."""
        if self._code is None:
            try:
                self._plain = self._plainly()
            except OSError as error:
                self._code, self.problem = os.EX_OSERR, str(error)

    @property
    def pid(self) -> int | None:
        return self._number if self._plain is None else self._plain.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal); None while it runs or is not forked yet."""
        if self._plain is not None:
            return self._plain.poll()
        if self._number is not None and self._code is None:
            number, status = os.waitpid(self._number, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if number else None
        return self._code

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._plain is not None:
            self._plain.kill() if number is signal.SIGKILL else self._plain.terminate()
        elif self._number is None:
            self._code = -number
        elif self.poll() is None:
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        assert self._number is not None
        os.kill(self._number, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came within the time."""
        if self._plain is not None:
            return self._plain.wait(timeout_s)
        if self._number is None or self.poll() is not None:
            return True
        descriptor = os.pidfd_open(self._number)
        try:
            select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)
        return self.poll() is not None


class Nursery:
    """The supervisor's connection to the fork server, and its process.

    ``command`` runs the fork server, which is started immediately, because its imports take time. It writes errors to
    ``log``. ``on_child_exit`` is called when a child may have ended.
    """

    def __init__(self, command: Sequence[str], lifeline: Lifeline, log: LogFile, look: Callable[[], None]) -> None:
        """Start the fork server. Raises ``OSError`` if the machine can't."""
        self._lifeline, self._log, self._look = lifeline, log, look
        self._unborn: deque[Forked] = deque()  # processes that are not forked yet, in the order of the requests
        self._loop = asyncio.get_running_loop()
        self._patience: asyncio.TimerHandle | None = None  # ends a fork server that does not answer in time
        self._problem = ""  # why it can never fork
        self._made_of = _installed()  # identifies the installed version at its start
        take_orphans_in()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self._process = self._started(command, theirs)
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._loop.add_reader(self._control.fileno(), self._hear)

    def _started(self, command: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
        log = self._log.open()
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **environment_of_child(),
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
    def is_there(self) -> bool:
        """Whether it is running and can fork."""
        return self._process.poll() is None and self._control.fileno() >= 0

    @property
    def end_in_words(self) -> str:
        """Why or how it ended, once it has."""
        return self._problem or describe_exit(self._process.returncode)

    @property
    def is_hopeless(self) -> bool:
        """Whether a new fork server would end the same way: it can't fork, or does not answer."""
        return bool(self._problem)

    @property
    def is_outdated(self) -> bool:
        """Whether another version was installed after it was started, so that its imports are those of the old one."""
        return self._made_of != _installed()

    @property
    def has_pending_births(self) -> bool:
        """Whether there may be a child, running or dead, whose process id is not read yet."""
        return bool(self._unborn)

    def look(self) -> None:
        """Check for the fork server's end, after some child has ended."""
        if self._process.poll() is not None:
            self.end()

    def begin(self, command: Sequence[str], log: LogFile) -> Forked:
        """Request a fork that runs ``command``, a command of ``swarm``. Raises ``OSError`` if the request can't be
        sent."""
        life = Forked(lambda: Process(command, log, self._lifeline))
        descriptor = log.open()
        try:
            order = json.dumps(arguments_of(command)).encode()
            socket.send_fds(self._control, [order], [descriptor])
        finally:
            os.close(descriptor)
        self._unborn.append(life)
        if self._patience is None:
            self._patience = self._loop.call_later(BIRTH_S, self._lose_patience)
        return life

    def _hear(self) -> None:
        """Handle a readable control socket: a child was forked, or the fork server has ended."""
        if self._hear_births():
            self.end()

    def _hear_births(self) -> bool:
        """Read all available messages; return whether the stream has ended."""
        with suppress(BlockingIOError):
            while self._control.fileno() >= 0 and (message := self._next_message()):
                said = json.loads(message)
                if isinstance(said, str):
                    self._problem = said
                else:
                    self._unborn.popleft().born(said)
                    self._be_patient()
            return True
        return False

    def _next_message(self) -> bytes:
        """Return the next message; empty at the end.

        A reset, which means that the fork server left requests unread, is raised once before its last messages.
        """
        with suppress(ConnectionResetError):
            return self._control.recv(MAX_ORDER_BYTES)
        return self._control.recv(MAX_ORDER_BYTES)

    def _be_patient(self) -> None:
        assert self._patience is not None
        self._patience.cancel()
        self._patience = self._loop.call_later(BIRTH_S, self._lose_patience) if self._unborn else None
        # The child may have ended before its id was read. Not immediately: this may run inside a call of ``check``.
        self._loop.call_soon(self._look)

    def _lose_patience(self) -> None:
        self._problem = f"did not answer within {BIRTH_S:g} s"
        self.end()

    def end(self) -> None:
        """End the fork server. Processes that are not forked yet are started separately."""
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control.fileno())
        self._process.kill()
        self._process.wait()
        self._hear_births()  # only now is it certain that no more messages will come: each of these children lives on
        self._control.close()
        if self._patience is not None:
            self._patience.cancel()
        while self._unborn:
            self._unborn.popleft().start_plainly()

    def close(self) -> None:
        """End the fork server and drop the pending requests."""
        for life in self._unborn:
            life.kill()
        self.end()


def _installed() -> tuple[int, int] | None:
    """Return a value that identifies the installed version; None while none is installed."""
    try:
        found = os.stat(version.__file__)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def take_orphans_in() -> None:
    """Become the parent of orphaned descendants. Raises ``OSError`` on systems that can't do it."""
    if sys.platform != "linux":
        raise OSError("no process takes orphans in here")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def arguments_of(command: Sequence[str]) -> list[str]:
    """Return the arguments after ``python … -m swarm``."""
    return list(command[command.index("-m") + 2 :])
