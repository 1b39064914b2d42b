"""Look-ups over HTTP while gateways die and readers come and go: none changes what becomes of an answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.faults.test_http import (
    MODEL,
    Bench,
    Stream,
    asked,
    bench,
    expected,
    gateways,
    opened,
    swarm,
    texts_of,
)
from tests.integration.gateway import Gateway, request

__all__ = ["bench", "expected", "gateways", "swarm"]  # fixtures

STORED: dict[str, Any] = {
    "model": MODEL,
    "input": "Who lives in the village?",
    "max_output_tokens": 300,
    "ignore_eos": True,
    "seed": 5,
    "stream": True,
    "store": True,
}


async def look(gateway: Gateway, path: str) -> tuple[int, dict[str, Any]]:
    """What a GET answers."""
    code, _, content = await asyncio.to_thread(request, gateway.url + path)
    return code, json.loads(content)


def text_of(response: dict[str, Any]) -> str:
    return "".join(content["text"] for item in response["output"] for content in item["content"])


def request_id(stream: Stream) -> str:
    return stream.events[0].id.partition(":")[0]


# --- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code"),
    [
        pytest.param("/v1/responses/resp_{}", 404, id="not-stored"),
        pytest.param("/v1/streams/{}:1.1", 400, id="of-another-shape"),
    ],
)
async def test_a_refused_look_leaves_the_answer_alone(bench: Bench, path: str, code: int) -> None:
    """Its gateway is gone, its reader on the way to another one, and somebody looks there in vain."""
    async with asked(bench) as stream:
        await stream.until_events(20)
        bench.gateways[0].kill()
        while await stream.more():
            pass
        seen = stream.events
    assert (await look(bench.gateways[1], path.format(request_id(stream))))[0] == code
    async with opened(bench.gateways[1], "GET", f"/v1/streams/{seen[-1].id}") as rest:
        assert texts_of([*seen, *await rest.to_the_end()]) == bench.expected


async def test_polls_leave_the_stream_to_its_reader(bench: Bench) -> None:
    """They tell how far it is; so does one whose client hangs up at once. Later they tell all of it."""
    async with opened(bench.gateways[0], "POST", "/v1/responses", STORED) as stream:
        await stream.until_events(8)
        path = f"/v1/responses/resp_{request_id(stream)}"
        for gateway in bench.gateways:
            async with opened(gateway, "GET", path):
                pass  # hung up
        polls = [await look(gateway, path) for gateway in bench.gateways]
        last = (await stream.to_the_end())[-1].json
    assert last["type"] == "response.incomplete"
    whole = text_of(last["response"])
    assert [code for code, _ in polls] == [200, 200]
    for _, answer in polls:
        assert answer["status"] in ("in_progress", "incomplete")
        assert whole.startswith(text_of(answer))
    for gateway in bench.gateways:
        code, answer = await look(gateway, path)
        assert (code, answer["status"], text_of(answer)) == (200, "incomplete", whole)


async def test_many_look_at_once(bench: Bench) -> None:
    """At both gateways, at an answer that is in the journal only: each is answered, none waits for a time limit."""
    async with opened(bench.gateways[0], "POST", "/v1/responses", STORED) as stream:
        last = (await stream.to_the_end())[-1].json["response"]
    await bench.until_empty()
    began = time.monotonic()
    path = f"/v1/responses/{last['id']}"
    found = await asyncio.gather(*(look(bench.gateways[number % 2], path) for number in range(16)))
    assert [code for code, _ in found] == [200] * 16
    assert {text_of(answer) for _, answer in found} == {text_of(last)}
    assert time.monotonic() - began < 20, "a question that nobody answers waits for 30 s"


# --- keeping ---------------------------------------------------------------------------------------------------------


async def test_keeping_outlives_the_gateway(bench: Bench) -> None:
    """The one that its reader left: the time is the broker's. Nobody came, so it is cancelled."""
    async with asked(bench, max_tokens=1900, keep_s=2.0) as stream:
        await stream.until_events(5)
        await stream.hang_up()
    await bench.swarm.until(bench.client, "requests", lambda told: is_left(told, request_id(stream)), 10)
    bench.gateways[0].kill()
    await bench.until_empty(20)
    assert (await row_of(bench, request_id(stream)))["reasons"] == ["cancelled", "cancelled"]


async def test_keeping_begins_anew_with_each_reader(bench: Bench) -> None:
    """Whoever reads on elsewhere and leaves has the same again: the first gateway cuts nothing short."""
    keep_s = 4.0
    async with asked(bench, max_tokens=1900, n=16, keep_s=keep_s) as stream:
        await stream.until_events(20)
        await stream.hang_up()
    left_first_at = time.monotonic()
    await asyncio.sleep(keep_s / 2)
    async with opened(bench.gateways[1], "GET", f"/v1/streams/{stream.events[-1].id}") as rest:
        await rest.until_events(3)
        left_at = time.monotonic()
        await rest.hang_up()
    await asyncio.sleep(max(0.0, left_first_at + keep_s + 0.7 - time.monotonic()))
    row = await row_of(bench, request_id(stream))
    if time.monotonic() < left_at + keep_s:  # else this machine was too busy to tell
        assert "cancelled" not in row["reasons"]
    await bench.until_empty(30)


def is_left(told: dict[str, Any], name: str) -> bool:
    return any(row["request_id"] == name and not row["attached"] for row in told["requests"])


async def row_of(bench: Bench, name: str) -> dict[str, Any]:
    told: Any = await bench.client.query("requests", all=True)
    (row,) = (row for row in told["requests"] if row["request_id"] == name)
    return dict(row)
