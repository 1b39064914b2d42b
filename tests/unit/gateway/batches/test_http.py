"""Files and batches over HTTP, with OpenAI's own client, before a stand-in for the client library."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from swarm.api_keys.file import update_keys
from swarm.api_keys.keys import KeyLimits, make_key
from swarm.client.results import Completion, Piece, Usage, VectorAnswer
from swarm.config import BatchSettings, GatewaySettings, Settings
from swarm.errors import ClientError, InvalidRequest, Overloaded, RequestFailed
from swarm.gateway.batches import line_request, service, store
from swarm.gateway.batches.upload import Upload
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.middleware import auth
from swarm.gateway.middleware.body import decode_body
from swarm.gateway.middleware.gateway_app import GatewayApp
from tests.unit.gateway.apis.feeding import served

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")

CHAT = "/v1/chat/completions"
WAIT_S = 20.0


class Stream:
    """An answer of one token; it comes when ``may_end`` is set."""

    completion: Completion | None = None

    def __init__(self, client: Client, request_id: str) -> None:
        self._client, self._id, self._pieces = client, request_id, [Piece(97, "a", 0, 0, None, (), ())]
        self._cancels = False

    async def take_ready(self) -> list[Piece]:
        if error := self._client.errors.pop(self._id, None):
            raise error
        if self._pieces:
            await self._client.may_end.wait()
            pieces, self._pieces = self._pieces, []
            return pieces
        if self.completion is None:
            self.completion = Completion(self._id, (), Usage(1, 1, 0), 0)
            return [Piece(None, "", 1, 0, "stop", (), ())]
        return []

    def cancel_when_left(self) -> None:
        self._cancels = True

    def close(self) -> None:
        if self.completion is None:
            self._client.closed.append((self._id, self._cancels))


class Client:
    """Describes a model, and answers as it is told to."""

    def __init__(self) -> None:
        self.errors: dict[str, ClientError] = {}  # by request: raised once
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.closed: list[tuple[str, bool]] = []
        self._model = served()
        self._manifest = msgspec.structs.replace(self._model.manifest, context=4096)

    @property
    def asked(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """What was asked, by request: prompts are prepared in two threads, so the order is theirs."""
        return sorted(self._asked, key=lambda asked: asked[0])

    async def describe(self) -> Any:
        return SimpleNamespace(manifest=self._manifest, state="serving", waits_for="", max_context=4096)

    async def text_model(self) -> Any:
        return self._model.text

    async def words(self) -> None:
        return None

    def stream(self, _prompt: object, params: object, *, request_id: str, **options: Any) -> Stream:
        self._asked.append((request_id, params, options))
        return Stream(self, request_id)

    async def compute_vectors(
        self, sources: list[tuple[int, ...]], params: object, *, request_id: str, **options: Any
    ) -> list[VectorAnswer]:
        self._asked.append((request_id, params, options))
        await self.may_end.wait()
        vector = array("f", [1.0] * 8).tobytes()
        return [VectorAnswer(request_id, vector, len(ids), 0, 0.0) for ids in sources]

    async def trace(self, request_id: str) -> Any:
        raise AssertionError(request_id)

    async def aclose(self) -> None:
        pass


class Gateway:
    """A gateway whose state is in ``directory``. Its clock is moved by the test."""

    def __init__(self, directory: Path | None, settings: BatchSettings | None = None) -> None:
        self.client, self.now, self.is_stopped = Client(), 1_000_000.0, False
        own = Settings(state_dir=directory, gateway=GatewaySettings(), batch=settings or BatchSettings())
        self.app = GatewayApp(own, [CompletionService(self.client)])  # type: ignore[arg-type]
        self.app.batches._clock = lambda: self.now
        transport = httpx.ASGITransport(self.app.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def openai(self, key: str = "none") -> Any:
        return openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key=key, http_client=self.http, max_retries=0, timeout=WAIT_S
        )

    async def start(self) -> None:
        self.app.batches.start()
        await until(lambda: not self.app.batches._problem)

    async def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            await self.app.batches.aclose()
            await self.app.aclose()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.app.batches._handle(service.TimePassed())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (a thread writes)
            await asyncio.sleep(0.001)


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(line_request, "RETRY_S", 0.0)
    gateway = Gateway(tmp_path)
    await gateway.start()
    yield gateway
    await gateway.stop()


def lines(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    described = ({"custom_id": f"c{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies, 1))
    return b"".join(json.dumps(line).encode() + b"\n" for line in described)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "a"}], **fields}


async def begin(client: Any, content: bytes, endpoint: str = CHAT, window: str = "24h", **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"of": "mine"}, **fields
    )


async def ended(client: Any, batch: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.001)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def read(client: Any, file_id: str) -> list[dict[str, Any]]:
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_a_batch_is_answered_line_by_line(gateway: Gateway) -> None:
    """Whatever a line alone would get: an answer, or its error. Every request has the lowest priority and the id of its
    line."""
    client = gateway.openai()
    content = lines(chat(), chat(model="other"), chat(seed=5, priority="high"), chat(nonsense=1))
    batch = await ended(client, await begin(client, content))
    assert (batch.status, batch.object, batch.endpoint, batch.metadata) == ("completed", "batch", CHAT, {"of": "mine"})
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    answers, errors = await read(client, batch.output_file_id), await read(client, batch.error_file_id)
    assert [line["custom_id"] for line in answers] == ["c1", "c3"]
    for line in answers:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "a"
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("c2", 404), ("c4", 400)]
    assert errors[1]["response"]["body"]["error"]["param"] == "nonsense"
    assert [asked[0] for asked in gateway.client.asked] == [f"{batch.id}-1", f"{batch.id}-3"]
    assert answers[0]["response"]["request_id"] == f"{batch.id}-1"
    for _, params, options in gateway.client.asked:
        assert params.seed is not None
        assert (options["priority"], options["detached"], options["memo"]) == (-100, True, "")
    assert gateway.client.asked[1][1].seed == 5


async def test_every_endpoint_of_the_gateway_takes_batches(gateway: Gateway) -> None:
    client = gateway.openai()
    for endpoint, body in (("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/responses", {"input": "a"})):
        content = lines({"model": "toy", **body}, url=endpoint)
        batch = await ended(client, await begin(client, content, endpoint))
        [line] = await read(client, batch.output_file_id)
        assert line["response"]["body"]["object"] in ("text_completion", "response")
    with pytest.raises(openai.BadRequestError, match="endpoint: must be one of /v1/chat/completions"):
        await begin(client, lines(chat()), "/v1/models")


async def test_files_are_listed_read_and_deleted(gateway: Gateway) -> None:
    client, content = gateway.openai(), lines(chat())
    files = [await client.files.create(file=(f"{n}.jsonl", content), purpose="batch") for n in range(3)]
    assert (files[0].filename, files[0].bytes, files[0].status) == ("0.jsonl", len(content), "processed")
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == [file.id for file in files]
    assert (await client.files.retrieve(files[1].id)).filename == "1.jsonl"
    assert (await client.files.content(files[1].id)).content == content
    assert (await client.files.delete(files[1].id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await call(files[1].id)


async def test_batches_are_listed_the_newest_first(gateway: Gateway) -> None:
    client = gateway.openai()
    batches = [await ended(client, await begin(client, lines(chat()))) for _ in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == [batch.id for batch in batches[::-1]]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_none")
    with pytest.raises(openai.ConflictError, match="completed"):
        await client.batches.cancel(batches[0].id)


async def test_bad_lines_fail_the_batch_and_are_named(gateway: Gateway) -> None:
    client = gateway.openai()
    content = lines(chat(), chat(stream=True)) + b"\n{\n" + lines(chat())
    batch = await ended(client, await begin(client, content))
    assert batch.status == "failed"
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [(2, "invalid_request"), (4, "invalid_json_line"), (5, "duplicate_custom_id")]
    assert gateway.client.asked == []


async def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 30 days, or as their owner asks: an upload since its creation, answers since the end of the batch."""
    monkeypatch.setattr(service, "EXPIRY_S", 0.001)
    gateway = Gateway(tmp_path)
    await gateway.start()
    client, expiry = gateway.openai(), {"anchor": "created_at", "seconds": 7200}
    short = await client.files.create(file=("in.jsonl", lines(chat())), purpose="batch", expires_after=expiry)
    assert short.expires_at == short.created_at + 7200
    batch = await ended(client, await begin(client, lines(chat()), output_expires_after=expiry))
    source = await client.files.retrieve(batch.input_file_id)
    assert source.expires_at == source.created_at + 30 * 86_400
    assert (await client.files.retrieve(batch.output_file_id)).expires_at == batch.completed_at + 7200
    gateway.now += 7200
    async with asyncio.timeout(WAIT_S):
        while [file.id for file in (await client.files.list()).data] != [source.id]:  # noqa: ASYNC110 (a thread deletes)
            await asyncio.sleep(0.001)
    assert (await client.batches.retrieve(batch.id)).output_file_id == batch.output_file_id
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)
    await gateway.stop()


async def test_an_upload_is_split_in_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of line breaks does not hold up other requests."""
    threads: set[threading.Thread] = set()
    feed = Upload.feed

    def feed_in_thread(own: Upload, data: bytes) -> Any:
        threads.add(threading.current_thread())
        return feed(own, data)

    monkeypatch.setattr(Upload, "feed", feed_in_thread)
    file = await gateway.openai().files.create(file=("in.jsonl", b"\n" * 100_000), purpose="batch")
    assert file.bytes == 100_000
    assert threading.main_thread() not in threads
    assert len(threads) == 1


async def test_an_answer_is_encoded_in_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    encode = line_request.encode_answer

    def encode_in_thread(*given: Any) -> bytes:
        threads.append(threading.current_thread())
        return encode(*given)

    monkeypatch.setattr(line_request, "encode_answer", encode_in_thread)
    client = gateway.openai()
    await ended(client, await begin(client, lines(chat())))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\xff\xfe\n", "invalid_json_line"),
        (b"\x00\n", "invalid_json_line"),
        (
            b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n',
            "invalid_json_line",
        ),
        (b"[" * 100_000 + b"\n", "invalid_request"),
        (b"\n" * 5000, "empty_file"),
    ],
)
async def test_hostile_lines_fail_their_batch(gateway: Gateway, content: bytes, error: str) -> None:
    client = gateway.openai()
    batch = await ended(client, await begin(client, content))
    assert (batch.status, [e.code for e in batch.errors.data]) == ("failed", [error])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    client = gateway.openai()
    file = await client.files.create(file=("in.jsonl", lines(chat())), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    response = await gateway.http.post("/v1/batches", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_files_may_be_kept_for_as_long_as_the_settings_say(tmp_path: Path) -> None:
    """By whom asks for it, and by whom does not."""
    gateway = Gateway(tmp_path, BatchSettings(max_age_days=365))
    await gateway.start()
    client, year = gateway.openai(), 365 * 86_400
    for seconds, kept_s in ((year - 1, year - 1), (year + 1, year), (None, year)):
        fields = {} if seconds is None else {"expires_after": {"anchor": "created_at", "seconds": seconds}}
        file = await client.files.create(file=("in.jsonl", lines(chat())), purpose="batch", **fields)
        assert file.expires_at - file.created_at == kept_s
    await gateway.stop()


async def test_uploads_have_bounds(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, BatchSettings(max_file=600, max_stored=900, max_lines=2))  # type: ignore[arg-type]
    await gateway.start()
    client = gateway.openai()
    with pytest.raises(openai.APIStatusError, match=r"batch\.max_file") as caught:
        await client.files.create(file=("in.jsonl", b"x\n" * 301), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        await client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3599})
    batch = await ended(client, await begin(client, lines(chat(), chat(), chat())))
    assert [error.code for error in batch.errors.data] == ["too_many_tasks"]
    with pytest.raises(openai.APIStatusError, match=r"batch\.max_stored") as caught:
        await client.files.create(file=("in.jsonl", b"x" * 590), purpose="batch")
    assert caught.value.status_code == 413
    assert len((await client.files.list()).data) == 1
    await gateway.stop()


async def test_an_upload_that_stops_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    await gateway.start()
    gateway.app.batches._body_timeout_s = 0.001

    async def stop_after_a_line() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + lines(chat())
        await asyncio.Event().wait()

    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with asyncio.timeout(WAIT_S):
        response = await gateway.http.post("/v1/files", content=stop_after_a_line(), headers=headers)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    await until(lambda: len(gateway.app.batches._tasks) == 1)  # which deletes expired files
    assert gateway.app.batches._store is not None
    assert gateway.app.batches._store._opened.execute("SELECT COUNT(*) FROM files").fetchone() == (0,)
    await gateway.stop()


def test_the_gateways_time_for_bodies_holds_for_uploads(tmp_path: Path) -> None:
    own = Settings(state_dir=tmp_path, gateway=GatewaySettings(body_timeout_s=7.0))
    assert GatewayApp(own, [CompletionService(Client())]).batches._body_timeout_s == 7.0  # type: ignore[arg-type]


async def test_a_tenant_has_a_limit_of_unfinished_batches(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_UNFINISHED", 2)
    client = gateway.openai()
    gateway.client.may_end.clear()
    batches = [await begin(client, lines(chat())) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match=r"2 unfinished batches.*wait.*or cancel") as caught:
        await begin(client, lines(chat()))
    assert caught.value.code == "rate_limit_exceeded"
    assert len((await client.batches.list()).data) == 2
    await client.batches.cancel(batches[0].id)
    await ended(client, batches[0])
    await begin(client, lines(chat()))
    gateway.client.may_end.set()


async def test_without_a_directory_the_remedy_is_named() -> None:
    gateway = Gateway(None)
    with pytest.raises(openai.APIStatusError, match="--state-dir") as caught:
        await gateway.openai().batches.list()
    assert caught.value.status_code == 404  # clients repeat a 503
    await gateway.stop()


async def test_a_gateway_waits_for_the_store_until_another_one_ends(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "OPEN_RETRY_S", 0.001)
    second = Gateway(tmp_path)
    second.app.batches.start()
    await until(lambda: "another gateway" in second.app.batches._problem)
    with pytest.raises(openai.APIStatusError, match="another gateway"):
        await second.openai().files.list()
    await gateway.stop()
    await until(lambda: not second.app.batches._problem)
    await second.stop()


async def test_a_refused_line_runs_again_until_the_swarm_takes_it(gateway: Gateway) -> None:
    client = gateway.openai()
    gateway.client.may_end.clear()
    batch = await begin(client, lines(chat()))
    await until(lambda: len(gateway.client.asked) == 1)
    gateway.client.errors[f"{batch.id}-1"] = Overloaded("full", 7.0)
    gateway.client.may_end.set()
    await until(lambda: gateway.app.batches._runner.next_due() == gateway.now + 7)
    gateway.pass_time(7)
    batch = await ended(client, batch)
    assert batch.request_counts.completed == 1


async def test_a_line_that_fails_for_good_has_the_swarms_error(gateway: Gateway, monkeypatch: Any) -> None:
    client = gateway.openai()
    monkeypatch.setattr(Client, "stream", lambda *_, **__: _raise(RequestFailed("its worker dies of it")))
    batch = await ended(client, await begin(client, lines(chat())))
    [line] = await read(client, batch.error_file_id)
    assert line["response"]["status_code"] == 500
    assert "its worker dies" in line["response"]["body"]["error"]["message"]


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("name", ["prepare_line", "run_line"])
async def test_a_line_that_meets_a_defect_ends_and_frees_its_place(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    client = gateway.openai()
    monkeypatch.setattr(service, name, lambda *_: _raise(RecursionError()))
    batch = await ended(client, await begin(client, lines(chat())))
    [line] = await read(client, batch.error_file_id)
    assert line["response"]["status_code"] == 500
    assert "internal error" in line["response"]["body"]["error"]["message"]


async def test_lines_are_decoded_in_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a long line does not hold up the other requests."""
    threads: list[threading.Thread] = []

    def decode(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return decode_body(*given)

    monkeypatch.setattr(line_request, "decode_body", decode)
    client = gateway.openai()
    batch = await ended(client, await begin(client, lines(chat())))
    assert batch.request_counts.completed == 1
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_line_whose_prompt_has_changed_runs_under_a_new_id(gateway: Gateway) -> None:
    """As with a template that has the date: the broker has another request under the old id."""
    client = gateway.openai()
    gateway.client.may_end.clear()
    batch = await begin(client, lines(chat(), chat()))
    gateway.client.errors[f"{batch.id}-1"] = InvalidRequest("in use for another request", code="conflict")
    gateway.client.may_end.set()
    batch = await ended(client, batch)
    assert batch.request_counts.completed == 2
    ids = [asked[0] for asked in gateway.client.asked]
    assert len(set(ids)) == len(ids)


async def test_a_cancelled_batch_cancels_its_lines_and_answers_them(gateway: Gateway) -> None:
    client = gateway.openai()
    gateway.client.may_end.clear()
    batch = await begin(client, lines(*[chat()] * 40))
    await until(lambda: len(gateway.client.asked) == 32)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 0, "failed": 40}
    assert sorted(gateway.client.closed) == sorted((f"{batch.id}-{n}", True) for n in range(1, 33))
    errors = await read(client, batch.error_file_id)
    assert [line["custom_id"] for line in errors] == [f"c{n}" for n in range(1, 41)]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


async def test_a_batch_expires(gateway: Gateway) -> None:
    client = gateway.openai()
    gateway.client.may_end.clear()
    batch = await begin(client, lines(chat()), window="2h")
    await until(lambda: len(gateway.client.asked) == 1)
    gateway.pass_time(7199)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    gateway.pass_time(1)
    batch = await ended(client, batch)
    assert (batch.status, batch.expires_at - batch.created_at) == ("expired", 7200)
    [line] = await read(client, batch.error_file_id)
    assert (line["response"], line["error"]["code"]) == (None, "batch_expired")


@pytest.mark.parametrize(
    ("url", "bodies"),
    [
        (CHAT, [{"messages": [{"role": "user", "content": text}]} for text in ("a", "bb")]),
        ("/v1/embeddings", [{"input": "a"}, {"input": ["bb", "c"]}]),
    ],
)
async def test_a_restarted_gateway_submits_the_same_requests(
    gateway: Gateway, tmp_path: Path, url: str, bodies: list[dict[str, Any]]
) -> None:
    """Equal to the last parameter, so that the broker takes them for the running ones; answered lines stay as they
    are."""
    client = gateway.openai()
    gateway.client.may_end.clear()
    batch = await begin(client, lines(*({"model": "toy", **body} for body in bodies), url=url), url)
    await until(lambda: len(gateway.client.asked) == 2)
    await gateway.stop()
    second = Gateway(tmp_path)
    second.now = gateway.now + 500
    await second.start()
    batch = await ended(second.openai(), batch)
    assert batch.request_counts.completed == 2
    assert second.client.asked == gateway.client.asked
    assert [(asked[0], asked[1].seed is None, asked[2]["detached"]) for asked in second.client.asked] == [
        (f"{batch.id}-{number}", False, True) for number in (1, 2)
    ]
    await second.stop()
    third = Gateway(tmp_path)
    await third.start()
    assert len(await read(third.openai(), batch.output_file_id)) == 2
    assert third.client.asked == []
    await third.stop()


async def test_a_key_sees_its_own_and_pays_for_its_lines(tmp_path: Path) -> None:
    shown = {}
    for name, limits in (("alice", KeyLimits(concurrency=1)), ("bob", KeyLimits())):
        key, shown[name] = make_key(name, limits, "")
        update_keys(tmp_path / "keys.json", lambda ring, key=key: ring.add(key))
    gateway = Gateway(tmp_path)
    await gateway.start()
    alice, bob = gateway.openai(shown["alice"]), gateway.openai(shown["bob"])
    batch = await ended(alice, await begin(alice, lines(chat(), chat())))
    assert batch.request_counts.completed == 2  # the limit of concurrency is for requests that somebody waits for
    assert gateway.app._auth.usage("alice") == (4, 0)
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(batch.output_file_id)
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(batch.id)
    assert (await bob.batches.list()).data == (await bob.files.list()).data == []
    await gateway.stop()


async def test_files_belong_to_a_key_and_not_to_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotated key keeps them; a new key with the name of a revoked one does not get them."""
    monkeypatch.setattr(auth, "KEYS_CHECK_S", 0.0)
    path, seen = tmp_path / "keys.json", {}
    old, seen["old"] = make_key("bob", KeyLimits(), "")
    update_keys(path, lambda ring: ring.add(old))
    gateway = Gateway(tmp_path)
    await gateway.start()
    batch = await ended(gateway.openai(seen["old"]), await begin(gateway.openai(seen["old"]), lines(chat())))
    rotated, seen["rotated"] = make_key("bob", KeyLimits(), "", key_id=old.id)
    update_keys(path, lambda ring: ring.replace(rotated))
    client = gateway.openai(seen["rotated"])
    assert (await client.batches.retrieve(batch.id)).id == batch.id
    assert len(await read(client, batch.output_file_id)) == 1
    with pytest.raises(openai.AuthenticationError):
        await gateway.openai(seen["old"]).files.list()
    new, seen["new"] = make_key("bob", KeyLimits(), "")
    update_keys(path, lambda ring: ring.remove("bob").add(new))
    client = gateway.openai(seen["new"])
    assert (await client.files.list()).data == (await client.batches.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)
    await gateway.stop()


async def test_a_key_without_tokens_waits_and_a_revoked_one_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "KEYS_CHECK_S", 0.0)
    key, shown = make_key("bob", KeyLimits(tokens_per_day=1), "")
    update_keys(tmp_path / "keys.json", lambda ring: ring.add(key))
    key, shown_root = make_key("root", KeyLimits(), "")
    update_keys(tmp_path / "keys.json", lambda ring: ring.add(key))
    gateway = Gateway(tmp_path, BatchSettings(in_flight=1))
    await gateway.start()
    bob = gateway.openai(shown)
    batch = await begin(bob, lines(chat(), chat(), chat()))
    await until(lambda: gateway.app.batches._runner.next_due() == gateway.now + line_request.MAX_WAIT_S)
    assert len(gateway.client.asked) == 1
    assert (await gateway.openai(shown_root).batches.list()).data == []
    update_keys(tmp_path / "keys.json", lambda ring: ring.remove("bob"))
    gateway.pass_time(line_request.MAX_WAIT_S)
    await until(lambda: not gateway.app.batches._runner.num_active)
    assert len(gateway.client.asked) == 1
    record = await gateway.app.batches.batch(batch.id, shown.split("-")[2])
    assert record is not None
    assert (record.status, record.num_completed, record.num_failed) == ("completed", 1, 2)
    await gateway.stop()
