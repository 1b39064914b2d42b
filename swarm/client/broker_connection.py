"""Broker connection: socket, clock and waiting callers around a :class:`Session`, whose actions it carries out."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from itertools import count

import msgspec
import zmq

from swarm.auth.rotation import CredentialStore
from swarm.client.events import (
    AbandonQuestion,
    AskQuestion,
    ConfirmStored,
    Connected,
    Deliver,
    Disconnected,
    EndContinuation,
    FailRequest,
    HandshakeFailed,
    IncompatibleBroker,
    LeaveRequest,
    Received,
    Reply,
    ReturnAnswer,
    ReturnError,
    Send,
    SessionAction,
    SessionEvent,
    SessionTick,
    StartRequest,
    TcpConnected,
    UndecodableMessage,
)
from swarm.client.session import Session
from swarm.errors import ClientError, ConfigError, InvalidRequest, Unavailable, WireError
from swarm.wire import dealer as wire
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.greeting import encode_greeting, incompatibility, negotiated_version, read_greeting
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    GetRequest,
    LookUp,
    Report,
    Rotate,
    RotateKey,
)
from swarm.wire.schema import client_schema
from swarm.wire.sockets import Frames
from swarm.wire.tensors import Bytes
from swarm.wire.transport.keys import KeyPair, public_of

_KEYS_CHECK_S = 1.0  # seconds between two reads of the stored keys while handshakes fail
_KEY_CHANGE_TIMEOUT_S = 10.0  # time limit for the broker's answer about a new key
_TICK_S = 0.1  # precision of time limits
_YIELD_EVERY = 64  # updates that one reader takes before others get a turn: about a millisecond
_MAX_OUTBOX = 1 << 16  # messages that wait for space in the socket's queue

Answer = tuple[Reply, bytes]
RequestUpdate = Deliver | EndContinuation | FailRequest | ConfirmStored


class Mailbox:
    """Queue of updates for one reader. The session bounds it: it accepts only a limited number of unconsumed tokens."""

    def __init__(self) -> None:
        self._updates: deque[RequestUpdate] = deque()
        self._has_updates = asyncio.Event()  # set while updates wait
        self._num_since_yield = 0  # updates taken since the reader last yielded to the loop

    def put(self, update: RequestUpdate) -> None:
        self._updates.append(update)
        self._has_updates.set()

    async def get(self) -> RequestUpdate:
        """Return the next update. A reader that always finds one yields to the loop every ``_YIELD_EVERY`` events."""
        self._num_since_yield += 1
        if self._num_since_yield >= _YIELD_EVERY:
            self._num_since_yield = 0
            await asyncio.sleep(0)
        while not self._updates:
            self._num_since_yield = 0
            self._has_updates.clear()
            await self._has_updates.wait()
        return self._updates.popleft()


class BrokerConnection:
    """A connection to a broker, on the running loop. Only :meth:`ask` waits. ``pair`` authenticates this machine
    there."""

    def __init__(
        self,
        session: Session,
        endpoint: str | None = None,
        pair: KeyPair | None = None,
        credentials: CredentialStore | None = None,
    ) -> None:
        """Connect to ``endpoint``, by default the session's address. ``credentials``: the store of both keys."""
        self.session = session
        self._credentials = credentials
        self._rotation: asyncio.Task[None] | None = None  # a key change in progress
        self._keys_checked_at = float("-inf")  # time of the last read of the stored keys
        self.num_connects = 0  # number of connects; after each, the broker may be a different one
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.term)
            self._channel = wire.DealerChannel(
                self._context, endpoint or session.url, secrets.token_bytes(16), SERVER.frame_limit_bytes, pair
            )
            undo.pop_all()
        self._mailboxes: dict[str, Mailbox] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._keys = count()
        self._outbox: deque[list[Bytes]] = deque(maxlen=_MAX_OUTBOX)
        self._has_work = asyncio.Event()
        self._encoded: tuple[ClientMessage, list[Bytes]] | None = None  # the message being started and its frames
        self._protocol_version = PROTOCOL_VERSION  # protocol version used with this broker
        self._closed_reason = ""  # why the connection is unusable; "" while it works
        self._runner = self._loop.create_task(self._run(), name="swarm client")
        self._runner.add_done_callback(self._on_stopped)

    # --- what callers do

    def start(self, event: StartRequest, mailbox: Mailbox) -> None:
        """Start a request; its updates go to the mailbox. Raises InvalidRequest if it cannot be sent."""
        if event.attached:
            self.handle(event)  # the broker already has it
        else:
            self._handle_encodable(event, event.submit)
        self._mailboxes[event.submit.request_id] = mailbox

    def is_read(self, request_id: str, mailbox: Mailbox | None) -> bool:
        """Whether this mailbox gets the request's updates: until its end, or until another reader takes over."""
        return mailbox is not None and self._mailboxes.get(request_id) is mailbox

    def leave(self, request_id: str, *, cancel: bool = False) -> None:
        """Stop reading a request. Ignored if the request has ended."""
        if self._mailboxes.pop(request_id, None) is not None:
            self.handle(LeaveRequest(request_id, cancel))

    async def ask(self, question: AskQuestion) -> Answer:
        """Return the broker's answer. Raises RequestTimeout, Unavailable, or InvalidRequest if it cannot be sent."""
        self._check_open()
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[question.key] = future
        try:
            self._handle_encodable(question, question.question)
            return await future
        finally:
            del self._answers[question.key]
            if not self._closed_reason:
                self.handle(AbandonQuestion(question.key))

    def new_key(self) -> int:
        return next(self._keys)

    def _handle_encodable(self, event: SessionEvent, message: ClientMessage) -> None:
        """Encode the message, which must be possible or every reconnect would try it again, and handle the event."""
        self._check_open()
        try:
            self._encoded = message, CLIENT.encode(message, version=self._protocol_version)
        except WireError as error:
            raise InvalidRequest(f"this can't be sent: {error}", code="invalid") from None
        try:
            self.handle(event)
        finally:
            self._encoded = None

    def handle(self, event: SessionEvent) -> None:
        """Pass an event to the session and carry out the actions it returns."""
        self._check_open()
        for action in self.session.handle(event, self._loop.time()):
            self._carry_out(action)
        if not self.session.is_idle:
            self._has_work.set()

    async def aclose(self) -> None:
        """Cancel live requests, send what is queued, and release all resources."""
        if self._context.closed:
            return
        if not self._closed_reason:
            for request_id, mailbox in list(self._mailboxes.items()):
                self.leave(request_id)
                mailbox.put(FailRequest(request_id, Unavailable("the client was closed")))
            self._flush()
        await self._release()

    async def abandon(self) -> None:
        """Release all resources without sending anything, as if this process had died."""
        if self._context.closed:
            return
        self._mailboxes.clear()  # a caller that leaves from now on sends no cancellation
        self._outbox.clear()
        await self._release()

    async def _release(self) -> None:
        running = [self._runner] if self._rotation is None else [self._runner, self._rotation]
        for task in running:
            task.cancel()
        try:
            await asyncio.gather(*running, return_exceptions=True)
        finally:
            self._channel.close()
            self._context.term()  # waits at most for the socket's linger time

    # --- what runs

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive_forever(), name="swarm client: receive")
            tasks.create_task(self._tick_forever(), name="swarm client: tick")

    async def _receive_forever(self) -> None:
        async for event in self._channel:
            self._on_socket_event(event)

    def _on_socket_event(self, event: Frames | wire.ConnectionEvent) -> None:
        if event is wire.ConnectionEvent.CONNECTED:
            self.num_connects += 1
            self._channel.send(encode_greeting(client_schema()))
            self.handle(TcpConnected())
        elif event is wire.ConnectionEvent.AUTH_REJECTED:
            self._on_auth_rejected()
        elif event is wire.ConnectionEvent.HANDSHAKE_FAILED:
            self.handle(HandshakeFailed())
            self._check_stored_keys()
        elif event is wire.ConnectionEvent.LOST:
            self._outbox.clear()  # after the next connect, the session sends everything again
            self.handle(Disconnected())
        elif not isinstance(event, wire.ConnectionEvent):
            self._on_frames(event)

    def _on_auth_rejected(self) -> None:
        """Handle a rejected key: use a newer one if this machine has it, otherwise count the broker as incompatible."""
        if not self._use_stored_keys():
            self.handle(
                IncompatibleBroker(
                    "it does not accept this machine's key (was it revoked?); join again with an invitation"
                )
            )

    def _check_stored_keys(self) -> None:
        """Handle a failed handshake: the broker may have another key, which another process here has stored."""
        if self._loop.time() - self._keys_checked_at >= _KEYS_CHECK_S:
            self._keys_checked_at = self._loop.time()
            self._use_stored_keys()

    def _use_stored_keys(self) -> bool:
        """Reconnect with the stored keys if they differ from the ones in use. Returns whether they do."""
        stored = None if self._credentials is None else self._credentials.switch_to_newer()
        if stored is None:
            return False
        self._channel.set_endpoint(stored.endpoint)
        self._channel.reconnect(stored.pair)
        return True

    def _store_broker_key(self, key: str) -> None:
        """Store the broker's new key for the next connection. If that fails, the broker gets no confirmation."""
        if self._credentials is None:
            return
        try:
            stored = self._credentials.set_broker_key(key)
        except ConfigError:
            return
        self._channel.set_endpoint(stored.endpoint)
        self._channel.send(CLIENT.encode(BrokerKeyKept(key=key)))

    def _start_key_change(self) -> None:
        """Start to replace this machine's key on an administrator's order; if it fails, the broker asks again later. If
        another process here has already done it, use that key."""
        if (
            self._credentials is None
            or (self._rotation is not None and not self._rotation.done())
            or self._use_stored_keys()
        ):
            return
        self._rotation = self._loop.create_task(self._change_key(self._credentials), name="swarm client: change key")

    async def _change_key(self, credentials: CredentialStore) -> None:
        """Follow the steps of ``swarm.auth.rotation`` over this connection, then reconnect with the new key."""
        with contextlib.suppress(ConfigError, ClientError):
            secret = credentials.next_secret()
            reply, _ = await self.ask(AskQuestion(self.new_key(), Rotate(key=public_of(secret)), _KEY_CHANGE_TIMEOUT_S))
            if isinstance(reply, Report) and reply.ok:
                credentials.replace_secret(secret)
                self._use_stored_keys()

    def _on_frames(self, frames: Frames) -> None:
        peer_greeting = read_greeting(frames)
        if peer_greeting is not None:
            reason = incompatibility(peer_greeting, client_schema())
            self._protocol_version = negotiated_version(peer_greeting)
            self.handle(Connected() if reason is None else IncompatibleBroker(reason))
            return
        try:
            message, payload = SERVER.decode(frames)
        except WireError as error:
            self.handle(UndecodableMessage(str(error), _read_request_id(frames[0])))
            return
        if isinstance(message, BrokerKey):
            self._store_broker_key(message.key)
        elif isinstance(message, RotateKey):
            self._start_key_change()
        else:
            self.handle(Received(message, b"" if payload is None else bytes(payload)))

    async def _tick_forever(self) -> None:
        while True:
            if self.session.is_idle:
                self._has_work.clear()
                await self._has_work.wait()
            await asyncio.sleep(_TICK_S)
            for event in self._channel.pending_events():  # an unread answer must not count as late
                self._on_socket_event(event)
            self._flush()
            self.handle(SessionTick())

    def _on_stopped(self, runner: asyncio.Task[None]) -> None:
        """Fail all waiting callers of a connection that is closed or broken, and all later ones."""
        failure = None if runner.cancelled() else runner.exception()
        self._closed_reason = "this client is closed" if failure is None else _failure_reason(failure)
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(FailRequest(request_id, Unavailable(self._closed_reason)))
        self._mailboxes.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Unavailable(self._closed_reason))

    def _check_open(self) -> None:
        if self._closed_reason:
            raise Unavailable(self._closed_reason)

    # --- carrying out

    def _carry_out(self, action: SessionAction) -> None:
        match action:
            case Send(message):
                self._send(message)
            case (
                Deliver(request_id=request_id)
                | EndContinuation(request_id=request_id)
                | ConfirmStored(request_id=request_id)
            ):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].put(action)
            case FailRequest(request_id=request_id):
                mailbox = self._mailboxes.pop(request_id, None)
                if mailbox is not None:
                    mailbox.put(action)
            case ReturnAnswer(key, answer, payload):
                self._resolve(key, (answer, payload))
            case ReturnError(key, error):
                self._resolve(key, error)

    def _frames(self, message: ClientMessage) -> list[Bytes]:
        if self._encoded is not None and self._encoded[0] is message:
            return self._encoded[1]
        return CLIENT.encode(message, version=self._protocol_version)

    def _send(self, message: ClientMessage) -> None:
        try:
            frames = self._frames(message)
        except WireError as error:  # a message kind that this older broker does not support
            request_id = "" if isinstance(message, GetRequest | LookUp) else getattr(message, "request_id", "")
            self.handle(UndecodableMessage(str(error), request_id))
            return
        self._outbox.append(frames)
        self._flush()

    def _resolve(self, key: int, outcome: Answer | ClientError) -> None:
        future = self._answers.get(key)
        if future is None or future.done():
            return
        if isinstance(outcome, ClientError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _flush(self) -> None:
        """Send queued messages until the socket's queue is full; the next tick sends the rest."""
        while self._outbox and self._channel.send(self._outbox[0]):
            self._outbox.popleft()


class _RequestIdField(msgspec.Struct):
    """The one field that is read from a message that cannot be decoded."""

    request_id: str = ""


def _read_request_id(header: Bytes) -> str:
    try:
        return msgspec.msgpack.decode(header, type=_RequestIdField).request_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _failure_reason(failure: BaseException) -> str:
    """Return why a connection is unusable. The cause is a bug in this client, whatever the exception was."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return f"this client has broken ({type(failure).__name__}: {failure}): make a new one, and report this"
