"""The way from here to a broker, tried by the door that workers knock at, with a worker's own key: greeted, then timed
with small and large messages. The broker hears of no worker by it."""

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
_UNREACHED: Final = "is swarm up there? Else a firewall: docs/explanation/network.md has the ports"
_SHUT: Final = "its key is not known there (any more): swarm worker --join, with an invitation"


async def reach(url: str, pair: KeyPair | None) -> Reach:
    """Raises ConfigError if that is no address. ``pair``: by which the broker knows this machine; None: it asks for
    none."""
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
        listener = asyncio.create_task(self._hear(), name="hear the broker")
        try:
            theirs = await asyncio.wait_for(self._met, _PATIENCE_S)
            if theirs is None:
                return Reach(self._at, wrong="it does not let this machine in", remedy=_SHUT)
            if reason := why_strangers(theirs, schema()):
                return Reach(self._at, wrong=reason, remedy="docs/how-to/operations.md, Upgrade")
            self._version = spoken_with(theirs)
            link = await self._probe.measure()
        except TimeoutError:
            return Reach(self._at, wrong=f"nobody answers within {_PATIENCE_S:g} s", remedy=_UNREACHED)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        if link is None:
            return Reach(self._at, wrong="it greets, and then does not answer", remedy="swarmctl doctor, there")
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
        except WireError:  # damaged on the way: then it is missed
            return
        if isinstance(order, Probed):
            self._probe.answered(order.ticket)

    def _meet(self, theirs: Greeting | None) -> None:
        if not self._met.done():
            self._met.set_result(theirs)

    def _send(self, probe: Probe, payload: bytes | None) -> None:
        self._channel.send(WORKER.encode(probe, payload, version=self._version))
