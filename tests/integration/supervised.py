"""A supervisor with scripted children, as a program: ``supervised.py SOCKET LOGS NUM_WORKERS [BEHAVIOUR]``.

Each child connects to SOCKET, says who it is, and does what it is told there. The connection ends with the child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from swarm.cli.output import Progress, complain
from swarm.cli.up.processes import die_with_parent
from swarm.cli.up.runner import Feed, Runner
from swarm.cli.up.supervisor import Answer


class NoHost:
    async def run(self, feed: Feed) -> None:
        await asyncio.Event().wait()

    def answer(self, answer: Answer) -> None:
        raise AssertionError("nobody asked")


async def supervise(address: str, logs: Path, num_workers: int, behaviour: str) -> int:
    def command_of(name: str, memory_limit: int | None) -> list[str]:
        return [sys.executable, __file__, "--child", name, address, behaviour]

    runner = Runner(command_of, logs, Progress(sys.stdout), NoHost())
    error = await runner.run(num_workers)
    if error is not None:
        return complain("swarm", error)
    return 130 if runner.was_impatient else 0


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


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        address, logs, num_workers, *rest = sys.argv[1:]
        sys.exit(asyncio.run(supervise(address, Path(logs), int(num_workers), *(rest or ["obedient"]))))
