"""Somebody between two ends of ZMTP who reads the frames that pass, and may forge, damage, repeat and take out some."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from swarm.wire.transport.server_handshake import encode_command
from swarm.wire.transport.zmtp import GREETING_BYTES, command_frame

HOST: Final = "127.0.0.1"
FORGED_ERROR: Final = command_frame(encode_command(b"ERROR", b"\x03400"))
_LONG, _COMMAND = 2, 4

# What somebody does with a frame, as it travels: from which end it comes ("knocks", "listens"), its number in this
# connection, the frame. Returns what is passed on instead.
Meddling = Callable[[str, int, bytes], bytes]


def nothing(_end: str, _number: int, frame: bytes) -> bytes:
    """Pass the frame on."""
    return frame


def is_handshake(frame: bytes) -> bool:
    return bool(frame[0] & _COMMAND)


class Meddler:
    """Listens in the place of a door, and passes on to it. ``meddling`` may be changed at any time."""

    def __init__(self, door: str, meddling: Meddling = nothing) -> None:
        self.meddling = meddling
        self.num_connections = 0
        self._door = int(door.rpartition(":")[2])
        self._host = door.removeprefix("tcp://").rpartition("@")[2].rpartition(":")[0]
        self._writers: set[asyncio.StreamWriter] = set()
        self._meetings: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str = HOST, port: int = 0) -> str:
        """Begin; return where."""
        self._server = await asyncio.start_server(self._came, host, port)
        return f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """End all connections that stand."""
        for writer in self._writers:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._meetings)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        meeting = asyncio.create_task(self._meet(reader, writer))
        self._meetings.add(meeting)
        meeting.add_done_callback(self._meetings.discard)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            door_reader, door_writer = await asyncio.open_connection(self._host, self._door)
            self._writers |= {writer, door_writer}
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on("knocks", reader, door_writer))
                    group.create_task(self._pass_on("listens", door_reader, writer))
            finally:
                self._writers -= {writer, door_writer}
                door_writer.close()
        writer.close()

    async def _pass_on(self, end: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            target.write(await source.readexactly(GREETING_BYTES))
            number = 0
            while True:
                frame = await _frame(source)
                target.write(self.meddling(end, number, frame))
                await target.drain()
                number += 1
        target.close()


async def _frame(source: asyncio.StreamReader) -> bytes:
    """Read a frame with what stands before it. Raises IncompleteReadError."""
    head = await source.readexactly(2)
    if head[0] & _LONG:
        head += await source.readexactly(7)
    return head + await source.readexactly(int.from_bytes(head[1:], "big"))
