"""Blocking client for programs without an event loop: runs an :class:`AsyncClient` in a background thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from swarm.auth.access import BrokerCredentials
from swarm.client.admin import ReportName
from swarm.client.client import AsyncClient
from swarm.client.request import Params, Prompt, RequestOptions
from swarm.client.results import BatchPiece, Completion, Embedding, Piece, RankedDocument
from swarm.client.stream import BatchStream, PromptStream
from swarm.client.text.tokenizer import Chat, TextModel
from swarm.errors import ClientError, Unavailable
from swarm.params import SamplingParams
from swarm.wire.messages import Description, Invite, Json, PlanCommand, PlanWhatIf, Submit

_T = TypeVar("_T")
_Item = TypeVar("_Item", Piece, BatchPiece)


class Client:
    """Blocking client with the same methods and guarantees as :class:`AsyncClient`. Thread-safe.

    Use it as a context manager, or call :meth:`close` at the end. Methods raise what those of :class:`AsyncClient`
    raise. An interrupt (Ctrl-C) during a method cancels its request.
    """

    def __init__(
        self,
        url: str | BrokerCredentials | None = None,
        *,
        connect_timeout_s: float = 5.0,
        reconnect_timeout_s: float = 600.0,
    ) -> None:
        self._client = AsyncClient(url, connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s)
        self.url = self._client.url
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # started on first use
        self._loop: asyncio.AbstractEventLoop | None = None  # the thread's loop
        self._stop = asyncio.Event()  # set by close(): ends the thread
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests in progress and release all resources. The client cannot be used afterwards."""
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
        """Return the complete answer to a prompt."""
        return self._run(self._client.generate(prompt, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> BlockingStream:
        """Stream the answer token by token. Leaving the iterator early cancels the request."""
        return BlockingStream(self, self._client.stream(prompt, params, **options))

    def chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Return the complete answer to a conversation: ``[{"role": "user", "content": "…"}, …]``."""
        return self._run(self._client.chat(messages, params, **options))

    def stream_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> BlockingStream:
        """Stream the answer to a conversation token by token. Leaving the iterator early cancels the request."""
        return BlockingStream(self, self._client.stream_chat(messages, params, **options))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> str:
        """Submit a prompt as a detached request and return its id once the swarm has accepted it, without waiting for
        the answer. Any process that has the id can :meth:`attach` to the request, until some time after its end."""
        return self._run(self._client.submit(prompt, params, **options))

    def submit_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Submit a conversation as a detached request and return its id; see :meth:`submit`."""
        return self._run(self._client.submit_chat(messages, params, **options))

    def attach(
        self, request_id: str, next_index: int = 0, *, timeout: float | None = None, visible: Sequence[int] = ()
    ) -> BlockingStream:
        """Read the answer of an existing request, perhaps one that another process made, from token ``next_index`` of
        each continuation on. Leaving the iterator early does not cancel the request."""
        return BlockingStream(self, self._client.attach(request_id, next_index, timeout=timeout, visible=visible))

    def recall(self, request_id: str) -> Submit:
        """Return the submission (prompt, parameters, memo) of an existing request."""
        return self._run(self._client.recall(request_id))

    def cancel(self, request_id: str) -> None:
        """Cancel a request, no matter which client made it. A request that has already ended is left unchanged."""
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
        """Return the answers to many prompts, in the order of the prompts. All requests run concurrently.

        ``params`` is one parameter set for all prompts, or a sequence with one for each prompt. The first error cancels
        the other requests and is raised; with ``return_errors``, the error is returned in its prompt's place instead.
        """
        if return_errors:
            return self._run(self._client.generate_batch(prompts, params, return_errors=True, **options))
        return self._run(self._client.generate_batch(prompts, params, **options))

    def stream_batch(
        self, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[RequestOptions]
    ) -> BlockingBatchStream:
        """Stream the answers to many prompts, which run concurrently. Yields ``(index of the prompt, token, text,
        finished)`` in order of arrival. ``params`` is one parameter set for all prompts, or a sequence with one for
        each prompt. Leaving the iterator early cancels all requests."""
        return BlockingBatchStream(self, self._client.stream_batch(prompts, params, **options))

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedding]:
        """Return the embeddings of texts, or of lists of token ids; see :meth:`AsyncClient.embed`."""
        return self._run(self._client.embed(prompts, dimensions=dimensions, truncate=truncate, **options))

    def rerank(
        self, query: str, documents: Sequence[str], *, truncate: int | None = None, **options: Unpack[RequestOptions]
    ) -> list[RankedDocument]:
        """Return how well each document answers the query, the best first; see :meth:`AsyncClient.rerank`."""
        return self._run(self._client.rerank(query, documents, truncate=truncate, **options))

    # --- questions

    def describe(self) -> Description:
        """Return the model, the limits, and, if the swarm is not serving, what it waits for."""
        return self._run(self._client.describe())

    def query(self, what: ReportName, *, all: bool = False, request_id: str = "") -> Json:
        """Return a report as ``swarmctl --json`` prints it. For "requests", ``all`` includes requests that ended long
        ago, and ``request_id`` selects a single request."""
        return self._run(self._client.query(what, all=all, request_id=request_id))

    def suppose_plan(self, suppose: PlanWhatIf) -> Json:
        """Return the plan that the broker would make under these assumptions. Nothing is changed."""
        return self._run(self._client.suppose_plan(suppose))

    def trace(self, request_id: str = "") -> Json:
        """Return where the time of each token went, for a request in progress or recently ended. ``request_id`` may be
        a prefix of the id; empty selects the newest request."""
        return self._run(self._client.trace(request_id))

    def join(self, count: int = 1, memory_limit: int | None = None, device: str = "") -> Json:
        """Have a running ``swarm up`` start ``count`` workers, each with this memory limit in bytes, on this device."""
        return self._run(self._client.join(count, memory_limit, device))

    def stop_worker(self, worker: str, *, force: bool = False, again: bool = False) -> Json:
        """Have a worker hand over its layers and leave. ``force``: even if the swarm cannot serve without it.
        ``again``: exit in such a way that ``swarm up`` or systemd restarts it."""
        return self._run(self._client.stop_worker(worker, force=force, again=again))

    def steer(self, steer: PlanCommand) -> Json:
        """Change which workers get layers (cordon, drain, pins), or have the plan made again. The change lasts until
        the broker's process ends."""
        return self._run(self._client.steer(steer))

    def adapters(self) -> Json:
        """Return the adapters that requests may name, with their source, state and number of requests."""
        return self._run(self._client.adapters())

    def load_adapter(self, name: str, source: str) -> Json:
        """Load a LoRA adapter on every worker: from a folder that each of them has, or by its name on a hub."""
        return self._run(self._client.load_adapter(name, source))

    def drop_adapter(self, name: str) -> Json:
        """Refuse new requests for an adapter, and unload it when those that have it end."""
        return self._run(self._client.drop_adapter(name))

    def settings(self, worker: str = "") -> Json:
        """Return the settings of the broker, or of the named worker, and the source of each. Passwords are left out."""
        return self._run(self._client.settings(worker))

    def invite(self, invite: Invite) -> Json:
        """Register an invitation at the broker. Its secret stays on this machine; the result has the broker's public
        key and the addresses to put into the invitation."""
        return self._run(self._client.invite(invite))

    def revoke_key(self, name: str) -> Json:
        """Revoke a machine's key or an invitation, given its name or a prefix of its key."""
        return self._run(self._client.revoke_key(name))

    def rotate_key(self, key: str) -> Json:
        """Announce to the broker the public key that this machine will use from now on. The present key stays valid
        until the new one has been used."""
        return self._run(self._client.rotate_key(key))

    def rotate_broker_key(self, *, now: bool = False) -> Json:
        """Have the broker replace its own key; if called again, return the progress. ``now``: discard the old key even
        if some machines have not received the new one yet. The result lists those machines."""
        return self._run(self._client.rotate_broker_key(now=now))

    def rotate_member_key(self, name: str) -> Json:
        """Have a member's machine replace its key, given its name or a prefix of its key. It does so now, or when it
        next connects."""
        return self._run(self._client.rotate_member_key(name))

    def check_grammar(self, params: SamplingParams) -> None:
        """Check whether the model can follow the grammar in these parameters. Raises InvalidRequest with the reason if
        not."""
        self._run(self._client.check_grammar(params))

    def text_model(self) -> TextModel | None:
        """Return the model's tokenizer and chat template; None if it has none."""
        return self._run(self._client.text_model())

    # --- the thread

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except BaseException:  # also on an interrupt: close the coroutine, or Python warns that it was never awaited
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("this client is closed") from None
        finally:
            if not future.done():  # interrupted: the caller no longer wants the result
                future.cancel()

    def _iterate(
        self, take_ready: Callable[[], Coroutine[Any, Any, list[_Item]]], on_close: Callable[[], None]
    ) -> Generator[_Item, None, None]:
        try:
            while ready := self._run(take_ready()):
                yield from ready
        finally:
            self._post(on_close)

    def _post(self, work: Callable[[], None]) -> None:
        """Run a function in the client's thread without waiting. The garbage collector may call this in any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(work)
            except RuntimeError:
                if not loop.is_closed():  # closed since the check above: nothing is left to do
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
                why = "it could not start, or it belongs to the process from which this one was forked"
                raise Unavailable(f"this client's thread does not run ({why}): make a new client")
            return self._loop

    def _serve(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve_until_stopped(started))
        finally:
            started.set()  # also if no loop could be created

    async def _serve_until_stopped(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        started.set()
        async with self._client:
            await self._stop.wait()


class BlockingStream:
    """Iterator over the pieces of one request. Leaving it early, or :meth:`close`, cancels the request.

    ``completion`` is the whole answer once the end has been reached; None before.
    """

    def __init__(self, client: Client, stream: PromptStream) -> None:
        self._stream = stream
        self._pieces = client._iterate(stream.take_ready, stream.close)

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the request if it is in progress."""
        self._pieces.close()

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion


class BlockingBatchStream:
    """Iterator over the tokens of a batch: ``(index, token, text, finished)``. Leaving it early, or :meth:`close`,
    cancels the requests in progress.

    ``completions`` has the whole answer to each prompt once all have ended; None before.
    """

    def __init__(self, client: Client, stream: BatchStream) -> None:
        self._stream = stream
        self._pieces = client._iterate(stream.take_ready, stream.close)

    def __iter__(self) -> BlockingBatchStream:
        return self

    def __next__(self) -> BatchPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the requests in progress."""
        self._pieces.close()

    @property
    def completions(self) -> list[Completion] | None:
        return self._stream.completions
