"""Requests that are not the caller's own: detached ones, and those that another process made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.events import (
    AskQuestion,
    CancelForeignRequest,
    ConfirmStored,
    Connected,
    Consumed,
    Deliver,
    Disconnected,
    EndContinuation,
    FailRequest,
    LeaveRequest,
    Received,
    ReturnAnswer,
    Send,
    SessionEvent,
    SessionTick,
    StartRequest,
    StopFound,
)
from swarm.client.session import Session
from swarm.errors import InvalidRequest, ReadElsewhere, RequestCancelled
from swarm.params import SamplingParams
from swarm.wire.messages import (
    Accepted,
    Attach,
    Cancel,
    Detach,
    Finished,
    GetRequest,
    LookUp,
    Malformed,
    Rejected,
    Report,
    RequestDetails,
    Submit,
    Timing,
    Tokens,
    TokensSnapshot,
)


def test_a_detached_request_says_when_it_is_taken() -> None:
    """Its caller may go then; leaving it is no cancellation."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("d", detached=True)
    assert session.handle(StartRequest(of), 0.0) == [Send(of)]
    assert session.handle(Received(Accepted(request_id="d")), 0.1) == [ConfirmStored("d")]
    assert session.handle(Received(Accepted(request_id="d")), 0.2) == []
    assert session.handle(LeaveRequest("d"), 0.3) == [Send(Detach(request_id="d"))]
    assert session.is_idle


def test_leaving_can_cancel_all_the_same() -> None:
    """If the caller says so."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(StartRequest(submit_of("d", detached=True)), 0.0)
    assert session.handle(LeaveRequest("d", cancel=True), 0.1) == [Send(Cancel(request_id="d", if_reader=True))]


def test_an_attached_request_is_read_and_let_go_of() -> None:
    """It is never submitted: another process did that; after a reconnect it goes on where it was."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("a")
    assert session.handle(StartRequest(of, attached=True), 0.0) == [Send(Attach(request_id="a", next_index=(0,)))]
    session.handle(Received(Tokens(request_id="a", index=0, start=0, ids=(5, 6))), 0.1)
    session.handle(Disconnected(), 0.2)
    assert session.handle(Connected(), 0.3) == [Send(Attach(request_id="a", next_index=(2,), again=True))]
    assert session.handle(LeaveRequest("a"), 0.4) == [Send(Detach(request_id="a"))]


def test_a_request_that_cannot_be_read_now_is_asked_for_later() -> None:
    """The broker has it, and says when to come back; an unknown one is a failure."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(StartRequest(submit_of("a"), attached=True), 0.0)
    busy = Rejected(request_id="a", code="overloaded", reason="busy", retry_after_s=1.0)
    assert session.handle(Received(busy), 0.1) == []
    assert session.handle(SessionTick(), 1.0) == []
    assert session.handle(SessionTick(), 1.2) == [Send(Attach(request_id="a", next_index=(0,)))]
    gone = Rejected(request_id="a", code="unknown", reason="never heard of it")
    (failed,) = session.handle(Received(gone), 1.3)
    assert isinstance(failed, FailRequest)


def test_a_time_limit_passes_while_it_cannot_be_read() -> None:
    """The caller hears why. Once it can be read again that is forgotten."""
    full = Rejected(request_id="a", code="journal", reason="the disk is full", retry_after_s=5.0)
    some = Tokens(request_id="a", index=0, start=0, ids=(5,))
    for came, reason in (((full,), "1 s: the disk is full"), ((full, some), "time limit of 1 s")):
        session = Session("tcp://here")
        session.handle(Connected(), 0.0)
        session.handle(StartRequest(submit_of("a"), attached=True, timeout_s=1.0), 0.0)
        for message in came:
            session.handle(Received(message), 0.1)
        failed, *_ = session.handle(SessionTick(), 1.0)
        assert isinstance(failed, FailRequest)
        assert str(failed.error).endswith(reason)


def test_another_reader_comes() -> None:
    """The caller is told, and nothing is said about the request any more. Whoever only had it taken has that."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    told = Rejected(request_id="d", code="superseded", reason="another client reads it")
    for accepted in (True, False):
        session.handle(StartRequest(submit_of("d", detached=True)), 0.0)
        if accepted:
            session.handle(Received(Accepted(request_id="d")), 0.1)
        *taken, failed = session.handle(Received(told), 0.2)
        assert taken == ([] if accepted else [ConfirmStored("d")])
        assert isinstance(failed, FailRequest)
        assert isinstance(failed.error, ReadElsewhere)
        assert session.is_idle


def test_ending_what_is_read_elsewhere() -> None:
    """It is not attached to for that; the Cancel is said again after a reconnect, until it is confirmed. Others may
    wish it, too."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    cancel = Send(Cancel(request_id="a"))
    assert session.handle(CancelForeignRequest(submit_of("a")), 0.0) == [cancel]
    assert session.handle(CancelForeignRequest(submit_of("a")), 0.0) == []
    session.handle(Disconnected(), 0.1)
    assert session.handle(Connected(), 0.2) == [cancel]
    session.handle(Received(end_of("a", 0, "cancelled")), 0.3)
    assert session.is_idle


def test_what_is_read_here_is_not_ended_as_somebody_else_s() -> None:
    """Its reader cancels it."""
    session = Session("tcp://here")
    session.handle(StartRequest(submit_of("a")), 0.0)
    with pytest.raises(InvalidRequest, match="in use"):
        session.handle(CancelForeignRequest(submit_of("a")), 0.0)


def test_recalling_is_a_question() -> None:
    """Answered by what was asked for, or by why that is not known; answers about others are not taken."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(AskQuestion(1, GetRequest(request_id="a"), 10.0), 0.0)
    session.handle(AskQuestion(2, GetRequest(request_id="b"), 10.0), 0.0)
    found = RequestDetails(submit=submit_of("b"))
    assert session.handle(Received(found), 0.1) == [ReturnAnswer(2, found)]
    missing = Report(what="recall", ok=False, body={"request_id": "a", "error": "unknown"})
    assert session.handle(Received(missing), 0.1) == [ReturnAnswer(1, missing)]


def submit_of(request_id: str, *, detached: bool = False, keep_s: float = 0.0, n: int = 1) -> Submit:
    params = SamplingParams(n=n)
    return Submit(request_id=request_id, prompt=(1,), params=params, seed=1, detached=detached, keep_s=keep_s)


def test_equal_look_ups_get_an_answer_each() -> None:
    """By their numbers, in any order; a refusal is one. Asked again after a reconnect, they keep them."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    for number in (1, 2, 3):
        session.handle(AskQuestion(number, LookUp(question=number, request_id="r"), 9.0), 0.0)
    refused = Report(
        what="look_up", ok=False, body={"question": 2, "request_id": "r", "error": "no", "code": "unknown"}
    )
    assert session.handle(Received(refused), 0.1) == [ReturnAnswer(2, refused)]
    session.handle(Disconnected(), 0.2)
    again = [LookUp(question=number, request_id="r") for number in (1, 3)]
    assert session.handle(Connected(), 0.3) == [Send(message) for message in again]
    for number in (3, 1):
        page = TokensSnapshot(question=number, request_id="r", index=0, start=0, ids=(), num_tokens=0)
        assert session.handle(Received(page), 0.4) == [ReturnAnswer(number, page)]
        assert session.handle(Received(page), 0.4) == []
    assert session.is_idle


@pytest.mark.parametrize("found", [True, False])
def test_one_recall_answers_all_who_ask_for_the_same(found: bool) -> None:
    """A broker of a former version says it once, for equal questions."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    for key, name in enumerate(("r", "s", "r")):
        session.handle(AskQuestion(key, GetRequest(request_id=name), 9.0), 0.0)
    refused = Report(what="recall", ok=False, body={"request_id": "r", "error": "no"})
    told = RequestDetails(submit=submit_of("r")) if found else refused
    assert session.handle(Received(told), 0.1) == [ReturnAnswer(0, told), ReturnAnswer(2, told)]
    assert not session.is_idle


def test_what_is_to_be_kept_is_let_go_of() -> None:
    """Whoever asked for that leaves the rest to the broker."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    session.handle(StartRequest(submit_of("k", keep_s=5.0)), 0.0)
    session.handle(Received(Accepted(request_id="k")), 0.1)
    assert session.handle(LeaveRequest("k"), 0.2) == [Send(Detach(request_id="k"))]
    assert session.is_idle


@pytest.mark.parametrize("attached", [True, False])
def test_a_bad_end_of_what_outlives_its_reader(attached: bool) -> None:
    """The others go on for whoever reads them next; with the last of them it is forgotten, whichever was bad."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    for ends in (("failed", "length"), ("length", "failed")):
        session.handle(StartRequest(submit_of("d", detached=True, n=2), attached=attached), 0.0)
        session.handle(Received(Accepted(request_id="d")), 0.0)
        actions = [a for i, reason in enumerate(ends) for a in session.handle(Received(end_of("d", i, reason)), 0.1)]
        (failed,) = [action for action in actions if isinstance(action, FailRequest)]
        assert failed.request_id == "d"
        said = [action.message for action in actions if isinstance(action, Send)]
        assert (Detach(request_id="d") in said) == (ends[0] == "failed")
        assert Cancel(request_id="d", if_reader=True) not in said
        assert session.is_idle


REASONS = st.sampled_from(["stop", "length", "cancelled", "failed"])
EVENTS = ["up", "down", "tokens", "accepted", "rejected", "malformed", "take", "stop", "leave", "cancel", "tick"]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nothing_that_comes_breaks_a_session(data: st.DataObject) -> None:
    """Requests of all kinds, with several continuations, and a broker that says anything at any time: a request fails
    once at most, nothing is told behind its end, and in the end nothing is left of it."""
    session, now, over = Session("tcp://here"), 0.0, set[str]()

    def do(event: SessionEvent) -> None:
        for action in session.handle(event, now):
            if isinstance(action, FailRequest | Deliver | EndContinuation):
                assert action.request_id not in over
            if isinstance(action, FailRequest):
                over.add(action.request_id)
        assert list(session.invariants()) == []

    kinds = data.draw(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=2))
    for number, (n, detached, attached) in enumerate(kinds):
        do(StartRequest(submit_of(f"r{number}", detached=detached, n=n), attached=attached))
    for kind in data.draw(st.lists(st.sampled_from(EVENTS + ["end"] * 6), max_size=40)):
        name, index = f"r{data.draw(st.integers(0, len(kinds) - 1))}", data.draw(st.integers(0, 2))
        now += 0.1
        if kind in ("leave", "cancel"):
            over.add(name)  # nobody listens any more
            do(LeaveRequest(name, cancel=kind == "cancel"))
        elif kind in ("take", "stop"):
            _take(session, name, index, do, stop=kind == "stop")
        else:
            do(_event(data, kind, name, index))
    for number in range(len(kinds)):
        session.handle(LeaveRequest(f"r{number}"), now)
    do(Connected())
    for _ in range(80):
        now += 0.5
        do(SessionTick())
    assert session.is_idle


def _event(data: st.DataObject, kind: str, name: str, index: int) -> SessionEvent:
    number, again = data.draw(st.sampled_from([0, 0, 1, 2, 8])), data.draw(st.sampled_from([None, 1.0]))
    said = {
        "tokens": Tokens(request_id=name, index=index, start=number, ids=(1, 2)),
        "end": end_of(name, index, data.draw(REASONS), number),
        "accepted": Accepted(request_id=name),
        "rejected": Rejected(request_id=name, code="unknown", reason="?", retry_after_s=again),
        "malformed": Malformed(reason="?"),
    }
    others: dict[str, SessionEvent] = {"up": Connected(), "down": Disconnected(), "tick": SessionTick()}
    return others.get(kind) or Received(said[kind])


def _take(session: Session, name: str, index: int, do: Callable[[SessionEvent], None], *, stop: bool) -> None:
    """The caller takes all that was delivered, and may find a stop string in it."""
    request = session._requests.get(name)
    if request is None or request.has_left or index >= len(request.continuations):
        return
    expected = request.continuations[index].expected
    if stop and expected:
        do(StopFound(name, index, expected - 1))
    do(Consumed(name, index, expected))


def end_of(request_id: str, index: int, reason: str, num_tokens: int = 0) -> Finished:
    return Finished(
        request_id=request_id,
        index=index,
        reason=reason,  # type: ignore[arg-type]
        num_prompt=1,
        num_tokens=num_tokens,
        timing=Timing(0.0, 0.0, 0.0, 0),
    )


# --- a later reader in the same client -------------------------------------------------------------------------------


def test_a_later_reader_in_the_same_client_has_the_request_from_then_on() -> None:
    """As between clients: the one before it is told, and the request goes on; leaving it then cancels nothing."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("r")
    session.handle(StartRequest(of), 0.0)
    session.handle(Received(Tokens(request_id="r", index=0, start=0, ids=(5, 6))), 0.1)
    told, attach = session.handle(StartRequest(of, attached=True), 0.2)
    assert isinstance(told, FailRequest)
    assert isinstance(told.error, ReadElsewhere)
    assert attach == Send(Attach(request_id="r", next_index=(0,), again=False))
    [again] = session.handle(Received(Tokens(request_id="r", index=0, start=0, ids=(5, 6))), 0.3)
    assert again == Deliver("r", 0, 0, (5, 6), (), ())
    assert session.handle(LeaveRequest("r"), 0.4) == [Send(Detach(request_id="r"))]
    assert session.is_idle


def test_a_request_can_be_made_once_and_not_read_once_it_is_cancelled() -> None:
    """A second submission of its name is a mistake; a cancelled request has nothing to be read."""
    session = Session("tcp://here")
    session.handle(Connected(), 0.0)
    of = submit_of("r")
    session.handle(StartRequest(of), 0.0)
    with pytest.raises(InvalidRequest):
        session.handle(StartRequest(of), 0.1)
    session.handle(Received(Accepted(request_id="r")), 0.1)
    session.handle(LeaveRequest("r"), 0.2)
    with pytest.raises(RequestCancelled):
        session.handle(StartRequest(of, attached=True), 0.3)
