"""The link by itself: nobody waits for one that is over. Nothing listens at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from swarm.client.events import Action, Ask, Connected, Event, Failed, Received, Start, Tick
from swarm.client.link import Link, Mailbox
from swarm.client.session import Session
from swarm.errors import InvalidRequest, Unavailable
from swarm.params import SamplingParams
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.messages import ClientMessage, Describe, Malformed, Query, Submit

NOBODY = "tcp://127.0.0.1:9"


class Breaking(Session):
    """One with a bug."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Tick):
            raise KeyError("a bug")
        return Session.handle(self, event, now)


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    link = Link(Breaking(NOBODY))
    yield link
    await link.aclose()


def submit(request_id: str) -> Submit:
    return Submit(request_id=request_id, prompt=(1,), params=SamplingParams(), seed=1)


async def test_a_broken_link_fails_everybody_at_once(link: Link) -> None:
    """Requests and questions under way, and whatever is asked of it later; in words that name what broke it."""
    mailbox = Mailbox()
    link.start(Start(submit("a")), mailbox)
    with pytest.raises(Unavailable, match=r"this client has broken \(KeyError: 'a bug'\): make a new one"):
        await asyncio.wait_for(link.ask(Ask(1, Describe(), 60.0)), 2.0)
    news = await asyncio.wait_for(mailbox.get(), 2.0)
    assert isinstance(news, Failed)
    assert isinstance(news.error, Unavailable)
    with pytest.raises(Unavailable, match="has broken"):
        link.start(Start(submit("b")), Mailbox())
    with pytest.raises(Unavailable, match="has broken"):
        await link.ask(Ask(2, Describe(), 60.0))
    link.leave("a")  # no error: there is nothing left to be left


async def test_a_closed_link_refuses(link: Link) -> None:
    """The same for one that its owner has closed."""
    await link.aclose()
    with pytest.raises(Unavailable, match="is closed"):
        link.start(Start(submit("a")), Mailbox())
    with pytest.raises(Unavailable, match="is closed"):
        await link.ask(Ask(1, Describe(), 60.0))


class Listing(Session):
    """One that notes what it is told."""

    told: ClassVar[list[Event]] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.told.append(event)
        return Session.handle(self, event, now)


async def test_what_has_come_is_read_before_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the broker's words may lie unread in the socket: nobody is judged before they are heard."""
    session = Listing(NOBODY)
    link = Link(session)
    word = SERVER.encode(Malformed(reason="late"))
    monkeypatch.setattr(link._channel, "waiting", lambda: iter([list(map(memoryview, word))]))
    with pytest.raises(InvalidRequest, match="late"):
        await link.ask(Ask(1, Describe(), 60.0))
    kinds = [type(event) for event in session.told]
    assert kinds.index(Received) < (kinds.index(Tick) if Tick in kinds else len(kinds))
    await link.aclose()


async def test_what_cannot_be_encoded_is_refused_at_once() -> None:
    """Else it would come up when the connection stands, and end it for all who share it."""
    link = Link(Session(NOBODY))
    with pytest.raises(InvalidRequest, match="can't be encoded"):
        link.start(Start(submit("half a \ud83d pair")), Mailbox())
    with pytest.raises(InvalidRequest, match="can't be encoded"):
        await link.ask(Ask(1, Query(what="trace", request_id="\ud83d"), 60.0))
    assert link.session.idle
    await link.aclose()


async def test_a_submission_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are long: what was encoded to see that it can be is what is sent."""
    link = Link(Session(NOBODY))
    link.do(Connected())
    encoded: list[ClientMessage] = []
    encode = CLIENT.encode
    monkeypatch.setattr(CLIENT, "encode", lambda message: encoded.append(message) or encode(message))
    link.start(Start(submit("a")), Mailbox())
    asking = asyncio.create_task(link.ask(Ask(1, Query(what="status"), 60.0)))
    await asyncio.sleep(0)
    assert encoded == [submit("a"), Query(what="status")]
    assert list(link._outbox) == list(map(encode, encoded))
    asking.cancel()
    await link.aclose()
