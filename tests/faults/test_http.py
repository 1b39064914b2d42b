"""Kills under HTTP streams: whoever dies, each token comes once, and the answer is as undisturbed."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient
from swarm.client.connection_state import UNANSWERED_S
from swarm.demo import model_path
from tests.faults.bench import WAIT_S, Swarm
from tests.faults.zygote import Zygote
from tests.integration.gateway import MODEL, Event, Gateway, events_in, is_empty, request, status

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Who lives in the village?"}],
    "max_tokens": 80,
    "temperature": 1.0,
    "seed": 77,
    "n": 2,
    "ignore_eos": True,
    "speculation": "off",  # an answer that was given before is guessed: it would be over before anything happens to it
}
FROZEN_S = UNANSWERED_S + 3.0
PAUSE_S = 2.0
Texts = dict[int, str]


@pytest.fixture(scope="module")
def swarm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three workers with the embedded model, which has a text; a broker with a journal."""
    logs = tmp_path_factory.mktemp("swarm")
    with Swarm(model_path(), logs, zygote, state=tmp_path_factory.mktemp("state")) as swarm:
        swarm.start(3)
        yield swarm


@pytest.fixture(scope="module")
def gateways(swarm: Swarm, zygote: Zygote) -> Iterator[list[Gateway]]:
    """Two, on one broker."""
    made = [Gateway(swarm.url, swarm.logs, f"gateway{number}", zygote) for number in range(2)]
    try:
        for gateway in made:
            gateway.start()
        yield made
    finally:
        for gateway in made:
            gateway.stop()


@pytest.fixture(scope="module")
def expected(gateways: list[Gateway]) -> Texts:
    """What is answered when nothing happens."""
    give_up_at = time.monotonic() + WAIT_S
    while status(gateways[0].url + "/ready") != 200:
        assert time.monotonic() < give_up_at, "the swarm does not serve"
        time.sleep(0.1)
    return undisturbed(gateways[0])


@dataclass
class Bench:
    """One test's view."""

    swarm: Swarm
    gateways: list[Gateway]
    client: AsyncClient
    expected: Texts

    async def until_empty(self, within_s: float = WAIT_S) -> None:
        await self.swarm.until(self.client, "stats", is_empty, within_s)

    async def make_well(self) -> None:
        for name in ("w0", "w1", "w2"):
            if name not in self.swarm.workers:
                self.swarm.start_worker(name)
        for gateway in self.gateways:
            if gateway.process.poll() is not None:
                await asyncio.to_thread(gateway.start)
        await self.swarm.until_serving(self.client, 3)
        await self.until_empty()


@pytest_asyncio.fixture
async def bench(swarm: Swarm, gateways: list[Gateway], expected: Texts) -> AsyncIterator[Bench]:
    """Three workers and both gateways are well, before and after."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, gateways, client, expected)
        await bench.make_well()
        yield bench
        await bench.make_well()


def undisturbed(gateway: Gateway, **more: Any) -> Texts:
    code, _, content = request(gateway.url + CHAT, {**BODY, **more})
    assert code == 200
    return {choice["index"]: choice["message"]["content"] for choice in json.loads(content)["choices"]}


@dataclass
class Stream:
    """A stream as a reader sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    text: str = ""
    comments: list[float] = field(default_factory=list)  # when they came

    async def more(self) -> bool:
        """Read what is there; False at the end."""
        line = await asyncio.wait_for(self.reader.readline(), WAIT_S)
        if line.startswith(b":"):
            self.comments.append(time.monotonic())
        self.text += line.decode()
        return bool(line)

    async def until_events(self, count: int) -> None:
        while len(self.events) < count:
            assert await self.more(), f"the stream ended: {self.text[-500:]}"

    async def to_the_end(self) -> list[Event]:
        while await self.more():
            pass
        return self.events

    @property
    def events(self) -> list[Event]:
        """Those that have come whole."""
        return events_in(self.text.rpartition("\n\n")[0])

    async def hang_up(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def opened(gateway: Gateway, method: str, path: str, body: Any = None, last: str = "") -> AsyncIterator[Stream]:
    """HTTP 1.0, so that what comes is the bytes of the stream and nothing else."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    head += f"Last-Event-ID: {last}\r\n" if last else ""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(head.encode() + b"\r\n" + content)
        answer = await asyncio.wait_for(reader.readline(), WAIT_S)
        while (await asyncio.wait_for(reader.readline(), WAIT_S)).strip():
            pass
        assert b" 200 " in answer, answer + await reader.read()
        yield Stream(reader, writer)
    finally:
        writer.close()


def asked(bench: Bench, number: int = 0, **more: Any) -> Any:
    return opened(bench.gateways[number], "POST", CHAT, {**BODY, "stream": True, **more})


def texts_of(events: list[Event]) -> Texts:
    """What each choice has said; and the form of the whole: each event once, each choice ended once, then [DONE]."""
    assert len({event.id for event in events}) == len(events)
    *chunks, done = events
    assert done.data == "[DONE]", done
    texts: Texts = {}
    reasons: dict[int, list[str]] = {}
    for event in chunks:
        for choice in event.json["choices"]:
            index = choice["index"]
            assert index not in reasons, "a choice goes on behind its end"
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    assert reasons == dict.fromkeys(texts, "length")
    return texts


# --- those behind the gateway ---------------------------------------------------------------------------------------


async def test_a_stream_outlives_a_worker(bench: Bench) -> None:
    async with asked(bench) as stream:
        await stream.until_events(20)
        bench.swarm.kill("w1")
        bench.swarm.start_worker("w1")
        assert texts_of(await stream.to_the_end()) == bench.expected


async def test_a_stream_outlives_the_broker(bench: Bench) -> None:
    async with asked(bench) as stream:
        await stream.until_events(20)
        bench.swarm.kill_broker()
        bench.swarm.start_broker(3)
        assert texts_of(await stream.to_the_end()) == bench.expected


async def test_answers_outlast_a_frozen_broker(bench: Bench) -> None:
    """For longer than anything waits that the broker has not answered: streams, with ``keep_s`` and without, and an
    answer in one piece. Readers hear comments meanwhile, and nothing is cancelled."""
    whole = asyncio.create_task(asyncio.to_thread(request, bench.gateways[0].url + CHAT, {**BODY, "max_tokens": 400}))
    async with asked(bench, max_tokens=400) as stream, asked(bench, number=1, max_tokens=400, keep_s=60) as kept:
        for each in (stream, kept):
            await each.until_events(20)
        bench.swarm.broker.send_signal(signal.SIGSTOP)
        try:
            stood_at = time.monotonic()
            while time.monotonic() < stood_at + FROZEN_S:
                assert await stream.more(), stream.text[-500:]
        finally:
            bench.swarm.broker.send_signal(signal.SIGCONT)
        assert len(stream.comments) > FROZEN_S / 2
        texts = texts_of(await stream.to_the_end())
        assert texts_of(await kept.to_the_end()) == texts
    code, _, content = await whole
    assert code == 200
    assert {c["index"]: c["message"]["content"] for c in json.loads(content)["choices"]} == texts


async def test_a_comment_comes_each_second_while_nobody_computes(bench: Bench) -> None:
    """Workers that stand still for three seconds: the reader hears that all is well, by the clock."""
    workers = list(bench.swarm.workers.values())
    async with asked(bench, max_tokens=600) as stream:  # so long that it is not over before they stand still
        await stream.until_events(20)
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        try:
            stood_at = time.monotonic()
            while len(stream.comments) < 2:
                assert await stream.more()
            assert time.monotonic() - stood_at < 3.5
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
        texts = texts_of(await stream.to_the_end())
        assert {index: text[: len(bench.expected[index])] for index, text in texts.items()} == bench.expected


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_the_makers_clients_mind_no_pause(bench: Bench, api: str) -> None:
    """Workers that stand still for two seconds in the middle of a stream: OpenAI's and Anthropic's own clients take
    what comes meanwhile as nothing, and say the same text."""
    pytest.importorskip("openai", reason="no openai")
    pytest.importorskip("anthropic", reason="no anthropic")
    expected = "".join([piece async for piece in PIECES[api](bench.gateways[0].url)])
    assert len(expected) > 50
    found, num_pieces, longest_s, last_at = "", 0, 0.0, time.monotonic()
    workers = list(bench.swarm.workers.values())
    try:
        async for piece in PIECES[api](bench.gateways[0].url):
            found, num_pieces = found + piece, num_pieces + 1
            now = time.monotonic()
            longest_s, last_at = max(longest_s, now - last_at), now
            if num_pieces == 10:
                for worker in workers:
                    worker.send_signal(signal.SIGSTOP)
                asyncio.get_running_loop().call_later(PAUSE_S, go_on, workers)
    finally:
        go_on(workers)
    assert longest_s > PAUSE_S / 2, "the answer was over before the workers stood still"
    assert found == expected


def go_on(workers: list[Any]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGCONT)


async def chat_pieces(url: str) -> AsyncIterator[str]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        more = {"extra_body": {"ignore_eos": True, "speculation": "off"}}
        stream = await client.chat.completions.create(
            model=MODEL, messages=BODY["messages"], max_tokens=300, seed=77, stream=True, **more
        )
        async for chunk in stream:
            for choice in chunk.choices:
                yield choice.delta.content or ""


async def response_pieces(url: str) -> AsyncIterator[str]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        more = {"extra_body": {"ignore_eos": True, "speculation": "off", "seed": 77}}
        stream = await client.responses.create(
            model=MODEL, input="Who lives in the village?", max_output_tokens=300, stream=True, **more
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta


async def message_pieces(url: str) -> AsyncIterator[str]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        more = {"extra_body": {"ignore_eos": True, "speculation": "off", "seed": 77}}
        stream = await client.messages.create(
            model=MODEL, messages=BODY["messages"], max_tokens=300, stream=True, **more
        )
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                yield event.delta.text


PIECES = {"chat": chat_pieces, "responses": response_pieces, "messages": message_pieces}


# --- the gateway itself, and readers ----------------------------------------------------------------------------------


async def test_another_gateway_goes_on_where_one_was_killed(bench: Bench) -> None:
    """By the id of the last event, each byte once and none missing; though one that was never told of it."""
    async with asked(bench, stream_options={"include_usage": True}) as stream:
        await stream.until_events(20)
        bench.gateways[0].kill()
        while await stream.more():
            pass
        seen = stream.events
    async with opened(bench.gateways[1], "GET", f"/v1/streams/{seen[-1].id}") as rest:
        events = [*seen, *await rest.to_the_end()]
    usage = events.pop(-2).json
    assert usage["usage"]["completion_tokens"] == 2 * BODY["max_tokens"]
    assert texts_of(events) == bench.expected


@pytest.mark.parametrize(("victim", "seed"), [("worker", 81), ("broker", 82), ("gateway", 83)])
async def test_a_stream_of_guessed_tokens_goes_on(bench: Bench, victim: str, seed: int) -> None:
    """Whose beginning was given before, so that steps return several tokens: each byte comes once, as without."""
    body: dict[str, Any] = {"max_tokens": 600, "seed": seed}
    await asyncio.to_thread(undisturbed, bench.gateways[1], **{**body, "max_tokens": 100})
    async with asked(bench, **body, speculation="suffix") as stream:
        await stream.until_events(20)
        if victim == "worker":
            bench.swarm.kill("w1")
            bench.swarm.start_worker("w1")
        elif victim == "broker":
            bench.swarm.kill_broker()
            bench.swarm.start_broker(3)
        else:
            bench.gateways[0].kill()
        events = await stream.to_the_end()
    if victim == "gateway":
        assert events[-1].data != "[DONE]", "the answer was over before its gateway was killed"
        async with opened(bench.gateways[1], "GET", f"/v1/streams/{events[-1].id}") as rest:
            events += await rest.to_the_end()
    stats = (await bench.client.query("stats"))["pipeline"]
    assert stats["accepted_tokens"] > 0
    assert texts_of(events) == await asyncio.to_thread(undisturbed, bench.gateways[1], **body)


async def test_a_reader_that_reloads_goes_on(bench: Bench) -> None:
    """With keep_s the answer goes on meanwhile. The last event is named as browsers do, in a header of the same
    request, and anywhere; a second reload begins anew."""
    async with asked(bench, keep_s=30) as stream:
        await stream.until_events(20)
        seen = stream.events
        await stream.hang_up()
    await asyncio.sleep(0.3)
    body = {**BODY, "stream": True, "keep_s": 30}
    async with opened(bench.gateways[0], "POST", CHAT, body, seen[-1].id) as rest:
        await rest.until_events(5)
        seen += rest.events
        await rest.hang_up()
    await asyncio.sleep(0.3)
    async with opened(bench.gateways[1], "GET", "/v1/streams/next", last=seen[-1].id) as rest:
        assert texts_of([*seen, *await rest.to_the_end()]) == bench.expected
    request_id = seen[0].id.partition(":")[0]
    async with opened(bench.gateways[0], "GET", f"/v1/streams/{request_id}") as again:
        assert texts_of(await again.to_the_end()) == bench.expected


@pytest.mark.parametrize("second", [0, 1])
async def test_the_latest_reader_has_the_stream(bench: Bench, second: int) -> None:
    """Also of one gateway: the one before it is told so, and its end cancels nothing."""
    async with asked(bench) as stream:
        await stream.until_events(20)
        seen = stream.events
        async with opened(bench.gateways[second], "GET", f"/v1/streams/{seen[-1].id}") as rest:
            await rest.until_events(3)
            told = await stream.to_the_end()
            assert "error" in told[-2].json
            await stream.hang_up()
            assert texts_of([*seen, *await rest.to_the_end()]) == bench.expected


async def test_a_reader_that_leaves_ends_the_answer(bench: Bench) -> None:
    """At once: nobody can read on."""
    async with asked(bench, max_tokens=1500) as stream:
        await stream.until_events(5)
        seen = stream.events
        await stream.hang_up()
    await bench.until_empty(10)
    path = f"/v1/streams/{seen[-1].id}"
    code, _, content = await asyncio.to_thread(request, bench.gateways[1].url + path)
    assert code == 404
    assert json.loads(content)["error"]["code"] == "not_found"


async def test_what_is_kept_is_not_kept_for_ever(bench: Bench) -> None:
    """Nobody came for it in time: it is cancelled. It ran until then."""
    async with asked(bench, max_tokens=1900, keep_s=1.5) as stream:
        await stream.until_events(5)
        request_id = stream.events[0].id.partition(":")[0]
        await stream.hang_up()
    left_at = time.monotonic()
    await bench.until_empty(15)
    assert time.monotonic() - left_at > 1.0
    known: Any = (await bench.client.query("requests", all=True))["requests"]
    assert [each["reasons"] for each in known if each["request_id"] == request_id] == [["cancelled", "cancelled"]]


async def test_two_gateways_are_as_one(bench: Bench) -> None:
    """The same seed, the same answer; the same models."""
    assert await asyncio.to_thread(undisturbed, bench.gateways[1]) == bench.expected
    one, other = (json.loads(request(gateway.url + "/v1/models")[2])["data"] for gateway in bench.gateways)
    assert [{**model, "created": 0} for model in one] == [{**model, "created": 0} for model in other]
