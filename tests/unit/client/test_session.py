"""The session by itself: facts in, orders out, no time but what the test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.active_requests import ACK_EVERY, MAX_UNCONSUMED, NUDGE_S
from swarm.client.connection_state import QUIET_S
from swarm.client.events import (
    AbandonQuestion,
    AskQuestion,
    Connected,
    Consumed,
    Deliver,
    Disconnected,
    EndContinuation,
    FailRequest,
    HandshakeFailed,
    IncompatibleBroker,
    LeaveRequest,
    Received,
    ReturnAnswer,
    ReturnError,
    Send,
    SessionAction,
    SessionEvent,
    SessionTick,
    StartRequest,
    StopFound,
    TcpConnected,
    UndecodableMessage,
)
from swarm.client.questions import ABANDONED_S
from swarm.client.session import CONFIRM_CANCEL_S, Session
from swarm.errors import (
    ClientError,
    InvalidRequest,
    JournalDown,
    Overloaded,
    ReadElsewhere,
    RequestCancelled,
    RequestFailed,
    RequestTimeout,
    Unavailable,
)
from swarm.params import SamplingParams
from swarm.wire.messages import (
    Accepted,
    Ack,
    Attach,
    Cancel,
    Describe,
    Description,
    Finished,
    GetAsset,
    Malformed,
    PlanWhatIf,
    Query,
    Rejected,
    Report,
    Stop,
    Submit,
    Timing,
    Tokens,
)

URL = "tcp://host:5700"
TICK_S = 0.1
TIMING = Timing(0.0, 0.1, 0.2, 0)


class Driver:
    """A session, its clock, and shorthands."""

    def __init__(self) -> None:
        self.session = Session(URL, connect_timeout_s=5.0, reconnect_timeout_s=30.0)
        self.now = 100.0

    def do(self, event: SessionEvent) -> list[SessionAction]:
        actions = self.session.handle(event, self.now)
        assert list(self.session.invariants()) == []
        return actions

    def get(self, message: object) -> list[SessionAction]:
        return self.do(Received(message))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> list[SessionAction]:
        """As the shell does: with a tick every so often."""
        actions, until = [], self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + TICK_S)
            actions += self.do(SessionTick())
        return actions + self.do(SessionTick())

    def pause(self, seconds: float) -> list[SessionAction]:
        """This process stands still."""
        self.now += seconds
        return self.do(SessionTick())

    def submitted(self, n: int = 1, timeout_s: float | None = None, request_id: str = "r") -> Submit:
        """Connected, one request on its way."""
        message = submit(n, request_id)
        self.do(Connected())
        assert self.do(StartRequest(message, timeout_s)) == [Send(message)]
        return message

    def running(self, n: int = 1, timeout_s: float | None = None) -> Submit:
        """Connected, one request accepted."""
        message = self.submitted(n, timeout_s)
        assert self.get(Accepted(request_id="r")) == []
        return message


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert list(driver.session.invariants()) == []


@pytest.fixture
def patient(driver: Driver) -> Driver:
    """With the usual limits."""
    driver.session = Session(URL)
    return driver


def submit(n: int = 1, request_id: str = "r") -> Submit:
    return Submit(request_id=request_id, prompt=(1, 2), params=SamplingParams(n=n), seed=5)


def tokens(start: int, count: int, index: int = 0) -> Tokens:
    return Tokens(request_id="r", index=index, start=start, ids=tuple(range(start, start + count)))


def deliver(start: int, count: int, index: int = 0) -> Deliver:
    return Deliver("r", index, start, tuple(range(start, start + count)), (), ())


def finished(num_tokens: int, index: int = 0, reason: str = "length", detail: str = "") -> Finished:
    return Finished(
        request_id="r",
        index=index,
        reason=reason,  # type: ignore[arg-type]
        num_prompt=2,
        num_tokens=num_tokens,
        timing=TIMING,
        detail=detail,
    )


def ack(next_index: int, index: int = 0) -> Send:
    return Send(Ack(request_id="r", index=index, next_index=next_index))


def attach(*next_index: int) -> Send:
    """Of one that the broker knows as the reader."""
    return Send(Attach(request_id="r", next_index=next_index, again=True))


def errors(actions: list[SessionAction]) -> list[ClientError]:
    return [action.error for action in actions if isinstance(action, FailRequest | ReturnError)]


# --- the straight way -------------------------------------------------------------------------------------------------


def test_a_request_from_start_to_end(driver: Driver) -> None:
    """Tokens in order, the end behind the last one, the last acknowledgement behind both; then it is forgotten."""
    driver.running()
    assert driver.get(tokens(0, 2)) == [deliver(0, 2)]
    assert driver.do(Consumed("r", 0, 2)) == []
    assert driver.get(tokens(2, 1)) == [deliver(2, 1)]
    assert driver.get(finished(3)) == [EndContinuation("r", 0, finished(3))]
    assert driver.do(Consumed("r", 0, 3)) == [ack(3)]
    assert driver.session.is_idle


def test_acknowledgements_follow_the_consumer(driver: Driver) -> None:
    """One per ACK_EVERY tokens taken, without the newest one; none for tokens that have only arrived."""
    driver.running()
    assert driver.get(tokens(0, 100)) == [deliver(0, 100)]
    assert driver.do(Consumed("r", 0, ACK_EVERY)) == []
    assert driver.do(Consumed("r", 0, ACK_EVERY + 1)) == [ack(ACK_EVERY)]
    assert driver.do(Consumed("r", 0, 2 * ACK_EVERY)) == []
    assert driver.do(Consumed("r", 0, 90)) == [ack(89)]
    assert driver.do(Consumed("r", 0, 100)) == []
    assert driver.get(finished(100)) == [EndContinuation("r", 0, finished(100)), ack(100)]


def test_the_last_token_is_acknowledged_with_the_end_only(driver: Driver) -> None:
    """The broker forgets a request once all its tokens are acknowledged, and the message of its end may be lost."""
    driver.running()
    driver.get(tokens(0, ACK_EVERY + 1))
    assert driver.do(Consumed("r", 0, ACK_EVERY + 1)) == [ack(ACK_EVERY)]
    assert driver.get(finished(ACK_EVERY + 1)) == [
        EndContinuation("r", 0, finished(ACK_EVERY + 1)),
        ack(ACK_EVERY + 1),
    ]
    assert driver.session.is_idle


def test_continuations_end_one_by_one(driver: Driver) -> None:
    """Each has its own positions and its own end; the request ends with the last of them."""
    driver.running(n=2)
    driver.get(tokens(0, 1, index=1))
    assert driver.get(finished(1, index=1)) == [EndContinuation("r", 1, finished(1, index=1))]
    assert driver.do(Consumed("r", 1, 1)) == [ack(1, index=1)]
    assert not driver.session.is_idle
    driver.get(tokens(0, 1))
    driver.get(finished(1))
    assert driver.do(Consumed("r", 0, 1)) == [ack(1)]
    assert driver.session.is_idle


def test_a_request_that_ends_without_tokens(driver: Driver) -> None:
    """Its end is acknowledged all the same: the broker can forget it. Nothing is kept here."""
    driver.running()
    assert driver.get(finished(0, reason="stop")) == [EndContinuation("r", 0, finished(0, reason="stop")), ack(0)]
    assert driver.session.is_idle


# --- order ------------------------------------------------------------------------------------------------------------


def test_what_comes_twice_is_delivered_once(driver: Driver) -> None:
    """Old tokens are dropped, also those in front of new ones."""
    driver.running()
    driver.get(tokens(0, 3))
    assert driver.get(tokens(0, 3)) == []
    assert driver.get(tokens(1, 4)) == [deliver(3, 2)]
    assert driver.session.num_ignored == 1


def test_a_gap_is_asked_for_once(driver: Driver) -> None:
    """Tokens behind a gap are dropped; one Attach brings them and the missing ones."""
    driver.running()
    driver.get(tokens(0, 2))
    assert driver.get(tokens(3, 1)) == [attach(2)]
    assert driver.get(tokens(4, 1)) == []
    assert driver.get(tokens(2, 4)) == [deliver(2, 4)]
    assert driver.get(tokens(8, 1)) == [attach(6)]  # the next gap is asked for again


def test_an_end_that_comes_before_the_last_tokens(driver: Driver) -> None:
    """The missing tokens are fetched, and the end is told behind them; the end that comes again is ignored."""
    driver.running()
    driver.get(tokens(0, 2))
    driver.do(Consumed("r", 0, 2))
    assert driver.get(finished(4)) == [attach(2)]
    assert driver.get(tokens(2, 2)) == [deliver(2, 2), EndContinuation("r", 0, finished(4))]
    assert driver.get(finished(4)) == []


def test_an_end_before_the_last_tokens_while_the_caller_is_behind(driver: Driver) -> None:
    """They are fetched once it has taken what is there: not sooner, and not never."""
    driver.running()
    driver.get(tokens(0, 2))
    assert driver.get(finished(4)) == []
    assert driver.do(Consumed("r", 0, 1)) == []
    assert driver.do(Consumed("r", 0, 2)) == [attach(2)]
    assert driver.get(tokens(2, 2)) == [deliver(2, 2), EndContinuation("r", 0, finished(4))]


def test_a_flood_is_bounded(driver: Driver) -> None:
    """No more than MAX_UNCONSUMED tokens wait for their consumer; the rest is fetched when all are taken."""
    driver.running()
    flood = MAX_UNCONSUMED + 10
    assert driver.get(tokens(0, flood)) == [deliver(0, MAX_UNCONSUMED)]
    assert driver.get(tokens(flood, 1)) == []
    assert driver.do(Consumed("r", 0, 10)) == []
    assert driver.do(Consumed("r", 0, MAX_UNCONSUMED)) == [ack(MAX_UNCONSUMED - 1), attach(MAX_UNCONSUMED)]


def test_messages_about_others_are_ignored(driver: Driver) -> None:
    """Unknown requests, continuations that don't exist, orders to hosts."""
    driver.running()
    other = Tokens(request_id="other", index=0, start=0, ids=(1,))
    assert driver.get(other) == []
    assert driver.get(tokens(0, 1, index=1)) == []
    assert driver.session.num_ignored == 2


# --- stop, leave, time limits ----------------------------------------------------------------------------------------


def test_a_stop_string(driver: Driver) -> None:
    """The broker is told; fewer tokens than were delivered may then be the end."""
    driver.running()
    driver.get(tokens(0, 5))
    driver.do(Consumed("r", 0, 5))
    stop = Send(Stop(request_id="r", index=0, at_index=3))
    assert driver.do(StopFound("r", 0, 3)) == [stop]
    assert driver.get(finished(3, reason="stop")) == [EndContinuation("r", 0, finished(3, reason="stop")), ack(5)]
    assert driver.do(StopFound("r", 0, 3)) == []


def test_leaving_cancels_until_the_broker_confirms(driver: Driver) -> None:
    """What still comes is acknowledged, so that the end can come, but delivered no more."""
    driver.running()
    assert driver.do(LeaveRequest("r")) == [Send(Cancel(request_id="r", if_reader=True))]
    assert driver.get(tokens(0, 4)) == [ack(4)]
    assert driver.get(finished(4, reason="cancelled")) == [ack(4)]
    assert driver.session.is_idle
    assert driver.do(LeaveRequest("r")) == []


def test_leaving_before_anything_was_sent(driver: Driver) -> None:
    """Nothing to cancel."""
    assert driver.do(StartRequest(submit())) == []
    assert driver.do(LeaveRequest("r")) == []
    assert driver.do(Connected()) == []


def test_leaving_while_the_connection_is_gone(driver: Driver) -> None:
    """The Cancel is said when the broker is back."""
    driver.running()
    driver.do(Disconnected())
    assert driver.do(LeaveRequest("r")) == []
    assert driver.do(Connected()) == [Send(Cancel(request_id="r", if_reader=True))]
    assert driver.get(Rejected(request_id="r", code="unknown", reason="")) == []
    assert driver.session.is_idle


def test_leaving_what_has_ended(driver: Driver) -> None:
    """Tokens that nobody will read are acknowledged; there is nothing to cancel."""
    driver.running()
    driver.get(tokens(0, 3))
    driver.get(finished(3))
    assert driver.do(LeaveRequest("r")) == [ack(3)]
    assert driver.session.is_idle


def test_a_broker_that_never_confirms_is_not_waited_for(driver: Driver) -> None:
    """A left request is forgotten after a while."""
    driver.running()
    driver.do(LeaveRequest("r"))
    driver.wait(CONFIRM_CANCEL_S - 1)
    assert not driver.session.is_idle
    driver.wait(2)
    assert driver.session.is_idle


def test_a_time_limit(driver: Driver) -> None:
    """Kept to the moment; the broker hears of it. A request whose answer has come entirely has no limit any more."""
    driver.running(timeout_s=3.0)
    assert errors(driver.wait(2.9)) == []
    failed, cancel = driver.wait(0.2)
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, RequestTimeout)
    assert "3 s" in str(failed.error)
    assert cancel == Send(Cancel(request_id="r", if_reader=True))
    driver.get(finished(0, reason="cancelled"))
    driver.running(timeout_s=3.0)
    driver.get(tokens(0, 1))
    driver.get(finished(1))
    assert driver.wait(10) == []


# --- connections ------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_without_a_connection(driver: Driver) -> None:
    """It is sent when there is one."""
    assert driver.do(StartRequest(submit())) == []
    question = AskQuestion(1, Describe(), 10.0)
    assert driver.do(question) == []
    assert driver.do(Connected()) == [Send(submit()), Send(Describe())]


def test_a_reconnect_goes_on_where_it_was(driver: Driver) -> None:
    """Accepted requests are attached at the next expected tokens, others submitted again, found stops repeated."""
    driver.running(n=2)
    driver.get(tokens(0, 5, index=1))
    driver.do(Consumed("r", 1, 5))
    driver.do(StopFound("r", 1, 4))
    second = submit(request_id="r2")
    driver.do(StartRequest(second))
    driver.do(Disconnected())
    stop = Send(Stop(request_id="r", index=1, at_index=4))
    assert driver.do(Connected()) == [attach(0, 5), stop, Send(second)]


def test_what_has_ended_is_not_told_again(driver: Driver) -> None:
    """A new broker that knows nothing of it can't spoil an answer that has come entirely."""
    driver.running()
    driver.get(tokens(0, 3))
    driver.get(finished(3))
    driver.do(Disconnected())
    assert driver.do(Connected()) == []
    assert driver.get(Rejected(request_id="r", code="unknown", reason="")) == []
    assert driver.do(Consumed("r", 0, 3)) == [ack(3)]


def test_nobody_there(driver: Driver) -> None:
    """After connect_timeout_s from the request's start, with a hint."""
    driver.do(StartRequest(submit()))
    driver.do(AskQuestion(1, Describe(), 60.0))
    assert driver.wait(4.9) == []
    failed, unanswered = driver.wait(0.2)
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, Unavailable)
    assert str(failed.error) == f"no broker answers at {URL}: is `swarm up` running there?"
    assert isinstance(unanswered, ReturnError)
    assert driver.session.is_idle


def test_a_broker_that_stays_away(driver: Driver) -> None:
    """What was live waits for reconnect_timeout_s; what began meanwhile, only as long as for a first connection."""
    driver.running()
    driver.do(Disconnected())
    assert driver.wait(20) == []
    driver.do(AskQuestion(1, Describe(), 60.0))
    assert [type(action) for action in driver.wait(6)] == [ReturnError]
    [failed] = driver.wait(5)
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, Unavailable)
    assert "has not come back" in str(failed.error)
    assert driver.do(Connected()) == [Send(Cancel(request_id="r", if_reader=True))]  # it may still be at work


def test_a_silent_broker(driver: Driver) -> None:
    """It is asked for a sign of life, and given up after reconnect_timeout_s without one."""
    driver.running()
    driver.do(Consumed("r", 0, 0))
    assert Send(Describe()) in driver.wait(QUIET_S)
    driver.get(Report(what="status", ok=True, body={}))  # any word will do
    for _ in range(5):
        assert errors(driver.wait(5)) == []
    [error] = errors(driver.wait(5))
    assert isinstance(error, Unavailable)
    assert "has sent nothing for 30 s" in str(error)


def test_an_answered_request_outlasts_a_frozen_broker(patient: Driver) -> None:
    """What the broker has not answered fails after half a minute. What it has answered goes on when the broker does:
    the broker hears no Cancel of it, and is asked for a sign of life less and less often."""
    patient.running()
    patient.do(StartRequest(submit(request_id="s")))
    patient.do(AskQuestion(1, Describe(), 60.0))
    actions = patient.wait(590)
    assert [type(action) for action in actions if isinstance(action, FailRequest | ReturnError)] == [
        FailRequest,
        ReturnError,
    ]
    assert [action.request_id for action in actions if isinstance(action, FailRequest)] == ["s"]
    assert "has sent nothing for 30 s" in str(errors(actions)[0])
    sent = [action.message for action in actions if isinstance(action, Send)]
    assert [message for message in sent if isinstance(message, Cancel)] == [Cancel(request_id="s", if_reader=True)]
    assert sent.count(Describe()) < 10
    assert patient.get(tokens(0, 3)) == [deliver(0, 3)]


def test_a_mute_broker_gets_nothing_new(patient: Driver) -> None:
    """What begins while it is known to stand still fails at once; when it has said something, all is as before."""
    patient.running()
    patient.do(LeaveRequest("r", cancel=True))
    patient.do(AskQuestion(1, Describe(), 60.0))
    assert len(errors(patient.wait(31))) == 1
    patient.wait(60)
    patient.do(StartRequest(submit(request_id="s")))
    assert "has sent nothing for 30 s" in str(errors(patient.wait(0.1))[0])
    patient.get(Report(what="status", ok=True, body={}))
    patient.do(StartRequest(submit(request_id="t")))
    assert errors(patient.wait(29)) == []


def test_a_broker_frozen_for_good(patient: Driver) -> None:
    """The wait ends."""
    patient.running()
    [error] = errors(patient.wait(601))
    assert "has sent nothing for 600 s" in str(error)


def test_an_answered_request_outlasts_an_absent_broker(patient: Driver) -> None:
    """It is told again when the broker is back; what was not answered fails after half a minute."""
    patient.running()
    patient.do(StartRequest(submit(request_id="s")))
    patient.do(Disconnected())
    assert errors(patient.wait(29)) == []
    [error] = errors(patient.wait(560))
    assert "has not come back" in str(error)
    assert patient.do(Connected()) == [attach(0)]


def test_nothing_is_told_again_while_the_broker_is_silent(patient: Driver) -> None:
    """It reads all that was sent when it goes on, and would answer each time. Then the request is told again once."""
    patient.running()
    assert patient.wait(590).count(attach(0)) == 1
    patient.get(Report(what="status", ok=True, body={}))
    assert patient.wait(0).count(attach(0)) == 1
    assert patient.wait(NUDGE_S - 1).count(attach(0)) == 0


def test_a_timeout_ends_the_wait_for_a_frozen_broker(patient: Driver) -> None:
    """The caller's own limit counts."""
    patient.running(timeout_s=45.0)
    [error] = errors(patient.wait(50))
    assert isinstance(error, RequestTimeout)


def test_silence_counts_only_while_something_is_awaited(driver: Driver) -> None:
    """An idle hour is no silence."""
    driver.running()
    driver.get(finished(0))
    driver.now += 3600
    assert driver.do(StartRequest(submit())) == [Send(submit())]
    assert driver.wait(1) == []


def test_silence_does_not_count_while_only_the_caller_is_slow(driver: Driver) -> None:
    """A request that has ended waits for its consumer, and the broker owes nothing."""
    driver.running()
    driver.get(tokens(0, 3))
    driver.get(finished(3))
    assert driver.wait(3600) == []
    driver.do(StartRequest(submit(request_id="s")))
    assert errors(driver.wait(4)) == []


def test_a_quiet_request_is_told_again(driver: Driver) -> None:
    """An answer may have been lost: Submit before the acceptance, Attach after it; not while the caller is behind."""
    message = driver.submitted()
    driver.get(Report(what="status", ok=True, body={}))  # it is a broker
    assert Send(message) in driver.wait(NUDGE_S)
    driver.get(Accepted(request_id="r"))
    assert attach(0) in driver.wait(NUDGE_S)
    driver.get(tokens(0, 5))
    assert attach(5) not in driver.wait(NUDGE_S)
    driver.do(Consumed("r", 0, 5))
    assert attach(5) in driver.wait(0)


# --- our own pauses ---------------------------------------------------------------------------------------------------


def test_our_own_pause_is_not_the_brokers_silence(driver: Driver) -> None:
    """However long it was, the broker gets the whole time from then on; it is asked for what may have been lost."""
    driver.running()
    driver.do(AskQuestion(1, Query(what="plan"), 20.0))
    driver.wait(1)
    assert errors(driver.pause(3600)) == []
    assert errors(driver.wait(18)) == []
    assert [type(error) for error in errors(driver.wait(1))] == [RequestTimeout]  # the question's own limit
    assert errors(driver.wait(9)) == []
    [error] = errors(driver.wait(1))
    assert "has sent nothing for 30 s" in str(error)


def test_our_own_pause_does_not_count_while_the_broker_is_away(driver: Driver) -> None:
    """Nor against its coming back, nor against the first connection."""
    driver.running()
    driver.do(Disconnected())
    driver.wait(20)
    second = submit(request_id="r2")
    driver.do(StartRequest(second))
    driver.wait(3)
    assert driver.pause(60) == []
    assert driver.wait(1) == []
    assert [action.request_id for action in driver.wait(1) if isinstance(action, FailRequest)] == ["r2"]
    assert [action.request_id for action in driver.wait(5) if isinstance(action, FailRequest)] == ["r"]


def test_our_own_pause_moves_a_callers_limit(driver: Driver) -> None:
    """As it moves all others; only of a loop that is always late, a part of every pause counts."""
    driver.running(timeout_s=3.0)
    assert errors(driver.pause(60)) == []
    driver.get(tokens(0, 1))
    driver.do(Consumed("r", 0, 1))
    assert errors(driver.wait(2)) == []
    assert [type(error) for error in errors(driver.wait(1))] == [RequestTimeout]
    driver.get(finished(1, reason="cancelled"))
    driver.running(timeout_s=3.0)
    assert errors([action for _ in range(5) for action in driver.pause(2)]) == []
    assert [type(error) for error in errors(driver.pause(2))] == [RequestTimeout]


def test_a_request_that_began_in_a_pause_has_its_own_time_only(driver: Driver) -> None:
    """A caller that blocks the loop, and starts something between: limits move by what each has lost."""
    driver.running()
    driver.now += 40
    driver.do(StartRequest(submit(request_id="r2"), 3.0))
    driver.now += 2
    driver.do(SessionTick())
    assert errors(driver.wait(2.9)) == []
    assert [type(error) for error in errors(driver.wait(2.2))] == [RequestTimeout]


def test_an_idle_hour_is_no_pause(driver: Driver) -> None:
    """Nobody ticks then; what begins afterwards has its limit from there."""
    driver.running()
    driver.get(finished(0))
    driver.now += 3600
    driver.do(StartRequest(submit(), 3.0))
    assert errors(driver.wait(2.9)) == []
    assert [type(error) for error in errors(driver.wait(0.1))] == [RequestTimeout]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid", InvalidRequest),
        ("context", InvalidRequest),
        ("conflict", InvalidRequest),
        ("unknown", InvalidRequest),
        ("overloaded", Overloaded),
        ("journal", JournalDown),
        ("unavailable", Unavailable),
        ("superseded", ReadElsewhere),
        ("never heard of", InvalidRequest),
    ],
)
def test_refusals_have_their_types(driver: Driver, code: str, kind: type[ClientError]) -> None:
    """The code decides; the broker's words are the text; the request is over."""
    driver.submitted()
    [error] = errors(driver.get(Rejected(request_id="r", code=code, reason="because", retry_after_s=7.0)))
    assert type(error) is kind
    assert str(error) == "because"
    if isinstance(error, InvalidRequest):
        assert error.code == code
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 7.0
    assert driver.session.is_idle


@pytest.mark.parametrize(("code", "is_cancelled"), [("invalid", True), ("conflict", False), ("overloaded", False)])
def test_a_later_submission_of_a_refused_request_is_cancelled(driver: Driver, code: str, is_cancelled: bool) -> None:
    """Its reason may be gone when that one arrives, such as the lack of an adapter, and nobody would read the answer.
    A request of another client that has the id is left alone, and so is one that the caller submits again."""
    message = driver.submitted()
    driver.get(Report(what="status", ok=True, body={}))  # it is a broker
    assert Send(message) in driver.wait(NUDGE_S)
    failed, *rest = driver.get(Rejected(request_id="r", code=code, reason="because"))
    assert isinstance(failed, FailRequest)
    assert rest == ([Send(Cancel(request_id="r", if_reader=True))] if is_cancelled else [])


def test_bad_ends_have_their_types(driver: Driver) -> None:
    """Failed, cancelled by somebody else, forgotten by the broker."""
    for answer, kind, text in (
        (finished(0, reason="failed", detail="a stage was lost"), RequestFailed, "a stage was lost"),
        (finished(0, reason="cancelled"), RequestCancelled, "the request was cancelled"),
        (Rejected(request_id="r", code="unknown", reason="gone"), RequestFailed, "gone"),
    ):
        driver.running()
        [error] = errors(driver.get(answer))
        assert type(error) is kind
        assert text in str(error)
        assert driver.session.is_idle


def test_one_bad_end_ends_all_continuations(driver: Driver) -> None:
    """The caller is told once; the broker is told that nobody wants the others, and that the end was heard."""
    driver.running(n=2)
    failed, acked, cancel = driver.get(finished(3, reason="failed", detail="lost", index=1))
    assert isinstance(failed, FailRequest)
    assert acked == ack(3, index=1)
    assert cancel == Send(Cancel(request_id="r", if_reader=True))
    assert driver.get(finished(0, reason="cancelled")) == [ack(0)]
    assert driver.session.is_idle


def test_a_bad_end_behind_good_ones(driver: Driver) -> None:
    """Nothing is left to be cancelled; what nobody will read of the others is acknowledged."""
    driver.running(n=2)
    driver.get(tokens(0, 2))
    driver.get(finished(2))
    failed, acked, other = driver.get(finished(3, reason="failed", detail="lost", index=1))
    assert isinstance(failed, FailRequest)
    assert (acked, other) == (ack(3, index=1), ack(2))
    assert driver.session.is_idle


def test_malformed_fails_what_is_unanswered(driver: Driver) -> None:
    """The broker can't say which message it was; accepted requests go on, unless nothing else can have been meant."""
    driver.running()
    driver.do(StartRequest(submit(request_id="r2")))
    driver.do(AskQuestion(1, Describe(), 9.0))
    failed, unanswered = driver.get(Malformed(reason="kind: strange"))
    assert isinstance(failed, FailRequest)
    assert failed.request_id == "r2"
    assert "can't decode this client's messages: kind: strange" in str(failed.error)
    assert isinstance(unanswered, ReturnError)
    [failed] = driver.get(Malformed(reason="kind: strange"))
    assert isinstance(failed, FailRequest)
    assert failed.request_id == "r"


def test_a_broker_of_another_build(driver: Driver) -> None:
    """What is live fails with the reason, whatever comes later is refused; until the connection breaks, for then there
    may be another broker."""
    driver.do(StartRequest(submit()))
    driver.do(AskQuestion(1, Describe(), 60.0))
    assert driver.do(TcpConnected()) == []
    failed, unanswered = driver.do(IncompatibleBroker("it is swarm 9"))
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, Unavailable)
    assert str(failed.error) == f"the broker at {URL} can't be used: it is swarm 9"
    assert isinstance(unanswered, ReturnError)
    for event in (StartRequest(submit()), AskQuestion(2, Describe(), 60.0)):
        with pytest.raises(Unavailable, match="it is swarm 9"):
            driver.do(event)
    assert driver.session.is_idle
    driver.do(Disconnected())
    driver.do(StartRequest(submit()))
    driver.do(TcpConnected())
    assert driver.do(Connected()) == [Send(submit())]


def test_what_cannot_be_understood_fails_whom_it_is_about(driver: Driver) -> None:
    """The request that it names, or else whoever has asked something; nobody, if nobody waits for it."""
    driver.running()
    second = submit(request_id="r2")
    driver.do(StartRequest(second))
    failed, cancel = driver.do(UndecodableMessage("finished.cost: unknown field", "r"))
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, Unavailable)
    assert "and this client are incompatible (finished.cost: unknown field): install the same version on both" in str(
        failed.error
    )
    assert cancel == Send(Cancel(request_id="r", if_reader=True))
    assert driver.do(UndecodableMessage("?", "somebody else's")) == []
    assert driver.do(UndecodableMessage("?")) == []
    driver.do(AskQuestion(1, Describe(), 60.0))
    assert [type(action) for action in driver.do(UndecodableMessage("?"))] == [ReturnError]
    assert driver.session.request_ids == ("r", "r2")  # the first only to have its Cancel confirmed


def test_an_id_in_use(driver: Driver) -> None:
    """Two live requests of one client can't have the same id."""
    driver.submitted()
    with pytest.raises(InvalidRequest, match="in use"):
        driver.do(StartRequest(submit()))


# --- questions --------------------------------------------------------------------------------------------------------


def test_answers_find_their_questions(driver: Driver) -> None:
    """Descriptions answer all who asked, parts of assets go by name and place."""
    driver.do(Connected())
    for key in range(2):
        assert driver.do(AskQuestion(key, Describe(), 9.0)) == [Send(Describe())]
    driver.do(AskQuestion(4, GetAsset(name="a", offset=0), 9.0))
    description = Description(
        manifest=None, state="waiting", waits_for="", max_context=0, max_queue=1, swarm_version="0"
    )
    assert driver.get(description) == [ReturnAnswer(0, description), ReturnAnswer(1, description)]
    missing = Report(what="asset", ok=False, body={})
    assert driver.get(missing) == [ReturnAnswer(4, missing)]
    assert driver.session.is_idle


PLAN, NODES = Query(what="plan"), Query(what="nodes")
SUPPOSED = Query(what="plan", suppose=PlanWhatIf(without=("w0",)))


def test_questions_of_one_kind_are_asked_one_after_the_other(driver: Driver) -> None:
    """A report tells its kind and no more: so each answers what was asked last. Other kinds don't wait."""
    driver.do(Connected())
    assert driver.do(AskQuestion(1, PLAN, 9.0)) == [Send(PLAN)]
    assert driver.do(AskQuestion(2, SUPPOSED, 9.0)) == []
    assert driver.do(AskQuestion(3, NODES, 9.0)) == [Send(NODES)]
    assert driver.do(AskQuestion(4, PLAN, 9.0)) == []
    assert driver.get(report("plan", 1)) == [ReturnAnswer(1, report("plan", 1)), Send(SUPPOSED)]
    assert driver.get(report("nodes", 2)) == [ReturnAnswer(3, report("nodes", 2))]
    driver.do(AbandonQuestion(4))  # it was not asked yet
    assert driver.get(report("plan", 3)) == [ReturnAnswer(2, report("plan", 3))]
    assert driver.get(report("plan", 4)) == []
    assert driver.session.is_idle


def test_an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one_s(driver: Driver) -> None:
    """Whether its asker has left or had no more time. One that never comes holds nobody up for good."""
    driver.do(Connected())
    driver.do(AskQuestion(1, PLAN, 2.0))
    driver.do(AskQuestion(2, SUPPOSED, 60.0))
    [late] = driver.wait(2)
    assert isinstance(late, ReturnError)
    assert late.key == 1
    assert driver.get(report("plan", 1)) == [Send(SUPPOSED)]
    driver.do(AskQuestion(3, PLAN, 60.0))
    driver.do(AbandonQuestion(2))
    assert driver.wait(ABANDONED_S - TICK_S) == [Send(Describe())]  # is the broker there?
    assert Send(PLAN) in driver.wait(2 * TICK_S)
    assert driver.get(report("plan", 3)) == [ReturnAnswer(3, report("plan", 3))]
    assert driver.session.is_idle


def test_after_a_reconnect_what_is_waited_for_is_asked_again(driver: Driver) -> None:
    """In its order; what was left is not."""
    driver.do(Connected())
    for key, question in enumerate((PLAN, SUPPOSED, NODES)):
        driver.do(AskQuestion(key, question, 60.0))
    driver.do(AbandonQuestion(0))
    driver.do(Disconnected())
    assert driver.do(Connected()) == [Send(NODES), Send(SUPPOSED)]
    assert driver.get(report("plan", 1)) == [ReturnAnswer(1, report("plan", 1))]


def report(what: str, number: int) -> Report:
    return Report(what=what, ok=True, body={"number": number})


def test_questions_have_time_limits_and_can_be_withdrawn(driver: Driver) -> None:
    """Nobody waits for ever, and nobody is told who waits no more."""
    driver.do(Connected())
    driver.do(AskQuestion(1, Describe(), 2.0))
    driver.do(AskQuestion(2, Describe(), 2.0))
    driver.do(AbandonQuestion(2))
    [unanswered] = driver.wait(2)
    assert isinstance(unanswered, ReturnError)
    assert isinstance(unanswered.error, RequestTimeout)
    assert unanswered.key == 1


# --- any order of events ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_tokens_come_once_and_in_order(data: st.DataObject) -> None:
    """Against a broker that loses, repeats, cuts and reorders messages and connections: what is delivered is a
    beginning of the answer, without holes or repetitions; and once the road is good again, all of it."""
    driver, num_tokens = Driver(), data.draw(st.integers(0, 80))
    delivered: list[int] = []
    ended = 0

    def collect(actions: list[SessionAction]) -> list[SessionAction]:
        nonlocal ended
        for action in actions:
            if isinstance(action, Deliver):
                assert action.start == len(delivered)
                delivered.extend(action.ids)
            ended += isinstance(action, EndContinuation)
            assert not isinstance(action, FailRequest)
        return actions

    driver.do(StartRequest(submit()))
    for step in data.draw(st.lists(st.sampled_from(["up", "down", "tokens", "end", "take", "tick", "accept"]))):
        start = data.draw(st.integers(0, num_tokens))
        match step:
            case "up":
                collect(driver.do(Connected()))
            case "down":
                driver.do(Disconnected())
            case "tokens":
                collect(driver.get(tokens(start, data.draw(st.integers(0, num_tokens - start)))))
            case "end":
                collect(driver.get(finished(num_tokens)))
            case "take":
                collect(driver.do(Consumed("r", 0, data.draw(st.integers(0, len(delivered))))))
            case "tick":
                collect(driver.wait(0.01))
            case "accept":
                driver.get(Accepted(request_id="r"))
    assert delivered == list(range(len(delivered)))
    if not ended:
        driver.get(Accepted(request_id="r"))
        driver.do(Disconnected())
        [sent] = driver.do(Connected())
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Attach)
        start = sent.message.next_index[0]
        collect(driver.get(tokens(start, num_tokens - start)))
        collect(driver.get(finished(num_tokens)))
    assert delivered == list(range(num_tokens))
    assert ended == 1


def test_who_is_hung_up_on_while_it_knocks_is_told_what_that_may_be() -> None:
    """Until somebody hears it."""
    driver = Driver()
    driver.do(StartRequest(submit()))
    driver.do(HandshakeFailed())
    driver.do(Disconnected())
    (failed,) = [action for action in driver.wait(6.0) if isinstance(action, FailRequest)]
    assert "if its key has changed" in str(failed.error)
    assert "or it is not a broker" in str(failed.error)
    driver.do(TcpConnected())
    driver.do(Disconnected())
    driver.do(StartRequest(submit()))
    (failed,) = [action for action in driver.wait(6.0) if isinstance(action, FailRequest)]
    assert "another key" not in str(failed.error)
