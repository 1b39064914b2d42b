"""The supervisor's end of the nursery: orders go out, lives begin."""

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
BIRTH_S = 60.0  # for an order: importing comes first, from a slow disk

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """One life of a child that the nursery was asked for: a child of ours, once it is born."""

    def __init__(self, plainly: Callable[[], Process]) -> None:
        self._plainly = plainly
        self._plain: Process | None = None  # instead, if there is no nursery any more
        self._number: int | None = None
        self._code: int | None = None
        self.problem = ""  # why the machine could not start it

    def born(self, number: int) -> None:
        """It is process ``number``. Who was ended before lives no longer."""
        self._number = number
        if self._code is not None:
            self._send(signal.SIGKILL)

    def start_plainly(self) -> None:
        """It won't be born: start it as a process of its own. If the machine can't, this life ends with ``problem``."""
        if self._code is None:
            try:
                self._plain = self._plainly()
            except OSError as error:
                self._code, self.problem = os.EX_OSERR, str(error)

    @property
    def pid(self) -> int | None:
        return self._number if self._plain is None else self._plain.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), None while it lives or isn't born yet."""
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
    """Begin lives. ``command`` runs the nursery's process, which is started at once: importing takes its time. It says
    why it ends in ``log``. ``look``: to be called when something may have ended."""

    def __init__(self, command: Sequence[str], lifeline: Lifeline, log: LogFile, look: Callable[[], None]) -> None:
        """Raises OSError if the machine can't."""
        self._lifeline, self._log, self._look = lifeline, log, look
        self._unborn: deque[Forked] = deque()  # in the order in which they were asked for
        self._loop = asyncio.get_running_loop()
        self._patience: asyncio.TimerHandle | None = None
        self._problem = ""  # why it can't ever begin a life
        self._made_of = _installed()
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
        """False: it has ended, and begins no lives any more."""
        return self._process.poll() is None and self._control.fileno() >= 0

    @property
    def end_in_words(self) -> str:
        """Say why or how it ended, once it has."""
        return self._problem or describe_exit(self._process.returncode)

    @property
    def is_hopeless(self) -> bool:
        """Another one would end like this one: it can't fork, or doesn't answer."""
        return bool(self._problem)

    @property
    def is_outdated(self) -> bool:
        """Another version has been installed since it was started: what it has imported is the former one."""
        return self._made_of != _installed()

    @property
    def has_pending_births(self) -> bool:
        """Whether a child may live, or have died, whose number is not read yet."""
        return bool(self._unborn)

    def look(self) -> None:
        """Something has ended, perhaps this."""
        if self._process.poll() is not None:
            self.end()

    def begin(self, command: Sequence[str], log: LogFile) -> Forked:
        """Begin a life of ``command``, one that runs ``swarm``. Raises OSError if that can't be asked for."""
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
        """A child is born, or the nursery has ended."""
        if self._hear_births():
            self.end()

    def _hear_births(self) -> bool:
        """Take what it has said; whether that is all that it will ever say."""
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
        """Empty at its end. That it has left orders unread is told once, before what it has said."""
        with suppress(ConnectionResetError):
            return self._control.recv(MAX_ORDER_BYTES)
        return self._control.recv(MAX_ORDER_BYTES)

    def _be_patient(self) -> None:
        assert self._patience is not None
        self._patience.cancel()
        self._patience = self._loop.call_later(BIRTH_S, self._lose_patience) if self._unborn else None
        # It may have ended before its number was read. Not at once: this may be in the middle of a look.
        self._loop.call_soon(self._look)

    def _lose_patience(self) -> None:
        self._problem = f"did not answer within {BIRTH_S:g} s"
        self.end()

    def end(self) -> None:
        """End it. Who isn't born yet is started as a process of its own."""
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control.fileno())
        self._process.kill()
        self._process.wait()
        self._hear_births()  # only now is it sure that no more will come: each of these children lives on
        self._control.close()
        if self._patience is not None:
            self._patience.cancel()
        while self._unborn:
            self._unborn.popleft().start_plainly()

    def close(self) -> None:
        """End it for good: who isn't born yet never is."""
        for life in self._unborn:
            life.kill()
        self.end()


def _installed() -> tuple[int, int] | None:
    """What tells two installations apart; None while there is none."""
    try:
        found = os.stat(version.__file__)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def take_orphans_in() -> None:
    """Be the parent of whoever loses its own below us. Raises OSError where there is no such thing."""
    if sys.platform != "linux":
        raise OSError("no process takes orphans in here")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def arguments_of(command: Sequence[str]) -> list[str]:
    """What follows ``python … -m swarm``."""
    return list(command[command.index("-m") + 2 :])
