"""Embeddings through a whole gateway before a stand-in for the client library: OpenAI's and Ollama's forms, what is
counted, and where the answer is encoded."""

from __future__ import annotations

import threading
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from swarm.client.results import VectorAnswer
from swarm.config import Settings
from swarm.errors import ClientError, RequestFailed
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.errors import ApiError
from swarm.gateway.middleware.gateway_app import GatewayApp
from tests.unit.gateway import test_doors

Json = dict[str, Any]
NUMBERS = [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]  # of length 1


class Client(test_doors.Client):
    """Each vector is the same. ``sources``: the token ids of the inputs that came."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[int, ...]] = []
        self.options: Json = {}
        self.num_dimensions = len(NUMBERS)

    async def compute_vectors(
        self, sources: list[tuple[int, ...]], _params: object, **options: Any
    ) -> list[VectorAnswer]:
        if self.error is not None:
            raise self.error
        self.sources, self.options = sources, options
        vector = array("f", (NUMBERS * self.num_dimensions)[: self.num_dimensions]).tobytes()
        return [VectorAnswer("r", vector, len(ids), 1, queued_s=0.25 * n) for n, ids in enumerate(sources)]


class Gateway:
    def __init__(self) -> None:
        self.client = Client()
        self.service = CompletionService(self.client)  # type: ignore[arg-type]
        self.app = GatewayApp(Settings(), [self.service])
        transport = httpx.ASGITransport(self.app.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "toy", **fields})

    @property
    def counted(self) -> tuple[Json, Json, int, int]:
        """What was refused, what ended how, how many are open, and the tokens of prompts."""
        metrics = self.app.metrics
        num_prompt = sum(count for (*_, kind), count in metrics.token_counts.items() if kind == "prompt")
        return dict(metrics.refused_counts), dict(metrics.ended_counts), sum(metrics.open_requests.values()), num_prompt


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    async with gateway.http:
        yield gateway
    await gateway.app.aclose()


async def test_ollamas_form_has_the_vectors_of_openais(gateway: Gateway) -> None:
    """For a text and a list, with the durations and the prompt's tokens."""
    openai = (await gateway.ask("/v1/embeddings", input=["a", "bc"])).json()
    num_prompt = openai["usage"]["prompt_tokens"]
    answer = (await gateway.ask("/api/embed", model="toy:latest", input=["a", "bc"], keep_alive="5m")).json()
    assert answer["total_duration"] > 0
    del answer["total_duration"]
    vectors = [item["embedding"] for item in openai["data"]]
    assert vectors == [NUMBERS, NUMBERS]
    load_duration = 250_000_000  # of the longest in the queue
    assert answer == {
        "model": "toy",
        "embeddings": vectors,
        "load_duration": load_duration,
        "prompt_eval_count": num_prompt,
    }
    assert (await gateway.ask("/api/embed", input="a")).json()["embeddings"] == [NUMBERS]
    assert (await gateway.ask("/api/embeddings", prompt="a")).json() == {"embedding": NUMBERS}
    endings = {("embeddings", "toy", "done"): 1, ("ollama", "toy", "done"): 3}
    assert gateway.counted[:3] == ({}, endings, 0)


async def test_ollamas_inputs_are_cut_unless_that_is_switched_off(gateway: Gateway) -> None:
    long = "a" * 40
    gateway.client.shrink_context(16)
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        assert (await gateway.ask(path, **{field: long})).status_code == 200
        assert [len(ids) for ids in gateway.client.sources] == [16]
    refused = await gateway.ask("/api/embed", input=long, truncate=False)
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "maximum context length is 16 tokens" in refused.json()["error"]


async def test_ollamas_dimensions_and_options(gateway: Gateway) -> None:
    """Swarm's own fields are options, as elsewhere; those about hardware are ignored."""
    short = await gateway.ask("/api/embed", input="a", dimensions=4)
    assert short.json()["embeddings"] == [[0.5] * 4]
    assert (await gateway.ask("/api/embed", input="a", dimensions=0)).json()["embeddings"] == [NUMBERS]
    assert (await gateway.ask("/api/embed", input="a", options={"num_ctx": 9, "priority": "low"})).status_code == 200
    assert gateway.client.options["priority"] < 0


async def test_ollamas_clients_load_a_model_without_an_input(gateway: Gateway) -> None:
    for fields in ({}, {"input": ""}, {"input": []}):
        assert (await gateway.ask("/api/embed", **fields)).json() == {"model": "toy", "embeddings": []}
    assert (await gateway.ask("/api/embeddings", prompt="")).json() == {"embedding": []}
    assert not gateway.client.sources


@pytest.mark.parametrize(
    ("path", "fields", "status", "text"),
    [
        ("/api/embed", {"input": 3}, 400, "input"),
        ("/api/embed", {"input": ["a", [1]]}, 400, "input"),
        ("/api/embed", {"input": ["a", ""]}, 400, "input"),
        ("/api/embed", {"input": "a", "dimensions": 9}, 400, "dimensions"),
        ("/api/embed", {"input": "a", "normalize": False}, 400, "normalize"),
        ("/api/embed", {"input": "a", "options": {"tfs_z": 3}}, 400, "options.tfs_z"),
        ("/api/embed", {"input": "a", "model": "gpt"}, 404, "'gpt' does not exist"),
        ("/api/embed", {"model": "gpt"}, 404, "'gpt' does not exist"),
        ("/api/embeddings", {"prompt": ["a"]}, 400, "prompt"),
    ],
)
async def test_errors_have_ollamas_form(gateway: Gateway, path: str, fields: Json, status: int, text: str) -> None:
    answer = await gateway.ask(path, **fields)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert text in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_a_failure_is_an_error_of_the_api(gateway: Gateway, path: str) -> None:
    failure: ClientError = RequestFailed("the worker is gone")
    gateway.client.error = failure
    answer = await gateway.ask(path, input="a")
    assert answer.status_code == failure.hint_status
    assert "the worker is gone" in answer.text


async def test_no_long_answer_is_encoded_on_the_event_loop(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor many numbers in one call, which would hold the interpreter's lock."""
    encode, calls = msgspec.json.encode, list[tuple[bool, bool, int]]()

    def spy(content: object, **options: Any) -> bytes:
        encoded: bytes = encode(content, **options)
        is_loop = threading.current_thread() is threading.main_thread()
        calls.append((is_loop, isinstance(content, list), len(encoded)))
        return encoded

    gateway.client.num_dimensions = 1000
    bodies = [("/v1/embeddings", {"input": ["a"] * 20}), ("/api/embed", {"input": ["a"] * 20})]
    monkeypatch.setattr(msgspec.json, "encode", spy)
    for path, fields in bodies:
        calls.clear()
        answer = await gateway.ask(path, **fields)
        whole = len(answer.content)
        assert max(size for _, _, size in calls) == whole > 20 * 1000
        assert not [size for is_loop, _, size in calls if is_loop and size > 1000]
        assert len([size for _, is_vector, size in calls if is_vector and size < whole / 10]) == 20


async def test_what_was_computed_counts_even_if_too_many_threads_are_busy(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encode the answer. Before that, nothing was computed, and the request is refused."""

    class Threads:
        """Threads that are busy after some pieces of work."""

        def __init__(self, num_left: int) -> None:
            self.num_left = num_left

        async def run(self, work: Any, *arguments: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise ApiError(429, "too many", code="overloaded", retry_after_s=1.0)
            return work(*arguments)

    threads = Threads(1)
    monkeypatch.setattr(gateway.service, "threads_for", lambda _: threads)
    assert (await gateway.ask("/v1/embeddings", input="abc")).status_code == 429
    num_prompt = len(gateway.client.sources[0])
    assert gateway.counted == ({}, {("embeddings", "toy", "failed"): 1}, 0, num_prompt)
    assert (await gateway.ask("/v1/embeddings", input="abc")).status_code == 429
    refused = {("embeddings", "429"): 1}
    assert gateway.counted == (refused, {("embeddings", "toy", "failed"): 1}, 0, num_prompt)
