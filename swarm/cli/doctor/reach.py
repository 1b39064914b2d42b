"""Test of the connection to a broker, on the workers' port and with a worker's own key.

The broker is greeted, then timed with small and large messages. No worker joins by it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import zmq

from swarm.cli.doctor.checks import Reach
from swarm.clock import SystemClock
from swarm.errors import WireError
from swarm.stage.shell.probing import LinkProbe
from swarm.wire.addresses import control_endpoint
from swarm.wire.codec import ORDER, WORKER
from swarm.wire.dealer import DealerChannel, Link
from swarm.wire.door.keys import KeyPair, address_and_key
from swarm.wire.greeting import Greeting, greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import Probe, Probed
from swarm.wire.schema import schema

_PATIENCE_S: Final = 5.0
_UNREACHED: Final = "is swarm running there? If so, a firewall may block it: docs/how-to/hosts.md has the ports"
_SHUT: Final = "the broker does not accept this machine's key (any more): swarm worker --join, with an invitation"


async def reach(url: str, pair: KeyPair | None) -> Reach:
    """Test the connection. Raises ``ConfigError`` if the URL is no address.

    ``pair`` is the key pair by which the broker authenticates this machine; None if it needs none.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = f"doctor-{secrets.token_hex(4)}".encode()
    try:
        channel = DealerChannel(context, control_endpoint(url), identity, ORDER.frame_limit_bytes, pair)
        try:
            return await _Visit(address_and_key(url)[0], channel).made()
        finally:
            channel.close()
    finally:
        context.term()


class _Visit:
    def __init__(self, at: str, channel: DealerChannel) -> None:
        self._at, self._channel = at, channel
        self._probe = LinkProbe(self._send, SystemClock())
        self._met: asyncio.Future[Greeting | None] = asyncio.get_running_loop().create_future()
        self._version = 0

    async def made(self) -> Reach:
        listener = asyncio.create_task(self._hear(), name="receive from the broker")
        try:
            theirs = await asyncio.wait_for(self._met, _PATIENCE_S)
            if theirs is None:
                return Reach(self._at, wrong="it rejects this machine", remedy=_SHUT)
            if reason := why_strangers(theirs, schema()):
                return Reach(self._at, wrong=reason, remedy="docs/how-to/operations.md, Upgrade")
            self._version = spoken_with(theirs)
            link = await self._probe.measure()
        except TimeoutError:
            return Reach(self._at, wrong=f"no answer within {_PATIENCE_S:g} s", remedy=_UNREACHED)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        if link is None:
            return Reach(self._at, wrong="it sent its greeting, but then no answer", remedy="swarmctl doctor, there")
        return Reach(self._at, theirs.build, link.round_trip_s, link.bytes_per_s, self._probe.loses_large)

    async def _hear(self) -> None:
        async for event in self._channel:
            if event is Link.UP:
                self._channel.send(greeting(schema()))
            elif event in (Link.TURNED_AWAY, Link.UNHEARD):
                self._meet(None)
            elif not isinstance(event, Link):
                self._take(event)

    def _take(self, frames: list[memoryview]) -> None:
        if (theirs := read_greeting(frames)) is not None:
            self._meet(theirs)
            return
        try:
            order, _ = ORDER.decode(frames)
        except WireError:  # damaged on the way: treated as lost
            return
        if isinstance(order, Probed):
            self._probe.answered(order.ticket)

    def _meet(self, theirs: Greeting | None) -> None:
        if not self._met.done():
            self._met.set_result(theirs)

    def _send(self, probe: Probe, payload: bytes | None) -> None:
        self._channel.send(WORKER.encode(probe, payload, version=self._version))
