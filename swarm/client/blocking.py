"""The client of a swarm for programs without an event loop: the asynchronous one, driven in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from swarm.client.client import AsyncClient
from swarm.client.governing import What
from swarm.client.request import Params, Prompt, RequestOptions
from swarm.client.results import BatchPiece, Completion, Piece
from swarm.client.stream import BatchStream, PromptStream
from swarm.client.text.tokenizer import Chat, TextModel
from swarm.errors import ClientError, Unavailable
from swarm.lock.access import Access
from swarm.params import SamplingParams
from swarm.wire.messages import Description, Invite, Json, Steer, Submit, Suppose

_T = TypeVar("_T")
_Item = TypeVar("_Item", Piece, BatchPiece)


class Client:
    """:class:`AsyncClient` for ordinary code: same verbs, same promises. Any thread may use it.

    Use it as a context manager, or call :meth:`close` at the end. An interrupt (Ctrl-C) in a verb cancels its request.
    """

    def __init__(
        self, url: str | Access | None = None, *, connect_timeout_s: float = 5.0, reconnect_timeout_s: float = 600.0
    ) -> None:
        self._client = AsyncClient(url, connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s)
        self.url = self._client.url
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way and release everything. The client can't be used afterwards."""
        with self._lock:
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is not None and loop is not None and thread.is_alive():
            self._post(self._stop.set)
            thread.join()

    # --- requests

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The finished answer to a prompt."""
        return self._run(self._client.generate(prompt, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> BlockingStream:
        """The answer token by token. Leaving the iterator early cancels the request."""
        return BlockingStream(self, self._client.stream(prompt, params, **options))

    def chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The finished answer to a conversation: ``[{"role": "user", "content": "…"}, …]``."""
        return self._run(self._client.chat(messages, params, **options))

    def stream_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> BlockingStream:
        """The answer to a conversation, token by token."""
        return BlockingStream(self, self._client.stream_chat(messages, params, **options))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> str:
        """Have a prompt answered without waiting for it: the id of a detached request, once the swarm has accepted it.
        Whoever knows the id can :meth:`attach` to it, from any process, until some time after its end."""
        return self._run(self._client.submit(prompt, params, **options))

    def submit_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Have a conversation answered without waiting for it; see :meth:`submit`."""
        return self._run(self._client.submit_chat(messages, params, **options))

    def attach(
        self, request_id: str, next_index: int = 0, *, timeout: float | None = None, visible: Sequence[int] = ()
    ) -> BlockingStream:
        """Read the answer to a request that was made before, perhaps by another process: from token ``next_index`` of
        each continuation on. Leaving the iterator early cancels nothing."""
        return BlockingStream(self, self._client.attach(request_id, next_index, timeout=timeout, visible=visible))

    def recall(self, request_id: str) -> Submit:
        """Look up what was asked for in a request that was made before."""
        return self._run(self._client.recall(request_id))

    def cancel(self, request_id: str) -> None:
        """End a request, whoever made it. One that has ended already stays as it is."""
        self._run(self._client.cancel(request_id))

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        return_errors: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        return_errors: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> list[Completion | ClientError]: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        return_errors: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Sequence[Completion | ClientError]:
        """The answers to many prompts, all under way together, in the order of the prompts. ``params``: one set for
        all, or a sequence with one for each prompt.

        The first error cancels the others and is raised; with ``return_errors`` it takes its prompt's place instead.
        """
        if return_errors:
            return self._run(self._client.generate_batch(prompts, params, return_errors=True, **options))
        return self._run(self._client.generate_batch(prompts, params, **options))

    def stream_batch(
        self, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[RequestOptions]
    ) -> BlockingBatchStream:
        """The answers to many prompts, all under way together, token by token as they come: yields
        ``(index of the prompt, token, text, finished)``. ``params``: one set for all, or a sequence with one for each
        prompt. Leaving the iterator early cancels all of them."""
        return BlockingBatchStream(self, self._client.stream_batch(prompts, params, **options))

    # --- questions

    def describe(self) -> Description:
        """The model, the limits, and what the swarm waits for, if anything."""
        return self._run(self._client.describe())

    def query(self, what: What, *, all: bool = False, request_id: str = "") -> Json:
        """A report as ``swarmctl --json`` prints it. With "requests", ``all`` are also those that ended long ago, and
        ``request_id`` is one alone."""
        return self._run(self._client.query(what, all=all, request_id=request_id))

    def suppose_plan(self, suppose: Suppose) -> Json:
        """The plan that would be made if things were so; nothing is changed."""
        return self._run(self._client.suppose_plan(suppose))

    def trace(self, request_id: str = "") -> Json:
        """Where each token's time went, of a request under way or ended lately; the beginning of its id suffices, none
        means the newest."""
        return self._run(self._client.trace(request_id))

    def join(self, count: int = 1, memory_limit: int | None = None) -> Json:
        """Have a running ``swarm up`` start workers."""
        return self._run(self._client.join(count, memory_limit))

    def stop_worker(self, worker: str, *, force: bool = False, again: bool = False) -> Json:
        """Have a worker hand over its layers and leave. ``force``: even if the swarm can't serve without it. ``again``:
        and end so that ``swarm up`` or systemd starts it anew."""
        return self._run(self._client.stop_worker(worker, force=force, again=again))

    def steer(self, steer: Steer) -> Json:
        """Say who gets layers, or have the plan made anew; what is said lasts as long as the broker's process."""
        return self._run(self._client.steer(steer))

    def settings(self, worker: str = "") -> Json:
        """By which settings the broker runs, or the worker of this name, and where each comes from; no passwords."""
        return self._run(self._client.settings(worker))

    def invite(self, invite: Invite) -> Json:
        """Have the broker take an invitation, whose secret stays here: its public key and the addresses to tell."""
        return self._run(self._client.invite(invite))

    def revoke_key(self, name: str) -> Json:
        """Take away a machine's key, or an invitation: by its name or how the key begins."""
        return self._run(self._client.revoke_key(name))

    def rotate_key(self, key: str) -> Json:
        """Tell the broker the public key by which this machine will knock; the present one counts until it has."""
        return self._run(self._client.rotate_key(key))

    def rotate_broker_key(self, *, now: bool = False) -> Json:
        """Have the broker change its own key; said again, how far that is. ``now``: put the old one away, whoever does
        not know the new one yet. Who those are is in the answer."""
        return self._run(self._client.rotate_broker_key(now=now))

    def rotate_member_key(self, name: str) -> Json:
        """Have a member's machine change its key, by its name or how its key begins: now, or when it is there."""
        return self._run(self._client.rotate_member_key(name))

    def check_grammar(self, params: SamplingParams) -> None:
        """Find out whether the model can follow these parameters' grammar. Raises InvalidRequest that says why not."""
        self._run(self._client.check_grammar(params))

    def text_model(self) -> TextModel | None:
        """The model's tokenizer and chat template; None if it has none."""
        return self._run(self._client.text_model())

    # --- the thread

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except BaseException:  # an interrupt, too: nobody will wait for it, which Python would complain about
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("this client is closed") from None
        finally:
            if not future.done():  # interrupted: the caller wants no more of it
                future.cancel()

    def _iterate(
        self, take: Callable[[], Coroutine[Any, Any, list[_Item]]], close: Callable[[], None]
    ) -> Generator[_Item, None, None]:
        try:
            while ready := self._run(take()):
                yield from ready
        finally:
            self._post(close)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the thread do something, without waiting: a collected iterator may find itself in any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(work)
            except RuntimeError:
                if not loop.is_closed():  # closed since we looked: nothing is left to be done
                    raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise Unavailable("this client is closed")
            if self._thread is None:
                started = threading.Event()
                self._thread = threading.Thread(target=self._serve, args=(started,), name="swarm client", daemon=True)
                self._thread.start()
                started.wait()
            if self._loop is None or not self._thread.is_alive():
                why = "it could not begin, or belongs to the process that this one was forked from"
                raise Unavailable(f"this client's thread does not run ({why}): make a new client")
            return self._loop

    def _serve(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve_until_stopped(started))
        finally:
            started.set()  # also if there is no loop to be had

    async def _serve_until_stopped(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        started.set()
        async with self._client:
            await self._stop.wait()


class BlockingStream:
    """An iterator over the pieces of one request. Leaving it early, or :meth:`close`, cancels the request.

    ``completion`` is what the pieces add up to, once the end has been reached; None before.
    """

    def __init__(self, client: Client, stream: PromptStream) -> None:
        self._stream = stream
        self._pieces = client._iterate(stream.take_ready, stream.close)

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the request if it is under way."""
        self._pieces.close()

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion


class BlockingBatchStream:
    """An iterator over the tokens of a batch: ``(index, token, text, finished)``. Leaving it early, or :meth:`close`,
    cancels what is under way.

    ``completions`` is what each prompt's pieces add up to, once the end of all has been reached; None before.
    """

    def __init__(self, client: Client, stream: BatchStream) -> None:
        self._stream = stream
        self._pieces = client._iterate(stream.take_ready, stream.close)

    def __iter__(self) -> BlockingBatchStream:
        return self

    def __next__(self) -> BatchPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what is under way."""
        self._pieces.close()

    @property
    def completions(self) -> list[Completion] | None:
        return self._stream.completions
