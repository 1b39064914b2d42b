"""Requests that are not the caller's own: detached ones, and those that another process made."""

from __future__ import annotations

from swarm.client.events import (
    Answered,
    Ask,
    Connected,
    Disconnected,
    Failed,
    Leave,
    Received,
    Send,
    Start,
    Taken,
    Tick,
)
from swarm.client.session import Session
from swarm.params import SamplingParams
from swarm.wire.messages import (
    Accepted,
    Attach,
    Cancel,
    Detach,
    Recall,
    Recalled,
    Rejected,
    Report,
    Submit,
    Tokens,
)


def test_a_detached_request_says_when_it_is_taken() -> None:
    """Its caller may go then; leaving it is no cancellation."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("d", detached=True)
    assert session.handle(Start(of), 0.0) == [Send(of)]
    assert session.handle(Received(Accepted(request_id="d")), 0.1) == [Taken("d")]
    assert session.handle(Received(Accepted(request_id="d")), 0.2) == []
    assert session.handle(Leave("d"), 0.3) == [Send(Detach(request_id="d"))]
    assert session.idle


def test_leaving_can_cancel_all_the_same() -> None:
    """If the caller says so."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(Start(submit_of("d", detached=True)), 0.0)
    assert session.handle(Leave("d", cancel=True), 0.1) == [Send(Cancel(request_id="d"))]


def test_an_attached_request_is_read_and_let_go_of() -> None:
    """It is never submitted: another process did that; after a reconnect it goes on where it was."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("a")
    assert session.handle(Start(of, attached=True), 0.0) == [Send(Attach(request_id="a", next_index=(0,)))]
    session.handle(Received(Tokens(request_id="a", index=0, start=0, ids=(5, 6))), 0.1)
    session.handle(Disconnected(), 0.2)
    assert session.handle(Connected(), 0.3) == [Send(Attach(request_id="a", next_index=(2,)))]
    assert session.handle(Leave("a"), 0.4) == [Send(Detach(request_id="a"))]


def test_a_request_that_cannot_be_read_now_is_asked_for_later() -> None:
    """The broker has it, and says when to come back; an unknown one is a failure."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(Start(submit_of("a"), attached=True), 0.0)
    busy = Rejected(request_id="a", code="overloaded", reason="busy", retry_after_s=1.0)
    assert session.handle(Received(busy), 0.1) == []
    assert session.handle(Tick(), 1.0) == []
    assert session.handle(Tick(), 1.2) == [Send(Attach(request_id="a", next_index=(0,)))]
    gone = Rejected(request_id="a", code="unknown", reason="never heard of it")
    (failed,) = session.handle(Received(gone), 1.3)
    assert isinstance(failed, Failed)


def test_recalling_is_a_question() -> None:
    """Answered by what was asked for, or by why that is not known; answers about others are not taken."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(Ask(1, Recall(request_id="a"), 10.0), 0.0)
    session.handle(Ask(2, Recall(request_id="b"), 10.0), 0.0)
    found = Recalled(submit=submit_of("b"))
    assert session.handle(Received(found), 0.1) == [Answered(2, found)]
    missing = Report(what="recall", ok=False, body={"request_id": "a", "error": "unknown"})
    assert session.handle(Received(missing), 0.1) == [Answered(1, missing)]


def submit_of(request_id: str, *, detached: bool = False) -> Submit:
    return Submit(request_id=request_id, prompt=(1,), params=SamplingParams(), seed=1, detached=detached)
