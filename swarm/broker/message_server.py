"""Message server: the broker's sockets, where messages are checked and turned into events.

Four sockets: clients at the port, workers' control at the next port, heartbeats and finished steps at ports of their
own that are announced to workers when they join. Messages that can't be decoded are answered here, and only counted by
the core.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from swarm import failpoints
from swarm.auth.worker_address import usable_kv_endpoint
from swarm.broker.auth.service import AuthService
from swarm.broker.events import (
    AcceptStopped,
    AssetPartArrived,
    ClientMessageReceived,
    ClientUnreachable,
    Event,
    HeartbeatReceived,
    MessageRefused,
    StepFinished,
    WorkerDisconnected,
    WorkerMessageReceived,
)
from swarm.broker.process import descriptor_limit
from swarm.clock import Clock
from swarm.errors import ForeignMessage, WireError
from swarm.log import LogRateLimiter, get_logger
from swarm.wire.channel import AsyncPullChannel, RouterChannel
from swarm.wire.codec import CLIENT, DATA, HEARTBEAT, SERVER, WORKER
from swarm.wire.greeting import encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import AssetPart, ClientMessage, Hello, Malformed, Stats, StepDone, WorkerMessage
from swarm.wire.schema import client_schema, schema
from swarm.wire.sockets import Frames
from swarm.wire.transport.accept import AcceptPaused
from swarm.wire.transport.keys import address_and_key, is_address
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected

if TYPE_CHECKING:
    from swarm.config import Settings

STEP_QUEUE = 64  # finished steps that wait to be read
MAX_STRIKES = 16  # messages that can't be decoded, until their client is disconnected

log = get_logger(__name__)


class MessageServer:
    """Receives messages and feeds events (see the module). ``feed`` receives each event."""

    def __init__(self, settings: Settings, auth: AuthService, clock: Clock, feed: Callable[[Event], None]) -> None:
        self._auth = auth
        self._clock = clock
        self._feed = feed
        bind_addresses = auth.bind_addresses
        self.port = port = settings.broker.port
        self.clients = RouterChannel(bind_addresses("client"), port, CLIENT.frame_limit_bytes)
        self.workers = RouterChannel(bind_addresses("worker"), port + 1, WORKER.frame_limit_bytes)
        self.heartbeats = AsyncPullChannel(bind_addresses("beat"), HEARTBEAT.frame_limit_bytes, 1024, port=auth.port(2))
        self.steps = AsyncPullChannel(bind_addresses("data"), DATA.limit_bytes, STEP_QUEUE, port=auth.port(3))
        self.sockets: dict[str, RouterChannel | AsyncPullChannel] = {
            "client": self.clients,
            "worker": self.workers,
            "beat": self.heartbeats,
            "data": self.steps,
        }
        self._log_limiters: defaultdict[str, LogRateLimiter] = defaultdict(LogRateLimiter)  # by socket
        self._strikes: Counter[bytes] = Counter()  # by connected client: messages that could not be decoded

    @property
    def advertised(self) -> tuple[str, str]:
        """Addresses to which workers send heartbeats and finished steps."""
        beats, steps = (
            failpoints.advertised_endpoint("broker.advertise", c.endpoint) for c in (self.heartbeats, self.steps)
        )
        return beats, steps

    def read_waiting_heartbeats(self) -> None:
        """Handle the heartbeats that have arrived and were not read yet."""
        for event in self.heartbeats.pending_events():
            self._on_heartbeat(event)

    async def serve_clients(self) -> None:
        async for event in self.clients:
            match event:
                case MessageReceived(peer, frames, key):
                    if self._handle_greeting(self.clients, "client", event, client_schema()):
                        continue
                    began = self._clock.now()
                    try:
                        message, _ = CLIENT.decode(frames)
                    except WireError as error:
                        self._reject_client_message(peer, str(error))
                    else:
                        self._on_client_message(peer, key, message)
                    now = self._clock.now()
                    self._auth.charge(peer, key, now - began, now)
                case LimitExceeded(peer, reason):
                    self._reject_client_message(peer, reason)
                case PeerDisconnected(peer):
                    self._strikes.pop(peer, None)
                    self._feed(ClientUnreachable(peer))
                case AcceptPaused():
                    self._feed(_accept_stopped("client", event))

    def _on_client_message(self, client: bytes, key: str, message: ClientMessage) -> None:
        """Pass a client's message on to the broker's core, unless the authentication service has answered it.

        The authentication service answers messages about keys, and rejects messages without permission.
        """
        if not self._auth.handle_client_message(client, key, message):
            self._feed(ClientMessageReceived(client, message, self._auth.account(key)))

    def _reject_client_message(self, client: bytes, reason: str) -> None:
        """Send a client the reason for refusing its message. After several it is disconnected: a broken loop must not
        keep the broker busy."""
        self._count_rejected(MessageRefused("client"), reason, client=client.hex())
        self.clients.send(client, SERVER.encode(Malformed(reason=reason[:4000])))
        self._strikes[client] += 1
        if self._strikes[client] >= MAX_STRIKES:
            del self._strikes[client]
            self.clients.disconnect(client)

    async def serve_workers(self) -> None:
        async for event in self.workers:
            match event:
                case MessageReceived(peer, frames, key):
                    if self._handle_greeting(self.workers, "worker", event, schema()):
                        continue
                    try:
                        message, payload = WORKER.decode(frames)
                        _check_sender(message, peer, key)
                    except WireError as error:
                        self._reject_worker_message(peer, error)
                    else:
                        self._on_worker_message(peer, key, message, payload)
                case LimitExceeded(peer, reason):
                    self._reject_worker_message(peer, WireError(reason))
                case PeerDisconnected(peer):
                    self._feed(WorkerDisconnected(peer))
                case AcceptPaused():
                    self._feed(_accept_stopped("worker", event))

    def _reject_worker_message(self, worker: bytes, error: WireError) -> None:
        """Disconnect a worker whose message can't be decoded. The broker may be waiting for that message, and the
        worker would not send it again; after the reconnect the worker sends Hello, with everything it holds. A worker
        of another build stays connected and gets an answer: it would send the same message again."""
        foreign = str(error) if isinstance(error, ForeignMessage) else ""
        self._count_rejected(
            MessageRefused("control", worker, foreign), str(error), worker=worker.decode(errors="replace")
        )
        if not foreign:
            self.workers.disconnect(worker)

    def _on_worker_message(self, peer: bytes, key: str, message: WorkerMessage, payload: memoryview | None) -> None:
        if self._auth.handle_worker_message(peer, key, message):
            return
        if isinstance(message, Stats):
            message = add_clock_offset(message, time.time())
        if not isinstance(message, AssetPart):
            address_error = self._auth.address_error(peer, key, message)
            if isinstance(message, Hello):
                kv_endpoint = usable_kv_endpoint(message.kv_endpoint, message.endpoint, address_error)
                message = replace(message, kv_endpoint=kv_endpoint)
            self._feed(WorkerMessageReceived(peer, message, self._auth.owner(key), address_error))
            return
        data = b"" if payload is None else bytes(payload)
        self._feed(AssetPartArrived(peer, message.name, message.offset, message.total, data))

    def _handle_greeting(self, channel: RouterChannel, name: str, event: MessageReceived, own_schema: str) -> bool:
        """Handle a greeting; returns whether it was one. It is answered with the broker's own; an incompatible peer
        logs the mismatch itself."""
        theirs = read_greeting(event.frames)
        if theirs is None:
            return False
        left_out = None
        if incompatibility(theirs, own_schema) is None:
            channel.set_version(event.peer, negotiated_version(theirs))
        else:
            left_out = self._log_limiters[f"strangers, {name}"].take(self._clock.now())
        if left_out is not None:
            is_of = str(theirs)[:500]
            log.warning("stranger_greeted", door=name, peer=event.peer.hex(), is_of=is_of, left_out=left_out)
        channel.send(event.peer, encode_greeting(own_schema))
        self._auth.on_greeting(channel, event.peer, event.key)
        return True

    async def serve_heartbeats(self) -> None:
        async for event in self.heartbeats:
            self._on_heartbeat(event)

    def _on_heartbeat(self, event: MessageReceived | LimitExceeded | AcceptPaused) -> None:
        if isinstance(event, AcceptPaused):
            self._feed(_accept_stopped("beat", event))
            return
        try:
            beat, _ = HEARTBEAT.decode(_require_frames(event))
            key = event.key if isinstance(event, MessageReceived) else ""
        except WireError as error:
            self._count_rejected(MessageRefused("beat"), str(error))
        else:
            self._feed(HeartbeatReceived(beat, key))

    async def serve_steps(self) -> None:
        async for event in self.steps:
            if isinstance(event, AcceptPaused):
                self._feed(_accept_stopped("data", event))
                continue
            try:
                message, _ = DATA.decode(_require_frames(event))
            except WireError as error:
                self._count_rejected(MessageRefused("data"), str(error))
                continue
            if isinstance(message, StepDone):
                if failpoints.armed:
                    failpoints.hit("broker.step_done")
                self._feed(StepFinished(message))
            else:
                self._count_rejected(MessageRefused("data"), f"a {type(message).__name__} is not for the broker")

    def _count_rejected(self, event: MessageRefused, reason: str, **about: object) -> None:
        """Count a message that can't be decoded, and log it, rate-limited."""
        if (left_out := self._log_limiters[event.socket].take(self._clock.now())) is not None:
            log.warning("message_refused", door=event.socket, reason=reason, left_out=left_out, **about)
        self._feed(event)


def _check_sender(message: WorkerMessage, peer: bytes, key: str) -> None:
    """Raise WireError if a message names a process other than its sender. (A worker's neighbours know its incarnation
    and could use it.) Also check a Hello: its address must be valid, and its key must be the key of the connection."""
    named = getattr(message, "incarnation", None)
    if named is not None and named.encode() != peer:
        shown = peer.decode(errors="replace")
        raise WireError(
            f"{type(message).__name__.lower()}.incarnation {named!r} is not the sender's, which is {shown!r}"
        )
    if not isinstance(message, Hello):
        return
    if not is_address(message.endpoint):
        shown = address_and_key(message.endpoint)[0]
        raise WireError(f"hello.endpoint {shown!r} is no address like tcp://127.0.0.1:20000")
    if key and message.key != key:
        raise WireError("hello.key is not the key of this connection")


def add_clock_offset(stats: Stats, now_s: float) -> Stats:
    """Replace the worker's clock by its offset from the broker's."""
    values = dict(stats.values)
    theirs_s = values.pop("clock_s", None)
    return stats if theirs_s is None else replace(stats, values=values | {"clock_ahead_s": theirs_s - now_s})


def _require_frames(event: MessageReceived | LimitExceeded) -> Frames:
    if isinstance(event, LimitExceeded):
        raise WireError(event.reason)
    return event.frames


def _accept_stopped(socket: str, event: AcceptPaused) -> Event:
    return AcceptStopped(socket, event.code, descriptor_limit())
