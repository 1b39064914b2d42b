"""The worker's control connection: greeting, Hello, and the keys for the broker, which may change.

It obeys no orders itself: it passes them to its ``ControlCallbacks``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import zmq

from swarm import failpoints
from swarm.clock import Clock
from swarm.config.shown import Shown
from swarm.errors import ConfigError, ForeignMessage, WireError
from swarm.lock.rotation import Home
from swarm.log import Damper, get_logger
from swarm.stage.actions import EX_CONFIG
from swarm.stage.core import StageCore
from swarm.stage.shell.equipment import Equipment
from swarm.stage.shell.probing import MTU_REMEDY, LinkProbe
from swarm.stage.shell.way import StepDoor, Way
from swarm.version import __version__
from swarm.wire.addresses import control_endpoint
from swarm.wire.codec import ORDER, WORKER
from swarm.wire.dealer import DealerChannel, Link
from swarm.wire.door.keys import address_and_key
from swarm.wire.greeting import Greeting, greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    BrokerKey,
    BrokerKeyKept,
    Hello,
    LinkCost,
    Order,
    Probed,
    RotateYours,
    Setting,
    WorkerMessage,
)
from swarm.wire.schema import schema
from swarm.wire.versions import VERSIONS

if TYPE_CHECKING:
    from swarm.config import Settings

GREET_S = 3.0  # until a missing greeting is logged; a live broker greets within milliseconds
LOOK_AGAIN_S = 30.0  # between two reconnections to a silent broker
RENEW_S = 2.0  # between two reconnections because of an order that can't be decoded

Rotate = Callable[[Home], str]  # makes a new key pair for this machine; returns an error text, or an empty one

log = get_logger(__name__)


class Hearer(Protocol):
    """Callbacks of a ``ControlConnection``."""

    def connected(self) -> None:
        """Handle a greeted connection whose link is measured: Hello may be sent."""

    def lost(self) -> None:
        """Handle the loss of the connection, which is re-established automatically."""

    def ordered(self, order: Order) -> None: ...

    def end(self, code: int, reason: str) -> None:
        """End a worker that can't work here."""


class Control:
    """Control connection of a worker. ``connector`` receives each new key pair of this worker."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Settings,
        way: Way,
        clock: Clock,
        hearer: Hearer,
        *,
        name: str,
        incarnation: str,
        home: Home | None = None,
        rotate: Rotate | None = None,
    ) -> None:
        self._url, self._way, self._clock, self._hearer, self._name = settings.client.url, way, clock, hearer, name
        self._loop = asyncio.get_running_loop()
        self._home, self._rotate = home, rotate
        self._looked_at = float("-inf")  # when the stored keys were last read
        self._rotation: asyncio.Task[None] | None = None
        self._channel = DealerChannel(
            context, control_endpoint(self._url), incarnation.encode(), ORDER.frame_limit_bytes, way.pair
        )
        self.is_connected = False  # connected and greeted
        self._closed = False
        self._spoken = PROTOCOL_VERSION  # protocol version negotiated with this broker
        self._ungreeted: object | None = None  # a token per connection that awaits the broker's greeting
        self._damper = Damper()  # limits log lines about orders that can't be decoded
        self._renewed_at: float | None = None  # time of the last forced reconnection
        self._up = asyncio.Event()  # set at the first greeting
        self._probe = LinkProbe(self.send, clock)
        self.link: LinkCost | None = None
        self._link_is_known = False  # the measurement has ended, with or without a result

    async def hear(self) -> None:
        """Handle connection events and messages until cancelled."""
        async for event in self._channel:
            if event is Link.UP:
                self._channel.send(greeting(schema()))
                waits_for = self._ungreeted = object()
                self._loop.call_later(GREET_S, self._miss_greeting, waits_for)
            elif event is Link.DOWN:
                self.is_connected, self._ungreeted = False, None
                self._hearer.lost()
                log.warning("broker_gone", note="reconnecting until it is back")
            elif event is Link.TURNED_AWAY:
                self._turned_away()
            elif event is Link.UNHEARD:
                self._look_at_home()
            elif not isinstance(event, Link):
                self._take(event)

    async def measure_link(self) -> None:
        """Measure the connection to the broker once, before the first Hello, which reports it."""
        await self._up.wait()
        self.link = await self._probe.measure()
        if self._probe.loses_large:
            log.warning("large_messages_lost", broker=address_and_key(self._url)[0], note=MTU_REMEDY)
        self._link_is_known = True
        if self.is_connected:
            self._hearer.connected()

    def renew_after(self, since: float, wait_s: float) -> None:
        """Reconnect if ``wait_s`` have passed since the last forced reconnection (or ``since``, if there was none)."""
        now = self._clock.now()
        if now - (since if self._renewed_at is None else self._renewed_at) >= wait_s:
            self._renewed_at = now
            self._channel.renew()

    def send(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Send a message. One that its own schema refuses is logged and dropped; if the broker waits for it, it has a
        deadline."""
        try:
            self._say(message, payload)
        except WireError as error:
            log.error("message_not_encoded", kind=type(message).__name__, reason=str(error))

    def introduce(self, hello: Hello) -> None:
        """Send Hello. If its own schema refuses it, end the worker: without Hello it gets no work."""
        try:
            self._say(hello)
        except WireError as error:
            reason = f"this worker's Hello message is invalid: {error}; correct the named value, then start it again"
            self._hearer.end(code_without(hello), reason)

    def close(self) -> None:
        self._closed = True  # the compute thread's last actions may still be queued
        self._channel.close()

    def _say(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Encode and send a message. Raises WireError."""
        kind = type(message).__name__
        if failpoints.armed:
            failpoints.reached(f"tell.{kind.lower()}")
        frames = WORKER.encode(message, payload, version=self._spoken)
        if self._closed or not self._channel.send(frames):
            log.warning("control_not_sent", kind=kind)
        if failpoints.armed:
            failpoints.reached(f"told.{kind.lower()}")

    # --- greetings and keys ------------------------------------------------------------------------------------------

    def _greeted(self, theirs: Greeting) -> None:
        """Handle the broker's greeting. Nothing is sent before it."""
        self._ungreeted = None
        reason = why_strangers(theirs, schema())
        if reason is not None:
            reason = f"this worker can't talk to the broker at {address_and_key(self._url)[0]}: {reason}"
            self._hearer.end(EX_CONFIG, reason)
            return
        self._spoken = spoken_with(theirs)
        self.is_connected = True
        self._up.set()
        if self._link_is_known:
            self._hearer.connected()

    def _miss_greeting(self, waits_for: object) -> None:
        if waits_for is self._ungreeted:
            url = self._url
            log.error("broker_does_not_greet", url=url, note="it is not a broker, or one of an older version")

    def _turned_away(self) -> None:
        """Handle a rejected key. This machine may have a new one by now; the broker itself closes established
        connections."""
        if not self._takes_up():
            self._hearer.end(EX_CONFIG, _turned_away(self._url))

    def _look_at_home(self) -> None:
        """Handle a failed handshake: the broker may have a new key, stored by another process of this machine."""
        if self._clock.now() - self._looked_at >= RENEW_S:
            self._looked_at = self._clock.now()
            if not self._takes_up() and (left_out := self._damper.asks(self._clock.now())) is not None:
                note = (
                    "the listener there has another key than the stored one, or is busy; with a new invitation: --join"
                )
                log.warning("broker_hangs_up", at=address_and_key(self._url)[0], note=note, left_out=left_out)

    def _takes_up(self) -> bool:
        """Reconnect with the stored keys if they have changed; return whether they have."""
        kept = None if self._home is None else self._home.take_up()
        if kept is None:
            return False
        log.info("key_changed", worker=self._name, key=kept.pair.public[:16], broker=kept.broker[:16])
        self._way.pair = kept.pair
        self._channel.move(control_endpoint(kept.endpoint))
        self._channel.renew(kept.pair)
        return True

    def _broker_moves(self, key: str) -> None:
        """Store a new key of the broker, which is used from the next connection on."""
        if self._home is None:
            return
        try:
            kept = self._home.broker_is(key)
        except ConfigError as error:
            log.error("broker_key_not_kept", worker=self._name, key=key, reason=str(error))
            return
        log.info("broker_key_kept", worker=self._name, broker=key[:16])
        self._channel.move(control_endpoint(kept.endpoint))
        self.send(BrokerKeyKept(key=key))

    async def _change_key(self, home: Home, rotate: Rotate) -> None:
        """Rotate this machine's key on an operator's order. The end of the old key shows as a rejected connection."""
        if reason := await asyncio.to_thread(rotate, home):
            log.error("key_not_changed", worker=self._name, reason=reason)

    # --- orders ------------------------------------------------------------------------------------------------------

    def _take(self, frames: list[memoryview]) -> None:
        theirs = read_greeting(frames)
        if theirs is not None:
            self._greeted(theirs)
            return
        try:
            order, _ = ORDER.decode(frames)
        except ForeignMessage as error:
            reason = f"the broker sent an unknown message ({error}): install the same version on both machines"
            self._hearer.end(EX_CONFIG, reason)
            return
        except WireError as error:
            self._refuse_order(str(error))
            return
        if isinstance(order, Probed):
            self._probe.answered(order.ticket)
            return
        if isinstance(order, BrokerKey):
            self._broker_moves(order.key)
            return
        if isinstance(order, RotateYours):
            if self._home and self._rotate and (self._rotation is None or self._rotation.done()):
                self._rotation = self._loop.create_task(self._change_key(self._home, self._rotate), name="change key")
            return
        self._hearer.ordered(order)

    def _refuse_order(self, reason: str) -> None:
        """Reconnect after an order that can't be decoded: the broker does not repeat it, and a plan may wait for it.

        After the reconnection, Hello reports the stored sequences, and the broker continues from there. The interval is
        bounded, in case the broker keeps sending such orders.
        """
        now = self._clock.now()
        if (left_out := self._damper.asks(now)) is not None:
            log.warning("order_refused", reason=reason, left_out=left_out)
        self.renew_after(float("-inf"), RENEW_S)


def introduction(core: StageCore, equipment: Equipment, door: StepDoor, key: str, link: LinkCost | None) -> Hello:
    """Return the Hello message: identity, device, memory, and stored sequences. ``key``: public key for other workers'
    listeners."""
    executor, own = equipment.executor, core.settings
    return Hello(
        epoch=core.fence,
        lineage=core.lineage,
        name=own.name,
        incarnation=own.incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
        wire_versions=VERSIONS,
        schema=schema(),
        device=executor.device,
        dtype=executor.dtype,
        cores=os.cpu_count() or 1,
        endpoint=door.endpoint,
        ticket=door.ticket,
        build=__version__,
        key=key,
        memory_bytes=executor.memory_bytes,
        kv_share=executor.kv_share,
        costs=equipment.costs,
        link=link,
        manifest=executor.manifest,
        held_layers=core.layers,
        held=core.introduction(),
        logs=tuple(core.log.ranges()),
        kept=core.preparation.kept,
    )


def as_told(settings: Iterable[Shown]) -> tuple[Setting, ...]:
    """Return the worker's settings for its broker. A value that is too long for a message is left out."""
    texts = [(each.name, json.dumps(each.value, ensure_ascii=False), each.origin) for each in settings]
    return tuple(
        Setting(name, value if len(value) <= MAX_TEXT else '"…"', origin[:MAX_TEXT]) for name, value, origin in texts
    )


def code_without(hello: Hello) -> int:
    """Return the exit code for a Hello that can't be sent.

    The facts about the worker itself stay wrong at the next start; only stored sequences are gone then.
    """
    return 1 if hello.held or hello.logs else EX_CONFIG


def _turned_away(url: str) -> str:
    return (
        f"the broker at {address_and_key(url)[0]} does not accept this machine's key: it was revoked, or is not a "
        "worker's; join again (swarm worker --join)"
    )
