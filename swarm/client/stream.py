"""Requests in progress as their callers see them: streams of pieces, and the completions they add up to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarm.client.active_requests import finish_error, question_error
from swarm.client.broker_connection import BrokerConnection, Mailbox, RequestUpdate
from swarm.client.events import (
    AskQuestion,
    ConfirmStored,
    Consumed,
    Deliver,
    EndContinuation,
    FailRequest,
    StartRequest,
    StopFound,
)
from swarm.client.model import ASK_TIMEOUT_S, ClientModel
from swarm.client.request import RequestSpec
from swarm.client.results import BatchPiece, Choice, Completion, Piece, Progress, Usage
from swarm.client.text.assemble import PieceAssembler
from swarm.errors import ClientError, Unavailable
from swarm.wire.messages import Finished, Hop, LookUp, Report, Submit, TokenLogprob, TokensSnapshot

_YIELD_EVERY = 256  # tokens of a look-up that are turned into text before other tasks get their turn


@dataclass(slots=True)
class RequestCall:
    """One request in progress: turns its updates into pieces. ``first_index``: pieces of each continuation before this
    index are kept for the completion, but not returned."""

    submit: Submit
    spec: RequestSpec
    connection: BrokerConnection
    get_model: Callable[[], Awaitable[ClientModel]]
    first_index: int = 0
    _earlier_pieces: list[Piece] = field(default_factory=list)  # pieces before ``first_index``
    _assemblers: dict[int, PieceAssembler] = field(default_factory=dict)  # by the number of the continuation
    _finished: dict[int, Finished] = field(default_factory=dict)
    _mailbox: Mailbox | None = None  # None before the start

    @property
    def is_done(self) -> bool:
        return len(self._finished) == self.submit.params.n

    async def process(self, update: RequestUpdate) -> list[Piece]:
        """Return the pieces that an update makes. Raises the error of a failed request."""
        if isinstance(update, FailRequest):
            raise update.error
        if isinstance(update, ConfirmStored):
            return []
        assembler = await self._assembler_for(update.index)
        pieces = self._on_tokens(update, assembler) if isinstance(update, Deliver) else self._on_end(update, assembler)
        return self._keep_earlier(pieces) if self.first_index else pieces

    def start(self, mailbox: Mailbox, timeout_s: float | None, *, attached: bool = False) -> None:
        self.connection.start(StartRequest(self.submit, timeout_s, attached), mailbox)
        self._mailbox = mailbox

    def leave(self, *, cancel: bool = False) -> None:
        if self._is_reader:
            self.connection.leave(self.submit.request_id, cancel=cancel)

    @property
    def _is_reader(self) -> bool:
        """Whether this call still reads the request. Another call, perhaps in this client, may have taken over; then
        nothing is sent about it."""
        return self.connection.is_read(self.submit.request_id, self._mailbox)

    def _keep_earlier(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces that the caller receives: those from ``first_index`` on, and the end. Keep the earlier
        pieces for the completion."""
        wanted = [piece for piece in pieces if piece.index >= self.first_index or piece.finish_reason is not None]
        self._earlier_pieces += [piece for piece in pieces if piece not in wanted]
        return wanted

    async def _assembler_for(self, choice: int) -> PieceAssembler:
        if choice not in self._assemblers:
            self._assemblers[choice] = (await self.get_model()).make_assembler(self.spec, choice)
        return self._assemblers[choice]

    def _on_tokens(self, update: Deliver, assembler: PieceAssembler) -> list[Piece]:
        pieces: list[Piece] = []
        was_stopped = assembler.stop_at is not None
        for offset, token in enumerate(update.ids):
            logprobs = update.logprobs[offset] if offset < len(update.logprobs) else ()
            hops = update.hops[offset] if offset < len(update.hops) else ()
            pieces += assembler.push(token, logprobs, hops)
        if not self._is_reader:
            return pieces
        if assembler.stop_at is not None and not was_stopped:
            self.connection.handle(StopFound(update.request_id, update.index, assembler.stop_at))
        self.connection.handle(Consumed(update.request_id, update.index, update.start + len(update.ids)))
        return pieces

    def _on_end(self, update: EndContinuation, assembler: PieceAssembler) -> list[Piece]:
        self._finished[update.index] = update.finished
        pieces = assembler.finish(update.finished.reason)
        if self.is_done:
            self.leave()
        return pieces

    @property
    def end(self) -> Finished:
        """The end of this (done) call's first continuation."""
        return self._finished[0]

    def completion(self, pieces: list[Piece]) -> Completion:
        """Return the completion of this (done) call from its pieces."""
        pieces = self._earlier_pieces + pieces
        choices = tuple(
            self._make_choice(index, [piece for piece in pieces if piece.choice == index])
            for index in range(self.submit.params.n)
        )
        first = self._finished[0]
        usage = Usage(first.num_prompt, sum(len(choice.tokens) for choice in choices), first.num_cached)
        return Completion(
            self.submit.request_id, choices, usage, self.submit.seed, first.vector, first.prompt_logprobs or b""
        )

    def _make_choice(self, index: int, pieces: list[Piece]) -> Choice:
        counted = [piece for piece in pieces if piece.token is not None]
        return Choice(
            index=index,
            text="".join(piece.text for piece in pieces),
            tokens=tuple(piece.token for piece in counted if piece.token is not None),
            finish_reason=pieces[-1].finish_reason or "",
            timing=self._finished[index].timing,
            logprobs=tuple(p.logprobs for p in counted) if self.spec.params.logprobs is not None else (),
            hops=tuple(p.hops for p in counted) if self.spec.hops else (),
        )


OpenCalls = dict[str, tuple[int, RequestCall]]  # by request id: the request's place among the prompts, and its call


class PieceStream:
    """Asynchronous iterator over (place, piece) of one or several requests, in the order of arrival.

    Leaving it early (by ``break``, an exception, a cancelled task, :meth:`aclose` or garbage collection) cancels the
    requests, but detaches from detached ones and from those that were only attached to. The first failure ends the
    stream and is raised, unless ``on_error`` handles it.
    """

    def __init__(
        self,
        begin: Callable[[Mailbox], Awaitable[OpenCalls]],
        on_error: Callable[[int, ClientError], None] | None = None,
    ) -> None:
        self._begin = begin
        self._on_error = on_error
        self._mailbox = Mailbox()
        self._calls: OpenCalls | None = None  # requests in progress; None before the first read
        self._ready: deque[tuple[int, Piece]] = deque()
        self._closed = False
        self.cancels = False  # whether leaving cancels even detached requests, and those that were only attached to
        self.ended_calls: dict[int, RequestCall] = {}  # ended calls by their place

    async def __aenter__(self) -> PieceStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        if not self._ready:
            await self._fill()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def take_ready(self) -> list[tuple[int, Piece]]:
        """Return all pieces that are available, at least one; empty at the end."""
        if not self._ready:
            await self._fill()
        pieces = list(self._ready)
        self._ready.clear()
        return pieces

    @property
    def has_ready(self) -> bool:
        """Whether untaken pieces are available."""
        return bool(self._ready)

    async def aclose(self) -> None:
        """Cancel the requests still in progress."""
        self.close()

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        calls, self._calls = self._calls, {}
        for _, call in (calls or {}).values():
            call.leave(cancel=self.cancels)

    def __del__(self) -> None:
        if self._calls:
            self.close()

    async def _fill(self) -> None:
        is_complete = False
        try:
            if self._calls is None and not self._closed:
                self._calls = await self._begin(self._mailbox)
            while self._calls and not self._ready:
                await self._process(await self._mailbox.get())
            is_complete = True
        finally:
            if not is_complete:
                self.close()

    async def _process(self, update: RequestUpdate) -> None:
        calls = self._calls or {}
        if update.request_id not in calls:
            return
        place, call = calls[update.request_id]
        try:
            pieces = await call.process(update)
        except ClientError as error:
            call.leave()
            del calls[update.request_id]
            if self._on_error is None:
                raise
            self._on_error(place, error)
            return
        self._ready.extend((place, piece) for piece in pieces)
        if call.is_done:
            self.ended_calls[place] = call
            del calls[update.request_id]


class PromptStream:
    """Asynchronous iterator over the pieces of one request. Leaving it early cancels the request, unless it is detached
    or was attached to; ``async with`` guarantees this in all cases.

    ``completion`` is the whole answer once the end has been reached; None before.
    """

    def __init__(self, stream: PieceStream) -> None:
        self._stream = stream
        self._pieces: list[Piece] = []

    async def __aenter__(self) -> PromptStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> PromptStream:
        return self

    async def __anext__(self) -> Piece:
        _, piece = await self._stream.__anext__()
        self._pieces.append(piece)
        return piece

    async def take_ready(self) -> list[Piece]:
        """Return all available pieces without waiting for more than the first one; an empty list at the end of the
        stream."""
        pieces = [piece for _, piece in await self._stream.take_ready()]
        self._pieces += pieces
        return pieces

    @property
    def completion(self) -> Completion | None:
        call = self._stream.ended_calls.get(0)
        return None if call is None or self._stream.has_ready else call.completion(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request if it is in progress."""
        self.close()

    def cancel_when_left(self) -> None:
        """Cancel the request whenever it is left, also by a cancelled task, even if it is detached or was attached
        to."""
        self._stream.cancels = True

    def close(self) -> None:
        """Stop reading."""
        self._stream.close()


class BatchStream:
    """Asynchronous iterator over the tokens of a batch in order of arrival: ``(index, token, text, finished)``. Leaving
    it early cancels the requests in progress; ``async with`` guarantees this in all cases. The first failure cancels
    the others and is raised.

    ``completions`` has the whole answer to each prompt once all have ended; None before.
    """

    def __init__(self, stream: PieceStream, num_prompts: int) -> None:
        self._stream = stream
        self._pieces: list[list[Piece]] = [[] for _ in range(num_prompts)]

    async def __aenter__(self) -> BatchStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> BatchStream:
        return self

    async def __anext__(self) -> BatchPiece:
        return self._record(*await self._stream.__anext__())

    async def take_ready(self) -> list[BatchPiece]:
        """Return all available tokens without waiting for more than the first one; an empty list at the end of the
        stream."""
        return [self._record(index, piece) for index, piece in await self._stream.take_ready()]

    def _record(self, index: int, piece: Piece) -> BatchPiece:
        self._pieces[index].append(piece)
        return BatchPiece.from_piece(index, piece)

    @property
    def completions(self) -> list[Completion] | None:
        calls = self._stream.ended_calls
        if len(calls) < len(self._pieces) or self._stream.has_ready:
            return None
        return [calls[index].completion(pieces) for index, pieces in enumerate(self._pieces)]

    async def aclose(self) -> None:
        """Cancel the requests in progress."""
        self.close()

    def close(self) -> None:
        self._stream.close()


# --- look-ups --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _FetchedContinuation:
    """Tokens of one continuation, collected page by page."""

    ids: list[int]
    logprobs: list[tuple[TokenLogprob, ...]]
    hops: list[tuple[Hop, ...]]
    finished: Finished | None = None


async def fetch_continuations(link: BrokerConnection, request_id: str) -> tuple[Submit, list[_FetchedContinuation]]:
    """Fetch all continuations of a request. Raises what ``BrokerConnection.ask`` raises, and the broker's reason if it
    refuses."""
    first = await _fetch_page(link, request_id, 0, 0)
    if first.submit is None:
        raise Unavailable("the broker's answer to a look-up lacks the request")
    return first.submit, [
        await _fetch_continuation(link, request_id, index, first) for index in range(first.submit.params.n)
    ]


async def _fetch_page(link: BrokerConnection, request_id: str, index: int, start: int) -> TokensSnapshot:
    key = link.new_key()
    question = LookUp(question=key, request_id=request_id, index=index, start=start)
    answer, _ = await link.ask(AskQuestion(key, question, ASK_TIMEOUT_S))
    if isinstance(answer, Report):
        raise question_error(request_id, answer)
    assert isinstance(answer, TokensSnapshot)  # the session matches answers to questions
    return answer


async def _fetch_continuation(
    link: BrokerConnection, request_id: str, index: int, first: TokensSnapshot
) -> _FetchedContinuation:
    fetched = _FetchedContinuation([], [], [])
    page = first if index == 0 else await _fetch_page(link, request_id, index, 0)
    while True:
        # A stop string that the reader found since can remove tokens of an earlier page.
        del fetched.ids[page.start :], fetched.logprobs[page.start :], fetched.hops[page.start :]
        fetched.ids += page.ids
        fetched.logprobs += page.logprobs
        fetched.hops += page.hops
        fetched.finished = page.finished
        if not page.ids or len(fetched.ids) >= page.num_tokens:
            return fetched
        page = await _fetch_page(link, request_id, index, len(fetched.ids))


async def make_progress(call: RequestCall, continuations: list[_FetchedContinuation]) -> Progress:
    """Turn fetched continuations into pieces. Raises the error of a failed request."""
    pieces: list[Piece] = []
    for index, read in enumerate(continuations):
        if read.finished is not None and read.finished.reason in ("failed", "cancelled"):
            raise finish_error(read.finished)
        for start in range(0, len(read.ids), _YIELD_EVERY):
            pieces += await call.process(_make_delivery(call.submit.request_id, index, start, read))
            await asyncio.sleep(0)
        if read.finished is not None:
            pieces += await call.process(EndContinuation(call.submit.request_id, index, read.finished))
    return Progress(call.submit, tuple(pieces), call.completion(pieces) if call.is_done else None)


def _make_delivery(request_id: str, index: int, start: int, fetched: _FetchedContinuation) -> Deliver:
    stop = start + _YIELD_EVERY
    return Deliver(
        request_id,
        index,
        start,
        tuple(fetched.ids[start:stop]),
        tuple(fetched.logprobs[start:stop]),
        tuple(fetched.hops[start:stop]),
    )
