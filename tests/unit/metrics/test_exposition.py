"""What ``/metrics`` answers when the broker is there, and when it is not."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.errors import Unavailable
from swarm.metrics.exposition import render
from swarm.metrics.http import HttpMetrics

ANSWERS = {
    "stats": {"pipeline": {"tokens": 7}, "stages": {"w0": {"log_bytes": 12.0}}},
    "status": {"state": "serving", "epoch": 3, "journal_problem": "no room", "connections_problem": ""},
    "nodes": {"workers": [{"name": 'odd "name"\n', "state": "member", "verdict": "slow", "layers": None}]},
}


def parsed(text: bytes) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def test_the_broker_and_the_gateway_are_told_together() -> None:
    async def query(what: str) -> dict:
        return ANSWERS[what]

    numbers = HttpMetrics()
    numbers.count_refused("chat", 429)
    text, content_type = await render(query, numbers)
    assert content_type.startswith("text/plain; version=0.0.4")
    found = parsed(text)
    assert found["swarm_up",] == found["swarm_serving",] == found["swarm_journal_broken",] == 1
    assert (found["swarm_generated_tokens_total",], found["swarm_epoch",]) == (7, 3)
    assert found["swarm_stage_log_bytes", "w0"] == 12
    assert found["swarm_worker_verdict", "slow", 'odd "name"\n'] == 1
    assert found["swarm_http_refused_total", "chat", "429"] == 1


@pytest.mark.parametrize("how", ["refused", "silent", "no connection"])
async def test_a_broker_that_is_away_is_a_zero_within_the_deadline(how: str) -> None:
    """The gateway's own numbers are served all the same; nothing is said of a swarm that nobody knows of."""

    async def query(what: str) -> dict:
        if how == "refused":
            raise Unavailable("no broker answers at tcp://127.0.0.1:1")
        if how == "no connection":
            raise OSError("unreachable")
        never: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        return await never

    async with asyncio.timeout(5):
        text, _ = await render(query, HttpMetrics(), deadline_s=0.05)
    found = parsed(text)
    assert found["swarm_up",] == 0
    assert ("swarm_epoch",) not in found
    assert any(name[0] == "swarm_gateway_resident_bytes" for name in found)


async def test_half_an_answer_is_none() -> None:
    """One report that fails leaves no figures that belong together and do not."""

    async def query(what: str) -> dict:
        if what == "nodes":
            raise Unavailable("it went away")
        return ANSWERS[what]

    assert parsed((await render(query))[0]) == {("swarm_up",): 0}
