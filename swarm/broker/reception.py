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
from swarm.broker.events import (
    AssetPartArrived,
    BeatHeard,
    ClientSaid,
    ClientUnreachable,
    DoorClosed,
    Event,
    MessageRefused,
    StepFinished,
    WorkerDisconnected,
    WorkerSaid,
)
from swarm.broker.lockkeeper import LockKeeper
from swarm.broker.process import descriptor_limit
from swarm.clock import Clock
from swarm.errors import ForeignMessage, WireError
from swarm.log import Damper, get_logger
from swarm.wire.channel import AsyncPullChannel, RouterChannel
from swarm.wire.codec import BEAT, CLIENT, DATA, SERVER, WORKER
from swarm.wire.door.keys import address_and_key, is_address
from swarm.wire.door.peers import Arrived, Overstepped, PeerLost
from swarm.wire.door.strangers import GateClosed
from swarm.wire.greeting import greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import AssetPart, ClientMessage, Hello, Malformed, Stats, StepDone, WorkerMessage
from swarm.wire.schema import client_schema, schema
from swarm.wire.sockets import Frames

if TYPE_CHECKING:
    from swarm.config import Settings

STEP_QUEUE = 64  # finished steps that wait to be read
STRIKES = 16  # messages that can't be decoded, until their client is disconnected

log = get_logger(__name__)


class Reception:
    """Receives messages and feeds events (see the module). ``feed`` receives each event."""

    def __init__(self, settings: Settings, keeper: LockKeeper, clock: Clock, feed: Callable[[Event], None]) -> None:
        self._keeper = keeper
        self._clock = clock
        self._feed = feed
        places = keeper.places
        self.port = port = settings.broker.port
        self.front = RouterChannel(places("client"), port, CLIENT.frame_limit_bytes)
        self.control = RouterChannel(places("worker"), port + 1, WORKER.frame_limit_bytes)
        self.beats = AsyncPullChannel(places("beat"), BEAT.frame_limit_bytes, 1024, port=keeper.port(2))
        self.steps = AsyncPullChannel(places("data"), DATA.limit_bytes, STEP_QUEUE, port=keeper.port(3))
        self.doors: dict[str, RouterChannel | AsyncPullChannel] = {
            "client": self.front,
            "worker": self.control,
            "beat": self.beats,
            "data": self.steps,
        }
        self._dampers: defaultdict[str, Damper] = defaultdict(Damper)  # by socket
        self._strikes: Counter[bytes] = Counter()  # by connected client: messages that could not be decoded

    @property
    def advertised(self) -> tuple[str, str]:
        """Addresses to which workers send heartbeats and finished steps."""
        beats, steps = (failpoints.retold("broker.advertise", c.endpoint) for c in (self.beats, self.steps))
        return beats, steps

    def hear_waiting_beats(self) -> None:
        """Handle the heartbeats that have arrived and were not read yet."""
        for event in self.beats.waiting():
            self._hear_beat(event)

    async def serve_clients(self) -> None:
        async for event in self.front:
            match event:
                case Arrived(peer, frames, key):
                    if self._greeted(self.front, "client", event, client_schema()):
                        continue
                    began = self._clock.now()
                    try:
                        message, _ = CLIENT.decode(frames)
                    except WireError as error:
                        self._client_refused(peer, str(error))
                    else:
                        self._client_said(peer, key, message)
                    now = self._clock.now()
                    self._keeper.took(peer, key, now - began, now)
                case Overstepped(peer, reason):
                    self._client_refused(peer, reason)
                case PeerLost(peer):
                    self._strikes.pop(peer, None)
                    self._feed(ClientUnreachable(peer))
                case GateClosed():
                    self._feed(_closed("client", event))

    def _client_said(self, client: bytes, key: str, message: ClientMessage) -> None:
        """Have messages about keys or without permission answered; feed the others."""
        if not self._keeper.takes(client, key, message):
            self._feed(ClientSaid(client, message, self._keeper.account(key)))

    def _client_refused(self, client: bytes, reason: str) -> None:
        """Send a client the reason for refusing its message. After several it is disconnected: a broken loop must not
        keep the broker busy."""
        self._refused(MessageRefused("client"), reason, client=client.hex())
        self.front.send(client, SERVER.encode(Malformed(reason=reason[:4000])))
        self._strikes[client] += 1
        if self._strikes[client] >= STRIKES:
            del self._strikes[client]
            self.front.hang_up(client)

    async def serve_workers(self) -> None:
        async for event in self.control:
            match event:
                case Arrived(peer, frames, key):
                    if self._greeted(self.control, "worker", event, schema()):
                        continue
                    try:
                        message, payload = WORKER.decode(frames)
                        _check_speaker(message, peer, key)
                    except WireError as error:
                        self._worker_refused(peer, error)
                    else:
                        self._worker_said(peer, key, message, payload)
                case Overstepped(peer, reason):
                    self._worker_refused(peer, WireError(reason))
                case PeerLost(peer):
                    self._feed(WorkerDisconnected(peer))
                case GateClosed():
                    self._feed(_closed("worker", event))

    def _worker_refused(self, worker: bytes, error: WireError) -> None:
        """Disconnect a worker whose message can't be decoded: the message may be awaited, and is not sent again. Over a
        new connection the worker sends Hello, with all that it holds. (A worker of another build would send the same
        again: it gets an answer instead.)"""
        foreign = str(error) if isinstance(error, ForeignMessage) else ""
        self._refused(MessageRefused("control", worker, foreign), str(error), worker=worker.decode(errors="replace"))
        if not foreign:
            self.control.hang_up(worker)

    def _worker_said(self, peer: bytes, key: str, message: WorkerMessage, payload: memoryview | None) -> None:
        if self._keeper.takes_of_worker(peer, key, message):
            return
        if isinstance(message, Stats):
            message = by_our_clock(message, time.time())
        if not isinstance(message, AssetPart):
            not_at = self._keeper.why_not_at(peer, key, message)
            self._feed(WorkerSaid(peer, message, self._keeper.owner(key), not_at))
            return
        data = b"" if payload is None else bytes(payload)
        self._feed(AssetPartArrived(peer, message.name, message.offset, message.total, data))

    def _greeted(self, door: RouterChannel, name: str, event: Arrived, own: str) -> bool:
        """Handle a greeting; returns whether it was one. It is answered with the broker's own; an incompatible peer
        logs the mismatch itself."""
        theirs = read_greeting(event.frames)
        if theirs is None:
            return False
        left_out = None
        if why_strangers(theirs, own) is None:
            door.speaks(event.peer, spoken_with(theirs))
        else:
            left_out = self._dampers[f"strangers, {name}"].asks(self._clock.now())
        if left_out is not None:
            is_of = str(theirs)[:500]
            log.warning("stranger_greeted", door=name, peer=event.peer.hex(), is_of=is_of, left_out=left_out)
        door.send(event.peer, greeting(own))
        self._keeper.greeted(door, event.peer, event.key)
        return True

    async def hear_beats(self) -> None:
        async for event in self.beats:
            self._hear_beat(event)

    def _hear_beat(self, event: Arrived | Overstepped | GateClosed) -> None:
        if isinstance(event, GateClosed):
            self._feed(_closed("beat", event))
            return
        try:
            beat, _ = BEAT.decode(_within(event))
            key = event.key if isinstance(event, Arrived) else ""
        except WireError as error:
            self._refused(MessageRefused("beat"), str(error))
        else:
            self._feed(BeatHeard(beat, key))

    async def take_finished_steps(self) -> None:
        async for event in self.steps:
            if isinstance(event, GateClosed):
                self._feed(_closed("data", event))
                continue
            try:
                message, _ = DATA.decode(_within(event))
            except WireError as error:
                self._refused(MessageRefused("data"), str(error))
                continue
            if isinstance(message, StepDone):
                if failpoints.armed:
                    failpoints.reached("broker.step_done")
                self._feed(StepFinished(message))
            else:
                self._refused(MessageRefused("data"), f"a {type(message).__name__} is not for the broker")

    def _refused(self, event: MessageRefused, reason: str, **about: object) -> None:
        """Count a message that can't be decoded, and log it, rate-limited."""
        if (left_out := self._dampers[event.door].asks(self._clock.now())) is not None:
            log.warning("message_refused", door=event.door, reason=reason, left_out=left_out, **about)
        self._feed(event)


def _check_speaker(message: WorkerMessage, peer: bytes, key: str) -> None:
    """Raise WireError if a message names another process than its sender, whose incarnation is known to its neighbours.
    Of a Hello, check the address to which others will connect, and that it names the key of its connection."""
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


def by_our_clock(stats: Stats, now_s: float) -> Stats:
    """Replace the worker's clock by its offset from the broker's."""
    values = dict(stats.values)
    theirs_s = values.pop("clock_s", None)
    return stats if theirs_s is None else replace(stats, values=values | {"clock_ahead_s": theirs_s - now_s})


def _within(event: Arrived | Overstepped) -> Frames:
    if isinstance(event, Overstepped):
        raise WireError(event.reason)
    return event.frames


def _closed(door: str, event: GateClosed) -> Event:
    return DoorClosed(door, event.code, descriptor_limit())
