"""Processes of a swarm that start in a tenth of a second: forked from one that has imported everything already.

``python -m tests.faults.zygote`` reads one order a line from stdin, ``{"arguments": […], "environment": {…}, "log":
"…"}``, forks, runs ``swarm`` with these arguments in the child and answers with its process number. It has a single
thread while it forks (importing torch starts none), so a child begins as a fresh process would. Children die with it,
and it ends with its stdin.

``"environment"`` may have ``ZYGOTE_GROUP``: the group that the process runs as, by which a firewall tells its packets;
``ZYGOTE_NAMESPACE``: the network namespace, by its name, in which it is; ``ZYGOTE_HOSTNAME``: what it takes for the
name of its machine.

``{"ended": PID}`` is answered with the exit code of one that has ended.

With ``"costs": true`` a worker reports what another one measured before it on the same machine, instead of measuring
for another 0.7 s. The folder of the model may be empty: then one is made there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

START_S = 120.0  # it imports torch, on a busy machine
GROUP_VARIABLE = "ZYGOTE_GROUP"
NAMESPACE_VARIABLE = "ZYGOTE_NAMESPACE"
HOSTNAME_VARIABLE = "ZYGOTE_HOSTNAME"
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


class Forked:
    """A process that the zygote forked, with the part of Popen's verbs that tests use. Signals can't reach another
    process that got its number since: they go through a descriptor. ``code_of`` tells how one ended that has."""

    def __init__(self, pid: int, code_of: Callable[[int], int]) -> None:
        self.pid = pid
        self._code_of = code_of
        self._code: int | None = None
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None

    def send_signal(self, number: int) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code once it has ended, the negative number of the signal that ended it; None until then."""
        if self._descriptor is not None and select.select([self._descriptor], [], [], 0)[0]:
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None and self._code is None:
            self._code = self._code_of(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._descriptor is not None and not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


class Zygote:
    """The parent's end: ``zygote(arguments, environment, log)`` starts a process."""

    def __init__(self, model: Path, *, same_costs: bool = True) -> None:
        self.model = model
        self._costs_of = str(model) if same_costs else None
        self._asking = threading.Lock()  # a test may wait for a process in a thread
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=Path(__file__).parents[2],
        )
        self._answer(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> Forked:
        order = {"arguments": list(arguments), "environment": environment, "log": str(log)}
        return Forked(self._ask(order | {"costs": self._costs_of in arguments}), self._code_of)

    def _code_of(self, pid: int) -> int:
        return self._ask({"ended": pid})

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        with self._asking:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return int(self._answer(10.0))

    def _answer(self, within_s: float) -> bytes:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            raise TimeoutError("the zygote does not answer")
        return self._process.stdout.readline()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- the zygote's own process ----------------------------------------------------------------------------------------


def main(model: str) -> None:
    """Import, measure, answer orders until stdin ends."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 (once, not in the children, too)

    import swarm.broker.service
    import swarm.cli.app
    import swarm.stage.shell.service  # noqa: F401

    torch.set_num_threads(1)
    if not os.listdir(model):
        _in_a_child(lambda: _made(model))
    _import_classes(model)
    costs = _in_a_child(lambda: _measured(model))
    gc.freeze()
    codes: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(codes))
    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("the zygote has threads: forking would be unsafe")
    print("ready", flush=True)
    while line := sys.stdin.buffer.readline():
        order = json.loads(line)
        if "ended" in order:
            _reap(codes)
            print(codes.pop(order["ended"], 0), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _be(order, costs)
        print(pid, flush=True)


def _reap(codes: dict[int, int]) -> None:
    """Note how those ended that have."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _import_classes(model: str) -> None:
    """Import what loading a model of this kind imports on demand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(model))]


def _in_a_child(does: Callable[[], bytes]) -> bytes:
    """What it returns there: it starts threads."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(does())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


def _made(model: str) -> bytes:
    """Make one of eight layers with weights of high entropy."""
    from tests.model.models import llama_config, random_model

    random_model(llama_config()).save_pretrained(model)
    return b""


def _measured(model: str) -> bytes:
    """Measure what a layer costs here."""
    import msgspec

    from swarm.stage.engine.torch_executor import TorchExecutor

    return msgspec.msgpack.encode(TorchExecutor(model, threads=1, memory_limit=2 << 30).measure())


def _be(order: dict[str, Any], costs: bytes) -> NoReturn:
    """The child: a ``swarm`` with these arguments, as if started by a shell."""
    from swarm.cli import main as swarm

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    enter(os.environ.pop(NAMESPACE_VARIABLE, None))
    hostname = os.environ.pop(HOSTNAME_VARIABLE, None)
    if hostname is not None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(hostname)
    group = os.environ.pop(GROUP_VARIABLE, None)
    if group is not None:
        os.setgid(int(group))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after setgid, which would undo it
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.closerange(3, 256)
    if order["costs"]:
        _know(costs)
    code = 1
    try:
        code = swarm.run(order["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter(namespace: str | None) -> None:
    """Move this thread, and what it starts from now on, to the network namespace of that name."""
    if namespace is not None:
        with open(f"/run/netns/{namespace}", "rb") as file:
            set_namespace(file.fileno())


def set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _know(costs: bytes) -> None:
    import msgspec

    from swarm.stage.engine.torch_executor import TorchExecutor
    from swarm.wire.messages import LayerCost

    known = msgspec.msgpack.decode(costs, type=tuple[LayerCost, ...])
    TorchExecutor.measure = lambda _self: known  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1])
