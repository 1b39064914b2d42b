"""A crowd at a door with a lock: many connections of somebody who may not come in, each badly behaved in one way."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from swarm.wire.transport.keys import KeyPair, new_pair
from swarm.wire.transport.server_handshake import encode_command, encode_metadata
from swarm.wire.transport.zmtp import command_frame, encode_greeting, frame_header
from tests.unit.wire.test_curve import Knocker

CURVE: Final = encode_greeting(b"CURVE", is_server=False)
_CONNECT_S: Final = 30.0
_AT_ONCE: Final = 500  # that are on their way in
_DRIP_S: Final = 0.5
_WELCOME: Final = 64 + 2 + 168  # a greeting, and a command


@dataclass(frozen=True)
class Door:
    """Where it is, its public key, which sockets speak there, and what was recorded of a conversation."""

    name: str
    host: str
    port: int
    public: str
    speaks: str = "DEALER"
    recorded: bytes = b""


@dataclass
class Counted:
    """``opened``: connections that stood; ``hung_up``: those that the door ended; ``most_open``: at the same time."""

    opened: int = 0
    failed: int = 0
    hung_up: int = 0
    most_open: int = 0
    seconds: float = 0.0


class Line(asyncio.Protocol):
    """One connection. What comes is kept as far as somebody asks for it."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._more = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        if len(self.came) < 1 << 14:
            self.came += data
        self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._more.set()
        if not self.ended.done():
            self.ended.set_result(None)

    async def read(self, size: int) -> bytes:
        """Raises EOFError if the other end hangs up before."""
        while len(self.came) < size:
            if self.ended.done():
                raise EOFError
            self._more.clear()
            await self._more.wait()
        return bytes(self.came)

    def write(self, data: bytes) -> None:
        self.transport.write(data)


Rudeness = Callable[[Door, Line], Awaitable[None]]


async def _silent(_door: Door, _line: Line) -> None:
    """Nothing, ever."""


async def _endless(_door: Door, line: Line) -> None:
    """A handshake that never ends: a byte of it now and then."""
    line.write(CURVE + b"\x04\xc8\x05HELLO\x01\x00")
    for _ in range(190):
        await asyncio.sleep(_DRIP_S)
        line.write(b"\0")


async def _garbage(_door: Door, line: Line) -> None:
    line.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20)


async def _null(_door: Door, line: Line) -> None:
    """No mechanism, and a message at once."""
    ready = encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=b"x"))
    line.write(
        encode_greeting(b"NULL", is_server=False) + command_frame(ready) + frame_header(5, more=False) + b"hello"
    )


async def _noise(_door: Door, line: Line) -> None:
    """A HELLO in form only."""
    line.write(CURVE + command_frame(encode_command(b"HELLO", b"\x01\x00" + bytes(range(192)))))


async def _wrong_key(door: Door, line: Line) -> None:
    """The whole handshake, with a key that nobody knows."""
    await converse(_knocker(door, _STRANGER), line)


async def _replayed(door: Door, line: Line) -> None:
    """All that a member once said there, again."""
    line.write(door.recorded)


async def _oversized(_door: Door, line: Line) -> None:
    """A frame of a terabyte is announced, and begun."""
    line.write(CURVE + bytes([6]) + (1 << 40).to_bytes(8, "big") + bytes(1 << 12))


_STRANGER: Final = new_pair()
KINDS: Final[dict[str, Rudeness]] = {
    "silent": _silent,
    "endless": _endless,
    "garbage": _garbage,
    "null": _null,
    "noise": _noise,
    "wrong-key": _wrong_key,
    "replayed": _replayed,
    "oversized": _oversized,
}


def _knocker(door: Door, own: KeyPair) -> Knocker:
    return Knocker(own, door.public, encode_metadata(Socket_Type=door.speaks.encode()))


async def converse(knocker: Knocker, line: Line) -> bytes:
    """Shake hands as far as the door does, and say hello. Returns every byte that was said."""
    first = CURVE + command_frame(knocker.hello())
    line.write(first)
    initiate = knocker.initiate((await line.read(_WELCOME))[66:_WELCOME])
    message = knocker.message(b"hello")
    rest = bytes([6]) + len(initiate).to_bytes(8, "big") + initiate + frame_header(len(message), more=False) + message
    line.write(rest)
    return first + rest


async def recorded(door: Door, own: KeyPair) -> bytes:
    """What somebody with this key says at a door in a conversation of its own."""
    _, line = await asyncio.get_running_loop().create_connection(Line, door.host, door.port)
    said = await converse(_knocker(door, own), line)
    line.transport.close()
    await line.ended
    return said


class Crowd:
    """So many connections to one door, as fast as they come, from these addresses in turn."""

    def __init__(self, door: Door, kind: str, sources: Sequence[str] = ()) -> None:
        self.counted = Counted()
        self._door, self._rude = door, KINDS[kind]
        self._sources = itertools.cycle([(source, 0) for source in sources] or [None])
        self._entering = asyncio.Semaphore(_AT_ONCE)
        self._came = asyncio.Semaphore(0)
        self._over = asyncio.Event()
        self._num_open = 0

    async def knock(self, count: int, stays_s: float = 1.0) -> Counted:
        """All stay for as long as the door lets them, at most until so long after the last one came."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._one(next(self._sources)))
            await self._all_came(count)
            await asyncio.sleep(stays_s)
            self._over.set()
        self.counted.seconds = round(time.monotonic() - started, 2)
        return self.counted

    async def _all_came(self, count: int) -> None:
        for _ in range(count):
            await self._came.acquire()

    async def _one(self, source: tuple[str, int] | None) -> None:
        async with self._entering:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, line = await asyncio.get_running_loop().create_connection(
                        Line, self._door.host, self._door.port, local_addr=source
                    )
            except (OSError, TimeoutError):
                self.counted.failed += 1
                return
            finally:
                self._came.release()
        self.counted.opened += 1
        self._num_open += 1
        self.counted.most_open = max(self.counted.most_open, self._num_open)
        rude = asyncio.create_task(self._be_rude(line))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait((over, line.ended), return_when=asyncio.FIRST_COMPLETED)
        self.counted.hung_up += line.ended.done()
        self._num_open -= 1
        over.cancel()
        rude.cancel()
        line.transport.abort()
        await asyncio.gather(over, rude, return_exceptions=True)

    async def _be_rude(self, line: Line) -> None:
        try:
            await self._rude(self._door, line)
        except EOFError:
            return
