"""What the desk knows of the swarm, and when it asks anew."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.client.results import Piece, Progress
from swarm.errors import RequestTimeout, Unavailable
from swarm.gateway.answer import TextPart
from swarm.gateway.completion import service as module
from swarm.gateway.completion.served_model import RequestDefaults, ServedModel
from swarm.gateway.completion.service import (
    MAX_IMAGE_TASKS,
    REST_OF_CONTEXT,
    Caller,
    CompletionService,
    PreparedRequest,
)
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.errors import ApiError
from swarm.gateway.images import image_part
from swarm.gateway.resume_state import ResumeState
from swarm.params import SamplingParams
from tests.integration.fake_broker import manifest_of


class Broker:
    """Describes itself, when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.is_there, self.state = True, "serving"

    async def describe(self) -> Any:
        self.num_asked += 1
        await self.may_answer.wait()
        if not self.is_there:
            raise Unavailable("nobody is there")
        return SimpleNamespace(manifest=manifest_of({}), state=self.state, waits_for="a worker", max_context=100)

    async def text_model(self) -> None:
        return None

    async def words(self) -> None:
        return None


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr(module, "FRESH_S", 0.0)  # old at once
    broker = Broker()
    broker.may_answer.set()
    return broker


async def test_nobody_waits_for_what_was_known_a_moment_ago(broker: Broker) -> None:
    """It is asked anew beside, once at a time; and when the broker is gone, the next one is told."""
    desk = CompletionService(broker)  # type: ignore[arg-type]
    await desk.served_model()
    assert broker.num_asked == 1
    broker.may_answer.clear()
    await desk.served_model()
    await asyncio.sleep(0)
    await desk.served_model()
    assert broker.num_asked == 2
    broker.is_there = False
    broker.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await desk.served_model()
    assert caught.value.status == 503
    await desk.aclose()


async def test_a_broker_that_does_not_describe_itself_in_time_is_not_there(broker: Broker) -> None:
    """So that another server is asked: no limit of a request has passed."""

    async def never() -> Any:
        raise RequestTimeout("the broker did not answer within 30 s")

    broker.describe = never  # type: ignore[method-assign]
    with pytest.raises(ApiError) as caught:
        await CompletionService(broker).description()  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)


async def test_whether_it_is_ready_is_asked_and_not_remembered(broker: Broker) -> None:
    desk = CompletionService(broker)  # type: ignore[arg-type]
    assert (await desk.description()).state == "serving"
    broker.state = "waiting"
    assert (await desk.description()).state == "waiting"
    await desk.served_model()
    await desk.served_model()
    assert broker.num_asked >= 4, "what doesn't serve is asked each time"
    await desk.aclose()


class Asked:
    """A client that notes what it is asked for, and remembers one answer."""

    def __init__(self, owner: str = "", *, keep_s: float = 0.0) -> None:
        self.fields: dict[str, Any] = {}
        memo = ResumeState("chat", 7).encode()
        params = SamplingParams(max_tokens=5)
        self._kept = SimpleNamespace(tenant=owner, memo=memo, params=params, detached=False, keep_s=keep_s)
        self.told: list[object] = []  # what is said to the broker about the answer
        self.progress = Progress(self._kept, (Piece(5, "once", 0), Piece(6, " upon", 1)), None)

    def stream(self, ids: Any, params: Any, **fields: Any) -> Any:
        self.fields = fields
        return SimpleNamespace(completion=None, close=lambda: None)

    async def recall(self, request_id: str) -> Any:
        return self._kept

    async def look_up(self, request_id: str, **fields: Any) -> Progress:
        return self.progress

    def attach(self, request_id: str, **fields: Any) -> Any:
        return SimpleNamespace(
            completion=None, cancel_when_left=lambda: self.told.append("cancel"), close=lambda: self.told.append("left")
        )


@pytest.mark.parametrize(("wanted", "most", "given"), [(50, 10, 10), (5, 10, 5), (-5, -20, -20), (0, 100, 0)])
async def test_a_priority_is_no_higher_than_its_owners(wanted: int, most: int, given: int) -> None:
    """And its owner is the tenant, whose share it takes."""
    client = Asked()
    ask = CompletionRequest(params=SamplingParams(max_tokens=5), prompt="x", priority=wanted)
    served = ServedModel.create(manifest_of({}), None, 100, ())
    CompletionService(client).begin(PreparedRequest(ask, (1,), ask.params, served), Caller("alice", most), "r", None)  # type: ignore[arg-type]
    assert (client.fields["priority"], client.fields["tenant"]) == (given, "alice")


async def test_an_answer_is_read_on_by_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To anybody else it is one that nobody knows."""

    async def served(_: CompletionService) -> ServedModel:
        return ServedModel.create(manifest_of({}), None, 100, ())

    monkeypatch.setattr(CompletionService, "served_model", served)
    desk = CompletionService(Asked("alice"))  # type: ignore[arg-type]
    memo, reading = await desk.resume("r", Caller("alice"))
    assert (memo.api, reading.num_choices) == ("chat", 1)
    for other in ("bob", "http", ""):
        with pytest.raises(ApiError) as caught:
            await desk.resume("r", Caller(other))
        assert (caught.value.status, caught.value.code) == (404, "not_found")


@pytest.mark.parametrize("keep_s", [0.0, 5.0])
async def test_how_long_an_answer_is_kept_is_the_brokers_to_know(keep_s: float) -> None:
    """It is told with the request, whatever becomes of this gateway."""
    client = Asked()
    ask = CompletionRequest(params=SamplingParams(max_tokens=5), prompt="x", keep_s=keep_s)
    served = ServedModel.create(manifest_of({}), None, 100, ())
    CompletionService(client).begin(PreparedRequest(ask, (1,), ask.params, served), Caller("alice"), "r", None)  # type: ignore[arg-type]
    assert (client.fields["keep_s"], client.fields["detached"]) == (keep_s, False)


@pytest.fixture
def knows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def served(_: CompletionService) -> ServedModel:
        return ServedModel.create(manifest_of({}), None, 100, ())

    monkeypatch.setattr(CompletionService, "served_model", served)


@pytest.mark.usefixtures("knows_the_model")
@pytest.mark.parametrize(("keep_s", "cancels"), [(0.0, True), (5.0, False)])
async def test_who_read_on_and_leaves_ends_it_unless_it_is_kept(keep_s: float, cancels: bool) -> None:
    client = Asked("alice", keep_s=keep_s)
    _, reading = await CompletionService(client).resume("r", Caller("alice"))  # type: ignore[arg-type]
    reading.close()
    assert client.told == ["cancel"] * cancels + ["left"]


@pytest.mark.usefixtures("knows_the_model")
async def test_an_answer_is_looked_up_beside_its_reader() -> None:
    """As far as it has come, by its owner, if it may be; nobody attaches to it."""
    client = Asked("alice")
    desk = CompletionService(client)  # type: ignore[arg-type]
    seen = await desk.look_up("r", Caller("alice"), lambda _: True)
    assert ("".join(part.text for part in seen.parts if isinstance(part, TextPart))) == "once upon"
    assert (seen.counts.answer, seen.has_ended) == (2, False)
    for owner, may in (("bob", True), ("alice", False)):
        with pytest.raises(ApiError) as caught:
            await desk.look_up("r", Caller(owner), lambda _, may=may: may)  # type: ignore[misc]
        assert caught.value.status == 404
    assert client.told == []


async def test_unknown_fields_are_refused_unless_the_gateway_ignores_them(broker: Broker) -> None:
    for ignores in (False, True):
        desk = CompletionService(broker, ignore_unknown_fields=ignores)  # type: ignore[arg-type]
        assert (await desk.served_model()).ignores_unknown_fields is ignores
        await desk.aclose()


async def test_a_model_has_the_gateway_s_defaults(broker: Broker) -> None:
    for defaults in (RequestDefaults(), RequestDefaults(7, 0.3)):
        desk = CompletionService(broker, defaults=defaults)  # type: ignore[arg-type]
        assert (await desk.served_model()).defaults == defaults
        await desk.aclose()


@pytest.mark.parametrize(
    ("max_tokens", "rest_limit", "min_tokens", "length"),
    [
        (REST_OF_CONTEXT, None, 0, 97),
        (REST_OF_CONTEXT, 7, 0, 7),
        (REST_OF_CONTEXT, 700, 0, 97),  # a default never asks for more than there is
        (REST_OF_CONTEXT, 7, 20, 20),  # nor for less than the request needs
        (50, None, 0, 50),
    ],
)
async def test_the_length_of_an_answer(
    broker: Broker, max_tokens: int, rest_limit: int | None, min_tokens: int, length: int
) -> None:
    """What the context (here 100) leaves, up to the gateway's default, unless the request gives a length."""
    desk = CompletionService(broker)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    request = CompletionRequest(params, prompt=(1, 2, 3), rest_limit=rest_limit)
    assert (await desk.prepare(request, await desk.served_model())).params.max_tokens == length
    await desk.aclose()


async def test_prompts_of_text_do_not_wait_for_images(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if images of many requests are decoded. The number of those that wait is limited."""
    gate = threading.Event()

    def decode(*_: object) -> None:
        assert gate.wait(60)
        raise ApiError(400, "decoded")

    monkeypatch.setattr(module, "take_images", decode)
    monkeypatch.setattr(module, "SHORT_PROMPT", -1)  # texts take a thread, too
    desk = CompletionService(broker)  # type: ignore[arg-type]
    served, params = await desk.served_model(), SamplingParams(max_tokens=1)
    parts = [{"type": "text", "text": "x" * (1 << 19)}, image_part("data:image/png;base64,")]
    seeing = CompletionRequest(params, prompt=(), messages=({"role": "user", "content": parts},))
    waiting = [asyncio.ensure_future(desk.prepare(seeing, served)) for _ in range(MAX_IMAGE_TASKS + 1)]
    try:
        async with asyncio.timeout(30):
            for _ in range(5):
                await desk.prepare(CompletionRequest(params, prompt=(1, 2, 3)), served)
            with pytest.raises(ApiError, match="too many") as refused:
                await waiting.pop()
        assert refused.value.status == 429
        assert not any(each.done() for each in waiting)
    finally:
        gate.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        await desk.aclose()
    assert {str(each) for each in ended} == {"decoded"}


class Asking:
    """A client whose broker reports one request, never, or not at all."""

    def __init__(self, rows: list[dict[str, int]] | None) -> None:
        self.rows, self.num_asked = rows, 0
        self.may_answer = asyncio.Event()

    async def query(self, what: str, *, request_id: str) -> dict[str, Any]:
        assert (what, request_id) == ("requests", "r")
        self.num_asked += 1
        if self.rows is None:
            raise Unavailable("nobody is there")
        await self.may_answer.wait()
        return {"requests": self.rows}


async def test_the_progress_of_a_prompt_is_the_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it knows one, and says so at once."""
    for rows, expected in (([{"num_prompt_computed": 5, "num_prompt": 9}], (5, 9)), ([], None), (None, None)):
        client = Asking(rows)
        client.may_answer.set()
        assert await CompletionService(client).prompt_progress("r") == expected  # type: ignore[arg-type]
    monkeypatch.setattr(module, "PROGRESS_TIMEOUT_S", 0.01)
    assert await CompletionService(Asking([])).prompt_progress("r") is None  # type: ignore[arg-type]


async def test_few_ask_for_progress_at_a_time() -> None:
    """However many wait. Each place is free again when its answer has come."""
    client = Asking([{"num_prompt_computed": 5, "num_prompt": 9}])
    desk = CompletionService(client)  # type: ignore[arg-type]
    asking = [asyncio.ensure_future(desk.prompt_progress("r")) for _ in range(module.MAX_PROGRESS_QUERIES + 3)]
    await asyncio.sleep(0)
    client.may_answer.set()
    answers = await asyncio.gather(*asking)
    assert answers == [(5, 9)] * module.MAX_PROGRESS_QUERIES + [None] * 3
    assert client.num_asked == module.MAX_PROGRESS_QUERIES
    assert await desk.prompt_progress("r") == (5, 9)
