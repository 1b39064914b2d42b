"""Several swarms behind one gateway, and keys that may use some of their models."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from swarm.api_keys.file import update_keys
from swarm.api_keys.keys import KeyLimits, make_key
from swarm.client.results import VectorAnswer
from swarm.config import GatewaySettings, Settings, UpstreamSettings
from swarm.errors import InvalidRequest, Unavailable
from swarm.gateway.completion.service import Caller, CompletionService
from swarm.gateway.errors import ApiError
from swarm.gateway.middleware.gateway_app import GatewayApp
from swarm.gateway.resume_state import ResumeState
from swarm.gateway.swarms import ANYONE, Swarms
from swarm.wire.messages import Asset
from tests.unit.gateway.apis.feeding import served
from tests.unit.gateway.test_doors import HELLO, Stream

Json = dict[str, Any]
TOY = served()
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"max_tokens": 3, "messages": HELLO},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {},
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
}


class Client:
    """A swarm with a model of this name. ``is_away``: nobody answers, as long as one waits."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, f"tcp://{name}"
        self.is_away, self.has_answer = False, False
        self.asked: list[str] = []
        self.adapters: tuple[Asset, ...] = ()
        self.num_described = 0

    async def describe(self) -> Any:
        self.num_described += 1
        await asyncio.sleep(0)
        if self.is_away:
            await asyncio.Event().wait()
        manifest = msgspec.structs.replace(TOY.manifest, name=self.name, adapters=self.adapters)
        return SimpleNamespace(manifest=manifest, state="serving", waits_for="", max_context=128)

    async def text_model(self) -> Any:
        return TOY.text

    async def words(self) -> None:
        return None

    def stream(self, _prompt: object, _params: object, *, request_id: str, **_: object) -> Stream:
        self.asked.append(request_id)
        return Stream(None, late=False)

    async def compute_vectors(self, sources: list[tuple[int, ...]], _params: object, **_: object) -> list[VectorAnswer]:
        return [VectorAnswer("r", array("f", [3.0, 4.0]).tobytes(), len(ids)) for ids in sources]

    async def recall(self, request_id: str) -> Any:
        if self.is_away:
            raise Unavailable(f"no broker answers at {self.url}")
        if not self.has_answer:
            raise InvalidRequest(f"there is no {request_id}", code="unknown")
        return SimpleNamespace(tenant="http", memo=ResumeState("chat", 7).encode())

    async def trace(self, request_id: str) -> Json:
        await self.recall(request_id)
        return {"at": self.name}

    async def aclose(self) -> None:
        pass


class Gateway:
    """Swarms of the models a and b; b has an alias. Another server has the model c."""

    def __init__(self, folder: Path, *, models: tuple[str, ...] = (), is_keyed: bool = False) -> None:
        self.clients = {name: Client(name) for name in "ab"}
        services = [CompletionService(client, aliases) for client, aliases in self._with_aliases()]  # type: ignore[arg-type]
        self.headers = {}
        if is_keyed:
            key, shown = make_key("alice", KeyLimits(), "2026", models=models)
            update_keys(folder / "keys.json", lambda ring: ring.add(key))
            self.headers = {"authorization": f"Bearer {shown}"}
        upstream = [UpstreamSettings(url="http://127.0.0.1:9/v1", models={"c": "c"}, connect_timeout_s=0.01)]
        settings = Settings(state_dir=folder, gateway=GatewaySettings(), upstream=upstream)
        self.doors = GatewayApp(settings, services)
        transport = httpx.ASGITransport(self.doors.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def _with_aliases(self) -> list[tuple[Client, tuple[str, ...]]]:
        return [(self.clients["a"], ("b",)), (self.clients["b"], ("beta",))]

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=BODIES[path] | fields, headers=self.headers)

    async def names(self) -> list[str]:
        listed = await self.http.get("/v1/models", headers=self.headers)
        return [row["id"] for row in listed.json()["data"]]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path)
    async with gateway.http:
        yield gateway
    await gateway.doors.aclose()


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_chooses_the_swarm(gateway: Gateway, path: str) -> None:
    """Its own name before another one's alias; an unknown name is refused with those that are there."""
    for name, chosen in (("a", "a"), ("b", "b"), ("beta", "b"), ("b:latest", "b")):
        answer = await gateway.ask(path, model=name)
        assert answer.status_code == 200, answer.text
        if "model" in answer.json():
            assert answer.json()["model"] == chosen
    unknown = await gateway.ask(path, model="gpt")
    assert unknown.status_code == 404
    assert "'gpt' does not exist: the models here are a, b" in unknown.text
    is_plain = path.startswith("/api/")
    assert isinstance(unknown.json()["error"], str) is is_plain
    assert (unknown.json().get("type") == "error") is path.startswith("/v1/messages")


async def test_answers_are_made_where_the_model_is(gateway: Gateway) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/api/chat"):
        await gateway.ask(path, model="b")
    assert (len(gateway.clients["a"].asked), len(gateway.clients["b"].asked)) == (0, 3)


async def test_without_a_model_the_first_swarm_answers(gateway: Gateway) -> None:
    assert (await gateway.ask("/tokenize")).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (await gateway.ask(path)).json()["model"] == "a"
    assert (await gateway.http.get("/ready")).status_code == 200


async def test_all_models_are_listed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their states; one that stopped answering stays listed, and the others answer on."""
    assert await gateway.names() == ["a", "b", "c"]
    monkeypatch.setattr("swarm.gateway.swarms.MODEL_WAIT_S", 0.01)
    gateway.clients["a"].is_away = True
    monkeypatch.setattr("swarm.gateway.completion.service.SILENT_S", -1.0)
    assert await gateway.names() == ["a", "b", "c"]
    listed = (await gateway.http.get("/v1/models/b")).json()
    assert (listed["id"], listed["swarm"]["state"]) == ("b", "unreachable")
    monkeypatch.setattr("swarm.gateway.completion.service.SILENT_S", 60.0)
    assert (await gateway.http.get("/v1/models/b")).json()["swarm"]["state"] == "serving"
    rows = (await gateway.http.get("/api/tags")).json()["models"]
    assert [row["name"] for row in rows] == ["a", "b"]
    assert (await gateway.ask("/v1/completions", model="b")).status_code == 200


async def test_a_swarm_that_never_answered_holds_up_no_other(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that it may have is unavailable, not unknown."""
    monkeypatch.setattr("swarm.gateway.swarms.MODEL_WAIT_S", 0.5)
    gateway.clients["a"].is_away = True
    assert (await gateway.ask("/v1/completions", model="b")).status_code == 200
    answer = await gateway.ask("/v1/completions", model="a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "the model of tcp://a is not known yet" in answer.text
    assert await gateway.names() == ["b", "c"]


async def test_the_first_swarm_answers_without_a_model_even_if_another_is_sooner(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its model is not known, a request without one waits, and then has to come again."""
    monkeypatch.setattr("swarm.gateway.swarms.MODEL_WAIT_S", 0.5)
    gateway.clients["a"].is_away = True
    assert (await gateway.ask("/tokenize", model="b")).status_code == 200
    answer = await gateway.ask("/tokenize")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "names no model, now; the model of tcp://a is not known yet" in answer.text
    gateway.clients["a"].is_away = False
    assert (await gateway.ask("/tokenize")).status_code == 200


async def test_the_first_swarm_of_a_key_is_one_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent swarm precedes the others only as long as it may have one of the key's models."""
    monkeypatch.setattr("swarm.gateway.swarms.MODEL_WAIT_S", 0.4)
    clients = [Client(name) for name in "abc"]
    services = [CompletionService(client) for client in clients]  # type: ignore[arg-type]
    swarms = Swarms(services)
    clients[0].is_away = True
    for models, status in ((frozenset("b"), 200), (frozenset("bc"), 200), (frozenset("ab"), 503), (frozenset(), 503)):
        if status == 200:
            assert (await swarms.select(None, Caller(models=models)))[0] is services[1]
        else:
            with pytest.raises(ApiError) as caught:
                await swarms.select(None, Caller(models=models))
            assert caught.value.status == status
    clients[0].is_away = False
    assert (await swarms.select(None, Caller()))[0] is services[0]
    await swarms.aclose()


async def test_overflow_has_the_name_of_the_model_that_was_selected(gateway: Gateway) -> None:
    """The swarm whose own name it is, not one whose alias precedes it; and as far as the key may use it."""
    services = [CompletionService(client, aliases) for client, aliases in gateway._with_aliases()]  # type: ignore[arg-type]
    swarms = Swarms(services)
    assert swarms.own_name("b", Caller()) == ""
    await swarms.models(Caller())
    for name, models, own in (
        ("b", "", "b"),
        ("b", "b", "b"),
        ("b", "a", "a"),
        ("beta", "", "b"),
        ("beta", "a", None),
        ("gpt", "", None),
    ):
        caller = Caller(models=frozenset(models))
        assert swarms.own_name(name, caller) == own
        if own is not None:
            assert (await swarms.select(name, caller))[1].name == own
    await swarms.aclose()


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_an_adapter_is_known_as_soon_as_it_is_loaded(names: str) -> None:
    """A name that is still unknown has the swarm described once more, also for many requests at a time."""
    clients = [Client(name) for name in names]
    swarms = Swarms([CompletionService(client) for client in clients])  # type: ignore[arg-type]
    await swarms.select("a", ANYONE)
    clients[-1].adapters = (Asset("red", 1, "d" * 32),)
    service, served = await swarms.select("red", ANYONE)
    assert (service, served.adapter) == (swarms.services[-1], "red")
    before = [client.num_described for client in clients]
    await asyncio.gather(*(swarms.select("gpt", ANYONE) for _ in range(20)), return_exceptions=True)
    assert all(client.num_described <= count + 2 for client, count in zip(clients, before, strict=True))
    before = [client.num_described for client in clients]
    await swarms.select("red", ANYONE)
    assert [client.num_described for client in clients] == before
    await swarms.aclose()


async def test_an_answer_is_found_where_it_is(gateway: Gateway) -> None:
    """Unknown to one swarm, and had by the other; one that is away may have it."""
    first, second = (CompletionService(client) for client in gateway.clients.values())  # type: ignore[arg-type]
    swarms = Swarms([first, second])
    gateway.clients["b"].has_answer = True
    assert await swarms.find_answer("r", Caller()) is second
    assert await swarms.trace("r") == {"at": "b"}
    gateway.clients["b"].has_answer = False
    with pytest.raises(ApiError) as caught:
        await swarms.find_answer("r", Caller())
    assert caught.value.status == 404
    gateway.clients["a"].is_away = True
    with pytest.raises(ApiError) as caught:
        await swarms.find_answer("r", Caller())
    assert caught.value.status == 503
    await swarms.aclose()


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_may_be_limited_to_models(tmp_path: Path, path: str) -> None:
    """In every API. The others do not exist for it, whatever they are called, and are not listed."""
    gateway = Gateway(tmp_path, models=("b",), is_keyed=True)
    async with gateway.http:
        assert (await gateway.ask(path, model="beta")).status_code == 200
        for name in ("a", "c", "gpt"):
            answer = await gateway.ask(path, model=name)
            assert answer.status_code == 404
            assert "or is not for this key, which may use b" in answer.text
            assert (await gateway.http.get(f"/v1/models/{name}", headers=gateway.headers)).status_code == 404
        assert await gateway.names() == ["b"]
        assert not gateway.clients["a"].asked
    await gateway.doors.aclose()


async def test_a_key_without_models_may_use_all(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, is_keyed=True)
    async with gateway.http:
        assert await gateway.names() == ["a", "b", "c"]
        assert (await gateway.ask("/v1/completions", model="c")).status_code == 503  # the other server is away
    await gateway.doors.aclose()


async def test_a_limited_key_of_a_single_swarm(tmp_path: Path) -> None:
    """The only model is no default for it."""
    client = Client("a")
    service = CompletionService(client)  # type: ignore[arg-type]
    for models, code in ((frozenset({"b"}), 404), (frozenset({"a"}), 200)):
        try:
            await Swarms([service]).select(None, Caller(models=models))
            status = 200
        except ApiError as error:
            status = error.status
        assert status == code
    await service.aclose()
