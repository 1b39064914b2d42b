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
from swarm.auth.rotation import CredentialStore
from swarm.clock import Clock
from swarm.config.display import ShownSetting
from swarm.errors import ConfigError, ForeignMessage, WireError
from swarm.log import LogRateLimiter, get_logger
from swarm.stage.actions import EX_CONFIG
from swarm.stage.core import StageCore
from swarm.stage.shell.connections import PeerConnector, StepListener
from swarm.stage.shell.link_probe import MTU_REMEDY, LinkProbe
from swarm.stage.shell.resources import WorkerResources
from swarm.version import __version__
from swarm.wire.addresses import control_endpoint
from swarm.wire.codec import ORDER, WORKER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import Greeting, encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    BrokerKey,
    BrokerKeyKept,
    Hello,
    LinkCost,
    Order,
    Probed,
    RotateKey,
    Setting,
    WorkerMessage,
)
from swarm.wire.schema import schema
from swarm.wire.transport.keys import address_and_key
from swarm.wire.versions import VERSIONS

if TYPE_CHECKING:
    from swarm.config import Settings

GREETING_TIMEOUT_S = 3.0  # until a missing greeting is logged; a live broker greets within milliseconds
RECONNECT_SILENT_S = 30.0  # between two reconnections to a silent broker
RECONNECT_S = 2.0  # between two reconnections because of an order that can't be decoded

# makes a new key pair for this machine; returns an error text, or an empty one
RotateKeyPair = Callable[[CredentialStore], str]

log = get_logger(__name__)


class ControlCallbacks(Protocol):
    """Callbacks of a ``ControlConnection``."""

    def on_connected(self) -> None:
        """Handle a greeted connection whose link is measured: Hello may be sent."""

    def on_lost(self) -> None:
        """Handle the loss of the connection, which is re-established automatically."""

    def on_order(self, order: Order) -> None: ...

    def end(self, code: int, reason: str) -> None:
        """End a worker that can't work here."""


class ControlConnection:
    """Control connection of a worker. ``connector`` receives each new key pair of this worker."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Settings,
        connector: PeerConnector,
        clock: Clock,
        callbacks: ControlCallbacks,
        *,
        name: str,
        incarnation: str,
        credentials: CredentialStore | None = None,
        rotate: RotateKeyPair | None = None,
    ) -> None:
        self._url, self._connector, self._clock, self._callbacks, self._name = (
            settings.client.url,
            connector,
            clock,
            callbacks,
            name,
        )
        self._loop = asyncio.get_running_loop()
        self._credentials, self._rotate = credentials, rotate
        self._keys_read_at = float("-inf")  # when the stored keys were last read
        self._rotation: asyncio.Task[None] | None = None
        self._channel = DealerChannel(
            context, control_endpoint(self._url), incarnation.encode(), ORDER.frame_limit_bytes, connector.pair
        )
        self.is_connected = False  # connected and greeted
        self._closed = False
        self._version = PROTOCOL_VERSION  # protocol version negotiated with this broker
        self._awaiting_greeting: object | None = None  # a token per connection that awaits the broker's greeting
        self._log_limiter = LogRateLimiter()  # limits log lines about orders that can't be decoded
        self._reconnected_at: float | None = None  # time of the last forced reconnection
        self._greeted_once = asyncio.Event()  # set at the first greeting
        self._probe = LinkProbe(self.send, clock)
        self.link: LinkCost | None = None
        self._is_measured = False  # the measurement has ended, with or without a result

    async def run(self) -> None:
        """Handle connection events and messages until cancelled."""
        async for event in self._channel:
            if event is ConnectionEvent.CONNECTED:
                self._channel.send(encode_greeting(schema()))
                waits_for = self._awaiting_greeting = object()
                self._loop.call_later(GREETING_TIMEOUT_S, self._on_greeting_timeout, waits_for)
            elif event is ConnectionEvent.LOST:
                self.is_connected, self._awaiting_greeting = False, None
                self._callbacks.on_lost()
                log.warning("broker_gone", note="reconnecting until it is back")
            elif event is ConnectionEvent.AUTH_REJECTED:
                self._on_auth_rejected()
            elif event is ConnectionEvent.HANDSHAKE_FAILED:
                self._on_handshake_failed()
            elif not isinstance(event, ConnectionEvent):
                self._handle_frames(event)

    async def measure_link(self) -> None:
        """Measure the connection to the broker once, before the first Hello, which reports it."""
        await self._greeted_once.wait()
        self.link = await self._probe.measure()
        if self._probe.loses_large:
            log.warning("large_messages_lost", broker=address_and_key(self._url)[0], note=MTU_REMEDY)
        self._is_measured = True
        if self.is_connected:
            self._callbacks.on_connected()

    def reconnect_after(self, since: float, wait_s: float) -> None:
        """Reconnect if ``wait_s`` have passed since the last forced reconnection (or ``since``, if there was none)."""
        now = self._clock.now()
        if now - (since if self._reconnected_at is None else self._reconnected_at) >= wait_s:
            self._reconnected_at = now
            self._channel.reconnect()

    def send(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Send a message. One that its own schema refuses is logged and dropped; if the broker waits for it, it has a
        deadline."""
        try:
            self._encode_and_send(message, payload)
        except WireError as error:
            log.error("message_not_encoded", kind=type(message).__name__, reason=str(error))

    def send_hello(self, hello: Hello) -> None:
        """Send Hello. If its own schema refuses it, end the worker: without Hello it gets no work."""
        try:
            self._encode_and_send(hello)
        except WireError as error:
            reason = f"this worker's Hello message is invalid: {error}; correct the named value, then start it again"
            self._callbacks.end(exit_code_without(hello), reason)

    def close(self) -> None:
        self._closed = True  # the compute thread's last actions may still be queued
        self._channel.close()

    def _encode_and_send(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Encode and send a message. Raises WireError."""
        kind = type(message).__name__
        if failpoints.armed:
            failpoints.hit(f"tell.{kind.lower()}")
        frames = WORKER.encode(message, payload, version=self._version)
        if self._closed or not self._channel.send(frames):
            log.warning("control_not_sent", kind=kind)
        if failpoints.armed:
            failpoints.hit(f"told.{kind.lower()}")

    # --- greetings and keys ------------------------------------------------------------------------------------------

    def _on_greeting(self, broker_greeting: Greeting) -> None:
        """Handle the broker's greeting. Nothing is sent before it."""
        self._awaiting_greeting = None
        reason = incompatibility(broker_greeting, schema())
        if reason is not None:
            reason = f"this worker can't talk to the broker at {address_and_key(self._url)[0]}: {reason}"
            self._callbacks.end(EX_CONFIG, reason)
            return
        self._version = negotiated_version(broker_greeting)
        self.is_connected = True
        self._greeted_once.set()
        if self._is_measured:
            self._callbacks.on_connected()

    def _on_greeting_timeout(self, waits_for: object) -> None:
        if waits_for is self._awaiting_greeting:
            url = self._url
            log.error("broker_does_not_greet", url=url, note="it is not a broker, or one of an older version")

    def _on_auth_rejected(self) -> None:
        """Handle a rejected key. This machine may have a new one by now; the broker itself closes established
        connections."""
        if not self._reload_keys():
            self._callbacks.end(EX_CONFIG, _auth_rejected_text(self._url))

    def _on_handshake_failed(self) -> None:
        """Handle a failed handshake: the broker may have a new key, stored by another process of this machine."""
        if self._clock.now() - self._keys_read_at >= RECONNECT_S:
            self._keys_read_at = self._clock.now()
            if not self._reload_keys() and (left_out := self._log_limiter.take(self._clock.now())) is not None:
                note = (
                    "the listener there has another key than the stored one, or is busy; with a new invitation: --join"
                )
                log.warning("broker_hangs_up", at=address_and_key(self._url)[0], note=note, left_out=left_out)

    def _reload_keys(self) -> bool:
        """Reconnect with the stored keys if they have changed; return whether they have."""
        stored = None if self._credentials is None else self._credentials.switch_to_newer()
        if stored is None:
            return False
        log.info("key_changed", worker=self._name, key=stored.pair.public[:16], broker=stored.broker[:16])
        self._connector.pair = stored.pair
        self._channel.set_endpoint(control_endpoint(stored.endpoint))
        self._channel.reconnect(stored.pair)
        return True

    def _store_broker_key(self, key: str) -> None:
        """Store a new key of the broker, which is used from the next connection on."""
        if self._credentials is None:
            return
        try:
            stored = self._credentials.set_broker_key(key)
        except ConfigError as error:
            log.error("broker_key_not_kept", worker=self._name, key=key, reason=str(error))
            return
        log.info("broker_key_kept", worker=self._name, broker=key[:16])
        self._channel.set_endpoint(control_endpoint(stored.endpoint))
        self.send(BrokerKeyKept(key=key))

    async def _rotate_key(self, home: CredentialStore, rotate: RotateKeyPair) -> None:
        """Rotate this machine's key on an operator's order. The end of the old key shows as a rejected connection."""
        if reason := await asyncio.to_thread(rotate, home):
            log.error("key_not_changed", worker=self._name, reason=reason)

    # --- orders ------------------------------------------------------------------------------------------------------

    def _handle_frames(self, frames: list[memoryview]) -> None:
        broker_greeting = read_greeting(frames)
        if broker_greeting is not None:
            self._on_greeting(broker_greeting)
            return
        try:
            order, _ = ORDER.decode(frames)
        except ForeignMessage as error:
            reason = f"the broker sent an unknown message ({error}): install the same version on both machines"
            self._callbacks.end(EX_CONFIG, reason)
            return
        except WireError as error:
            self._on_bad_order(str(error))
            return
        if isinstance(order, Probed):
            self._probe.on_answer(order.ticket)
            return
        if isinstance(order, BrokerKey):
            self._store_broker_key(order.key)
            return
        if isinstance(order, RotateKey):
            if self._credentials and self._rotate and (self._rotation is None or self._rotation.done()):
                self._rotation = self._loop.create_task(
                    self._rotate_key(self._credentials, self._rotate), name="change key"
                )
            return
        self._callbacks.on_order(order)

    def _on_bad_order(self, reason: str) -> None:
        """Reconnect after an order that can't be decoded: the broker does not repeat it, and a plan may wait for it.

        After the reconnection, Hello reports the stored sequences, and the broker continues from there. The interval is
        bounded, in case the broker keeps sending such orders.
        """
        now = self._clock.now()
        if (left_out := self._log_limiter.take(now)) is not None:
            log.warning("order_refused", reason=reason, left_out=left_out)
        self.reconnect_after(float("-inf"), RECONNECT_S)


def build_hello(
    core: StageCore,
    resources: WorkerResources,
    listener: StepListener,
    kv_listener: StepListener | None,
    *,
    key: str,
    link: LinkCost | None,
) -> Hello:
    """Return the Hello message: identity, device, memory, and stored sequences. ``key``: public key for other workers'
    listeners."""
    executor, own = resources.executor, core.settings
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
        dtypes=resources.dtypes,
        cores=os.cpu_count() or 1,
        endpoint=listener.endpoint,
        ticket=listener.ticket,
        kv_endpoint="" if kv_listener is None else kv_listener.endpoint,
        build=__version__,
        key=key,
        memory_bytes=executor.memory_bytes,
        kv_share=executor.kv_share,
        costs=resources.costs,
        link=link,
        manifest=executor.manifest,
        held_layers=core.layers,
        held=core.hello_inventory(),
        logs=tuple(core.log.ranges()),
        kept=core.pending_plan.standby,
        bits=core.pending_plan.bits,
        adapters=core.adapters.entries,
    )


def settings_message(settings: Iterable[ShownSetting]) -> tuple[Setting, ...]:
    """Return the worker's settings for its broker. A value that is too long for a message is left out."""
    texts = [(setting.name, json.dumps(setting.value, ensure_ascii=False), setting.origin) for setting in settings]
    return tuple(
        Setting(name, value if len(value) <= MAX_TEXT else '"…"', origin[:MAX_TEXT]) for name, value, origin in texts
    )


def exit_code_without(hello: Hello) -> int:
    """Return the exit code for a worker whose Hello can't be sent.

    If the Hello lists stored sequences, a restart may help, because they will be gone. Otherwise the cause is in the
    facts about the worker itself, and a restart does not help.
    """
    return 1 if hello.held or hello.logs else EX_CONFIG


def _auth_rejected_text(url: str) -> str:
    return (
        f"the broker at {address_and_key(url)[0]} does not accept this machine's key: it was revoked, or is not a "
        "worker's; join again (swarm worker --join)"
    )
