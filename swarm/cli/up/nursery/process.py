"""The nursery's own process: imports, then forks a worker for each order.

An order is a JSON list, the arguments of ``swarm``, with the descriptor of a log. The answer is the number of a process
that is the supervisor's child by then; or, in words, why there will never be one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
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
_LOOK_AGAIN_S = 0.0005


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
            number = _fork_twice(supervisor)
            if number is None:
                break
            os.close(order.log)
            way.send(json.dumps(number).encode())
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


def _fork_twice(supervisor: int) -> int | None:
    """Fork a process that forks the child and ends. Returns the child's number; None in the child, once the supervisor
    is its parent."""
    reads, writes = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        child = os.fork()
        if child == 0:
            os.close(reads)
            os.close(writes)
            _be_adopted(between, supervisor)
            return None
        os.write(writes, str(child).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        number = int(pipe.read())
    os.waitpid(between, 0)
    return number


def _be_adopted(between: int, supervisor: int) -> None:
    """Wait until the process between has ended, which it does at once. Without a supervisor there is nothing to do."""
    while os.getppid() == between:
        time.sleep(_LOOK_AGAIN_S)
    if os.getppid() != supervisor:
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
