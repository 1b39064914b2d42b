"""The console over HTTP, before a stand-in for the client: who gets what, in which words, with which headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import httpx
import pytest

from swarm.api_keys.file import update_keys
from swarm.api_keys.keys import KeyLimits, make_key
from swarm.config import GatewaySettings, Settings
from swarm.errors import InvalidRequest, RequestFailed, Unavailable
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.console.local_swarm import LocalSwarm
from swarm.gateway.middleware.auth import CONSOLE_LIMITS
from swarm.gateway.middleware.gateway_app import GatewayApp

Json = dict[str, Any]
OWNERS = {"a" * 32: "alice", "b" * 32: "bob"}
# Written out here once more: whoever makes them looser has to say so twice.
SEAL = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Client:
    """Notes what it is told."""

    is_connected = True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.refuses = ""
        self.is_away = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def describe(self) -> Any:
        if self.is_away:
            raise Unavailable("no broker answers")
        return SimpleNamespace(manifest=SimpleNamespace(name="toy"), state="serving")

    async def recall(self, request_id: str) -> Any:
        if request_id not in OWNERS:
            raise InvalidRequest("nobody knows it", code="unknown")
        return SimpleNamespace(tenant=OWNERS[request_id])

    async def trace(self, request_id: str) -> Json:
        return {"request_id": request_id}

    async def cancel(self, request_id: str) -> None:
        self.told.append(("cancel", request_id))

    async def query(self, what: str) -> Json:
        return {"workers": []} if what == "nodes" else {}

    async def steer(self, steer: object) -> Json:
        return self._told(steer)

    async def suppose_plan(self, suppose: object) -> Json:
        return self._told(suppose)

    async def stop_worker(self, worker: str, *, force: bool) -> Json:
        return self._told(("stop", worker, force))

    async def join(self, count: int) -> Json:
        return self._told(("join", count))

    def _told(self, what: object) -> Json:
        if self.refuses:
            raise RequestFailed(self.refuses)
        self.told.append(what)
        return {"state": "done"}


SETTINGS: Json = {"process": "gateway", "settings": []}


class Gateway:
    def __init__(self, folder: Path, *, keyed: bool, **settings: Any) -> None:
        self.client, self.keys = Client(), {"": ""}
        if keyed:
            for name, admin in (("alice", False), ("bob", False), ("root", True)):
                limits = KeyLimits(rate_per_min=1, concurrency=1, tokens_per_day=7)
                key, self.keys[name] = make_key(name, limits, "2026", admin=admin)
                update_keys(folder / "keys.json", lambda ring, key=key: ring.add(key))  # type: ignore[misc]
        logs = folder / "logs"
        logs.mkdir()
        (logs / "w0.log").write_text('{"event": "worker_out", "level": "info"}\n')
        whole = Settings(state_dir=folder, gateway=GatewaySettings(**settings))
        home = LocalSwarm(logs, is_demo=True)
        self.doors = GatewayApp(
            whole, [CompletionService(cast(Any, self.client))], home, lambda: cast(Any, self.client), lambda: SETTINGS
        )
        transport = httpx.ASGITransport(self.doors.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    async def get(self, path: str, key: str = "", **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=headers | self._shown(key))

    async def post(self, path: str, body: Any, key: str = "", **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers | self._shown(key))

    def _shown(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[key]}"} if key else {}


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Without keys."""
    gateway = Gateway(tmp_path, keyed=False)
    async with gateway.http:
        yield gateway


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path, keyed=True)
    async with gateway.http:
        yield gateway


def words(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def seal_of(answer: httpx.Response) -> Json:
    return {name: answer.headers.get(name) for name in SEAL}


async def test_the_page_needs_no_key_and_tells_nothing(keyed: Gateway) -> None:
    """Nor does it count against a key's rate."""
    files = keyed.doors.console.open_paths if keyed.doors.console else ()
    assert "/" in files
    for path in files:
        answer = await keyed.get(path)
        assert answer.status_code == 200
        assert seal_of(answer) == SEAL
        for secret in filter(None, keyed.keys.values()):
            assert secret not in answer.text
    assert (await keyed.get("/console/me")).status_code == 401
    assert (await keyed.get("/console/nothing.js")).status_code == 401


async def test_a_file_is_sent_once(alone: Gateway) -> None:
    first = await alone.get("/", **{"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    again = await alone.get("/", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = await alone.get("/", **{"accept-encoding": "identity"})
    assert plain.text == first.text
    assert "content-encoding" not in plain.headers


async def test_what_is_refused_is_sealed_too(keyed: Gateway) -> None:
    for answer in (await keyed.get("/console/me"), await keyed.get("/console/nothing", "alice")):
        assert seal_of(answer) == SEAL
    assert "content-security-policy" not in (await keyed.get("/health")).headers


async def test_who_asks_is_told_who_it_is(keyed: Gateway, tmp_path: Path) -> None:
    me = (await keyed.get("/console/me", "alice")).json()
    assert (me["name"], me["admin"], me["needs_key"], me["model"], me["state"]) == (
        "alice",
        False,
        True,
        "toy",
        "serving",
    )
    assert (await keyed.get("/console/me", "root")).json()["admin"] is True
    keyed.client.is_away = True
    gone = (await keyed.get("/console/me", "root")).json()
    assert me["base_url"] == "http://127.0.0.1:8000/v1"
    assert gone["has_logs"] is gone["is_demo"] is True


async def test_without_keys_whoever_is_on_this_machine_may_all(alone: Gateway) -> None:
    me = (await alone.get("/console/me")).json()
    assert (me["name"], me["admin"], me["needs_key"]) == (None, True, False)
    assert (await alone.post("/console/orders", {"verb": "join"})).json() == {
        "text": "a worker is started",
        "body": {"state": "done"},
    }


async def test_a_wrong_key_is_refused_in_words(keyed: Gateway) -> None:
    keyed.keys["thief"] = keyed.keys["root"][:-1] + "x"
    for path in ("/console/me", "/console/live", "/console/keys"):
        answer = await keyed.get(path, "thief")
        assert (answer.status_code, words(answer)) == (401, "this API key is unknown")


async def test_only_admins_govern(keyed: Gateway) -> None:
    orders: list[Json] = [
        {"verb": "drain", "worker": "w0"},
        {"verb": "cordon", "worker": "w0"},
        {"verb": "stop", "worker": "w0"},
        {"verb": "join"},
        {"verb": "rebalance"},
        {"verb": "kill", "worker": "w0"},
        {"verb": "plan"},
    ]
    for order in orders:
        answer = await keyed.post("/console/orders", order, "alice")
        assert (answer.status_code, "admin" in words(answer)) == (403, True)
    for path in ("/console/keys", "/console/logs", "/console/logs/w0", "/console/settings"):
        assert (await keyed.get(path, "alice")).status_code == 403
    assert (await keyed.post("/console/plan", {}, "alice")).status_code == 403
    assert keyed.client.told == []
    for order in orders[:5]:
        assert (await keyed.post("/console/orders", order, "root")).status_code == 200
    assert len(keyed.client.told) == 5


async def test_tenants_see_and_end_their_own_requests_alone(keyed: Gateway) -> None:
    cancel = {"verb": "cancel", "request": "a" * 32}
    for stranger in ({"verb": "cancel", "request": "b" * 32}, {"verb": "cancel", "request": "c" * 32}):
        answer = await keyed.post("/console/orders", stranger, "alice")
        assert (answer.status_code, words(answer)) == (404, "you have no such request")
        assert (await keyed.get(f"/console/trace/{stranger['request']}", "alice")).status_code == 404
    assert (await keyed.post("/console/orders", cancel, "alice")).status_code == 200
    assert (await keyed.get(f"/console/trace/chatcmpl-{'a' * 32}", "alice")).json() == {"request_id": "a" * 32}
    assert (await keyed.get(f"/console/trace/{'b' * 32}", "root")).status_code == 200
    assert keyed.client.told == [("cancel", "a" * 32)]


async def test_what_the_broker_refuses_is_told_in_its_words(alone: Gateway) -> None:
    alone.client.refuses = "the swarm can't do without w0"
    answer = await alone.post("/console/orders", {"verb": "drain", "worker": "w0"})
    assert (answer.status_code, words(answer)) == (409, "the swarm can't do without w0")
    alone.client.refuses = "no worker 'w9': the workers are w0"
    assert (await alone.post("/console/orders", {"verb": "drain", "worker": "w9"})).status_code == 404
    alone.client.refuses = "nothing was changed: the swarm would wait for 3 GiB more"
    answer = await alone.post("/console/plan", {"exclude": ["w0"]})
    assert (answer.status_code, answer.json()) == (200, {"state": "no plan", "waits_for": "3 GiB more", "stages": []})


async def test_orders_are_logged_with_who_gave_them(keyed: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    from swarm import log
    from swarm.config import LogSettings

    log.configure(LogSettings(format="json"))
    await keyed.post("/console/orders", {"verb": "drain", "worker": "w0"}, "root")
    await keyed.post("/console/orders", {"verb": "drain", "worker": "w0"}, "alice")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"console_order' in line]
    assert [(line["event"], line["by"], line["order"]) for line in lines] == [
        ("console_order", "root", "drain w0"),
        ("console_order_refused", "alice", "drain w0"),
    ]
    assert not any(key in str(lines) for key in keyed.keys.values() if key)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9000", "http://localhost:8000"])
async def test_pages_from_elsewhere_may_not_ask(tmp_path: Path, origin: str) -> None:
    """Not even with a key, nor if they may read answers."""
    gateway = Gateway(tmp_path, keyed=True, cors_origins=["https://evil.example"])
    for path in ("/console/me", "/console/live", "/"):
        answer = await gateway.get(path, "root", origin=origin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")
    order = {"verb": "rebalance"}
    assert (await gateway.post("/console/orders", order, "root", origin=origin)).status_code == 403
    assert gateway.client.told == []
    own = await gateway.post("/console/orders", order, "root", origin="http://127.0.0.1:8000")
    assert own.status_code == 200
    await gateway.http.aclose()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_orders_must_be_said_to_be_json(alone: Gateway, kind: str) -> None:
    """What a form of another page can send is none."""
    headers = {"content-type": kind} if kind else {}
    answer = await alone.http.post("/console/orders", content=b'{"verb": "join"}', headers=headers)
    assert (answer.status_code, alone.client.told) == (415, [])


async def test_a_page_that_looks_takes_nothing_of_its_keys_limits(keyed: Gateway) -> None:
    """They are for answers; the console has its own."""
    for _ in range(5):
        assert (await keyed.get("/console/me", "alice")).status_code == 200
    assert (await keyed.get("/v1/streams/x", "alice")).status_code != 429
    assert (await keyed.get("/v1/streams/x", "alice")).status_code == 429
    assert CONSOLE_LIMITS.concurrency > 1


async def test_settings_are_told_to_admins(keyed: Gateway) -> None:
    assert (await keyed.get("/console/settings", "root")).json() == SETTINGS


async def test_quotas_are_told_without_secrets(keyed: Gateway, tmp_path: Path) -> None:
    answer = await keyed.get("/console/keys", "root")
    rows = {row["name"]: row for row in answer.json()["keys"]}
    assert rows["alice"] == {
        "name": "alice",
        "admin": False,
        "rate_per_min": 1.0,
        "concurrency": 1,
        "tokens_per_day": 7,
        "spent_today": 0,
        "under_way": 0,
        "created": "2026",
    }
    assert rows["root"]["admin"] is True
    written = json.loads((tmp_path / "keys.json").read_text())["keys"]
    for key in written:
        assert not any(key[secret] in answer.text for secret in ("id", "salt", "hash"))


async def test_logs_are_listed_and_read(alone: Gateway) -> None:
    assert (await alone.get("/console/logs")).json()["processes"] == [{"name": "w0", "alive": False, "bytes": 41}]
    lines = (await alone.get("/console/logs/w0?search=OUT")).json()["lines"]
    assert [line["event"] for line in lines] == ["worker_out"]
    assert (await alone.get("/console/logs/w0?search=nothing")).json()["lines"] == []
    for name in ("w9", "..%2Fkeys.json", "%2e%2e", "w0.log"):
        assert (await alone.get(f"/console/logs/{name}")).status_code == 404
    assert (await alone.get("/console/logs/w0?before=x")).status_code == 400


async def test_the_console_can_be_left_out(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, keyed=False, console=False)
    for path in ("/console/me", "/console/live"):
        assert (await gateway.get(path)).status_code == 404
    assert (await gateway.get("/")).text == "Ollama is running"
    await gateway.http.aclose()


async def test_a_stream_ends_with_the_right_to_it(
    keyed: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked or rotated: whoever holds a stream by the old key is told no more."""
    monkeypatch.setattr("swarm.gateway.middleware.auth.KEYS_CHECK_S", 0.0)
    monkeypatch.setattr("swarm.gateway.console.poller.QUIET_S", 0.02)
    update_keys(tmp_path / "keys.json", lambda ring: ring.remove("bob"))
    async with asyncio.timeout(20):
        reading = asyncio.ensure_future(keyed.get("/console/live", "root"))
        while not keyed.doors.console or not keyed.doors.console.poller.num_viewers:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        update_keys(tmp_path / "keys.json", lambda ring: ring.remove("root"))
        answer = await reading
    assert answer.status_code == 200
    assert "event: snapshot" in answer.text or answer.text == ""
