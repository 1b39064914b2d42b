"""The link by itself: nobody waits for one that is over. Nothing listens at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from swarm.auth import memberships
from swarm.auth.invitation import Invitation
from swarm.auth.rotation import CredentialStore
from swarm.client import broker_connection as links
from swarm.client.broker_connection import BrokerConnection, Mailbox
from swarm.client.events import (
    AskQuestion,
    Connected,
    FailRequest,
    Received,
    SessionAction,
    SessionEvent,
    SessionTick,
    StartRequest,
)
from swarm.client.session import Session
from swarm.errors import InvalidRequest, Unavailable
from swarm.params import SamplingParams
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.dealer import ConnectionEvent as ChannelLink
from swarm.wire.dealer import DealerChannel
from swarm.wire.messages import (
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Describe,
    Enrolled,
    Malformed,
    Query,
    Report,
    Rotate,
    RotateKey,
    ServerMessage,
    Submit,
)
from swarm.wire.transport.keys import new_pair
from tests.unit.growing import Growing

NOBODY = "tcp://127.0.0.1:9"


class Breaking(Session):
    """One with a bug."""

    def handle(self, event: SessionEvent, now: float) -> list[SessionAction]:
        if isinstance(event, SessionTick):
            raise KeyError("a bug")
        return Session.handle(self, event, now)


@pytest.fixture
async def link() -> AsyncIterator[BrokerConnection]:
    link = BrokerConnection(Breaking(NOBODY))
    yield link
    await link.aclose()


def submit(request_id: str) -> Submit:
    return Submit(request_id=request_id, prompt=(1,), params=SamplingParams(), seed=1)


async def test_a_broken_link_fails_everybody_at_once(link: BrokerConnection) -> None:
    """Requests and questions under way, and whatever is asked of it later; in words that name what broke it."""
    mailbox = Mailbox()
    link.start(StartRequest(submit("a")), mailbox)
    with pytest.raises(Unavailable, match=r"this client has broken \(KeyError: 'a bug'\): make a new one"):
        await asyncio.wait_for(link.ask(AskQuestion(1, Describe(), 60.0)), 2.0)
    news = await asyncio.wait_for(mailbox.get(), 2.0)
    assert isinstance(news, FailRequest)
    assert isinstance(news.error, Unavailable)
    with pytest.raises(Unavailable, match="has broken"):
        link.start(StartRequest(submit("b")), Mailbox())
    with pytest.raises(Unavailable, match="has broken"):
        await link.ask(AskQuestion(2, Describe(), 60.0))
    link.leave("a")  # no error: there is nothing left to be left


async def test_a_closed_link_refuses(link: BrokerConnection) -> None:
    """The same for one that its owner has closed."""
    await link.aclose()
    with pytest.raises(Unavailable, match="is closed"):
        link.start(StartRequest(submit("a")), Mailbox())
    with pytest.raises(Unavailable, match="is closed"):
        await link.ask(AskQuestion(1, Describe(), 60.0))


class Listing(Session):
    """One that notes what it is told."""

    told: ClassVar[list[SessionEvent]] = []

    def handle(self, event: SessionEvent, now: float) -> list[SessionAction]:
        self.told.append(event)
        return Session.handle(self, event, now)


async def test_what_has_come_is_read_before_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the broker's words may lie unread in the socket: nobody is judged before they are heard."""
    session = Listing(NOBODY)
    link = BrokerConnection(session)
    word = SERVER.encode(Malformed(reason="late"))
    monkeypatch.setattr(link._channel, "pending_events", lambda: iter([list(map(memoryview, word))]))
    with pytest.raises(InvalidRequest, match="late"):
        await link.ask(AskQuestion(1, Describe(), 60.0))
    kinds = [type(event) for event in session.told]
    assert kinds.index(Received) < (kinds.index(SessionTick) if SessionTick in kinds else len(kinds))
    await link.aclose()


async def test_what_cannot_be_encoded_is_refused_at_once() -> None:
    """Else it would come up when the connection stands, and end it for all who share it."""
    link = BrokerConnection(Session(NOBODY))
    with pytest.raises(InvalidRequest, match="can't be encoded"):
        link.start(StartRequest(submit("half a \ud83d pair")), Mailbox())
    with pytest.raises(InvalidRequest, match="can't be encoded"):
        await link.ask(AskQuestion(1, Query(what="trace", request_id="\ud83d"), 60.0))
    assert link.session.is_idle
    await link.aclose()


async def test_a_submission_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are long: what was encoded to see that it can be is what is sent."""
    link = BrokerConnection(Session(NOBODY))
    link.handle(Connected())
    encoded: list[ClientMessage] = []
    encode = CLIENT.encode
    monkeypatch.setattr(CLIENT, "encode", lambda message, **_: encoded.append(message) or encode(message))
    link.start(StartRequest(submit("a")), Mailbox())
    asking = asyncio.create_task(link.ask(AskQuestion(1, Query(what="status"), 60.0)))
    await asyncio.sleep(0)
    assert encoded == [submit("a"), Query(what="status")]
    assert list(link._outbox) == list(map(encode, encoded))
    asking.cancel()
    await link.aclose()


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[BrokerConnection, CredentialStore, Growing[object]]]:
    """A link of a machine that has joined, where its keys are kept, and what it says and does about its connection."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    invitation = Invitation((NOBODY,), "ab" * 32, new_pair().secret, "client")
    joined = memberships.add(tmp_path, invitation, new_pair(), (NOBODY,), Enrolled(name="me", role="client"))
    home, did = CredentialStore(tmp_path, joined), Growing[object]()
    monkeypatch.setattr(DealerChannel, "send", lambda _, frames: did.append(CLIENT.decode(frames)[0]) or True)
    monkeypatch.setattr(DealerChannel, "set_endpoint", lambda _, endpoint: did.append(endpoint))
    monkeypatch.setattr(DealerChannel, "reconnect", lambda _, pair: did.append(pair))
    link = BrokerConnection(Session(NOBODY), joined.endpoint, joined.pair, home)
    yield link, home, did
    await link.aclose()


def tell(link: BrokerConnection, message: ServerMessage) -> None:
    link._on_socket_event([memoryview(frame) for frame in SERVER.encode(message)])


async def test_the_brokers_new_key_is_kept_before_it_is_said_to_be(
    member: tuple[BrokerConnection, CredentialStore, Growing[object]],
) -> None:
    """And is used at the next connection."""
    link, home, did = member
    tell(link, BrokerKey(key="cd" * 32))
    (kept,) = memberships.read_all(home.state_dir)
    assert kept.broker == "cd" * 32
    assert did == [kept.endpoint, BrokerKeyKept(key="cd" * 32)]


async def test_what_cant_be_kept_is_not_said_to_be(
    member: tuple[BrokerConnection, CredentialStore, Growing[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the broker would do without the old key, and this machine would be shut out after its next start."""
    link, home, did = member
    (file,) = (tmp_path / "joined").iterdir()
    file.rename(tmp_path / memberships.CREDENTIAL)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    tell(link, BrokerKey(key="cd" * 32))
    assert did == []
    assert memberships.read_all(home.state_dir) == [home.membership]


async def test_who_is_not_heard_looks_at_what_others_of_its_machine_were_told(
    member: tuple[BrokerConnection, CredentialStore, Growing[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And knocks with that; where nothing has changed it goes on as before."""
    link, home, did = member
    monkeypatch.setattr(links, "_KEYS_CHECK_S", 0.0)
    link._on_socket_event(ChannelLink.HANDSHAKE_FAILED)
    assert did == []
    kept = CredentialStore(home.state_dir, home.membership).set_broker_key("cd" * 32)
    link._on_socket_event(ChannelLink.HANDSHAKE_FAILED)
    assert did == [kept.endpoint, kept.pair]


async def test_who_is_told_to_change_its_key_does(
    member: tuple[BrokerConnection, CredentialStore, Growing[object]],
) -> None:
    """It announces one, puts it in the old one's place when that is known, and knocks with it."""
    link, home, did = member
    link.handle(Connected())
    tell(link, RotateKey())
    tell(link, RotateKey())  # said again
    await did.has(1)
    (announced,) = did
    assert isinstance(announced, Rotate)
    assert home.newer() is None
    tell(link, Report(what="rotate", ok=True, body={}))
    await did.has(3)
    (kept,) = memberships.read_all(home.state_dir)
    assert kept.pair.public == announced.key
    assert did[1:] == [kept.endpoint, kept.pair]
