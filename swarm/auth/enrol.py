"""Joining a swarm on another machine: register this machine's own key, authorized by an invitation."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import NamedTuple

import zmq

from swarm.auth.invitation import Invitation
from swarm.auth.key_proof import prove
from swarm.errors import Unavailable, WireError
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import BrokerKey, Enrol, Enrolled, Malformed, ServerMessage
from swarm.wire.schema import client_schema
from swarm.wire.transport.keys import KeyPair, public_of, with_key

TIMEOUT_S = 10.0  # For each address of the invitation.


class Enrolment(NamedTuple):
    """Result of joining: the address that answered, the broker's public key, and the name and role given to this
    machine."""

    address: str
    broker: str  # Public key of the broker.
    enrolled: Enrolled


async def enrol(invitation: Invitation, own: KeyPair, name: str, timeout_s: float = TIMEOUT_S) -> Enrolment:
    """Register our public key at the first address of the invitation that answers. Raises Unavailable if none answers
    or the invitation is refused."""
    reasons = []
    for address in invitation.addresses:
        events: set[ConnectionEvent] = set()
        try:
            async with asyncio.timeout(timeout_s):
                return await _enrol_at(address, invitation, own, name, events)
        except TimeoutError:
            reasons.append(
                f"the broker at {address} disconnects during the handshake: its key may have changed since it made "
                "this invitation; ask for another one (swarmctl invite)"
                if ConnectionEvent.HANDSHAKE_FAILED in events
                else f"no answer at {address} within {timeout_s:g} s"
            )
    raise Unavailable("; ".join(reasons) + ": check that the swarm runs and that its ports can be reached from here")


async def _enrol_at(
    address: str, invitation: Invitation, own: KeyPair, name: str, events: set[ConnectionEvent]
) -> Enrolment:
    """Enrol at one address. Connection events are added to ``events``, so that a timeout can be explained."""
    broker = invitation.broker
    pair = KeyPair(public_of(invitation.secret), invitation.secret)
    enrolment = Enrol(key=own.public, name=name, proof=prove(own, pair.public, broker))
    async with _open_channel(with_key(address, invitation.broker.encode()), pair) as channel:
        async for event in channel:
            if isinstance(event, ConnectionEvent):
                events.add(event)
            if event is ConnectionEvent.CONNECTED:
                channel.send(encode_greeting(client_schema()))
            elif event is ConnectionEvent.AUTH_REJECTED:
                raise Unavailable(
                    f"the swarm at {address} does not take this invitation: it has been used, has expired or was "
                    "revoked; ask for another (swarmctl invite)"
                )
            elif not isinstance(event, ConnectionEvent):
                if (theirs := read_greeting(event)) is not None:
                    if (reason := incompatibility(theirs, client_schema())) is not None:
                        raise Unavailable(f"the swarm at {address} can't be joined: {reason}")
                    channel.send(CLIENT.encode(enrolment, version=negotiated_version(theirs)))
                elif isinstance(message := SERVER.decode(event)[0], BrokerKey):
                    broker = message.key  # The broker has rotated its key since the invitation was made.
                elif (enrolled := _enrolled_or_none(message)) is not None:
                    return Enrolment(address, broker, enrolled)
    # Unreachable in practice: a channel yields events for as long as it is open.
    raise Unavailable(f"the connection to {address} ended")


def _enrolled_or_none(message: ServerMessage) -> Enrolled | None:
    if isinstance(message, Malformed):
        raise Unavailable(f"the swarm refused: {message.reason}")
    return message if isinstance(message, Enrolled) else None


@contextlib.asynccontextmanager
async def _open_channel(endpoint: str, pair: KeyPair) -> AsyncIterator[DealerChannel]:
    context = zmq.Context()
    try:
        channel = DealerChannel(context, endpoint, secrets.token_bytes(16), SERVER.frame_limit_bytes, pair)
        try:
            yield channel
        except WireError as error:
            raise Unavailable(f"the peer is not a compatible swarm: {error}") from None
        finally:
            channel.close()
    finally:
        context.term()
