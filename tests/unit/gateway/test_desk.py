"""What the desk knows of the swarm, and when it asks anew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import RequestTimeout, Unavailable
from swarm.gateway.ask import Ask
from swarm.gateway.desk import desk as module
from swarm.gateway.desk.desk import Desk, Order, Owner
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem
from swarm.gateway.memo import Memo
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
    desk = Desk(broker)  # type: ignore[arg-type]
    await desk.served()
    assert broker.num_asked == 1
    broker.may_answer.clear()
    await desk.served()
    await asyncio.sleep(0)
    await desk.served()
    assert broker.num_asked == 2
    broker.is_there = False
    broker.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(Problem) as caught:
        await desk.served()
    assert caught.value.status == 503
    await desk.aclose()


async def test_a_broker_that_does_not_describe_itself_in_time_is_not_there(broker: Broker) -> None:
    """So that another server is asked: no limit of a request has passed."""

    async def never() -> Any:
        raise RequestTimeout("the broker did not answer within 30 s")

    broker.describe = never  # type: ignore[method-assign]
    with pytest.raises(Problem) as caught:
        await Desk(broker).description()  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)


async def test_whether_it_is_ready_is_asked_and_not_remembered(broker: Broker) -> None:
    desk = Desk(broker)  # type: ignore[arg-type]
    assert (await desk.description()).state == "serving"
    broker.state = "waiting"
    assert (await desk.description()).state == "waiting"
    await desk.served()
    await desk.served()
    assert broker.num_asked >= 4, "what doesn't serve is asked each time"
    await desk.aclose()


class Asked:
    """A client that notes what it is asked for, and remembers one answer."""

    def __init__(self, owner: str = "") -> None:
        self.fields: dict[str, Any] = {}
        memo = Memo("chat", 7).text()
        self._kept = SimpleNamespace(tenant=owner, memo=memo, params=SamplingParams(max_tokens=5))

    def stream(self, ids: Any, params: Any, **fields: Any) -> Any:
        self.fields = fields
        return SimpleNamespace(completion=None, close=lambda: None)

    async def recall(self, request_id: str) -> Any:
        return self._kept

    def attach(self, request_id: str, **fields: Any) -> Any:
        return SimpleNamespace(completion=None, close=lambda: None)


@pytest.mark.parametrize(("wanted", "most", "given"), [(50, 10, 10), (5, 10, 5), (-5, -20, -20), (0, 100, 0)])
async def test_a_priority_is_no_higher_than_its_owners(wanted: int, most: int, given: int) -> None:
    """And its owner is the tenant, whose share it takes."""
    client = Asked()
    ask = Ask(params=SamplingParams(max_tokens=5), prompt="x", priority=wanted)
    served = Served.of(manifest_of({}), None, 100, ())
    Desk(client).begin(Order(ask, (1,), ask.params, served), Owner("alice", most), "r", None)  # type: ignore[arg-type]
    assert (client.fields["priority"], client.fields["tenant"]) == (given, "alice")


async def test_an_answer_is_read_on_by_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To anybody else it is one that nobody knows."""

    async def served(_: Desk) -> Served:
        return Served.of(manifest_of({}), None, 100, ())

    monkeypatch.setattr(Desk, "served", served)
    desk = Desk(Asked("alice"))  # type: ignore[arg-type]
    memo, reading = await desk.resume("r", Owner("alice"))
    assert (memo.api, reading.num_choices) == ("chat", 1)
    for other in ("bob", "http", ""):
        with pytest.raises(Problem) as caught:
            await desk.resume("r", Owner(other))
        assert (caught.value.status, caught.value.code) == (404, "not_found")
