"""A supervisor with scripted children, as a program: ``supervised.py SOCKET LOGS NUM_WORKERS BEHAVIOUR NURSERY``.

Each child connects to SOCKET, says who it is, and does what it is told there. The connection ends with the child.
NURSERY: "none", "nursery", which forks workers, one that is "threaded", so it can't, one that is "deaf" to orders, one
that is "late", which is not waited for any longer than a moment, or one that halts at each birth, "before" or "after"
it sends the child's number: it connects to SOCKET as a child named by that number, and goes on at its next order.
"refusing": one that finds that the model can't be served.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from swarm.cli.output import ConsoleProgress, print_error
from swarm.cli.up.forkserver import client, process
from swarm.cli.up.processes import die_with_parent
from swarm.cli.up.runner import Feed, Runner
from swarm.cli.up.supervisor import AnswerRequest


class NoHost:
    async def run(self, feed: Feed) -> None:
        await asyncio.Event().wait()

    def answer(self, answer: AnswerRequest) -> None:
        raise AssertionError("nobody asked")


async def supervise(address: str, logs: Path, num_workers: int, behaviour: str, nursery: str) -> int:
    def command_of(name: str, memory_limit: int | None, device: str) -> list[str]:
        return [sys.executable, "-m", "supervised", "--child", name, address, behaviour]

    client.version = SimpleNamespace(__file__=logs / "version.py")  # type: ignore[assignment]
    if nursery == "late":
        client.FORK_TIMEOUT_S = 0.3
    command = None if nursery == "none" else [sys.executable, "-m", "supervised", "--nursery", nursery, address]
    runner = Runner(command_of, logs, ConsoleProgress(sys.stdout), NoHost, forkserver=command)
    error = await runner.run(num_workers, "cpu")
    if error is not None:
        return print_error("swarm", error)
    return 130 if runner.was_interrupted_twice else 0


def child(name: str, address: str, behaviour: str) -> None:
    if behaviour != "forgetful":  # one that forgets is how we know that the test sees who stays behind
        die_with_parent()
    ignore = behaviour == "deaf"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else lambda *_: sys.exit(0))
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    link.sendall(f"{name} {os.getpid()}\n".encode())
    while order := link.recv(4096).decode():
        verb, _, rest = order.partition(" ")
        if verb == "say":
            print(rest, file=sys.stderr, flush=True)
            link.sendall(b"said\n")
        elif verb == "exit":
            sys.exit(int(rest))


class Halting(socket.socket):
    """The nursery's way to the supervisor, which halts at each birth."""

    def __init__(self, control: socket.socket, when: str, address: str) -> None:
        super().__init__(fileno=control.detach())
        self._when, self._address = when, address

    def send(self, message: bytes, flags: int = 0) -> int:  # type: ignore[override]
        if self._when == "before":
            self._halt(message)
        num_bytes = super().send(message, flags)
        if self._when == "after":
            self._halt(message)
        return num_bytes

    def _halt(self, message: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(self._address)
            link.sendall(f"{message.decode()} {os.getpid()}\n".encode())
            link.recv(4096)


def run_nursery(kind: str) -> None:
    """One as the product's, whose children are ours."""
    control = process.connect_supervisor()
    if kind in ("before", "after"):
        control = Halting(control, kind, sys.argv[3])
    if kind == "refusing":
        control.send(json.dumps({"refused": "the model has no attention"}).encode())
        sys.exit(1)
    if kind == "threaded":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if kind in ("deaf", "late"):
        threading.Event().wait()
    sys.exit(process.serve(control, forked))


def forked(arguments: Sequence[str]) -> int:
    child(*arguments[1:])
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    elif sys.argv[1] == "--nursery":
        run_nursery(sys.argv[2])
    else:
        address, logs, num_workers, behaviour, nursery = sys.argv[1:]
        sys.exit(asyncio.run(supervise(address, Path(logs), int(num_workers), behaviour, nursery)))
