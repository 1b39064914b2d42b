"""A broker that plays a script: real sockets and the real codec, but no model, no workers and no scheduling.

It keeps requests over a restart of its door, as a broker with a journal does, and honours the client's window.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
import xxhash
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from swarm.errors import ConfigError, WireError
from swarm.wire.channel import BindAddress, RouterChannel
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.greeting import Greeting, read_greeting
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    Accepted,
    Ack,
    Asset,
    AssetPart,
    Attach,
    Cancel,
    ClientMessage,
    Describe,
    Description,
    Finished,
    GetAsset,
    GetRequest,
    Hop,
    Invite,
    Join,
    LayerRange,
    Malformed,
    Manifest,
    PayloadSpec,
    PlanCommand,
    Query,
    Rejected,
    Report,
    RequestDetails,
    Revoke,
    RotateBroker,
    RotateMember,
    ServerMessage,
    ShowSettings,
    Stop,
    StopWorker,
    Submit,
    Timing,
    TokenLogprob,
    Tokens,
)
from swarm.wire.schema import client_schema
from swarm.wire.sockets import DATA_PORTS
from swarm.wire.transport.peers import MessageReceived

WINDOW = 256
_AGAIN_S = 0.001  # until what found no room in a peer's queue is tried again
EOS = 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level: one token per byte and a few merged ones; 0 is <s>, 1 is </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    words = ["<s>", "</s>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def tokenizer_files() -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    return {"tokenizer.json": tiny_tokenizer().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def manifest_of(files: dict[str, bytes]) -> Manifest:
    return Manifest(
        name="tiny",
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=8,
        vocab_size=262,
        context=4096,
        eos_token_ids=(EOS,),
        dtype="float32",
        layer_bytes=(1, 1),
        embed_bytes=1,
        head_bytes=1,
        kv_bytes_per_token=(1, 1),
        files=(),
        assets=tuple(Asset(n, len(c), xxhash.xxh3_128_hexdigest(c)) for n, c in files.items()),
    )


@dataclass
class Play:
    """One continuation as the broker knows it."""

    script: list[int]
    reason: str = "length"
    sent: int = 0
    acked: int = 0
    ended: bool = False


@dataclass
class Known:
    submit: Submit
    peer: bytes
    plays: list[Play]


def say(text: str) -> list[int]:
    """The tokens of a text, without special ones around."""
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


@dataclass
class FakeBroker:
    """``answer`` scripts a request's continuations. ``allowed`` tokens of each are sent at once, the rest when it grows
    (None: all). ``chunk`` tokens travel together. ``refuse`` may turn a submission down. ``lose`` tells which token
    messages vanish on their way; ``repeat`` sends each twice. ``greets``: how it greets back (None: not at all).
    ``last_lines`` changes what it says on the way."""

    answer: Callable[[Submit, int], list[int]]
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    manifest: Manifest | None = None
    port: int = 0
    allowed: int | None = None
    chunk: int = 1
    refuse: Callable[[Submit], Rejected | None] = lambda _: None
    lose: Callable[[Tokens], bool] = lambda _: False
    repeat: bool = False
    silent: bool = False
    greets: Greeting | None = field(default_factory=lambda: Greeting(schema=client_schema()))
    retell: Callable[[ServerMessage, list[bytes]], list[bytes]] = lambda _, frames: frames
    reports: dict[str, Report] = field(default_factory=dict)
    heard: list[ClientMessage] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        if self.manifest is None:
            self.manifest = manifest_of(self.files)
        self._news = asyncio.Condition()
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._door is not None:
            await self.shut()

    async def open(self) -> None:
        """Open the door (again, at the same port)."""
        self._context = zmq.Context()
        self._door: RouterChannel | None = self._bind()
        self._unsaid: deque[tuple[bytes, list[bytes]]] = deque()
        self.url = self._door.endpoint
        self.port = int(self.url.rsplit(":", 1)[1])
        self._listener = asyncio.create_task(self._listen(self._door))

    def _bind(self) -> RouterChannel:
        """At the same port as before, or at any below the ephemeral ones (a dead one of those can meet itself)."""
        for port in [self.port] if self.port else random.sample(DATA_PORTS, 50):
            with contextlib.suppress(ConfigError):
                return RouterChannel([BindAddress("127.0.0.1")], port, CLIENT.frame_limit_bytes)
        raise ConfigError("no free port for the fake broker")

    async def shut(self) -> None:
        """Close the door, keep what is known."""
        assert self._door is not None
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._door.close()
        self._door = None
        self._context.term()  # returns when the port is free again

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a loop in another thread, for clients that have none."""
        started, stop = threading.Event(), asyncio.Event()

        async def serve() -> None:
            async with self:
                self._loop = asyncio.get_running_loop()
                started.set()
                await stop.wait()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert started.wait(10)
            yield self
        finally:
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(10)

    def wait_in_thread(self, condition: Callable[[], bool]) -> None:
        """``wait_until`` for a broker in another thread."""
        asyncio.run_coroutine_threadsafe(self.wait_until(condition), self._loop).result(20)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until what was heard makes this true."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(condition)

    def heard_of(self, kind: type[ClientMessage]) -> list[ClientMessage]:
        return [message for message in self.heard if isinstance(message, kind)]

    def allow(self, count: int | None) -> None:
        """Let so many tokens of each continuation go out."""
        self.allowed = count
        for known in self.known.values():
            self._pump(known)

    async def _listen(self, door: RouterChannel) -> None:
        async for event in door:
            if isinstance(event, MessageReceived):
                await self._arrived(event)

    async def _arrived(self, event: MessageReceived) -> None:
        if read_greeting(event.frames) is not None:
            if self.greets is not None and self._door is not None:
                self._door.send(event.peer, [msgspec.msgpack.encode(self.greets)])
            return
        try:
            message, _ = CLIENT.decode(event.frames)
        except WireError as error:
            self._say(event.peer, Malformed(reason=str(error)))
            return
        if not self.silent:
            self._handle(event.peer, message)
        async with self._news:
            self.heard.append(message)
            self._news.notify_all()

    def _handle(self, peer: bytes, message: ClientMessage) -> None:
        match message:
            case Submit():
                self._submit(peer, message)
            case Describe():
                self._describe(peer)
            case GetAsset(name=name, offset=offset):
                part = self.files[name][offset : offset + ASSET_PART_BYTES]
                total = len(self.files[name])
                self._say(
                    peer, AssetPart(name=name, offset=offset, total=total, payload=PayloadSpec(len(part), 0)), part
                )
            case (
                Query() | Join() | StopWorker() | PlanCommand() | Invite() | Revoke() | RotateBroker() | RotateMember()
            ):
                self._report(peer, message)
            case ShowSettings(worker=worker):
                rows = [{"name": "log.level", "value": "debug", "from": "the command line"}]
                body: dict[str, object] = {"process": worker or "broker", "settings": rows}
                self._say(peer, self.reports.get("settings", Report(what="settings", ok=True, body=body)))
            case _:
                self._about_known(peer, message)

    def _about_known(self, peer: bytes, message: ClientMessage) -> None:
        match message:
            case Attach():
                known = self.known.get(message.request_id)
                if known is None:
                    self._say(peer, Rejected(request_id=message.request_id, code="unknown", reason="never heard of it"))
                    return
                known.peer = peer
                for play, index in zip(known.plays, message.next_index, strict=True):
                    play.sent, play.acked, play.ended = index, index, False
                self._pump(known)
            case GetRequest(request_id=request_id) if request_id in self.known:
                self._say(peer, RequestDetails(submit=self.known[request_id].submit))
            case Ack(request_id=request_id, index=index) if request_id in self.known:
                self.known[request_id].plays[index].acked = message.next_index
                self._pump(self.known[request_id])
            case Stop(request_id=request_id, index=index, at_index=at_index) if request_id in self.known:
                play = self.known[request_id].plays[index]
                del play.script[at_index:]
                play.reason, play.sent = "stop", min(play.sent, at_index)
                self._pump(self.known[request_id], ignore_limit=True)
            case Cancel(request_id=request_id) if request_id in self.known:
                for play in self.known[request_id].plays:
                    play.reason, play.script = "cancelled", play.script[: play.sent]
                self._pump(self.known[request_id], ignore_limit=True)

    def _report(
        self,
        peer: bytes,
        message: Query | Join | StopWorker | PlanCommand | Invite | Revoke | RotateBroker | RotateMember,
    ) -> None:
        what, body = "stop", {}
        match message:
            case Query(what=what):
                pass
            case Join(count=count):
                what, body = "join", {"started": [f"w{i}" for i in range(count)]}
            case StopWorker(worker=worker):
                body = {"worker": worker}
            case PlanCommand(worker=worker):
                what, body = "steer", {"worker": worker}
            case Invite():
                what, body = "invite", {"addresses": ["tcp://192.0.2.1:5700"], "key": "ab" * 32, "expires_at": 1e9}
            case Revoke(name=name):
                what, body = "revoke", {"name": name}
            case RotateMember(name=name):
                what, body = "rotate_member", {"name": name}
            case RotateBroker():
                what = "rotate_broker"
        self._say(peer, self.reports.get(what, Report(what=what, ok=True, body=body)))

    def _describe(self, peer: bytes) -> None:
        state = "serving" if self.manifest else "waiting"
        waits_for = "" if self.manifest else "a first worker"
        self._say(
            peer,
            Description(
                manifest=self.manifest,
                state=state,
                waits_for=waits_for,
                max_context=4096,
                max_queue=100,
                swarm_version="0.1.0",
            ),
        )

    def _submit(self, peer: bytes, submit: Submit) -> None:
        refusal = self.refuse(submit)
        if refusal is not None:
            self._say(peer, refusal)
            return
        if submit.request_id not in self.known:
            plays = [Play(self.answer(submit, index)) for index in range(submit.params.n)]
            for play in plays:
                cut = play.script[: submit.params.max_tokens]
                play.reason = "stop" if cut and cut[-1] == EOS else "length"
                play.script = cut
            self.known[submit.request_id] = Known(submit, peer, plays)
        known = self.known[submit.request_id]
        known.peer = peer
        self._say(peer, Accepted(request_id=submit.request_id))
        self._pump(known)

    def _pump(self, known: Known, ignore_limit: bool = False) -> None:
        busy = deque(enumerate(known.plays))
        while busy:
            index, play = busy.popleft()
            allowed = len(play.script) if self.allowed is None else min(self.allowed, len(play.script))
            limit = min(allowed, play.acked + WINDOW)
            if play.sent < limit:
                stop = min(play.sent + self.chunk, limit)
                self._tokens(known, index, play.sent, stop)
                play.sent = stop
                busy.append((index, play))
            elif not play.ended and play.sent >= len(play.script) and (ignore_limit or allowed == len(play.script)):
                play.ended = True
                self._finish(known, index, play)

    def _tokens(self, known: Known, index: int, start: int, stop: int) -> None:
        ids = known.plays[index].script[start:stop]
        num_logprobs = known.submit.params.logprobs
        logprobs = () if num_logprobs is None else tuple((TokenLogprob(i, -0.5),) * (num_logprobs + 1) for i in ids)
        hop = Hop("w0", LayerRange(0, 2), 0.001, 0.002, 0.0, 0.0, 32)
        hops = tuple((hop,) for _ in ids) if known.submit.hops else ()
        message = Tokens(
            request_id=known.submit.request_id, index=index, start=start, ids=tuple(ids), logprobs=logprobs, hops=hops
        )
        if self.lose(message):
            return
        for _ in range(2 if self.repeat else 1):
            self._say(known.peer, message)

    def _finish(self, known: Known, index: int, play: Play) -> None:
        failed = play.reason.startswith("failed")
        message = Finished(
            request_id=known.submit.request_id,
            index=index,
            reason="failed" if failed else play.reason,
            num_prompt=len(known.submit.prompt),
            num_tokens=len(play.script),
            timing=Timing(0.001, 0.002, 0.003, 0),
            detail=play.reason.removeprefix("failed").lstrip(": ") if failed else "",
        )
        self._say(known.peer, message)

    def fail(self, request_id: str, detail: str) -> None:
        """End a request badly."""
        known = self.known[request_id]
        for index, play in enumerate(known.plays):
            play.reason = f"failed: {detail}"
            self._finish(known, index, play)

    def malformed(self, reason: str) -> None:
        """Complain to everybody who has submitted something."""
        for known in self.known.values():
            self._say(known.peer, Malformed(reason=reason))

    def _say(self, peer: bytes, message: ServerMessage, payload: bytes | None = None) -> None:
        """Behind what waits already. A door takes so much at once for a peer, and the rest when that has left."""
        if self._door is None:
            return
        frames = self.retell(message, SERVER.encode(message, payload))  # type: ignore[arg-type]
        if self._unsaid or not self._door.send(peer, frames):
            if not self._unsaid:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._say_more, self._door)
            self._unsaid.append((peer, frames))

    def _say_more(self, door: RouterChannel) -> None:
        """Say what found no room; what is for nobody any more is left out."""
        if door is not self._door:
            return
        while self._unsaid and (door.send(*self._unsaid[0]) or not door.is_connected(self._unsaid[0][0])):
            self._unsaid.popleft()
        if self._unsaid:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._say_more, door)
