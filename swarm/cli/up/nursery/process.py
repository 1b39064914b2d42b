"""The nursery's own process: imports, then forks a worker for each order.

An order is a JSON list, the arguments of ``swarm``, with the descriptor of a log. The answer is the number of a process
that is the supervisor's child by then; or, in words, why there will never be one.

A child runs only after its number has been sent. It waits for one byte in a pipe whose only other end is the nursery's;
if the nursery dies first, the pipe ends and so does the child. So every child that runs has a number that the
supervisor can read, also after the nursery's death.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

from swarm.cli import entry
from swarm.cli.up.nursery.ours import CONTROL_VARIABLE, MAX_ORDER_BYTES
from swarm.errors import ModelError

Run = Callable[[Sequence[str]], int]  # what a child does: the exit code

_PR_SET_PDEATHSIG = 1


def main(model: str) -> int:
    """Import all that a worker imports, then serve."""
    way = control()
    _prepare()
    from swarm.cli.main import run

    gc.disable()  # imports leave no garbage worth the search
    _import_all(model)
    gc.enable()
    return serve(way, run)


def serve(way: socket.socket, run: Run) -> int:
    """Fork a child for each order, until the supervisor is gone; the exit code. Returns in children, too."""
    if len(os.listdir("/proc/self/task")) != 1:
        print("swarm: the nursery has threads, so it can't fork: workers start by themselves", file=sys.stderr)
        way.send(json.dumps("has threads, so it can't fork").encode())
        return 1
    gc.collect()
    gc.freeze()  # children share these pages for as long as nobody writes to them
    supervisor = os.getppid()
    with way:
        while order := _next_order(way):
            newborn = _fork_twice(supervisor)
            if newborn is None:
                break
            os.close(order.log)
            way.send(json.dumps(newborn.pid).encode())
            newborn.release()
    return 0 if order is None else _be(order, run)


def control() -> socket.socket:
    """The way to the supervisor, with whom this process ends. What a child of a child starts doesn't get it."""
    setproctitle(" ".join(["swarm nursery", *sys.argv[1:]]))
    way = socket.socket(fileno=int(os.environ.pop(CONTROL_VARIABLE)))
    way.set_inheritable(False)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return way


def _prepare() -> None:
    """What must be said before torch is imported, and what would start threads."""
    from swarm.stage.shell.waiting import prepare_openmp

    prepare_openmp()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's, which starts them when it is imported; no worker uses it


def _import_all(model: str) -> None:
    import swarm.cli.app
    import swarm.config
    import swarm.stage.shell.service  # noqa: F401
    from swarm.stage.model.build import import_family
    from swarm.stage.native.siblings import share_with_children

    share_with_children()
    if Path(model).is_dir():  # another one must be fetched first, which is the worker's to do
        with suppress(ModelError):  # the worker says it
            import_family(Path(model))


@dataclass(frozen=True, slots=True)
class _Order:
    """What a child is: the arguments of ``swarm``, and the descriptor of its log."""

    arguments: list[str]
    log: int


def _next_order(way: socket.socket) -> _Order | None:
    """Wait for one. None: the supervisor has no more."""
    message, descriptors, _, _ = socket.recv_fds(way, MAX_ORDER_BYTES, 1)
    return _Order(json.loads(message), descriptors[0]) if message else None


@dataclass(frozen=True, slots=True)
class _Newborn:
    """A forked child that waits to be released."""

    pid: int
    word: int  # write end of the pipe in which the child waits

    def release(self) -> None:
        """Let the child run. One that is dead already stays with the supervisor, which knows its number."""
        with suppress(BrokenPipeError):
            os.write(self.word, b"!")
        os.close(self.word)


def _fork_twice(supervisor: int) -> _Newborn | None:
    """Fork a process that forks the child and ends. Returns None in the child, once it is released."""
    reads, writes = os.pipe()
    hears, word = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            for descriptor in (reads, writes, word):
                os.close(descriptor)
            _wait_for_release(hears, supervisor)
            return None
        with suppress(BrokenPipeError):  # the nursery is dead, and the child ends by itself
            os.write(writes, str(child).encode())
        os._exit(0)
    os.close(writes)
    os.close(hears)
    with os.fdopen(reads) as pipe:
        number = int(pipe.read())
    os.waitpid(between, 0)
    return _Newborn(number, word)


def _wait_for_release(hears: int, supervisor: int) -> None:
    """Return once the nursery has sent this child's number; by then the process between has ended. End this process if
    the nursery is dead, or if the supervisor is."""
    is_released = os.read(hears, 1)
    os.close(hears)
    if not is_released or os.getppid() != supervisor:
        os._exit(1)


def _be(order: _Order, run: Run) -> NoReturn:
    """The child: as if the supervisor had started it."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (order.log, 1), (order.log, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(order.log)
    sys.argv = ["swarm", *order.arguments]
    setproctitle(" ".join(sys.argv))  # as ps and top show it
    entry.end_with(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
