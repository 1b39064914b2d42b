"""Broker connection: socket, clock and waiting callers around a :class:`Session`, whose actions it carries out."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from itertools import count

import msgspec
import zmq

from swarm.client.events import (
    Action,
    Answered,
    Ask,
    Connected,
    Deliver,
    Disconnected,
    Ended,
    Estranged,
    Event,
    Failed,
    Leave,
    NotUnderstood,
    Reached,
    Received,
    Reply,
    Send,
    Start,
    Taken,
    Tick,
    Unanswered,
    Unheard,
    Withdraw,
)
from swarm.client.session import Session
from swarm.errors import ClientError, ConfigError, InvalidRequest, Unavailable, WireError
from swarm.lock.rotation import Home
from swarm.wire import dealer as wire
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.door.keys import KeyPair, public_of
from swarm.wire.greeting import greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    LookUp,
    Recall,
    Report,
    Rotate,
    RotateYours,
)
from swarm.wire.schema import client_schema
from swarm.wire.sockets import Frames
from swarm.wire.tensors import Bytes

_LOOK_S = 1.0  # seconds between two reads of the stored keys while handshakes fail
_CHANGE_S = 10.0  # time limit for the broker's answer about a new key
_TICK_S = 0.1  # precision of time limits
_TURN = 64  # updates that one reader takes before others get a turn: about a millisecond
_MAX_OUTBOX = 1 << 16  # messages that wait for space in the socket's queue

Answer = tuple[Reply, bytes]
News = Deliver | Ended | Failed | Taken


class Mailbox:
    """Queue of updates for one reader. The session bounds it: it accepts only a limited number of unconsumed tokens."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._some = asyncio.Event()  # set while updates wait
        self._num_at_once = 0  # updates taken since the reader last yielded to the loop

    def put(self, news: News) -> None:
        self._news.append(news)
        self._some.set()

    async def get(self) -> News:
        """Return the next update. A reader that always finds one yields to the loop every ``_YIELD_EVERY`` events."""
        self._num_at_once += 1
        if self._num_at_once >= _TURN:
            self._num_at_once = 0
            await asyncio.sleep(0)
        while not self._news:
            self._num_at_once = 0
            self._some.clear()
            await self._some.wait()
        return self._news.popleft()


class Link:
    """A connection to a broker, on the running loop. Only :meth:`ask` waits. ``pair`` authenticates this machine
    there."""

    def __init__(
        self,
        session: Session,
        endpoint: str | None = None,
        pair: KeyPair | None = None,
        home: Home | None = None,
    ) -> None:
        """Connect to ``endpoint``, by default the session's address. ``credentials``: the store of both keys."""
        self.session = session
        self._home = home
        self._rotation: asyncio.Task[None] | None = None  # a key change in progress
        self._looked_at = float("-inf")  # time of the last read of the stored keys
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
        self._busy = asyncio.Event()
        self._encoded: tuple[ClientMessage, list[Bytes]] | None = None  # the message being started and its frames
        self._spoken = PROTOCOL_VERSION  # protocol version used with this broker
        self._refusal = ""  # why the connection is unusable; "" while it works
        self._runner = self._loop.create_task(self._run(), name="swarm client")
        self._runner.add_done_callback(self._stopped)

    # --- what callers do

    def start(self, event: Start, mailbox: Mailbox) -> None:
        """Start a request; its updates go to the mailbox. Raises InvalidRequest if it cannot be sent."""
        if event.attached:
            self.do(event)  # the broker already has it
        else:
            self._begin(event, event.submit)
        self._mailboxes[event.submit.request_id] = mailbox

    def is_read(self, request_id: str, mailbox: Mailbox | None) -> bool:
        """Whether this mailbox gets the request's updates: until its end, or until another reader takes over."""
        return mailbox is not None and self._mailboxes.get(request_id) is mailbox

    def leave(self, request_id: str, *, cancel: bool = False) -> None:
        """Stop reading a request. Ignored if the request has ended."""
        if self._mailboxes.pop(request_id, None) is not None:
            self.do(Leave(request_id, cancel))

    async def ask(self, question: Ask) -> Answer:
        """Return the broker's answer. Raises RequestTimeout, Unavailable, or InvalidRequest if it cannot be sent."""
        self._refuse_if_over()
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[question.key] = future
        try:
            self._begin(question, question.question)
            return await future
        finally:
            del self._answers[question.key]
            if not self._refusal:
                self.do(Withdraw(question.key))

    def new_key(self) -> int:
        return next(self._keys)

    def _begin(self, event: Event, message: ClientMessage) -> None:
        """Encode the message, which must be possible or every reconnect would try it again, and handle the event."""
        self._refuse_if_over()
        try:
            self._encoded = message, CLIENT.encode(message, version=self._spoken)
        except WireError as error:
            raise InvalidRequest(f"this can't be sent: {error}", code="invalid") from None
        try:
            self.do(event)
        finally:
            self._encoded = None

    def do(self, event: Event) -> None:
        """Pass an event to the session and carry out the actions it returns."""
        self._refuse_if_over()
        for action in self.session.handle(event, self._loop.time()):
            self._carry_out(action)
        if not self.session.idle:
            self._busy.set()

    async def aclose(self) -> None:
        """Cancel live requests, send what is queued, and release all resources."""
        if self._context.closed:
            return
        if not self._refusal:
            for request_id, mailbox in list(self._mailboxes.items()):
                self.leave(request_id)
                mailbox.put(Failed(request_id, Unavailable("the client was closed")))
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
            tasks.create_task(self._receive(), name="swarm client: receive")
            tasks.create_task(self._tick(), name="swarm client: tick")

    async def _receive(self) -> None:
        async for event in self._channel:
            self._came(event)

    def _came(self, event: Frames | wire.Link) -> None:
        if event is wire.Link.UP:
            self.num_connects += 1
            self._channel.send(greeting(client_schema()))
            self.do(Reached())
        elif event is wire.Link.TURNED_AWAY:
            self._turned_away()
        elif event is wire.Link.UNHEARD:
            self.do(Unheard())
            self._look_at_home()
        elif event is wire.Link.DOWN:
            self._outbox.clear()  # after the next connect, the session sends everything again
            self.do(Disconnected())
        elif not isinstance(event, wire.Link):
            self._arrived(event)

    def _turned_away(self) -> None:
        """Handle a rejected key: use a newer one if this machine has it, otherwise count the broker as incompatible."""
        if not self._takes_up():
            self.do(Estranged("it does not accept this machine's key (was it revoked?); join again with an invitation"))

    def _look_at_home(self) -> None:
        """Handle a failed handshake: the broker may have another key, which another process here has stored."""
        if self._loop.time() - self._looked_at >= _LOOK_S:
            self._looked_at = self._loop.time()
            self._takes_up()

    def _takes_up(self) -> bool:
        """Reconnect with the stored keys if they differ from the ones in use. Returns whether they do."""
        kept = None if self._home is None else self._home.take_up()
        if kept is None:
            return False
        self._channel.move(kept.endpoint)
        self._channel.renew(kept.pair)
        return True

    def _broker_moves(self, key: str) -> None:
        """Store the broker's new key for the next connection. If that fails, the broker gets no confirmation."""
        if self._home is None:
            return
        try:
            kept = self._home.broker_is(key)
        except ConfigError:
            return
        self._channel.move(kept.endpoint)
        self._channel.send(CLIENT.encode(BrokerKeyKept(key=key)))

    def _rotate(self) -> None:
        """Start to replace this machine's key on an administrator's order; if it fails, the broker asks again later. If
        another process here has already done it, use that key."""
        if self._home is None or (self._rotation is not None and not self._rotation.done()) or self._takes_up():
            return
        self._rotation = self._loop.create_task(self._change_key(self._home), name="swarm client: change key")

    async def _change_key(self, home: Home) -> None:
        """Follow the steps of ``swarm.auth.rotation`` over this connection, then reconnect with the new key."""
        with contextlib.suppress(ConfigError, ClientError):
            secret = home.announced()
            reply, _ = await self.ask(Ask(self.new_key(), Rotate(key=public_of(secret)), _CHANGE_S))
            if isinstance(reply, Report) and reply.ok:
                home.takes_place(secret)
                self._takes_up()

    def _arrived(self, frames: Frames) -> None:
        theirs = read_greeting(frames)
        if theirs is not None:
            reason = why_strangers(theirs, client_schema())
            self._spoken = spoken_with(theirs)
            self.do(Connected() if reason is None else Estranged(reason))
            return
        try:
            message, payload = SERVER.decode(frames)
        except WireError as error:
            self.do(NotUnderstood(str(error), _about(frames[0])))
            return
        if isinstance(message, BrokerKey):
            self._broker_moves(message.key)
        elif isinstance(message, RotateYours):
            self._rotate()
        else:
            self.do(Received(message, b"" if payload is None else bytes(payload)))

    async def _tick(self) -> None:
        while True:
            if self.session.idle:
                self._busy.clear()
                await self._busy.wait()
            await asyncio.sleep(_TICK_S)
            for event in self._channel.waiting():  # an unread answer must not count as late
                self._came(event)
            self._flush()
            self.do(Tick())

    def _stopped(self, runner: asyncio.Task[None]) -> None:
        """Fail all waiting callers of a connection that is closed or broken, and all later ones."""
        broken = None if runner.cancelled() else runner.exception()
        self._refusal = "this client is closed" if broken is None else _epitaph(broken)
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(Failed(request_id, Unavailable(self._refusal)))
        self._mailboxes.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Unavailable(self._refusal))

    def _refuse_if_over(self) -> None:
        if self._refusal:
            raise Unavailable(self._refusal)

    # --- carrying out

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(message):
                self._say(message)
            case Deliver(request_id=request_id) | Ended(request_id=request_id) | Taken(request_id=request_id):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].put(action)
            case Failed(request_id=request_id):
                mailbox = self._mailboxes.pop(request_id, None)
                if mailbox is not None:
                    mailbox.put(action)
            case Answered(key, answer, payload):
                self._settle(key, (answer, payload))
            case Unanswered(key, error):
                self._settle(key, error)

    def _frames(self, message: ClientMessage) -> list[Bytes]:
        if self._encoded is not None and self._encoded[0] is message:
            return self._encoded[1]
        return CLIENT.encode(message, version=self._spoken)

    def _say(self, message: ClientMessage) -> None:
        try:
            frames = self._frames(message)
        except WireError as error:  # a message kind that this older broker does not support
            about = "" if isinstance(message, Recall | LookUp) else getattr(message, "request_id", "")
            self.do(NotUnderstood(str(error), about))
            return
        self._outbox.append(frames)
        self._flush()

    def _settle(self, key: int, outcome: Answer | ClientError) -> None:
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


class _About(msgspec.Struct):
    """The one field that is read from a message that cannot be decoded."""

    request_id: str = ""


def _about(header: Bytes) -> str:
    try:
        return msgspec.msgpack.decode(header, type=_About).request_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _epitaph(broken: BaseException) -> str:
    """Return why a connection is unusable. The cause is a bug in this client, whatever the exception was."""
    while isinstance(broken, BaseExceptionGroup):
        broken = broken.exceptions[0]
    return f"this client has broken ({type(broken).__name__}: {broken}): make a new one, and report this"
