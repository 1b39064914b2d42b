"""Requests that a broker finds in its journal: when it starts again, and when somebody asks for one that it no longer
has in memory. And what becomes of requests while the journal can't be written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.actions import Action, NewTokens, ReadRequest, SendToClient, WriteAcceptance, WriteEnd, WriteTokens
from swarm.broker.events import (
    AcceptanceWritten,
    ClientUnreachable,
    EndNotWritten,
    JournalBroke,
    JournalMended,
    ListRead,
    RequestRead,
)
from swarm.broker.requests.tokens import WINDOW
from swarm.broker.state import SequenceState, ended_requests
from swarm.broker.state.ended_requests import MAX_PER_REQUEST, RETRY_S
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import (
    Accepted,
    Ack,
    Attach,
    Cancel,
    Detach,
    Finished,
    FinishReason,
    GetRequest,
    Query,
    Rejected,
    Report,
    RequestDetails,
    ServerMessage,
    Stop,
    Submit,
    TokenLogprob,
    Tokens,
)
from tests.unit.broker.bench import CLIENT, TOKEN, Bench, request_settings, said, settings, submit

MakeBench = Callable[..., Bench]
OTHER = b"other"
JOURNALLED = settings(requests=request_settings(has_journal=True))


def record(
    of: Submit | None = None,
    *generated: int,
    reason: FinishReason | None = None,
    detail: str = "",
    age_s: float = 2.0,
    ended_age_s: float = 1.0,
    num_cached: int = 0,
) -> RequestRecord:
    """A request with one continuation, as the journal tells of it."""
    each = SequenceRecord(5, 0, list(generated), reason=reason, detail=detail, num_cached=num_cached)
    return RequestRecord(of or submit(), "tenant", age_s, [each], None if reason is None else ended_age_s)


def past(*records: RequestRecord) -> JournalSnapshot:
    return JournalSnapshot(3, (), next_sequence=1000, requests=records)


def read(bench: Bench, found: RequestRecord | None, request_id: str = "r", problem: str = "") -> list[Action]:
    """The journal answers."""
    if found is not None:
        for each in found.sequences:
            bench.watch.written[each.id] = len(found.submit.prompt) + len(each.tokens)
        bench.watch.accepted.add(request_id)
    return bench.feed(RequestRead(request_id, found, problem))


def tokens_in(messages: list[ServerMessage]) -> list[int]:
    return [token for message in messages if isinstance(message, Tokens) for token in message.ids]


def only(actions: list[Action], kind: type[ServerMessage]) -> ServerMessage:
    (message,) = said(actions)
    assert isinstance(message, kind)
    return message


@pytest.fixture
def journalled(make_bench: MakeBench) -> Bench:
    """Two workers, serving; the broker has a journal."""
    return make_bench(JOURNALLED).serve(2)


def begin(bench: Bench, of: Submit, client: bytes = CLIENT) -> None:
    """A request whose id the journal doesn't know is accepted."""
    bench.say(of, client)
    bench.feed(RequestRead(of.request_id, None))
    assert bench.state.requests[of.request_id].accepted


def end(bench: Bench, of: Submit, client: bytes = CLIENT) -> None:
    """It runs to its end, unread; the journal has it all."""
    begin(bench, of, client)
    bench.run_dry()
    assert bench.state.requests[of.request_id].is_end_written


def test_two_who_asked_at_the_same_time_both_read_it(journalled: Bench) -> None:
    """The first one has taken all of it, and says so: it leaves memory before the second one is answered."""
    # who was reading it when memory had no room for it any more
    journalled.state.journal_lookups.dropped_readers["r"] = b"one"
    journalled.say(Ack(request_id="r", index=0, next_index=3), b"one")
    journalled.say(Attach(request_id="r", next_index=(0,)), b"two")
    # Not by the bench, whose guard knows of one reader.
    answers = journalled.core.handle(RequestRead("r", record(submit(), 7, 8, 9, reason="length")), journalled.now)
    told = [each for each in answers if isinstance(each, SendToClient)]
    assert [each.client for each in told if isinstance(each.message, Rejected)] == []
    assert tokens_in([each.message for each in told if each.client == b"two"]) == [7, 8, 9]


# --- after a restart -------------------------------------------------------------------------------------------------


def test_running_requests_wait_for_their_turn(make_bench: MakeBench) -> None:
    """With all tokens that the journal has, under their old numbers; new requests get higher ones."""
    bench = make_bench(JOURNALLED, past(record(submit(ignore_eos=True), 7, 8, 9)))
    sequence = bench.sequence()
    assert (sequence.id, sequence.state, sequence.num_generated) == (5, SequenceState.WAITING, 3)
    assert (sequence.committed, sequence.sent, sequence.delivered) == (6, 3, 3)
    assert bench.state.requests["r"].tenant == "tenant"
    bench.serve(1)
    bench.run_dry()
    assert bench.sequence().tokens[3:6] == [7, 8, 9]
    assert bench.sequence().num_generated == 8
    begin(bench, submit("new"))
    assert bench.sequence("new").id == 1000


def test_seeds_are_those_of_before(make_bench: MakeBench) -> None:
    """Each continuation draws on as it did."""
    of = submit(n=2)
    found = RequestRecord(of, "", 0.0, [SequenceRecord(5, 0, [1]), SequenceRecord(6, 1, [2])])
    bench = make_bench(JOURNALLED, past(found))
    fresh = make_bench().serve(1)
    fresh.say(of)
    assert [s.seed for s in bench.state.requests["r"].sequences] == [
        s.seed for s in fresh.state.requests["r"].sequences
    ]


def test_a_deadline_is_as_far_away_as_it_was(make_bench: MakeBench) -> None:
    """It counts from the arrival, the time in which there was no broker included."""
    bench = make_bench(JOURNALLED, past(record(submit(deadline_s=10.0), 7, age_s=9.0)))
    bench.tick(0.9)
    assert bench.sequence().state is SequenceState.WAITING
    bench.tick(0.3)
    assert (bench.sequence().reason, bench.sequence().detail[:12]) == ("failed", "the deadline")


def test_a_deadline_that_has_passed_meanwhile(make_bench: MakeBench) -> None:
    """It ends as soon as the broker looks."""
    bench = make_bench(JOURNALLED, past(record(submit(deadline_s=10.0), 7, age_s=60.0)))
    actions = bench.tick()
    assert [a.reason for a in actions if isinstance(a, WriteEnd)] == ["failed"]


def test_clients_have_the_grace_to_come_back(make_bench: MakeBench) -> None:
    """From the restart on; then what nobody wants is cancelled."""
    bench = make_bench(JOURNALLED, past(record(None, 7)))
    bench.tick(9.8)
    assert bench.sequence().state is SequenceState.WAITING
    bench.tick(0.4)
    assert bench.sequence().reason == "cancelled"


def test_detached_requests_need_no_client(make_bench: MakeBench) -> None:
    """They run on, whoever stays away."""
    bench = make_bench(JOURNALLED, past(record(submit(detached=True, max_tokens=4), 7)))
    bench.tick(30.0)
    bench.serve(1)
    bench.run_dry()
    assert (bench.sequence().reason, bench.sequence().num_generated) == ("length", 4)


def test_a_client_reads_on_where_it_was(make_bench: MakeBench) -> None:
    """It attaches, and gets what it doesn't have yet, then what is new."""
    bench = make_bench(JOURNALLED, past(record(submit(max_tokens=5), 7, 8, 9)))
    messages = said(bench.say(Attach(request_id="r", next_index=(1,))))
    assert messages == [Tokens(request_id="r", index=0, start=1, ids=(8, 9))]
    bench.serve(1)
    bench.run_dry()
    assert tokens_in(said(bench.log)) == [TOKEN, TOKEN]
    assert bench.state.requests["r"].has_ended


def test_the_same_submission_after_a_restart(make_bench: MakeBench) -> None:
    """Same id and body: the same request, with its tokens from the start. Another body: a conflict."""
    of = submit(max_tokens=5)
    bench = make_bench(JOURNALLED, past(record(of, 7, 8)))
    assert said(bench.say(of)) == [
        Accepted(request_id="r"),
        Tokens(request_id="r", index=0, start=0, ids=(7, 8)),
    ]
    answer = only(bench.say(submit(max_tokens=6)), Rejected)
    assert isinstance(answer, Rejected)
    assert answer.code == "conflict"


def test_a_stop_that_was_under_way_is_told_again(make_bench: MakeBench) -> None:
    """The client found a stop string, and the broker died of something else: the tokens behind it don't count."""
    bench = make_bench(JOURNALLED, past(record(None, 7, 8, 9)))
    bench.say(Attach(request_id="r", next_index=(3,)))
    actions = bench.say(Stop(request_id="r", index=0, at_index=2))
    assert WriteEnd(5, "stop", 2) in actions
    (told,) = said(bench.log, Finished)
    assert isinstance(told, Finished)
    assert (told.reason, told.num_tokens) == ("stop", 2)


def test_ended_requests_are_told_to_whoever_missed_it(make_bench: MakeBench) -> None:
    """With all tokens, the reason and its detail; what is not known any more is 0."""
    found = record(None, 7, 8, reason="failed", detail="too bad", age_s=9.0, ended_age_s=4.0)
    bench = make_bench(JOURNALLED, past(found))
    tokens, told = said(bench.say(Attach(request_id="r", next_index=(0,))))
    assert isinstance(tokens, Tokens)
    assert isinstance(told, Finished)
    assert (tokens.ids, told.reason, told.detail, told.num_tokens) == ((7, 8), "failed", "too bad", 2)
    assert (told.timing.queued_s, told.timing.first_token_s, told.timing.total_s) == (0.0, 0.0, 5.0)
    # Read to the end, it leaves memory.
    bench.say(Ack(request_id="r", index=0, next_index=2))
    assert bench.state.requests == {}


def test_ended_requests_are_retained_as_long_as_others(make_bench: MakeBench) -> None:
    """From their end on, whenever that was."""
    bench = make_bench(JOURNALLED, past(record(None, 7, reason="length", ended_age_s=50.0)))
    bench.tick(9.8)
    assert "r" in bench.state.requests
    bench.tick(0.4)
    assert bench.state.requests == {}


def test_one_that_its_client_took_back_is_not_restored(make_bench: MakeBench) -> None:
    """Its id is free: the next submission is a new request."""
    bench = make_bench(JOURNALLED, past(record(None, 7, reason="cancelled"))).serve(1)
    assert bench.state.requests == {}
    begin(bench, submit(max_tokens=3))
    assert bench.sequence().id == 1000


def test_an_end_of_sequence_whose_end_was_not_written(make_bench: MakeBench) -> None:
    """The last token is the end; that is found out as soon as the model is known, and nothing is computed."""
    bench = make_bench(JOURNALLED, past(record(None, 7, 0)))
    bench.say(Attach(request_id="r", next_index=(2,)))
    assert said(bench.log) == []
    bench.join("w0")
    (told,) = said(bench.log, Finished)
    assert isinstance(told, Finished)
    assert (told.reason, told.num_tokens) == ("stop", 2)
    bench.tick()
    assert not bench.pipe


def test_the_context_limits_what_is_restored(make_bench: MakeBench) -> None:
    """As it did before: the model is known only once a worker has come."""
    of = submit(num_prompt=500, max_tokens=100, ignore_eos=True)
    bench = make_bench(JOURNALLED, past(record(of, *[7] * 10)))
    assert bench.sequence().limit == 600
    bench.serve(1, kv_capacity=1024)
    assert bench.sequence().limit == 512
    bench.run_dry()
    assert (bench.sequence().reason, bench.sequence().num_generated) == ("length", 12)


def test_log_probabilities_and_hops_are_restored(make_bench: MakeBench) -> None:
    """Who asked for them gets those of before, too."""
    of = submit(logprobs=0, max_tokens=3)
    found = record(of, 7, 8)
    found.sequences[0].logprobs = [(TokenLogprob(7, -0.1),), (TokenLogprob(8, -0.2),)]
    bench = make_bench(JOURNALLED, past(found))
    (message,) = said(bench.say(Attach(request_id="r", next_index=(1,))))
    assert isinstance(message, Tokens)
    assert message.logprobs == ((TokenLogprob(8, -0.2),),)


# --- ends and the journal --------------------------------------------------------------------------------------------


def test_an_end_is_told_once_the_journal_has_it(journalled: Bench) -> None:
    """Else a broker that dies at the wrong moment would let the request end twice, in two ways."""
    begin(journalled, submit(max_tokens=1))
    journalled.held = {WriteEnd}
    journalled.finish()
    assert said(journalled.log, Finished) == []
    assert "r" in journalled.state.requests
    journalled.write_out()
    assert len(said(journalled.log, Finished)) == 1


def test_what_was_read_leaves_memory_once_the_journal_has_it(journalled: Bench) -> None:
    """Whoever asks for it then finds it there."""
    begin(journalled, submit(max_tokens=1))
    journalled.run_dry()
    journalled.say(Ack(request_id="r", index=0, next_index=1))
    assert journalled.state.requests == {}


# --- what only the journal knows -------------------------------------------------------------------------------------

ENDED = record(submit(max_tokens=3), 7, 8, 9, reason="length", ended_age_s=1000.0)


def test_attach_to_one_that_is_not_in_memory(journalled: Bench) -> None:
    """It is read, and served as if it had never been away; read to its end, it goes again."""
    assert journalled.say(Attach(request_id="r", next_index=(1,))) == [ReadRequest("r")]
    tokens, told = said(read(journalled, ENDED))
    assert tokens == Tokens(request_id="r", index=0, start=1, ids=(8, 9))
    assert isinstance(told, Finished)
    journalled.say(Ack(request_id="r", index=0, next_index=3))
    assert journalled.state.requests == {}


def test_cached_tokens_of_an_answer_that_is_read_again(journalled: Bench) -> None:
    """The usage is the one of the first time."""
    journalled.say(Attach(request_id="r", next_index=(0,)))
    _, end = said(read(journalled, record(submit(max_tokens=3), 7, 8, 9, reason="length", num_cached=2)))
    assert isinstance(end, Finished)
    assert end.num_cached == 2


def test_cached_tokens_of_an_answer_that_goes_on_after_a_restart(make_bench: MakeBench) -> None:
    """Its prompt is computed again, perhaps from the prefix cache: the usage tells how it was computed first."""
    bench = make_bench(JOURNALLED, past(record(submit(max_tokens=9, ignore_eos=True), 7, num_cached=2))).serve(1)
    bench.say(Attach(request_id="r", next_index=(1,)))
    bench.run_dry()
    (end,) = [message for message in said(bench.log) if isinstance(message, Finished)]
    assert end.num_cached == 2


def test_it_stays_for_its_reader(journalled: Bench) -> None:
    """What was read is retained like what has just ended, however long ago its end was."""
    journalled.say(Attach(request_id="r", next_index=(0,)))
    read(journalled, ENDED)
    journalled.tick(50.0)
    assert "r" in journalled.state.requests
    journalled.tick(11.0)
    assert journalled.state.requests == {}


def test_submission_of_one_that_is_not_in_memory(journalled: Bench) -> None:
    """Same id and body: its tokens from the start; another body: a conflict; unknown: a new request."""
    journalled.say(ENDED.submit)
    accepted, tokens, told = said(read(journalled, ENDED))
    assert accepted == Accepted(request_id="r")
    assert isinstance(tokens, Tokens)
    assert isinstance(told, Finished)
    assert (tokens.ids, told.reason) == ((7, 8, 9), "length")
    journalled.say(Ack(request_id="r", index=0, next_index=3))
    journalled.say(submit(max_tokens=4))
    answer = only(read(journalled, ENDED), Rejected)
    assert isinstance(answer, Rejected)
    assert answer.code == "conflict"
    journalled.say(submit("new"))
    assert [a for a in read(journalled, None, "new") if isinstance(a, WriteAcceptance)]


def test_submission_of_one_that_its_client_took_back(journalled: Bench) -> None:
    """It is new."""
    journalled.say(submit(max_tokens=4))
    found = read(journalled, record(submit(max_tokens=3), 7, reason="cancelled"))
    assert [a for a in found if isinstance(a, WriteAcceptance)]


def test_unknown_to_the_journal_too(journalled: Bench) -> None:
    """One clear answer each."""
    journalled.say(Attach(request_id="r", next_index=(0,)))
    journalled.say(GetRequest(request_id="r"), OTHER)
    rejected, report = said(read(journalled, None))
    assert isinstance(rejected, Rejected)
    assert isinstance(report, Report)
    assert (rejected.code, report.ok) == ("unknown", False)
    assert rejected.reason == report.body["error"]


def test_a_journal_that_cannot_be_read(journalled: Bench) -> None:
    """Nobody is told that a request is unknown, or gets a second one of the same name."""
    journalled.say(Attach(request_id="r", next_index=(0,)))
    journalled.say(submit(), OTHER)
    answers = said(read(journalled, None, problem="a bad page"))
    assert [(a.code, a.retry_after_s) for a in answers if isinstance(a, Rejected)] == [("journal", RETRY_S)] * 2
    assert journalled.state.requests == {}


def test_what_was_asked_for_can_be_looked_up_by_anybody(journalled: Bench) -> None:
    """What was asked for, whether it is in memory or not; nobody becomes its reader by that."""
    begin(journalled, submit("here"))
    assert said(journalled.say(GetRequest(request_id="here"), OTHER)) == [RequestDetails(submit=submit("here"))]
    assert journalled.state.requests["here"].client == CLIENT
    journalled.say(GetRequest(request_id="r"), OTHER)
    assert said(read(journalled, ENDED)) == [RequestDetails(submit=ENDED.submit)]


def test_many_ask_for_the_same(journalled: Bench) -> None:
    """It is read once; each gets an answer, and too many are told to come back."""
    recall = GetRequest(request_id="r")
    actions = [journalled.say(recall, b"%d" % n) for n in range(MAX_PER_REQUEST + 1)]
    assert sum(ReadRequest("r") in each for each in actions) == 1
    refused = only(actions[-1], Report)
    assert isinstance(refused, Report)
    assert (refused.what, refused.body["request_id"]) == ("recall", "r")
    assert (refused.body["code"], refused.body["retry_after_s"]) == ("overloaded", 1.0)
    assert said(read(journalled, ENDED)) == [RequestDetails(submit=ENDED.submit)] * MAX_PER_REQUEST


def test_cancelled_before_the_journal_has_answered(journalled: Bench) -> None:
    """It never becomes a request."""
    journalled.say(submit())
    answer = only(journalled.say(Cancel(request_id="r")), Rejected)
    assert isinstance(answer, Rejected)
    assert answer.code == "cancelled"
    assert read(journalled, None) == []
    assert journalled.state.requests == {}


def test_accepted_while_the_journal_was_asked(journalled: Bench) -> None:
    """Two clients submit the same: one request, read by the latter."""
    journalled.say(submit())
    journalled.say(submit(), OTHER)
    read(journalled, None)
    assert len(journalled.state.requests) == 1
    assert journalled.state.requests["r"].client == OTHER
    assert len([a for a in journalled.log if isinstance(a, WriteAcceptance)]) == 1


def test_lists_are_memory_and_journal(journalled: Bench) -> None:
    """What is in memory is not listed twice."""
    end(journalled, submit("here"))
    query = Query(what="requests")
    journalled.say(query)
    rows = ({"request_id": "here"}, {"request_id": "gone"})
    report = only(journalled.feed(ListRead(CLIENT, query, rows)), Report)
    assert isinstance(report, Report)
    assert [row["request_id"] for row in report.body["requests"]] == ["here"]  # type: ignore[attr-defined]
    assert [row["request_id"] for row in report.body["kept"]] == ["gone"]  # type: ignore[attr-defined]


# --- readers who are slow, or gone -----------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than four ended requests in memory."""
    monkeypatch.setattr(ended_requests, "MAX_ENDED", 4)


def test_what_is_written_once_more_is_written_whole(journalled: Bench) -> None:
    """With log-probabilities and hops, if they were asked for."""
    begin(journalled, submit(max_tokens=3, logprobs=1, hops=True))
    journalled.held = {WriteEnd}
    journalled.run_dry()
    first = [new for action in journalled.log if isinstance(action, WriteTokens) for new in action.tokens]
    (again,) = [action for action in journalled.feed(EndNotWritten(1)) if isinstance(action, WriteTokens)]
    (whole,) = again.tokens
    assert whole.ids == tuple(token for new in first for token in new.ids)
    assert whole.logprobs == tuple(each for new in first for each in new.logprobs)
    assert whole.hops == tuple(each for new in first for each in new.hops)
    assert len(whole.logprobs) == len(whole.hops) == 3


@pytest.mark.usefixtures("few")
def test_ended_requests_take_a_bounded_part_of_memory(journalled: Bench) -> None:
    """The oldest go first; what is under way is not touched."""
    begin(journalled, submit("long", max_tokens=100, ignore_eos=True))
    for number in range(7):
        begin(journalled, submit(f"r{number}", max_tokens=1))
        while not journalled.state.requests[f"r{number}"].has_ended:
            journalled.finish()
    assert list(journalled.state.requests) == ["long", "r3", "r4", "r5", "r6"]


@pytest.mark.parametrize(("room", "kept"), [(700, ["r1", "r2", "r3"]), (250, ["r3"]), (10, ["r3"])])
def test_their_tokens_are_what_counts(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, room: int, kept: list[str]
) -> None:
    """A few long ones fill the same room; the latest is kept whatever its size."""
    monkeypatch.setattr(ended_requests, "MAX_ENDED_WEIGHT", room)
    found = [record(submit(f"r{n}", max_tokens=200), *[7] * 200, reason="length") for n in range(4)]
    for number, each in enumerate(found):
        each.sequences[0].id = 5 + number
    bench = make_bench(JOURNALLED, past(*found))
    assert list(bench.state.requests) == kept


@pytest.mark.usefixtures("few")
def test_nothing_is_dropped_that_is_not_written(journalled: Bench) -> None:
    """A journal that is behind makes memory wait, not requests disappear."""
    journalled.held = {WriteEnd}
    for number in range(6):
        begin(journalled, submit(f"r{number}", max_tokens=1))
        journalled.run_dry()
    assert len(journalled.state.requests) == 6
    journalled.write_out()
    assert len(journalled.state.requests) == 4


@pytest.mark.usefixtures("few")
def test_without_a_journal_the_bound_holds_too(serving: Bench) -> None:
    """Then the oldest are gone for good, and whoever asks for one is told so."""
    for number in range(5):
        serving.say(submit(f"r{number}", max_tokens=1))
        serving.run_dry()
    assert list(serving.state.requests) == ["r1", "r2", "r3", "r4"]
    answer = only(serving.say(Attach(request_id="r0", next_index=(0,))), Rejected)
    assert isinstance(answer, Rejected)
    assert answer.code == "unknown"


def test_a_slow_reader_reads_on_from_the_journal(journalled: Bench) -> None:
    """It had a window's worth when its request was dropped; its next acknowledgement brings the rest, and nothing
    that it has already."""
    of = submit(max_tokens=300, ignore_eos=True)
    end(journalled, of)
    assert len(tokens_in(said(journalled.log))) == WINDOW
    written = record(of, *journalled.sequence().tokens[3:], reason="length")
    written.sequences[0].id = journalled.sequence().id
    journalled.tick(61.0)
    assert journalled.state.requests == {}
    journalled.take()
    assert journalled.say(Ack(request_id="r", index=0, next_index=250)) == [ReadRequest("r")]
    messages = said(read(journalled, written))
    assert [m.start for m in messages if isinstance(m, Tokens)] == [250]
    assert len(tokens_in(messages)) == 50
    assert isinstance(messages[-1], Finished)


def test_other_continuations_wait_for_their_own_word(journalled: Bench) -> None:
    """Where their reader stands with them, only it knows."""
    of = submit(n=2, max_tokens=3)
    end(journalled, of)
    sequences = journalled.state.requests["r"].sequences
    parts = [SequenceRecord(s.id, s.index, s.tokens[3:], reason="length") for s in sequences]
    written = RequestRecord(of, "tenant", 9.0, parts, 5.0)
    journalled.tick(61.0)
    journalled.say(Ack(request_id="r", index=1, next_index=2))
    messages = said(read(journalled, written))
    assert [(m.index, m.start) for m in messages if isinstance(m, Tokens)] == [(1, 2)]
    messages = said(journalled.say(Ack(request_id="r", index=0, next_index=1)))
    assert [(m.index, m.start) for m in messages if isinstance(m, Tokens)] == [(0, 1)]


def test_late_acknowledgements_bring_nothing_back(journalled: Bench) -> None:
    """Neither of what was read to the end, nor of a stranger's."""
    end(journalled, submit(max_tokens=1))
    journalled.say(Ack(request_id="r", index=0, next_index=1))
    assert journalled.say(Ack(request_id="r", index=0, next_index=1)) == []
    end(journalled, submit("s", max_tokens=1))
    journalled.tick(61.0)
    assert journalled.say(Ack(request_id="s", index=0, next_index=0), OTHER) == []


def test_a_reader_who_lets_go(make_bench: MakeBench) -> None:
    """A detached request runs on at once without it, another one for the grace."""
    bench = make_bench().serve(1)
    bench.say(submit("on", detached=True, max_tokens=100, ignore_eos=True))
    bench.say(submit("off", max_tokens=100, ignore_eos=True))
    for request_id in ("on", "off"):
        bench.say(Detach(request_id=request_id))
        assert bench.state.requests[request_id].client is None
    bench.take()
    bench.finish()
    assert said(bench.log) == []
    bench.tick(11.0)
    assert bench.sequence("off").reason == "cancelled"
    bench.run_dry()
    assert bench.sequence("on").reason == "length"


def test_letting_go_of_somebody_elses(serving: Bench) -> None:
    """Changes nothing."""
    serving.say(submit())
    serving.say(Detach(request_id="r"), OTHER)
    assert serving.state.requests["r"].client == CLIENT


def test_a_detached_request_outlives_its_client(make_bench: MakeBench) -> None:
    """The connection is gone; the next reader gets it all."""
    bench = make_bench().serve(1)
    bench.say(submit(detached=True, max_tokens=4))
    bench.feed(ClientUnreachable(CLIENT))
    bench.tick(11.0)
    bench.run_dry()
    bench.take()
    messages = said(bench.say(Attach(request_id="r", next_index=(0,)), OTHER))
    assert tokens_in(messages) == [TOKEN] * 4
    assert isinstance(messages[-1], Finished)


# --- a journal that can't be written ---------------------------------------------------------------------------------


def test_running_requests_go_on_and_are_shown(journalled: Bench) -> None:
    """Their tokens and ends are told though they are not written."""
    begin(journalled, submit(max_tokens=3))
    journalled.held = {WriteTokens, WriteEnd}
    journalled.finish()
    assert tokens_in(said(journalled.log)) == []
    journalled.watch.written[1] = 6  # what is shown now need not be written: the journal broke
    journalled.feed(JournalBroke("the disk is full"))
    assert tokens_in(said(journalled.log)) == [TOKEN]
    journalled.run_dry()
    assert tokens_in(said(journalled.log)) == [TOKEN] * 3
    assert len(said(journalled.log, Finished)) == 1
    # Whoever else asks for it meanwhile finds it nowhere but here.
    journalled.say(Ack(request_id="r", index=0, next_index=3))
    assert tokens_in(said(journalled.say(Attach(request_id="r", next_index=(0,)), b"another"))) == [TOKEN] * 3
    journalled.say(Ack(request_id="r", index=0, next_index=3), b"another")
    assert "r" in journalled.state.requests
    journalled.held = set()
    journalled.feed(JournalMended())
    journalled.write_out()
    assert journalled.state.requests == {}


@pytest.mark.slow
def test_what_could_not_be_written_is_kept(journalled: Bench) -> None:
    """A reader who comes late finds the answer in memory, as long as it is nowhere else."""
    begin(journalled, submit(max_tokens=3))
    journalled.held = {WriteTokens, WriteEnd}
    journalled.watch.written[1] = 6
    journalled.feed(JournalBroke("the disk is full"))
    journalled.run_dry()
    journalled.tick(200.0)
    assert "r" in journalled.state.requests
    journalled.held = set()
    journalled.feed(JournalMended())
    journalled.write_out()
    journalled.tick(200.0)
    assert journalled.state.requests == {}


def test_new_requests_are_refused_meanwhile(journalled: Bench) -> None:
    """With the reason, and when to come back; afterwards they are taken again."""
    journalled.feed(JournalBroke("the disk is full"))
    journalled.say(submit())
    answer = only(read(journalled, None), Rejected)
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after_s) == ("journal", RETRY_S)
    assert "the disk is full" in answer.reason
    journalled.feed(JournalMended())
    begin(journalled, submit())


def test_requests_about_to_be_accepted_are_refused(journalled: Bench) -> None:
    """They are not in the journal, and their clients must not wait for it; when it is mended, they can come again
    under the same names, whatever it wrote meanwhile."""
    journalled.held = {WriteAcceptance}
    journalled.say(submit())
    journalled.feed(RequestRead("r", None))
    answer = only(journalled.feed(JournalBroke("the disk is full")), Rejected)
    assert isinstance(answer, Rejected)
    assert answer.code == "journal"
    assert journalled.state.requests == {}
    # It was written after all, and its end behind it.
    journalled.feed(JournalMended())
    assert journalled.feed(AcceptanceWritten("r", (1,))) == []
    (ended,) = [a for a in journalled.log if isinstance(a, WriteEnd)]
    journalled.held = set()
    journalled.pending.clear()
    journalled.say(submit())
    read(journalled, record(None, reason=ended.reason, detail=ended.detail))
    assert journalled.state.requests["r"].accepted


def test_tokens_of_a_broken_journal_are_still_handed_over(journalled: Bench) -> None:
    """It keeps them, and writes them when it can."""
    begin(journalled, submit(max_tokens=3))
    journalled.feed(JournalBroke("the disk is full"))
    journalled.watch.written[1] = 6
    actions = journalled.finish()
    assert WriteTokens((NewTokens(1, 3, 0, (TOKEN,)),)) in actions


def test_an_end_that_the_journal_could_not_take(journalled: Bench) -> None:
    """It lacks tokens that were let go: it is given all of them, and the end once more, for as long as it takes."""
    begin(journalled, submit(max_tokens=3))
    journalled.held = {WriteEnd}
    journalled.run_dry()
    (end,) = journalled.pending
    journalled.pending.clear()
    actions = journalled.feed(EndNotWritten(1))
    (again,) = [action for action in actions if isinstance(action, WriteTokens)]
    assert [(new.first, new.ids) for new in again.tokens] == [(0, (TOKEN,) * 3)]
    assert list(journalled.pending) == [end]
    assert said(journalled.log, Finished) == []
    journalled.write_out()
    assert len(said(journalled.log, Finished)) == 1
    assert journalled.feed(EndNotWritten(1)) == []


def _answer_to(bench: Bench, message: Attach | GetRequest, client: bytes = CLIENT) -> Rejected | Report:
    (answer,) = said(bench.say(message, client))
    assert isinstance(answer, Rejected | Report)
    return answer


@pytest.mark.usefixtures("few")
def test_dropped_while_the_disk_is_full(journalled: Bench) -> None:
    """Its end is not in the journal, and may come there: whoever asks is told why it can't be read, and comes again.
    Once it is written it is read from there."""
    journalled.held = {WriteTokens, WriteEnd}
    for number in range(6):
        begin(journalled, submit(f"r{number}", max_tokens=1))
        journalled.watch.written[number + 1] = 4
    journalled.feed(JournalBroke("the disk is full: make room"))
    journalled.run_dry()
    assert "r0" not in journalled.state.requests
    journalled.say(Attach(request_id="r0", next_index=(0,)))
    answer = only(read(journalled, record(submit("r0", max_tokens=1)), "r0"), Rejected)
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after_s) == ("journal", RETRY_S)
    assert "the request has ended" in answer.reason
    assert "the disk is full: make room" in answer.reason
    journalled.say(GetRequest(request_id="r0"))
    report = only(read(journalled, record(submit("r0", max_tokens=1)), "r0"), Report)
    assert isinstance(report, Report)
    assert "the disk is full: make room" in str(report.body["error"])
    # The disk has room again.
    journalled.held = set()
    journalled.write_out()
    journalled.feed(JournalMended())
    journalled.say(Attach(request_id="r0", next_index=(0,)))
    found = record(submit("r0", max_tokens=1), TOKEN, reason="length")
    found.sequences[0].id = 1
    assert tokens_in(said(read(journalled, found, "r0"))) == [TOKEN]


@pytest.mark.usefixtures("few")
def test_dropped_and_its_tokens_let_go(journalled: Bench) -> None:
    """The disk was full for too long: its end is not taken, and it says so, and what to do. Sent again it is computed
    again."""
    journalled.held = {WriteTokens, WriteEnd}
    of = submit("r0", max_tokens=1)
    for number in range(6):
        begin(journalled, submit(f"r{number}", max_tokens=1))
        journalled.watch.written[number + 1] = 4
    journalled.feed(JournalBroke("the disk is full"))
    journalled.run_dry()
    journalled.held = set()
    journalled.pending.clear()
    journalled.feed(EndNotWritten(1))
    journalled.feed(JournalMended())
    journalled.say(Attach(request_id="r0", next_index=(0,)))
    answer = only(read(journalled, record(of), "r0"), Rejected)
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after_s) == ("unknown", None)
    assert "submit it again" in answer.reason
    journalled.say(of)
    read(journalled, record(of), "r0")
    assert journalled.state.requests["r0"].accepted


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("is_read", [True, False])
def test_without_a_journal_it_is_told_why_it_is_gone(serving: Bench, is_read: bool) -> None:
    """Its submitter was away; another client has read it to its end, or nobody has. Then others needed the room."""
    serving.say(submit("r0", max_tokens=1))
    serving.feed(ClientUnreachable(CLIENT))
    serving.say(Attach(request_id="r0", next_index=(0,)), OTHER)
    serving.run_dry()
    if is_read:
        serving.say(Ack(request_id="r0", index=0, next_index=1), OTHER)
    assert "r0" in serving.state.requests, "its submitter may still come for it"
    for number in range(1, 5):
        serving.say(submit(f"r{number}", max_tokens=1))
        serving.run_dry()
    answer = _answer_to(serving, Attach(request_id="r0", next_index=(0,), again=True))
    assert isinstance(answer, Rejected)
    assert answer.code == ("superseded" if is_read else "unknown")
    assert ("another client" in answer.reason, "--state-dir" in answer.reason) == (is_read, not is_read)
    report = _answer_to(serving, GetRequest(request_id="r0"))
    assert isinstance(report, Report)
    assert report.body["error"] == answer.reason


def test_read_by_another_and_out_of_the_journal(journalled: Bench) -> None:
    """Its bounds have pushed it out: the submitter is told that somebody has read it. One that nobody knows has another
    answer."""
    of = submit(max_tokens=1)
    begin(journalled, of)
    journalled.say(Attach(request_id="r", next_index=(0,)), OTHER)
    journalled.run_dry()
    journalled.say(Ack(request_id="r", index=0, next_index=1), OTHER)
    assert journalled.state.requests == {}
    for request_id, code in (("r", "superseded"), ("other", "unknown")):
        journalled.say(Attach(request_id=request_id, next_index=(0,)))
        answer = only(read(journalled, None, request_id), Rejected)
        assert isinstance(answer, Rejected)
        assert answer.code == code


def test_who_has_read_it_all_itself_is_not_told_of_another(journalled: Bench) -> None:
    """Its bounds have pushed it out, and its own submitter had read it."""
    begin(journalled, submit(max_tokens=1))
    journalled.run_dry()
    journalled.say(Ack(request_id="r", index=0, next_index=1))
    journalled.say(Attach(request_id="r", next_index=(0,)))
    answer = only(read(journalled, None), Rejected)
    assert isinstance(answer, Rejected)
    assert "ended too long ago" in answer.reason
