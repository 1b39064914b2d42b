"""A client process: reads orders from stdin, sends requests, reports results on stdout. Ends when stdin is closed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

from swarm.bench.processes.load import Load
from swarm.bench.processes.loops import run_loop
from swarm.bench.processes.orders import BATCH, LINE_BYTES, Done, Ready, Records, Report, Run, line, read_order
from swarm.bench.records import Gathered

PROGRESS_S = 0.25  # between two progress reports


class Mouth:
    """Pipe to the parent, which always reads; a closed pipe ends this process."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def tell(self, report: Report) -> None:
        self._out.write(line(report))
        self._out.flush()


async def serve(mouth: Mouth) -> None:
    """Carry out one order after the other, until stdin is closed.

    A line that arrives while a share is being sent ends the share: it can only be Stop, or the end of stdin.
    """
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    mouth.tell(Ready())
    while told := await reader.readline():
        order = read_order(told)
        if isinstance(order, Run):
            ended = await _carry_out(order, reader, mouth)
            if ended:
                return


async def _carry_out(order: Run, reader: asyncio.StreamReader, mouth: Mouth) -> bool:
    """Send a share and report its records; return whether stdin was closed."""
    load = Load(order)
    sending = asyncio.create_task(load.send_all())
    listening = asyncio.create_task(reader.readline())
    while not sending.done() and not listening.done():
        await asyncio.wait((sending, listening), timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        mouth.tell(load.progress())
    if not sending.done():
        sending.cancel()
    await asyncio.wait((sending,))
    if not sending.cancelled() and (error := sending.exception()) is not None:
        raise error
    _tell_all(load.gathered, mouth.tell)
    if listening.done():
        return not listening.result()
    told = await listening  # the next order: the parent sends Stop after each share
    return not told


def _tell_all(gathered: Gathered, tell: Callable[[Report], None]) -> None:
    for at in range(0, len(gathered.records), BATCH):
        tell(Records(gathered.records[at : at + BATCH]))
    tell(Done(gathered.gaps, gathered.pieces, gathered.cpu[0] if gathered.cpu else 0.0))


def main() -> None:
    # Libraries must not print between our lines: stdout becomes stderr.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        run_loop(serve(Mouth(out)))
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
