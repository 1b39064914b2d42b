"""Joining a swarm on another machine: register this machine's own key, authorized by an invitation."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import NamedTuple

import zmq

from swarm.errors import Unavailable, WireError
from swarm.lock.invitation import Invitation
from swarm.lock.possession import prove
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.dealer import DealerChannel, Link
from swarm.wire.door.keys import KeyPair, keyed, public_of
from swarm.wire.greeting import greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import BrokerKey, Enrol, Enrolled, Malformed, ServerMessage
from swarm.wire.schema import client_schema

TIMEOUT_S = 10.0  # For each address of the invitation.


class Joined(NamedTuple):
    """Result of joining: the address that answered, the broker's public key, and the name and role given to this
    machine."""

    address: str
    broker: str  # Public key of the broker.
    enrolled: Enrolled


async def enrol(invitation: Invitation, own: KeyPair, name: str, timeout_s: float = TIMEOUT_S) -> Joined:
    """Register our public key at the first address of the invitation that answers. Raises Unavailable if none answers
    or the invitation is refused."""
    reasons = []
    for address in invitation.addresses:
        links: set[Link] = set()
        try:
            async with asyncio.timeout(timeout_s):
                return await _enrol_at(address, invitation, own, name, links)
        except TimeoutError:
            reasons.append(
                f"the broker at {address} disconnects during the handshake: its key may have changed since it made "
                "this invitation; ask for another one (swarmctl invite)"
                if Link.UNHEARD in links
                else f"no answer at {address} within {timeout_s:g} s"
            )
    raise Unavailable("; ".join(reasons) + ": check that the swarm runs and that its ports can be reached from here")


async def _enrol_at(address: str, invitation: Invitation, own: KeyPair, name: str, links: set[Link]) -> Joined:
    """Enrol at one address. Connection events are added to ``events``, so that a timeout can be explained."""
    broker = invitation.broker
    pair = KeyPair(public_of(invitation.secret), invitation.secret)
    enrolment = Enrol(key=own.public, name=name, proof=prove(own, pair.public, broker))
    async with _knocking(keyed(address, invitation.broker.encode()), pair) as channel:
        async for event in channel:
            if isinstance(event, Link):
                links.add(event)
            if event is Link.UP:
                channel.send(greeting(client_schema()))
            elif event is Link.TURNED_AWAY:
                raise Unavailable(
                    f"the swarm at {address} does not take this invitation: it has been used, has expired or was "
                    "revoked; ask for another (swarmctl invite)"
                )
            elif not isinstance(event, Link):
                if (theirs := read_greeting(event)) is not None:
                    if (reason := why_strangers(theirs, client_schema())) is not None:
                        raise Unavailable(f"the swarm at {address} can't be joined: {reason}")
                    channel.send(CLIENT.encode(enrolment, version=spoken_with(theirs)))
                elif isinstance(message := SERVER.decode(event)[0], BrokerKey):
                    broker = message.key  # The broker has rotated its key since the invitation was made.
                elif (enrolled := _answer(message)) is not None:
                    return Joined(address, broker, enrolled)
    # Unreachable in practice: a channel yields events for as long as it is open.
    raise Unavailable(f"the connection to {address} ended")


def _answer(message: ServerMessage) -> Enrolled | None:
    if isinstance(message, Malformed):
        raise Unavailable(f"the swarm refused: {message.reason}")
    return message if isinstance(message, Enrolled) else None


@contextlib.asynccontextmanager
async def _knocking(endpoint: str, pair: KeyPair) -> AsyncIterator[DealerChannel]:
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
