"""A whole gateway before a stand-in for the client library: what is counted, how errors name fields, ids, headers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from swarm.client.results import Completion, Piece, Usage
from swarm.config import GatewaySettings, Settings
from swarm.errors import ClientError, InvalidRequest, JournalDown, Overloaded, RequestFailed
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.middleware.gateway_app import GatewayApp
from tests.unit.gateway.apis.feeding import served

Json = dict[str, Any]
ORIGIN = "http://localhost:3000"
HELLO = [{"role": "user", "content": "a"}]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"model": "toy", "messages": HELLO},
    "/v1/completions": {"model": "toy", "prompt": "a"},
    "/v1/messages": {"model": "toy", "max_tokens": 3, "messages": HELLO},
    "/v1/responses": {"model": "toy", "input": "a"},
    "/api/chat": {"model": "toy", "messages": HELLO},
    "/api/generate": {"model": "toy:latest", "prompt": "a"},
}
# the names under which they are counted
APIS = {path: "ollama" if path.startswith("/api/") else path.split("/")[2] for path in BODIES}


class Stream:
    """An answer of one token, or none but an error; ``late``: the error comes behind the token."""

    completion: Completion | None = None

    def __init__(self, error: ClientError | None, *, late: bool) -> None:
        self._error, self._late = error, late
        self._pieces = [] if error is not None and not late else [Piece(97, "a", 0, 0, None, (), ())]

    async def take_ready(self) -> list[Piece]:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            return pieces
        if self._error is not None:
            raise self._error
        if self.completion is None:
            self.completion = Completion("r", (), Usage(1, 1, 0), 0)
            return [Piece(None, "", 1, 0, "stop", (), ())]
        return []

    def cancel_when_left(self) -> None:
        pass

    def close(self) -> None:
        pass


class Client:
    """Describes a model, and answers as it is told to."""

    def __init__(self) -> None:
        self.error: ClientError | None = None
        self.late = False
        self.asked: list[str] = []
        self._model = served()
        self._manifest = msgspec.structs.replace(self._model.manifest, context=4096)

    async def describe(self) -> Any:
        return SimpleNamespace(manifest=self._manifest, state="serving", waits_for="", max_context=4096)

    def shrink_context(self, context: int) -> None:
        self._manifest = msgspec.structs.replace(self._manifest, context=context)

    async def text_model(self) -> Any:
        return self._model.text

    async def words(self) -> None:
        return None

    def stream(self, _prompt: object, _params: object, *, request_id: str, **_: object) -> Stream:
        self.asked.append(request_id)
        return Stream(self.error, late=self.late)

    async def trace(self, request_id: str) -> Json:
        raise AssertionError(request_id)

    async def aclose(self) -> None:
        pass


class Gateway:
    def __init__(self) -> None:
        self.client = Client()
        self.service = CompletionService(self.client)  # type: ignore[arg-type]
        settings = Settings(gateway=GatewaySettings(cors_origins=[ORIGIN]))
        self.doors = GatewayApp(settings, [self.service])
        transport = httpx.ASGITransport(self.doors.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=BODIES[path] | fields, headers={"origin": ORIGIN})

    @property
    def counted(self) -> tuple[Json, Json, int]:
        """What was refused, what ended how, and how many are open."""
        numbers = self.doors.metrics
        return dict(numbers.refused_counts), dict(numbers.ended_counts), sum(numbers.open_requests.values())


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    async with gateway.http:
        yield gateway
    await gateway.doors.aclose()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_what_is_refused_is_counted_once(gateway: Gateway, path: str, stream: bool) -> None:
    """Among the refused, and not among those that were answered and failed."""
    gateway.client.error = Overloaded("the queue is full", retry_after_s=3.0)
    answer = await gateway.ask(path, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert gateway.counted == ({(APIS[path], "429"): 1}, {}, 0)


@pytest.mark.parametrize("path", BODIES)
async def test_what_fails_when_it_has_begun_is_counted_once(gateway: Gateway, path: str) -> None:
    """Among those that were answered, whether its status could still tell or not."""
    gateway.client.error, gateway.client.late = RequestFailed("all workers are gone"), True
    for stream, status in ((False, 500), (True, 200)):
        assert (await gateway.ask(path, stream=stream)).status_code == status
    refused, ended, num_open = gateway.counted
    assert (refused, list(ended.values()), num_open) == ({}, [2], 0)
    assert next(iter(ended))[2] == "failed"


GRAMMAR = InvalidRequest("grammar (json_schema): it can't be compiled", code="grammar")
TOO_LONG = InvalidRequest("it has 900 tokens, which is too many", code="context")
TOO_LARGE = InvalidRequest("these make 900 positions", code="too_large")
OBJECT: Json = {"type": "json_object"}
SCHEMA: Json = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
TOOL: Json = {"type": "function", "name": "f", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "error", "name"),
    [
        ("/v1/chat/completions", {"response_format": OBJECT}, GRAMMAR, "response_format"),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, GRAMMAR, "tools"),
        ("/v1/chat/completions", {}, TOO_LONG, "messages"),
        ("/v1/chat/completions", {}, TOO_LARGE, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, TOO_LARGE, "max_completion_tokens"),
        ("/v1/completions", {"response_format": OBJECT}, GRAMMAR, "response_format"),
        ("/v1/completions", {}, TOO_LONG, "prompt"),
        ("/v1/responses", {"text": {"format": OBJECT}}, GRAMMAR, "text.format"),
        ("/v1/responses", {}, TOO_LONG, "input"),
        ("/v1/responses", {}, TOO_LARGE, "max_output_tokens"),
        ("/v1/messages", {"output_config": SCHEMA}, GRAMMAR, "output_config.format"),
        ("/v1/messages", {}, TOO_LONG, "messages"),
        ("/api/chat", {"format": "json"}, GRAMMAR, "format"),
        ("/api/chat", {}, TOO_LONG, "messages"),
        ("/api/generate", {"options": {"num_predict": 9}}, TOO_LARGE, "options.num_predict"),
        ("/api/generate", {}, TOO_LONG, "prompt"),
    ],
)
async def test_what_the_swarm_finds_wrong_has_the_name_that_the_client_sent(
    gateway: Gateway, path: str, fields: Json, error: ClientError, name: str
) -> None:
    """In Anthropic's and Ollama's forms, which have no place for it, the text names it."""
    gateway.client.error = error
    answer = await gateway.ask(path, **fields)
    told = answer.json()["error"]
    assert answer.status_code == 400
    assert (told if path.startswith("/api/") else told["message"]).startswith(f"{name}: ")
    if path != "/v1/messages" and not path.startswith("/api/"):
        assert told["param"] == name


async def test_without_a_journal_the_service_is_unavailable_for_a_while(gateway: Gateway) -> None:
    """It is no overload: other servers that take requests when this one is down get them."""
    gateway.client.error = JournalDown("the journal can't be written: disk full", retry_after_s=5.0)
    for path in BODIES:
        answer = await gateway.ask(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        told = answer.json()["error"]
        assert "disk full" in (told if path.startswith("/api/") else told["message"])


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/audio/speech", "/v1/fine_tuning/jobs"])
async def test_a_place_that_is_not_offered_is_refused_by_its_name_and_a_code(gateway: Gateway, path: str) -> None:
    answer = await gateway.http.post(path, json={})
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["type"]) == (404, "unsupported_endpoint", "not_found_error")
    assert f"POST {path} is not offered here" in told["message"]
    assert (await gateway.http.get("/openapi.json")).status_code == 200
    other = await gateway.http.post("/v1/models", json={})
    assert (other.status_code, other.json()["error"]["code"]) == (405, "unsupported_method")


@pytest.mark.parametrize(
    ("path", "similar"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/v1/images/generations", None),
        ("/v1/completion", None),
    ],
)
async def test_a_base_url_with_or_without_v1_in_the_wrong_place_is_named(
    gateway: Gateway, path: str, similar: str | None
) -> None:
    told = (await gateway.http.post(path, json={})).json()
    message = told["error"]["message"]
    assert message.endswith("lists what is" if similar is None else f"{similar} is: check the client's base URL")


async def test_models_are_listed_in_the_form_of_the_client(gateway: Gateway) -> None:
    """Anthropic's clients send their version with every request; errors are in their form, too."""
    version = {"anthropic-version": "2023-06-01"}
    plain = (await gateway.http.get("/v1/models")).json()["data"][0]
    assert (plain["id"], plain["max_model_len"], plain["swarm"]["context"]) == ("toy", 4096, 4096)
    listed = (await gateway.http.get("/v1/models", headers=version)).json()
    one = (await gateway.http.get("/v1/models/toy", headers=version)).json()
    assert listed == {"data": [one], "has_more": False, "first_id": "toy", "last_id": "toy"}
    assert (one["type"], one["id"], one["max_input_tokens"]) == ("model", "toy", 4096)
    assert datetime.fromisoformat(one["created_at"]).timestamp() == plain["created"]
    missing = await gateway.http.get("/v1/models/other", headers=version)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")


async def test_the_tokens_of_a_response_are_counted(gateway: Gateway) -> None:
    """Without a model's name, too. Wrong fields are named."""
    body: Json = {"input": "a b c", "instructions": "Be kind."}
    counted = (await gateway.http.post("/v1/responses/input_tokens", json=body)).json()
    assert counted["object"] == "response.input_tokens"
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a b c"}]
    tokenized = (await gateway.http.post("/tokenize", json={"messages": chat})).json()
    assert counted["input_tokens"] == tokenized["count"] > 3
    wrong = await gateway.http.post("/v1/responses/input_tokens", json={"input": "a", "previous_response_id": "resp_1"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "previous_response_id")
    assert (await gateway.http.post("/v1/responses/input_tokens", json={"model": "other"})).status_code == 404


EXACT = (
    "This model's maximum context length is 128 tokens. However, you requested 129 tokens (128 in the prompt, 1 in the "
)
EXACT += "completion). Please reduce the length of the prompt."


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/v1/completions", {"prompt": [1] * 128}, EXACT),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            r"This model's maximum context length is 128 tokens. However, you requested at least \d+ tokens \(\d+ in "
            r"the messages, 1 in the completion\). Please reduce the length of the messages.",
        ),
        ("/v1/responses", {"input": "word " * 9000}, r"This model's maximum context length is .* length of the input."),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            r"prompt is too long: \d+ tokens > 127 maximum",
        ),
    ],
)
async def test_a_prompt_that_is_too_long_is_refused_in_the_sentence_of_its_api(
    gateway: Gateway, path: str, fields: Json, text: str
) -> None:
    """Routers fall back and agents compact by these words. In a stream, too, they come with the status."""
    gateway.client.shrink_context(128)
    for stream in (False, True):
        answer = await gateway.ask(path, **fields, stream=stream)
        told = answer.json()["error"]
        assert answer.status_code == 400
        assert told["message"] == text or re.fullmatch(text, told["message"])
        assert told["type"] == "invalid_request_error"
        assert told.get("code", "context_length_exceeded") == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 2**70}, "max_completion_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/completions", {"logprobs": 99}, "logprobs"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/messages", {"stop_sequences": ["a"] * 99}, "stop_sequences"),
    ],
)
async def test_a_wrong_value_has_the_name_that_the_client_sent(
    gateway: Gateway, path: str, fields: Json, name: str
) -> None:
    answer = await gateway.ask(path, **fields)
    told = answer.json()["error"]
    assert answer.status_code == 400
    assert told["message"].startswith(f"{name}: ")
    assert told.get("param", name) == name


async def test_each_prompt_of_several_has_an_id_of_its_own(gateway: Gateway) -> None:
    """The answer's id, and the prompt's number; a single prompt has the answer's."""
    answer = await gateway.ask("/v1/completions", prompt=["a", "b", "c"])
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{request_id}"
    assert gateway.client.asked == [f"{request_id}-{number}" for number in range(3)]
    answer = await gateway.ask("/v1/completions")
    assert gateway.client.asked[3:] == [answer.headers["x-request-id"]]


class Tracer:
    """Notes what it is to tell of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def export_request(self, request_id: str, _parent: object, _about: object) -> None:
        self.told.append(request_id)

    async def close(self) -> None:
        pass


async def test_each_prompt_of_several_has_its_trace(gateway: Gateway) -> None:
    tracer = Tracer()
    gateway.doors._routes_app.state.handlers[gateway.service]._usage._tracer = tracer
    await gateway.ask("/v1/completions", prompt=["a", "b"])
    await asyncio.sleep(0)
    assert tracer.told == gateway.client.asked


async def test_pages_may_read_what_clients_look_for(gateway: Gateway) -> None:
    """Where other sites are allowed, also in errors; a page of another one gets nothing."""
    gateway.client.error = Overloaded("the queue is full", retry_after_s=3.0)
    answer = await gateway.ask("/v1/completions")
    exposed = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed >= {"x-request-id", "request-id", "retry-after", "x-swarm-upstream"}
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    other = await gateway.http.post("/v1/completions", json={}, headers={"origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_events_of_a_stream_name_the_answer(gateway: Gateway) -> None:
    """The request's id is the header's and the events', in every API that has events."""
    for path in (path for path in BODIES if not path.startswith("/api/")):
        answer = await gateway.ask(path, stream=True)
        ids = {line.split(":")[1].strip() for line in answer.text.splitlines() if line.startswith("id: ")}
        assert ids == {answer.headers["x-request-id"]}
        assert json.dumps(answer.headers["x-request-id"])[1:-1] in answer.text
