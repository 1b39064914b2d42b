"""Somebody between two ends, with a key of its own or without: what it forges is not believed, what it takes out is
missed, and when it is gone everything goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import pytest

from swarm import AsyncClient
from swarm.wire.channel import BindAddress, RouterChannel
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.sockets import Context
from swarm.wire.transport.client_handshake import is_refused
from swarm.wire.transport.keys import AuthPolicy, new_pair, with_key
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected
from tests.faults.zygote import Zygote
from tests.integration.meddler import FORGED_ERROR, HOST, Meddler, is_handshake, nothing
from tests.integration.processes import Processes

LIMIT = 1 << 20
SOON_S = 20.0
DOOR, ME, THEIRS = new_pair(), new_pair(), new_pair()


class Front:
    """A door with a lock, and somebody in front of it."""

    def __init__(self) -> None:
        self.known = {ME.public}
        self.router = RouterChannel([BindAddress(HOST, AuthPolicy(DOOR, self.known.__contains__))], 0, LIMIT)
        self.meddler = Meddler(self.router.endpoint)
        self.endpoint = ""
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._listens = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self.router:
            self._events.put_nowait(event)

    async def close(self) -> None:
        await self.meddler.close()
        self._listens.cancel()
        self.router.close()

    async def heard(self) -> object:
        async with asyncio.timeout(SOON_S):
            return await self._events.get()

    async def hears(self, text: bytes) -> None:
        """Wait until this is heard, beside the news of what was hung up on."""
        while (event := await self.heard()) != MessageReceived(b"me", [memoryview(text)], ME.public):
            assert isinstance(event, PeerDisconnected | LimitExceeded)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    front.endpoint = with_key(await front.meddler.listen(), DOOR.public.encode())
    yield front
    await front.close()


@pytest.fixture
async def dealer(context: Context, front: Front) -> AsyncIterator[DealerChannel]:
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    yield dealer
    dealer.close()


async def until(dealer: DealerChannel, wanted: ConnectionEvent) -> list[object]:
    """All that happens before this does."""
    before: list[object] = []
    async with asyncio.timeout(SOON_S):
        while (event := await anext(dealer)) is not wanted:
            before.append(event)
    return before


@pytest.mark.parametrize("place", [0, 1], ids=["for WELCOME", "for READY"])
async def test_a_forged_refusal_silences_nobody(context: Context, front: Front, place: int) -> None:
    """ERROR is sent in the clear, and libzmq knocks no more when it reads one. Who knocks asks the door itself, and
    goes on knocking: it is in as soon as nobody forges any more."""

    def forge(end: str, number: int, frame: bytes) -> bytes:
        return FORGED_ERROR if end == "listens" and number == place else frame

    front.meddler.meddling = forge
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    give_up_at = monotonic() + SOON_S
    while front.meddler.num_connections < 4:
        assert monotonic() < give_up_at
        async with asyncio.timeout(SOON_S):
            assert await anext(dealer) in (ConnectionEvent.LOST, ConnectionEvent.HANDSHAKE_FAILED)
    front.meddler.meddling = nothing
    assert ConnectionEvent.AUTH_REJECTED not in await until(dealer, ConnectionEvent.CONNECTED)
    dealer.close()


async def test_the_doors_own_refusal_is_believed_also_from_between(front: Front) -> None:
    """Passed on as it is, it proves itself; without its proof, or with a proof of another connection, it is nothing."""
    proofs: list[bytes] = []

    def keep(end: str, _number: int, frame: bytes) -> bytes:
        if end == "listens":
            proofs.append(frame)
        return frame

    front.meddler.meddling = keep
    assert await asyncio.to_thread(is_refused, front.endpoint, THEIRS)
    assert not await asyncio.to_thread(is_refused, front.endpoint, ME)
    refusal = next(frame for frame in proofs if b"ERROR" in frame)
    for instead in (FORGED_ERROR, refusal, refusal[:-1] + bytes([refusal[-1] ^ 1])):
        front.meddler.meddling = lambda end, number, frame, instead=instead: (  # type: ignore[misc]
            instead if end == "listens" and number == 1 else frame
        )
        assert not await asyncio.to_thread(is_refused, front.endpoint, THEIRS)


@pytest.mark.parametrize("end", ["knocks", "listens"])
async def test_a_damaged_message_costs_a_connection_and_no_more(front: Front, dealer: DealerChannel, end: str) -> None:
    """libzmq gives up a connection on which a seal does not fit, and does not connect again by itself."""
    assert await until(dealer, ConnectionEvent.CONNECTED) == []
    dealer.send([b"1"])
    assert await front.heard() == MessageReceived(b"me", [memoryview(b"1")], ME.public)

    def damage(of: str, _number: int, frame: bytes) -> bytes:
        if of != end or is_handshake(frame):
            return frame
        front.meddler.meddling = nothing
        return frame[:-1] + bytes([frame[-1] ^ 1])

    front.meddler.meddling = damage
    dealer.send([b"2"])
    if end == "listens":
        assert await front.heard() == MessageReceived(b"me", [memoryview(b"2")], ME.public)
        front.router.send(b"me", [b"answer"])
    assert await until(dealer, ConnectionEvent.CONNECTED) == [ConnectionEvent.LOST]
    dealer.send([b"3"])
    await front.hears(b"3")


async def test_a_message_that_was_taken_out_is_missed(front: Front, dealer: DealerChannel) -> None:
    """What follows it is not believed: numbers have no gaps."""
    assert await until(dealer, ConnectionEvent.CONNECTED) == []

    def take_out(end: str, _number: int, frame: bytes) -> bytes:
        return b"" if end == "knocks" and not is_handshake(frame) else frame

    front.meddler.meddling = take_out
    dealer.send([b"who is to stop?"])
    await asyncio.sleep(0.1)
    front.meddler.meddling = nothing
    dealer.send([b"stop"])
    assert await until(dealer, ConnectionEvent.CONNECTED) == [ConnectionEvent.LOST]
    dealer.send([b"heard"])
    await front.hears(b"heard")


async def test_a_message_that_is_repeated_is_heard_once(front: Front, dealer: DealerChannel) -> None:
    assert await until(dealer, ConnectionEvent.CONNECTED) == []

    def repeat(end: str, _number: int, frame: bytes) -> bytes:
        return frame + frame if end == "knocks" and not is_handshake(frame) else frame

    front.meddler.meddling = repeat
    dealer.send([b"once"])
    assert await front.heard() == MessageReceived(b"me", [memoryview(b"once")], ME.public)
    assert isinstance(await front.heard(), LimitExceeded)
    front.meddler.meddling = nothing
    assert await until(dealer, ConnectionEvent.CONNECTED) == [ConnectionEvent.LOST]


async def test_a_door_with_another_key_learns_nothing(context: Context) -> None:
    """Somebody who listens in the door's place, with a lock of its own that opens for everybody."""
    thief = RouterChannel([BindAddress(HOST, AuthPolicy(THEIRS, lambda _: True))], 0, LIMIT)
    dealer = DealerChannel(context, with_key(thief.endpoint, DOOR.public.encode()), b"me", LIMIT, ME)
    give_up_at = monotonic() + 1.0
    while monotonic() < give_up_at:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                assert await anext(dealer) in (ConnectionEvent.LOST, ConnectionEvent.HANDSHAKE_FAILED)
        dealer.send([b"secret"])
    assert list(thief.pending_events()) == []
    dealer.close()
    thief.close()


async def test_a_forged_refusal_ends_no_edge(context: Context) -> None:
    """A stage knocks at the next one's door until that hears it, whatever somebody between them says."""
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, ME.public.__eq__, reject_explicitly=False))
    meddler = Meddler(pull.endpoint)
    place = with_key(await meddler.listen(), DOOR.public.encode())
    for at in (0, 1):
        meddler.meddling = lambda end, number, frame, at=at: (  # type: ignore[misc]
            FORGED_ERROR if end == "listens" and number == at else frame
        )
        push = PushChannel(place, pair=ME)
        seen = meddler.num_connections

        def step(push: PushChannel = push) -> bool:
            return pull.wait(0.01) or push.send([b"step"])

        while meddler.num_connections < seen + 3:
            assert not await asyncio.to_thread(step)
        meddler.meddling = nothing
        while not await asyncio.to_thread(step):
            pass
        while not await asyncio.to_thread(pull.wait, 0.05):
            pass
        assert [bytes(frame) for frame in pull.receive() or []] == [b"step"]
        push.close()
    pull.close()
    await meddler.close()


async def test_answers_are_whole_though_messages_to_the_client_are_taken_out(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """libzmq, which clients read with, does not miss one. The client does: it asks again for what it lacks."""
    num_seen = 0

    def take_out(end: str, _number: int, frame: bytes) -> bytes:
        nonlocal num_seen
        if end == "knocks" or is_handshake(frame):
            return frame
        num_seen += 1
        return b"" if num_seen % 5 == 0 else frame

    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        meddler = Meddler(swarm.url)
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
            expected = await client.generate([5, 6, 7], max_tokens=40, ignore_eos=True, temperature=0.0)
        async with AsyncClient(await meddler.listen(), connect_timeout_s=60.0) as client:
            meddler.meddling = take_out
            for _ in range(6):
                done = await client.generate([5, 6, 7], max_tokens=40, ignore_eos=True, temperature=0.0, timeout=60.0)
                assert done.tokens == expected.tokens
        await meddler.close()
    assert num_seen > 30
