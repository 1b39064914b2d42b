"""Peers of another build: whoever meets one says so, in words and within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from swarm import AsyncClient, Unavailable
from swarm.wire.channel import BindAddress, RouterChannel
from swarm.wire.codec import WORKER
from swarm.wire.greeting import Greeting, read_greeting
from swarm.wire.messages import Finished, ServerMessage, Submit
from swarm.wire.transport.peers import MessageReceived
from tests.faults.zygote import Zygote
from tests.integration.fake_broker import FakeBroker, say
from tests.integration.processes import Processes

PROMPT = [5, 6, 7]
OTHER = Greeting(schema="0123456789abcdef", build="9.9.9")


pytestmark = pytest.mark.usefixtures("own_cache")


def story(_submit: object, _index: int) -> list[int]:
    return say("hello")


def with_a_price(message: ServerMessage, frames: list[bytes]) -> list[bytes]:
    """A later build's field, under the same version."""
    if not isinstance(message, Finished):
        return frames
    return [msgspec.msgpack.encode(msgspec.msgpack.decode(frames[0]) | {"price": 1})]


async def test_a_client_meets_a_broker_of_another_build() -> None:
    """Every verb fails at once and names both; nothing was submitted there."""
    async with FakeBroker(story, greets=OTHER) as broker, AsyncClient(broker.url) as client:
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"can't be used: it is swarm 9\.9\.9 .* install the same"):
                await client.generate(PROMPT, max_tokens=5, timeout=10)
            with pytest.raises(Unavailable, match=r"swarm 9\.9\.9"):
                await client.describe()
        assert broker.heard_of(Submit) == []
        await broker.shut()
        broker.greets = Greeting(schema=FakeBroker(story).greets.schema)  # type: ignore[union-attr]
        await broker.open()  # a broker of our build has taken its place
        async with asyncio.timeout(10):
            while True:
                try:
                    done = await client.generate(PROMPT, max_tokens=5, timeout=10)
                except Unavailable:  # the connection has not broken yet
                    await asyncio.sleep(0.05)
                else:
                    break
        assert done.finish_reason == "length"


async def test_a_client_meets_a_broker_that_never_greets() -> None:
    """One of before there were greetings, or none at all."""
    async with FakeBroker(story, greets=None) as broker, AsyncClient(broker.url, connect_timeout_s=0.4) as client:
        with pytest.raises(Unavailable, match="does not answer like a broker"):
            await client.generate(PROMPT, max_tokens=5)


async def test_a_field_that_is_not_known_here_ends_in_words() -> None:
    """Though the broker greeted like one of our build. Requests that it does not concern go on."""
    async with FakeBroker(story, retell=with_a_price) as broker, AsyncClient(broker.url) as client:
        with pytest.raises(
            Unavailable, match=r"this client are incompatible \(finished.*price.*\): install the same version"
        ):
            await asyncio.wait_for(client.generate(PROMPT, max_tokens=5), 5)
        broker.retell = lambda _, frames: frames
        assert (await client.generate(PROMPT, max_tokens=5)).finish_reason == "length"


@asynccontextmanager
async def stranger(port: int) -> AsyncIterator[list[bytes]]:
    """Greets workers like one of another build; tells what else it heard."""
    context, heard = zmq.Context[zmq.Socket[bytes]](), list[bytes]()
    door = RouterChannel([BindAddress("127.0.0.1")], port, WORKER.frame_limit_bytes)

    async def listen() -> None:
        async for event in door:
            if isinstance(event, MessageReceived) and read_greeting(event.frames) is not None:
                door.send(event.peer, [msgspec.msgpack.encode(OTHER)])
            elif isinstance(event, MessageReceived):
                heard.append(bytes(event.frames[0]))

    listener = asyncio.create_task(listen())
    try:
        yield heard
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        door.close()
        context.term()


async def test_a_worker_meets_a_broker_of_another_build(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """It ends with one line that names both, and a code that says that another start won't help."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        async with stranger(swarm.port + 1) as heard:
            swarm.start_worker("w0")
            assert await asyncio.to_thread(swarm.workers.pop("w0").wait, 60) == 78
        assert heard == []
        (line,) = [line for line in swarm.log("w0").splitlines() if "can't talk to the broker" in line]
        assert "swarm 9.9.9" in line
        assert "install the same version on both" in line
