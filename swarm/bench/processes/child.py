"""A client process: reads orders from stdin, sends requests, reports results on stdout. Ends when stdin is closed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

from swarm.bench.processes.loops import run_loop
from swarm.bench.processes.pipe_messages import (
    BATCH_SIZE,
    MAX_LINE_BYTES,
    ProcessReady,
    Report,
    RunShare,
    ShareDone,
    TimingBatch,
    encode_line,
    read_order,
)
from swarm.bench.processes.share_sender import ShareSender
from swarm.bench.records import PointRecords

PROGRESS_S = 0.25  # between two progress reports


class ParentPipe:
    """Pipe to the parent, which always reads; a closed pipe ends this process."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def send(self, report: Report) -> None:
        self._out.write(encode_line(report))
        self._out.flush()


async def serve(pipe: ParentPipe) -> None:
    """Carry out one order after the other, until stdin is closed.

    A line that arrives while a share is being sent ends the share: it can only be ``StopShare``, or the end of stdin.
    """
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pipe.send(ProcessReady())
    while line_bytes := await reader.readline():
        order = read_order(line_bytes)
        if isinstance(order, RunShare):
            ended = await _carry_out(order, reader, pipe)
            if ended:
                return


async def _carry_out(order: RunShare, reader: asyncio.StreamReader, pipe: ParentPipe) -> bool:
    """Send a share and report its records; return whether stdin was closed."""
    load = ShareSender(order)
    sending = asyncio.create_task(load.send_all())
    listening = asyncio.create_task(reader.readline())
    while not sending.done() and not listening.done():
        await asyncio.wait((sending, listening), timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        pipe.send(load.progress())
    if not sending.done():
        sending.cancel()
    await asyncio.wait((sending,))
    if not sending.cancelled() and (error := sending.exception()) is not None:
        raise error
    _report_all(load.point_records, pipe.send)
    if listening.done():
        return not listening.result()
    line_bytes = await listening  # the next order: the parent sends StopShare after each share
    return not line_bytes


def _report_all(gathered: PointRecords, send: Callable[[Report], None]) -> None:
    for at in range(0, len(gathered.records), BATCH_SIZE):
        send(TimingBatch(gathered.records[at : at + BATCH_SIZE]))
    send(ShareDone(gathered.gaps, gathered.pieces, gathered.cpu[0] if gathered.cpu else 0.0))


def main() -> None:
    # Libraries must not print between our lines: stdout becomes stderr.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        run_loop(serve(ParentPipe(out)))
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
