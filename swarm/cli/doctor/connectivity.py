"""Test of the connection to a broker, on the workers' port and with a worker's own key.

The broker is greeted, then timed with small and large messages. No worker joins by it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import zmq

from swarm.cli.doctor.checks import BrokerConnectivity
from swarm.clock import SystemClock
from swarm.errors import WireError
from swarm.stage.shell.link_probe import LinkProbe
from swarm.wire.addresses import control_endpoint
from swarm.wire.codec import ORDER, WORKER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import Greeting, encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import Probe, Probed
from swarm.wire.schema import schema
from swarm.wire.transport.keys import KeyPair, address_and_key

_PATIENCE_S: Final = 5.0
_NO_ANSWER_REMEDY: Final = (
    "is swarm running there? If so, a firewall may block it: docs/explanation/network.md has the ports"
)
_REJECTED_REMEDY: Final = (
    "the broker does not accept this machine's key (any more): swarm worker --join, with an invitation"
)


async def check_connectivity(url: str, pair: KeyPair | None) -> BrokerConnectivity:
    """Test the connection. Raises ``ConfigError`` if the URL is no address.

    ``pair`` is the key pair by which the broker authenticates this machine; None if it needs none.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = f"doctor-{secrets.token_hex(4)}".encode()
    try:
        channel = DealerChannel(context, control_endpoint(url), identity, ORDER.frame_limit_bytes, pair)
        try:
            return await _ConnectivityCheck(address_and_key(url)[0], channel).run()
        finally:
            channel.close()
    finally:
        context.term()


class _ConnectivityCheck:
    def __init__(self, at: str, channel: DealerChannel) -> None:
        self._at, self._channel = at, channel
        self._probe = LinkProbe(self._send, SystemClock())
        self._greeting: asyncio.Future[Greeting | None] = asyncio.get_running_loop().create_future()
        self._version = 0

    async def run(self) -> BrokerConnectivity:
        listener = asyncio.create_task(self._receive(), name="receive from the broker")
        try:
            theirs = await asyncio.wait_for(self._greeting, _PATIENCE_S)
            if theirs is None:
                return BrokerConnectivity(self._at, error="it rejects this machine", remedy=_REJECTED_REMEDY)
            if reason := incompatibility(theirs, schema()):
                return BrokerConnectivity(self._at, error=reason, remedy="docs/how-to/operations.md, Upgrade")
            self._version = negotiated_version(theirs)
            link = await self._probe.measure()
        except TimeoutError:
            return BrokerConnectivity(self._at, error=f"no answer within {_PATIENCE_S:g} s", remedy=_NO_ANSWER_REMEDY)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        if link is None:
            return BrokerConnectivity(
                self._at, error="it sent its greeting, but then no answer", remedy="swarmctl doctor, there"
            )
        return BrokerConnectivity(self._at, theirs.build, link.round_trip_s, link.bytes_per_s, self._probe.loses_large)

    async def _receive(self) -> None:
        async for event in self._channel:
            if event is ConnectionEvent.CONNECTED:
                self._channel.send(encode_greeting(schema()))
            elif event in (ConnectionEvent.AUTH_REJECTED, ConnectionEvent.HANDSHAKE_FAILED):
                self._set_greeting(None)
            elif not isinstance(event, ConnectionEvent):
                self._handle(event)

    def _handle(self, frames: list[memoryview]) -> None:
        if (theirs := read_greeting(frames)) is not None:
            self._set_greeting(theirs)
            return
        try:
            order, _ = ORDER.decode(frames)
        except WireError:  # damaged on the way: treated as lost
            return
        if isinstance(order, Probed):
            self._probe.on_answer(order.ticket)

    def _set_greeting(self, theirs: Greeting | None) -> None:
        if not self._greeting.done():
            self._greeting.set_result(theirs)

    def _send(self, probe: Probe, payload: bytes | None) -> None:
        self._channel.send(WORKER.encode(probe, payload, version=self._version))
