"""Client of a swarm for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

from swarm.auth.access import BrokerCredentials, credentials_for
from swarm.client.active_requests import question_error
from swarm.client.admin import AdminMixin
from swarm.client.broker_connection import BrokerConnection, Mailbox
from swarm.client.events import AskQuestion, CancelForeignRequest, FailRequest, Question, Reply
from swarm.client.model import ASK_TIMEOUT_S, ModelSource
from swarm.client.request import (
    Conversation,
    Params,
    Prompt,
    RequestOptions,
    RequestSpec,
    Source,
    batch_specs,
    check_attach_args,
    check_options,
    check_prompt,
)
from swarm.client.results import Completion, Embedding, Piece, Progress, RankedDocument, VectorAnswer
from swarm.client.session import Session
from swarm.client.stream import (
    BatchStream,
    OpenCalls,
    PieceStream,
    PromptStream,
    RequestCall,
    fetch_continuations,
    make_progress,
)
from swarm.client.text.grammar_checks import GrammarCheckPool
from swarm.client.text.tokenizer import Chat, TextModel
from swarm.client.vectors import (
    SCORES,
    check_dimensions,
    check_reranks,
    embedding_params,
    find_pooling,
    rank_documents,
    to_embedding,
)
from swarm.errors import ClientError, InvalidRequest, RequestFailed, RequestTimeout, Unavailable
from swarm.params import SamplingParams
from swarm.wire.messages import Describe, Description, GetRequest, Report, RequestDetails, Submit

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_VECTORS_AT_ONCE = 64  # prompts of one call of ``embed`` that are in the swarm's queue; few, to leave it to others
_YIELD_EVERY = 16  # prompts of a batch that are tokenized before other tasks get their turn

PreparedPrompt = tuple[Source, RequestSpec]
OnError = Callable[[int, ClientError], None]


class AsyncClient(AdminMixin):
    """Asynchronous client of one broker. Use it as an async context manager, or call :meth:`aclose` at the end.

    The client connects on first use. Every method that makes a request takes a prompt (text or token ids), ``params``
    and the keywords of :class:`RequestOptions`; keywords override ``params``. Methods raise a
    :class:`~swarm.errors.ClientError` (or a ModelError if the broker's tokenizer is broken):

    - InvalidRequest: a mistake in the call.
    - Unavailable: no broker answers within ``connect_timeout_s``, or a broker that was connected stays away or silent
      for ``reconnect_timeout_s``. Shorter outages are invisible: requests continue where they were.
    - Unavailable after at most 30 seconds: the broker has not answered this request at all.
    - RequestTimeout: the request's own ``timeout`` has passed. It ends either wait sooner.
    """

    def __init__(
        self,
        url: str | BrokerCredentials | None = None,
        *,
        connect_timeout_s: float = 5.0,
        reconnect_timeout_s: float = 600.0,
    ) -> None:
        """Create a client for the broker at ``url``. The default is ``$SWARM_URL``, else the swarm that this machine
        joined last, else the broker on this machine."""
        self._access = (
            url if isinstance(url, BrokerCredentials) else credentials_for(url or os.environ.get("SWARM_URL"))
        )
        self.url = self._access.url
        self._session = Session(self.url, connect_timeout_s, reconnect_timeout_s)
        self._connection: BrokerConnection | None = None  # created on first use
        self._closed = False
        self._model = ModelSource(self._connect, self.describe, self.url)
        self._checks = GrammarCheckPool()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all requests in progress and release all resources. The client cannot be used afterwards."""
        self._closed = True
        self._checks.close()
        link, self._connection = self._connection, None
        if link is not None:
            await link.aclose()

    async def abandon(self) -> None:
        """Release all resources without cancelling requests. The broker continues them for ``broker.client_grace_s``,
        so that another client can ``attach``. Readers that still wait on this client never return."""
        self._closed = True
        self._checks.close()
        link, self._connection = self._connection, None
        if link is not None:
            await link.abandon()

    @property
    def is_connected(self) -> bool:
        """Whether a broker has completed the greeting and is still connected."""
        return self._session.is_connected

    # --- requests

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Return the complete answer to a prompt."""
        return await self._complete(check_prompt(prompt), check_options(params, options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> PromptStream:
        """Stream the answer token by token. Leaving the iterator early cancels the request."""
        return PromptStream(self._stream([(check_prompt(prompt), check_options(params, options))]))

    async def chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Return the complete answer to a conversation: ``[{"role": "user", "content": "…"}, …]``."""
        return await self._complete(Conversation(messages), check_options(params, options))

    def stream_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> PromptStream:
        """Stream the answer to a conversation token by token. Leaving the iterator early cancels the request."""
        return PromptStream(self._stream([(Conversation(messages), check_options(params, options))]))

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Submit a prompt as a detached request and return its id once the swarm has accepted it, without waiting for
        the answer. Any process that has the id can :meth:`attach` to the request, until some time after its end. Stop
        strings are found by the client that reads the answer: without a reader, the request runs until its other
        limits."""
        return await self._submit(check_prompt(prompt), check_options(params, {**options, "detached": True}))

    async def submit_chat(
        self, messages: Chat, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Submit a conversation as a detached request and return its id; see :meth:`submit`."""
        return await self._submit(Conversation(messages), check_options(params, {**options, "detached": True}))

    def attach(
        self, request_id: str, next_index: int = 0, *, timeout: float | None = None, visible: Sequence[int] = ()
    ) -> PromptStream:
        """Read the answer of an existing request, perhaps one that another process made, from token ``next_index`` of
        each continuation on.

        A request has one reader: the latest one receives the tokens, and the previous one ends with ReadElsewhere. The
        text of a token depends on the tokens before it, so those are fetched, too, and ``completion`` contains them
        all. Leaving the iterator early does not cancel the request. ``visible`` is as in :class:`RequestOptions`; the
        request does not store it, so each reader passes it.

        Raises InvalidRequest (code "unknown") if the broker does not have such a request (any more).
        """
        shown = check_attach_args(request_id, next_index, timeout, visible)

        async def begin(mailbox: Mailbox) -> OpenCalls:
            call = await self._recall(request_id, timeout, shown)
            call.first_index = next_index
            call.start(mailbox, timeout, attached=True)
            return {request_id: (0, call)}

        return PromptStream(PieceStream(begin))

    async def recall(self, request_id: str) -> Submit:
        """Return the submission (prompt, parameters, memo) of an existing request.

        Raises InvalidRequest (code "unknown") if the broker does not have such a request (any more).
        """
        check_attach_args(request_id, 0, None)
        return (await self._recall(request_id, None)).submit

    async def look_up(self, request_id: str, *, visible: Sequence[int] = ()) -> Progress:
        """Return what an existing request has produced so far, without becoming its reader. ``visible`` is as in
        :meth:`attach`.

        Raises InvalidRequest (code "unknown") if the broker does not have such a request (any more), Overloaded if the
        broker cannot look it up now, and the request's own error if it failed.
        """
        shown, connection = check_attach_args(request_id, 0, None, visible), self._connect()
        submit, continuations = await fetch_continuations(connection, request_id)
        return await make_progress(
            RequestCall(submit, RequestSpec.from_submit(submit, None, shown), connection, self._model.get),
            continuations,
        )

    async def cancel(self, request_id: str) -> None:
        """Cancel a request, no matter which client made it. A request that has already ended is left unchanged.

        Raises InvalidRequest (code "unknown") if the broker does not have such a request (any more).
        """
        check_attach_args(request_id, 0, None)
        call = await self._recall(request_id, ASK_TIMEOUT_S)
        call.connection.handle(CancelForeignRequest(call.submit))
        # messages arrive in order: once this is answered, the broker has processed the cancellation
        await self.describe()

    @overload
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        return_errors: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    @overload
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        return_errors: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> list[Completion | ClientError]: ...

    async def generate_batch(
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
        results: dict[int, Completion | ClientError] = {}
        prepared: dict[int, PreparedPrompt] = {}
        for place, (prompt, spec) in enumerate(zip(prompts, batch_specs(params, options, len(prompts)), strict=True)):
            try:
                prepared[place] = _prepare_prompt(prompt, spec)
            except InvalidRequest as error:
                if not return_errors:
                    raise
                results[place] = error
        places = list(prepared)

        def record_error(index: int, error: ClientError) -> None:
            results[places[index]] = error

        stream = self._stream(list(prepared.values()), record_error if return_errors else None)
        pieces = await _collect(stream, len(places))
        for index, place in enumerate(places):
            if place not in results:
                results[place] = stream.ended_calls[index].completion(pieces[index])
        return [results[place] for place in range(len(prompts))]

    def stream_batch(
        self, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[RequestOptions]
    ) -> BatchStream:
        """Stream the answers to many prompts, which run concurrently. Yields ``(index of the prompt, token, text,
        finished)`` in order of arrival. ``params`` is one parameter set for all prompts, or a sequence with one for
        each prompt. Leaving the iterator early cancels all requests."""
        specs = batch_specs(params, options, len(prompts))
        prepared = [_prepare_prompt(prompt, wish) for prompt, wish in zip(prompts, specs, strict=True)]
        return BatchStream(self._stream(prepared), len(prepared))

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedding]:
        """Return the embeddings of texts, or of lists of token ids, in their order. The model's folder decides how they
        are pooled; without settings, the last token's output counts, scaled to length 1.

        ``dimensions``: keep only the first numbers. ``truncate``: keep at most this number of tokens of each text;
        without it, a text that exceeds the model's context is refused. The first error cancels the rest and is raised.
        Raises InvalidRequest (code "unsupported_task") if the model makes no embeddings.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts must be a list of texts or of lists of token ids", code="prompts")
        model = await self._model.get()
        pooling = find_pooling(model.manifest)
        check_dimensions(dimensions, model.manifest)
        sources = await asyncio.to_thread(lambda: [model.to_input(prompt, truncate) for prompt in prompts])
        answers = await self.compute_vectors(sources, embedding_params(pooling), **options)
        return [
            Embedding(
                answer.request_id,
                to_embedding(answer.vector, pooling, dimensions),
                answer.num_prompt,
                answer.num_cached,
            )
            for answer in answers
        ]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RankedDocument]:
        """Return how well each document answers the query, the best first. ``truncate`` and errors are as in
        :meth:`embed`; the model must have a classification head with one label."""
        model = await self._model.get()
        check_reranks(model.manifest)
        sources = await asyncio.to_thread(lambda: [model.to_input(query, truncate, document) for document in documents])
        return rank_documents(await self.compute_vectors(sources, SCORES, **options))

    async def compute_vectors(
        self, sources: Sequence[tuple[int, ...]], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> list[VectorAnswer]:
        """Return the vector of each prompt as the last stage computed it. A limited number of the prompts is in
        progress at a time. A ``request_id`` of several prompts gets each one's place as a suffix."""
        spec = check_options(params, options)
        done: dict[int, VectorAnswer] = {}
        streams: list[PieceStream] = []
        places = iter(range(len(sources)))

        async def work() -> None:
            for place in places:
                own = spec
                if spec.request_id is not None and len(sources) > 1:
                    own = dataclasses.replace(spec, request_id=f"{spec.request_id}-{place}")
                stream = self._stream([(sources[place], own)])
                stream.cancels = True
                streams.append(stream)
                await _collect(stream, 1)
                streams.remove(stream)
                call = stream.ended_calls[0]
                end = call.end
                request_id = call.submit.request_id
                if not end.vector:
                    raise RequestFailed(f"the swarm ended {request_id} without a vector; try again")
                done[place] = VectorAnswer(request_id, end.vector, end.num_prompt, end.num_cached, end.timing.queued_s)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(MAX_VECTORS_AT_ONCE, len(sources)))]
        try:
            await asyncio.gather(*tasks)
        except InvalidRequest:
            raise
        except ClientError:
            for stream in streams:
                stream.cancels = False  # detached requests run on: a repetition finds them
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [done[place] for place in range(len(sources))]

    async def describe(self) -> Description:
        """Return the model, the limits, and, if the swarm is not serving, what it waits for."""
        answer = await self._ask(Describe())
        assert isinstance(answer, Description)  # the session matches answers to questions
        return answer

    async def check_grammar(self, params: SamplingParams) -> None:
        """Check whether the model can follow the grammar in these parameters, as every request does before it is sent.
        Raises InvalidRequest (code "grammar") with the reason if not."""
        if params.grammar is not None:
            await self._check_grammar(params)

    async def words(self) -> LLTokenizer | None:
        """Return the model's vocabulary as bytes per token (``decode_bytes``); None if it has no tokenizer."""
        checker = (await self._model.get()).grammars
        return checker.ready if checker.ready is not None else await asyncio.to_thread(checker.words)

    async def text_model(self) -> TextModel | None:
        """Return the model's tokenizer and chat template; None if it has none."""
        return (await self._model.get()).text

    async def _ask(self, question: Question, timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        connection = self._connect()
        answer, _ = await connection.ask(AskQuestion(connection.new_key(), question, timeout_s))
        return answer

    # --- how requests are made

    async def _submit(self, source: Source, spec: RequestSpec) -> str:
        mailbox = Mailbox()
        call = await self._start(source, spec, mailbox, asyncio.get_running_loop().time())
        try:
            update = await mailbox.get()  # any update except a failure means that the broker has accepted the request
            if isinstance(update, FailRequest):
                raise update.error
        finally:
            call.leave()
        return call.submit.request_id

    async def _recall(self, request_id: str, timeout_s: float | None, visible: tuple[int, ...] = ()) -> RequestCall:
        """Fetch an existing request's submission from the broker and return a call that can read its answer."""
        limit_s = min(ASK_TIMEOUT_S, timeout_s or ASK_TIMEOUT_S)
        answer = await self._ask(GetRequest(request_id=request_id), limit_s)
        if isinstance(answer, Report):
            raise question_error(request_id, answer)
        assert isinstance(answer, RequestDetails)
        return RequestCall(
            answer.submit, RequestSpec.from_submit(answer.submit, timeout_s, visible), self._connect(), self._model.get
        )

    async def _complete(self, source: Source, spec: RequestSpec) -> Completion:
        stream = self._stream([(source, spec)])
        [pieces] = await _collect(stream, 1)
        return stream.ended_calls[0].completion(pieces)

    def _stream(self, prepared: Sequence[PreparedPrompt], on_error: OnError | None = None) -> PieceStream:
        if len(prepared) != 1 and any(wish.request_id is not None for _, wish in prepared):
            raise InvalidRequest("a request_id can name only one request, not a batch", code="request_id")

        async def begin(mailbox: Mailbox) -> OpenCalls:
            calls: OpenCalls = {}  # on an error, cancel the requests that were already started
            with contextlib.ExitStack() as undo:
                undo.callback(_leave_all, calls)
                await self._open(prepared, mailbox, calls, on_error)
                undo.pop_all()
            return calls

        return PieceStream(begin, on_error)

    async def _open(
        self, prepared: Sequence[PreparedPrompt], mailbox: Mailbox, calls: OpenCalls, on_error: OnError | None
    ) -> None:
        started_at = asyncio.get_running_loop().time()
        for place, (source, spec) in enumerate(prepared):
            try:
                call = await self._start(source, spec, mailbox, started_at)
            except ClientError as error:
                if on_error is None:
                    raise  # an error handler turns a prompt's error into its result, and the others continue
                on_error(place, error)
            else:
                calls[call.submit.request_id] = (place, call)
            if place % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)

    async def _start(self, source: Source, spec: RequestSpec, mailbox: Mailbox, started_at: float) -> RequestCall:
        connection, loop = self._connect(), asyncio.get_running_loop()
        limit = None if spec.timeout_s is None else started_at + spec.timeout_s
        try:
            async with asyncio.timeout_at(limit):
                ids = await self._encode(source, spec)
        except TimeoutError:
            raise RequestTimeout(f"the model was not described within the time limit of {spec.timeout_s:g} s") from None
        call = RequestCall(spec.to_submit(ids), spec, connection, self._model.get)
        call.start(mailbox, None if limit is None else max(limit - loop.time(), 0.0))
        return call

    async def _check_grammar(self, params: SamplingParams) -> None:
        await self._checks.check((await self._model.get()).grammars, params)

    async def _encode(self, source: Source, spec: RequestSpec) -> tuple[int, ...]:
        if spec.params.grammar is not None:
            await self._check_grammar(spec.params)
        if isinstance(source, tuple):
            if spec.params.stop:
                (await self._model.get()).check_stops(spec)
            return source
        model = await self._model.get()
        if model.text is None:
            raise InvalidRequest("this model has no tokenizer: pass token ids", code="tokenizer")
        return model.text.encode(source) if isinstance(source, str) else model.text.encode_chat(source.messages)

    def _connect(self) -> BrokerConnection:
        if self._closed:
            raise Unavailable("this client is closed")
        if self._connection is None:
            access = self._access
            self._connection = BrokerConnection(self._session, access.endpoint, access.pair, access.store)
        return self._connection


def _leave_all(calls: OpenCalls) -> None:
    for _, call in calls.values():
        call.leave()


def _prepare_prompt(prompt: Prompt, spec: RequestSpec | InvalidRequest) -> PreparedPrompt:
    if isinstance(spec, InvalidRequest):
        raise spec
    return check_prompt(prompt), spec


async def _collect(stream: PieceStream, num_prompts: int) -> list[list[Piece]]:
    """Gather all pieces, by prompt."""
    pieces: list[list[Piece]] = [[] for _ in range(num_prompts)]
    while ready := await stream.take_ready():
        for place, piece in ready:
            pieces[place].append(piece)
    return pieces
