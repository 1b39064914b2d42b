"""Look-ups read beside whoever reads, and change nothing; what nobody reads is kept for as long as was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm.broker.actions import Action, ReadRequest, SendToClient, WriteEnd, WriteTokens
from swarm.broker.events import ClientUnreachable, RequestRead, Tick
from swarm.broker.requests import lookups
from swarm.broker.requests.tokens import WINDOW
from swarm.broker.state.ended_requests import JOURNAL_TIMEOUT_S, MAX_PER_REQUEST, ClientAccount
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import (
    Ack,
    Attach,
    Cancel,
    Detach,
    Finished,
    GetRequest,
    LookUp,
    Rejected,
    Report,
    RequestDetails,
    ServerMessage,
    Submit,
    TokenLogprob,
    Tokens,
    TokensSnapshot,
)
from tests.unit.broker.bench import CLIENT, TOKEN, Bench, request_settings, said, settings, submit

MakeBench = Callable[..., Bench]
OTHER = b"other"
JOURNALLED = settings(requests=request_settings(has_journal=True))
ENDLESS = submit(max_tokens=1000, ignore_eos=True)
ENDED = RequestRecord(submit(max_tokens=3), "tenant", 2.0, [SequenceRecord(5, 0, [7, 8, 9], reason="length")], 1000.0)


@pytest.fixture
def journalled(make_bench: MakeBench) -> Bench:
    """Two workers, serving; the broker has a journal."""
    return make_bench(JOURNALLED).serve(2)


def look(question: int = 1, request_id: str = "r", **fields: int) -> LookUp:
    return LookUp(question=question, request_id=request_id, **fields)


def only(actions: list[Action], client: bytes = OTHER) -> Any:
    """The one message that is said, to this client."""
    (told,) = [action for action in actions if isinstance(action, SendToClient)]
    assert told.client == client
    return told.message


def fate(bench: Bench) -> list[object]:
    """All that decides what becomes of requests, and of their readers."""
    state = bench.state
    return [
        (
            r.client,
            r.owner,
            r.detached_at,
            r.grace_s,
            r.is_blocked,
            r.read_at,
            [
                (s.state, s.sent, s.delivered, s.committed, s.reader_position_unknown, s.end_sent, s.stop_at)
                for s in r.sequences
            ],
        )
        for r in state.requests.values()
    ] + [len(state.timers), list(state.journal_lookups.dropped_readers.items())]


def read(bench: Bench, found: RequestRecord | None, problem: str = "") -> list[ServerMessage]:
    """The journal answers."""
    if found is not None:
        bench.watch.written[5] = len(found.submit.prompt) + 3
        bench.watch.accepted.add("r")
    return said(bench.feed(RequestRead("r", found, problem)))


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_look_up_reads_beside_the_reader(serving: Bench) -> None:
    """What has come so far is told; the reader has its place, its window and the rest, as without the look-up."""
    serving.say(ENDLESS)
    for _ in range(WINDOW + 5):
        serving.finish()
    before = fate(serving)
    page = only(serving.say(look(7), OTHER))
    assert page == TokensSnapshot(
        question=7,
        request_id="r",
        index=0,
        start=0,
        ids=(TOKEN,) * (WINDOW + 5),
        num_tokens=WINDOW + 5,
        submit=ENDLESS,
    )
    assert fate(serving) == before
    (rest,) = said(serving.say(Ack(request_id="r", index=0, next_index=10)))
    assert rest == Tokens(request_id="r", index=0, start=WINDOW, ids=(TOKEN,) * 5)


def test_what_is_not_written_is_not_told(journalled: Bench) -> None:
    """No more than its reader may see; and its end only when the journal has it."""
    journalled.say(submit(max_tokens=2))
    journalled.feed(RequestRead("r", None))
    journalled.held = {WriteTokens}
    journalled.finish()
    assert only(journalled.say(look(), OTHER)).ids == ()
    journalled.held = {WriteEnd}
    journalled.write_out()
    journalled.finish()
    page = only(journalled.say(look(), OTHER))
    assert (page.ids, page.finished) == ((TOKEN,) * 2, None)
    journalled.held = set()
    journalled.write_out()
    assert isinstance(only(journalled.say(look(), OTHER)).finished, Finished)


def test_a_long_answer_is_told_page_by_page(serving: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page has the next tokens, the first one what was asked for, the last one the end."""
    monkeypatch.setattr(lookups, "PAGE_WEIGHT", 3)
    serving.say(submit(max_tokens=8, ignore_eos=True))
    serving.run_dry()
    pages = [only(serving.say(look(n, start=start), OTHER)) for n, start in enumerate((0, 3, 6))]
    assert [len(page.ids) for page in pages] == [3, 3, 2]
    assert [page.num_tokens for page in pages] == [8, 8, 8]
    assert [page.submit is not None for page in pages] == [True, False, False]
    assert [page.finished is not None for page in pages] == [False, False, True]
    assert only(serving.say(look(9, start=100), OTHER)).start == 8


def test_what_was_asked_for_beside_tokens_comes_too(journalled: Bench) -> None:
    """Of each continuation by itself."""
    logprobs = [(TokenLogprob(8, -0.2),), (TokenLogprob(9, -0.5),)]
    parts = [SequenceRecord(4, 0, [5], [()], reason="stop"), SequenceRecord(5, 1, [8, 9], logprobs, reason="length")]
    journalled.say(look(index=1, start=1), OTHER)
    journalled.watch.written[4] = 4
    (page,) = read(journalled, RequestRecord(submit(logprobs=0, max_tokens=2, n=2), "tenant", 2.0, parts, 1.0))
    assert isinstance(page, TokensSnapshot)
    assert (page.index, page.ids, page.logprobs, page.submit) == (1, (9,), (logprobs[1],), None)


# --- each question gets an answer ------------------------------------------------------------------------------------


def test_equal_questions_get_an_answer_each(journalled: Bench) -> None:
    """Of one client, while the journal is asked once. One that is said again after a broken connection is the same."""
    assert journalled.say(look(1), OTHER) == [ReadRequest("r")]
    for message in (look(2), look(2), GetRequest(request_id="r"), GetRequest(request_id="r")):
        assert journalled.say(message, OTHER) == []
    told = read(journalled, ENDED)
    assert [message.question for message in told if isinstance(message, TokensSnapshot)] == [1, 2]
    assert [type(message) for message in told].count(RequestDetails) == 2


@pytest.mark.parametrize("question", [look(4), GetRequest(request_id="r")])
def test_every_refusal_is_an_answer_to_the_question(question: LookUp | GetRequest, make_bench: MakeBench) -> None:
    """Unknown, somebody else's, unreadable, too many, a slow journal: never ``Rejected``, which is a reader's."""
    bench = make_bench(JOURNALLED).serve(1)

    def refusal(actions: list[Action]) -> tuple[object, ...]:
        report = only(actions)
        assert isinstance(report, Report)
        assert not report.ok
        assert report.what == ("recall" if isinstance(question, GetRequest) else "look_up")
        assert report.body["request_id"] == "r"
        assert report.body.get("question") == (None if isinstance(question, GetRequest) else 4)
        return report.body["code"], report.body.get("retry_after_s")

    bench.say(question, OTHER)
    assert refusal(bench.feed(RequestRead("r", None))) == ("unknown", None)
    bench.say(question, OTHER, account=ClientAccount("bob"))
    assert refusal(bench.feed(RequestRead("r", ENDED))) == ("unknown", None)
    bench.say(question, OTHER)
    assert refusal(bench.feed(RequestRead("r", None, "disk I/O error"))) == ("journal", 5.0)
    for number in range(MAX_PER_REQUEST):
        bench.say(look(100 + number))
    assert refusal(bench.say(question, OTHER)) == ("overloaded", 1.0)
    bench.feed(RequestRead("r", None))
    bench.take()
    bench.say(question, OTHER)
    bench.tick(JOURNAL_TIMEOUT_S / 2)
    assert said(bench.take()) == []
    bench.tick(JOURNAL_TIMEOUT_S)
    assert refusal([action for action in bench.take() if isinstance(action, SendToClient)]) == ("journal", 5.0)
    bench.feed(RequestRead("r", ENDED))
    assert said(bench.take()) == [], "what comes late is for nobody"


def test_a_question_outlives_a_reader_of_the_same_client(journalled: Bench) -> None:
    """A gateway asks for one of its clients, while another one's stream is left."""
    for leave in (Detach(request_id="r"), Cancel(request_id="r")):
        journalled.say(look(), OTHER)
        journalled.say(Attach(request_id="r", next_index=(0,)), OTHER)
        journalled.say(leave, OTHER)
        assert [type(message) for message in read(journalled, ENDED)] == [TokensSnapshot]
        journalled.tick(61.0)


def test_a_continuation_that_is_none(serving: Bench) -> None:
    serving.say(submit())
    report = only(serving.say(look(index=1), OTHER))
    assert (report.what, report.body["code"]) == ("look_up", "invalid")


# --- nothing changes -------------------------------------------------------------------------------------------------


def test_a_refused_look_up_changes_nothing(serving: Bench) -> None:
    """Its gateway is gone; whoever looks and is refused leaves it to whoever comes within the grace."""
    serving.say(ENDLESS)
    serving.finish()
    serving.feed(ClientUnreachable(CLIENT))
    before = fate(serving)
    serving.say(look(index=5), OTHER)
    serving.say(look(request_id="s"), OTHER)
    serving.say(look(), OTHER, account=ClientAccount("bob"))
    serving.say(GetRequest(request_id="r"), OTHER)
    assert fate(serving) == before
    serving.tick(9.0)
    assert said(serving.say(Attach(request_id="r", next_index=(0,)), OTHER), Tokens)


def test_a_look_up_keeps_nothing_alive(serving: Bench) -> None:
    """Nor does it give a request without a reader more time."""
    serving.say(ENDLESS)
    serving.feed(ClientUnreachable(CLIENT))
    for _ in range(5):
        serving.tick(2.5)
        serving.say(look(), OTHER)
    assert serving.sequence("r").reason == "cancelled"


def test_a_reader_whose_request_left_memory_is_not_forgotten_over_a_look_up(journalled: Bench) -> None:
    """The look-up brings it back; the reader's next acknowledgement goes on where it was."""
    journalled.state.journal_lookups.dropped_readers["r"] = CLIENT
    journalled.say(look(), OTHER)
    read(journalled, ENDED)
    messages = said(journalled.say(Ack(request_id="r", index=0, next_index=1)))
    assert [(m.start, m.ids) for m in messages if isinstance(m, Tokens)] == [(1, (8, 9))]


def test_a_former_reader_that_leaves_cancels_nothing(serving: Bench) -> None:
    """It has not heard yet that another one reads. Whoever reads, or was the last to read, still cancels."""
    serving.say(ENDLESS)
    serving.say(Attach(request_id="r", next_index=(0,)), OTHER)
    serving.take()
    told = only(serving.say(Cancel(request_id="r", if_reader=True)), CLIENT)
    assert isinstance(told, Rejected)
    assert told.code == "superseded"
    serving.say(Cancel(request_id="r", if_reader=True), OTHER)
    assert not serving.state.requests
    serving.say(ENDLESS)
    serving.feed(ClientUnreachable(CLIENT))
    serving.say(Cancel(request_id="r", if_reader=True))
    assert serving.sequence("r").reason == "cancelled"


# --- keeping ---------------------------------------------------------------------------------------------------------


def kept(bench: Bench, keep_s: float) -> Submit:
    asked = submit(max_tokens=1000, ignore_eos=True, keep_s=keep_s)
    bench.say(asked)
    return asked


def lives(bench: Bench) -> bool:
    return bench.sequence("r").reason is None


def test_it_is_kept_for_as_long_as_was_asked_for(serving: Bench) -> None:
    """Not for the grace, be that longer or shorter."""
    for keep_s in (4.0, 30.0):
        kept(serving, keep_s)
        serving.say(Detach(request_id="r"))
        serving.tick(keep_s - 0.5)
        assert lives(serving)
        serving.tick(0.6)
        assert serving.sequence("r").reason == "cancelled"
        serving.tick(61.0)


def test_each_reader_that_leaves_gives_the_same_again(serving: Bench) -> None:
    """Whichever gateway it read at. The death of one that does not read it (any more) changes nothing."""
    kept(serving, 4.0)
    serving.say(Detach(request_id="r"))
    serving.tick(2.0)
    serving.say(Attach(request_id="r", next_index=(0,)), OTHER)
    serving.tick(1.0)
    serving.say(Detach(request_id="r"), OTHER)
    serving.feed(ClientUnreachable(CLIENT))
    serving.tick(2.0)
    serving.feed(ClientUnreachable(OTHER))
    serving.tick(1.5)
    assert lives(serving)
    serving.tick(0.6)
    assert serving.sequence("r").reason == "cancelled"


@pytest.mark.parametrize(("keep_s", "lasts_s"), [(4.0, 10.0), (30.0, 30.0)])
def test_a_gateway_that_dies_leaves_the_longer_time(serving: Bench, keep_s: float, lasts_s: float) -> None:
    """Its reader wants to come back within the grace, and has what it asked for."""
    kept(serving, keep_s)
    serving.feed(ClientUnreachable(CLIENT))
    serving.tick(lasts_s - 0.5)
    assert lives(serving)
    serving.tick(0.6)
    assert serving.sequence("r").reason == "cancelled"


def test_it_is_kept_over_a_restart_of_the_broker(make_bench: MakeBench) -> None:
    """What was asked for is in the journal; the time begins anew with the broker."""
    asked = submit(max_tokens=1000, ignore_eos=True, keep_s=30.0)
    record = RequestRecord(asked, "tenant", 2.0, [SequenceRecord(5, 0, [7])], None)
    bench = make_bench(JOURNALLED, JournalSnapshot(3, (), next_sequence=1000, requests=(record,)))
    bench.feed(Tick())
    bench.tick(29.0)
    assert lives(bench)
    bench.tick(1.5)
    assert bench.sequence("r").reason == "cancelled"
