"""Answers and their accounts: what each took is written down, however it ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from swarm.client.results import Piece
from swarm.errors import Unavailable
from swarm.gateway.answer import Counts, End, Text
from swarm.gateway.apis.chat import ChatWriter
from swarm.gateway.apis.completions import CompletionBody, CompletionWriter, asks_of, memo_of
from swarm.gateway.ask import Ask, ToolUse
from swarm.gateway.desk.desk import Desk, Order, Owner
from swarm.gateway.desk.parts import Parts
from swarm.gateway.desk.reading import Reading
from swarm.gateway.errors import Problem
from swarm.gateway.http.accounts import Accounts
from swarm.gateway.http.counter import Counter, Job
from swarm.gateway.memo import Memo
from swarm.numbers.http import HttpNumbers
from swarm.params import SamplingParams
from swarm.wire.messages import MAX_MEMO
from tests.unit.gateway.apis.feeding import served

TOY = served()
ALICE = Owner("alice")
PROMPT = (1, 2, 3, 4, 5, 6, 7)


class Stream:
    """A request under way that says two tokens, and then ends, breaks, or goes on for ever."""

    def __init__(self, then: str) -> None:
        self._then, self._num, self.closed = then, 0, False
        self.completion: Any = None

    async def take_ready(self) -> list[Piece]:
        self._num += 1
        if self._num <= 2:
            return [Piece(self._num, "word ", self._num - 1)]
        if self._then == "broken":
            raise Unavailable("the swarm is gone")
        if self._then == "endless":
            await asyncio.Event().wait()
        if self.completion is not None:
            return []
        usage = SimpleNamespace(num_prompt=len(PROMPT), num_tokens=3, num_cached=2)
        self.completion = SimpleNamespace(usage=usage)
        return [Piece(9, "", 2, finish_reason="stop")]

    def close(self, *, cancel: bool = False) -> None:
        self.closed = True


class Swarm:
    """A desk whose requests all go as ``then`` says."""

    def __init__(self, then: str) -> None:
        self.stream = Stream(then)

    async def order(self, ask: Ask, served: Any) -> Order:
        return Order(ask, PROMPT, ask.params, served)

    def begin(self, order: Order, owner: Owner, request_id: Any, memo: Any, *, told: Any) -> Reading:
        parts = Parts("r", ToolUse(), order.served.family)
        return Reading(cast("Any", self.stream), parts, num_prompt=len(order.ids), told=told)


class Book:
    """A ledger."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Counts]] = []

    def ended(self, owner: Owner, counts: Counts) -> None:
        self.written.append((owner.tenant, counts))


async def answer(then: str, stream: bool, num_taken: int | None) -> tuple[Book, Stream]:
    """Ask, and hang up when so many messages were taken (None: never)."""
    swarm, book, gone = Swarm(then), Book(), asyncio.Event()
    counter = Counter(cast("Desk", swarm), {}, Accounts(HttpNumbers(), book))
    sent: list[Message] = []

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == num_taken:
            gone.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    ask = Ask(params=SamplingParams(max_tokens=5), prompt="x")
    memo = Memo("chat", 7)
    job = Job("r", [ask], memo, ChatWriter(memo, TOY, "r"), stream)
    if num_taken == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    async with asyncio.timeout(20.0):
        response = await counter.serve(Request(scope, receive, send), TOY, ALICE, job)
        await response(scope, receive, send)
    return book, swarm.stream


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_read_on_is_not_kept(stream: bool) -> None:
    """An echo longer than what the broker notes of a request: ``keep_s`` is refused before a status is sent."""
    counter = Counter(cast("Desk", Swarm("")), {}, Accounts(HttpNumbers(), Book()))
    memo = Memo("completions", 7, echoes=("x" * MAX_MEMO,))
    job = Job(
        "r", [Ask(params=SamplingParams(), prompt="x", keep_s=5.0)], memo, CompletionWriter(memo, TOY, "r"), stream
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with pytest.raises(Problem, match="can't be resumed") as caught:
        await counter.serve(Request(scope), TOY, ALICE, job)
    assert (caught.value.status, caught.value.param) == (400, "keep_s")


def test_an_echo_is_noted_once_for_all_choices() -> None:
    """So that its length alone counts, and each choice begins with it."""
    body = CompletionBody(model="toy", prompt="Once", n=3, echo=True)
    memo = memo_of(body, asks_of(body, TOY), TOY, 7)
    assert memo.echoes == ("Once",)
    ends = [End(choice, "stop", 1) for choice in range(3)]
    whole = CompletionWriter(memo, TOY, "r").whole([Text(0, " upon"), *ends], Counts(1, 3))
    assert [choice["text"] for choice in whole["choices"]] == ["Once upon", "Once", "Once"]
    writer = CompletionWriter(memo, TOY, "r")
    assert all(b'"Once"' in writer.write(end)[0].data for end in ends)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ended_is_written_to_its_owner(stream: bool) -> None:
    book, _ = await answer("ends", stream, None)
    assert book.written == [("alice", Counts(7, 3, 2))]


@pytest.mark.parametrize(("stream", "num_taken"), [(True, 3), (False, 0)])
async def test_what_somebody_leaves_is_paid_as_far_as_it_came(stream: bool, num_taken: int) -> None:
    """Whoever hangs up has used the prompt and what was made of the answer; and the request is let go."""
    book, under_way = await answer("endless", stream, num_taken)
    assert book.written == [("alice", Counts(7, 2))]
    assert under_way.closed


async def test_what_breaks_off_is_written_once() -> None:
    book, _ = await answer("broken", True, None)
    assert book.written == [("alice", Counts(7, 2))]
