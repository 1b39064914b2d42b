"""The fork server's own process: imports, then forks a worker for each request.

A request is a JSON list, the arguments of ``swarm``, with the descriptor of a log. The answer is the id of a process
that is already the supervisor's child; or, as a string, the reason why there will never be one; or, as an object, the
reason why this model can't be served by any worker (``refused``).

A child runs only after its id has been sent. It waits for one byte from a pipe whose only other end belongs to the fork
server. If the fork server dies first, the pipe ends, and so does the child. Every child that runs therefore has an id
that the supervisor can read, even after the fork server's death.
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
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

from swarm.cli import entry
from swarm.cli.up.forkserver.client import CONTROL_VARIABLE, MAX_ORDER_BYTES
from swarm.errors import ModelError, UnservedModel

Run = Callable[[Sequence[str]], int]  # what a child does; returns the exit code

MAX_REFUSAL_CHARS = 4096

_PR_SET_PDEATHSIG = 1


def main(folder: str) -> int:
    """Import everything that a worker imports, and what the model in this folder needs, then serve."""
    channel = connect_supervisor()
    _prepare_environment()
    from swarm.cli.main import run

    gc.disable()  # imports leave no garbage worth collecting
    _import_all()
    refusal = find_refusal(Path(folder))
    gc.enable()
    if refusal:
        channel.send(json.dumps({"refused": refusal}).encode())
        return 1
    return serve(channel, run)


def serve(channel: socket.socket, run: Run) -> int:
    """Fork a child for each request, until the supervisor is gone; return the exit code. Returns in children, too."""
    if len(os.listdir("/proc/self/task")) != 1:
        print(
            "swarm: the fork server has threads, so it can't fork: workers start as separate processes", file=sys.stderr
        )
        channel.send(json.dumps("has threads, so it can't fork").encode())
        return 1
    gc.collect()
    gc.freeze()  # children share these pages until one of them is written
    supervisor = os.getppid()
    with channel:
        while request := _next_request(channel):
            child = _fork_twice(supervisor)
            if child is None:
                break
            os.close(request.log)
            channel.send(json.dumps(child.pid).encode())
            child.release()
    return 0 if request is None else _run_child(request, run)


def connect_supervisor() -> socket.socket:
    """Return the socket to the supervisor, and make this process end with it. Children's children do not inherit it."""
    setproctitle(" ".join(["swarm nursery", *sys.argv[1:]]))
    channel = socket.socket(fileno=int(os.environ.pop(CONTROL_VARIABLE)))
    channel.set_inheritable(False)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return channel


def _prepare_environment() -> None:
    """Set the environment that must be set before torch is imported, and prevent imports from starting threads."""
    from swarm.stage.shell.openmp import configure_openmp

    configure_openmp()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's OpenBLAS starts threads when it is imported; no worker uses them


def _import_all() -> None:
    import swarm.cli.app
    import swarm.config
    import swarm.stage.shell.service  # noqa: F401
    from swarm.stage.native.shared_cache import create_shared_cache

    create_shared_cache()


def find_refusal(folder: Path) -> str:
    """Import the code of the folder's kind of model, by building it without weights. Return the reason if that, or a
    comparison with the weights' headers, shows that no worker can serve it; empty otherwise: other errors are the
    worker's to report, and so is what it downloads."""
    from swarm.errors import refusing_model
    from swarm.stage.model.checkpoint import Checkpoint
    from swarm.stage.model.fitting import import_family

    try:
        checkpoint = Checkpoint(folder, images=False)
    except ModelError:
        checkpoint = None
    try:
        with refusing_model() if checkpoint is not None else nullcontext():
            import_family(folder, checkpoint)
    except UnservedModel as error:
        return str(error)[:MAX_REFUSAL_CHARS]  # it must fit in one message
    except ModelError:
        pass
    return ""


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """Request to fork: the arguments of ``swarm``, and the descriptor of the child's log."""

    arguments: list[str]
    log: int


def _next_request(channel: socket.socket) -> _ForkRequest | None:
    """Wait for a request; None if the supervisor has closed the socket."""
    message, descriptors, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
    return _ForkRequest(json.loads(message), descriptors[0]) if message else None


@dataclass(frozen=True, slots=True)
class _PendingChild:
    """A forked child that waits to be released."""

    pid: int
    release_fd: int  # write end of the pipe on which the child waits

    def release(self) -> None:
        """Let the child run. If it is already dead, the supervisor, which has its id, handles it."""
        with suppress(BrokenPipeError):
            os.write(self.release_fd, b"!")
        os.close(self.release_fd)


def _fork_twice(supervisor: int) -> _PendingChild | None:
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
        with suppress(BrokenPipeError):  # the fork server is dead, and the child ends by itself
            os.write(writes, str(child).encode())
        os._exit(0)
    os.close(writes)
    os.close(hears)
    with os.fdopen(reads) as pipe:
        number = int(pipe.read())
    os.waitpid(between, 0)
    return _PendingChild(number, word)


def _wait_for_release(hears: int, supervisor: int) -> None:
    """Return once the fork server has sent this child's id; by then the intermediate process has ended.

    End this process if the fork server or the supervisor is dead.
    """
    is_released = os.read(hears, 1)
    os.close(hears)
    if not is_released or os.getppid() != supervisor:
        os._exit(1)


def _run_child(order: _ForkRequest, run: Run) -> NoReturn:
    """Run as the child, in the state of a process that the supervisor has started."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (order.log, 1), (order.log, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(order.log)
    sys.argv = ["swarm", *order.arguments]
    setproctitle(" ".join(sys.argv))  # as ps and top show it
    entry.run_and_exit(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
