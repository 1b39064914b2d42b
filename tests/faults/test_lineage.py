"""Numbers that another journal gave, or this one before a backup took its place; and numbers that nobody can give."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from swarm import AsyncClient
from swarm.wire.codec import CLIENT, SERVER, WORKER
from swarm.wire.messages import Describe, Description, HeldSequence, Hello, LayerRange, RangePosition
from swarm.wire.schema import schema
from swarm.wire.versions import VERSIONS
from tests.faults.bench import CASES, Swarm
from tests.faults.zygote import Zygote

LONG = 300  # tokens: it has not ended when everything dies
HELD = 60  # tokens that stages have of a request by then
MOST = 2**63 - 1
OURS, THEIRS = CASES[1], CASES[2]


@pytest.fixture
def swarm(model: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Swarm]:
    """A broker with a state directory, and two workers."""
    with Swarm(model, tmp_path, zygote, state=tmp_path / "state") as swarm:
        swarm.start(2)
        yield swarm


@pytest_asyncio.fixture
async def client(swarm: Swarm) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        await swarm.until_serving(client, 2)
        yield client


async def submit(client: AsyncClient, case: int, request_id: str) -> None:
    await client.submit(
        list(CASES[case].prompt), max_tokens=LONG, ignore_eos=True, request_id=request_id, **CASES[case].options
    )


async def until_held(swarm: Swarm, client: AsyncClient) -> None:
    """The stages have so many positions of a request that runs."""
    await swarm.until(client, "stats", lambda s: s["pipeline"].get("tokens", 0) > HELD)


async def check_answer(client: AsyncClient, case: int, request_id: str) -> None:
    """Check that an answer is that of an undisturbed run."""
    told = [p.token async for p in client.attach(request_id, timeout=120) if p.token is not None]
    expected = await client.generate(
        list(CASES[case].prompt), max_tokens=LONG, ignore_eos=True, timeout=120, **CASES[case].options
    )
    assert tuple(told) == expected.tokens


def put_in_place(swarm: Swarm, backup: Path) -> None:
    assert swarm.state is not None
    shutil.rmtree(swarm.state)
    shutil.copytree(backup, swarm.state)


async def test_workers_that_served_another_journal(swarm: Swarm, client: AsyncClient) -> None:
    """A broker is started with the state directory of another swarm. What its workers hold has the same numbers, and is
    of other requests."""
    first = swarm.state
    assert first is not None
    await submit(client, 1, "ours")
    await until_held(swarm, client)
    swarm.kill_broker()
    for name in list(swarm.workers):
        swarm.kill(name)
    swarm.state = first.with_name("another")
    swarm.start_broker(2)
    swarm.start_worker("v0")
    swarm.start_worker("v1")
    await swarm.until_serving(client, 2)
    await submit(client, 2, "theirs")
    await until_held(swarm, client)
    swarm.kill_broker()
    swarm.state = first
    swarm.start_broker(2)
    await swarm.until_serving(client, 2)
    await check_answer(client, 1, "ours")


async def test_numbers_that_were_given_out_again_after_a_backup(swarm: Swarm, client: AsyncClient) -> None:
    """A backup takes the journal's place; a number is given to another request while the workers are away."""
    await client.generate(list(CASES[0].prompt), max_tokens=5)
    backup = swarm.logs / "backup"
    swarm.kill_broker()
    assert swarm.state is not None
    shutil.copytree(swarm.state, backup)
    swarm.start_broker(2)
    await swarm.until_serving(client, 2)
    await submit(client, 1, "forgotten")
    await until_held(swarm, client)
    swarm.kill_broker()
    for process in swarm.workers.values():
        process.send_signal(signal.SIGSTOP)
    put_in_place(swarm, backup)
    swarm.start_broker(2)
    await submit(client, 2, "later")
    swarm.kill_broker()
    for process in swarm.workers.values():
        process.send_signal(signal.SIGCONT)
    swarm.start_broker(2)
    await swarm.until_serving(client, 2)
    await check_answer(client, 2, "later")


def forged(description: Description) -> Hello:
    """Somebody says of himself whatever numbers he likes."""
    held = HeldSequence(MOST, (RangePosition(LayerRange(0, 1), 1),))
    return Hello(
        epoch=MOST,
        name="evil",
        incarnation="evil-1",
        pid=1,
        host="h",
        wire_versions=VERSIONS,
        schema=schema(),
        device="cpu",
        dtype="float32",
        cores=1,
        endpoint="tcp://127.0.0.1:29999",
        memory_bytes=1 << 33,
        costs=(),
        manifest=description.manifest,
        held_layers=LayerRange(0, 1),
        held=(held,),
        logs=(),
    )


async def test_a_forged_hello_moves_no_number(swarm: Swarm, client: AsyncClient) -> None:
    """Neither the broker dies of it nor the next one, and the swarm goes on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, control = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket, port in ((front, swarm.port), (control, swarm.port + 1)):
        socket.linger = 0
        socket.setsockopt(zmq.IDENTITY, b"evil-1")
        socket.connect(f"tcp://127.0.0.1:{port}")
    front.send_multipart(CLIENT.encode(Describe()))
    described, _ = SERVER.decode(await asyncio.to_thread(front.recv_multipart))
    assert isinstance(described, Description)
    control.send_multipart(WORKER.encode(forged(described)))
    await asyncio.to_thread(control.recv_multipart)  # it is welcome
    await asyncio.sleep(1.0)
    context.destroy()
    assert swarm.broker.poll() is None
    await swarm.restart_broker(client, 2)
    assert (await client.query("status"))["epoch"] < 100
    done = await client.generate(list(CASES[0].prompt), max_tokens=5, ignore_eos=True, timeout=120)
    assert len(done.tokens) == 5
