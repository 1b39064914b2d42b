"""The journal was begun anew: the broker writes down once more what it knows, and what runs never notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.actions import (
    Action,
    FinishJournalRewrite,
    NewTokens,
    WriteAcceptance,
    WriteEnd,
    WriteEpoch,
    WriteLog,
    WriteTokens,
)
from swarm.broker.core import MAX_NOTES
from swarm.broker.events import AcceptanceWritten, JournalBroke, JournalMended, JournalRenewed, RequestRead
from swarm.sim.checks.ledger import Ledger
from swarm.wire.messages import Accepted, Cancel, Hop, LayerRange, Query, Rejected, Report, Stop, TokenLogprob
from tests.unit.broker.bench import CLIENT, Bench, orders, request_settings, said, settings, submit

MakeBench = Callable[..., Bench]
LOST = JournalRenewed("the journal was deleted: it was begun anew", 3)


def ask(bench: Bench, request_id: str, client: bytes = CLIENT, **fields: object) -> list[Action]:
    """Somebody submits a request that the journal does not know either."""
    return bench.say(submit(request_id, **fields), client) + bench.feed(RequestRead(request_id, None))


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """One that ended and is not delivered, one that runs with two tokens."""
    bench = make_bench(settings(requests=request_settings(has_journal=True))).serve(2)
    ask(bench, "ended", max_tokens=1, ignore_eos=True)
    bench.finish()
    ask(bench, "runs", max_tokens=9, ignore_eos=True, logprobs=1)
    for _ in range(3):  # its prompt, and two more
        bench.finish()
    assert bench.sequence("runs").num_generated >= 2
    bench.feed(JournalBroke("the journal was deleted"))
    return bench


def test_all_that_memory_has_is_written_once_more(bench: Bench) -> None:
    """A journal that gets it and had nothing tells a broker after this one the same, ages included."""
    bench.tick(5.0)
    ledger = Ledger()
    bench.held = {WriteAcceptance, WriteTokens, WriteEnd, FinishJournalRewrite}
    done = bench.feed(LOST)
    writes = [a for a in done if isinstance(a, WriteAcceptance | WriteTokens | WriteEnd | FinishJournalRewrite)]
    assert isinstance(writes[-1], FinishJournalRewrite), "with that it is whole"
    ledger.write(writes, bench.now)
    past = ledger.snapshot(bench.now, 60.0)
    assert (past.epoch, past.workers, past.next_sequence) == (bench.epoch, ("w0", "w1"), bench.state.next_sequence)
    assert past.manifest == bench.state.manifest
    by_id = {record.submit.request_id: record for record in past.requests}
    assert by_id.keys() == {"ended", "runs"}
    for name, record in by_id.items():
        (known,) = bench.state.requests[name].sequences
        (sequence,) = record.sequences
        assert (sequence.id, sequence.tokens, sequence.reason) == (
            known.id,
            known.tokens[known.num_prompt :],
            known.reason,
        )
    (before,) = by_id["runs"].sequences
    assert len(before.tokens) == len(before.logprobs) >= 2
    bench.write_out()


def test_a_cut_answer_is_written_with_what_stands_beside_its_tokens(bench: Bench) -> None:
    """A stop string was found behind the first token: of the others there are no logprobs or hops either."""
    bench.feed(JournalMended())
    ask(bench, "cut", max_tokens=9, ignore_eos=True, logprobs=1, hops=True)
    while bench.sequence("cut").num_generated < 3:
        bench.finish(hops=(Hop("w0", LayerRange(0, 3), 0.0, 0.1, 0.0, 0.0, 0),))
    bench.say(Stop(request_id="cut", index=0, at_index=1))
    number = bench.sequence("cut").id
    (new,) = [n for a in bench.feed(LOST) if isinstance(a, WriteTokens) for n in a.tokens if n.sequence == number]
    assert (len(new.ids), len(new.logprobs), len(new.hops)) == (1, 1, 1)


def test_as_old_as_they_are(bench: Bench) -> None:
    """A deadline does not move by it."""
    bench.tick(5.0)
    written = [a for a in bench.feed(LOST) if isinstance(a, WriteAcceptance)]
    ages = {a.submit.request_id: a.age_s for a in written}
    assert ages == {r.id: bench.now - r.arrived_at for r in bench.state.requests.values()}
    assert min(ages.values()) > 4.9


def test_nobody_is_told_anew_and_nothing_is_queued_twice(bench: Bench) -> None:
    """What runs goes on."""
    before = len(bench.log)
    bench.feed(LOST)
    assert not said(bench.log[before:], Accepted)
    assert not orders(bench.log[before:])
    bench.feed(JournalMended())
    bench.run_dry()
    assert bench.sequence("runs").reason == "length"


def test_one_that_waits_has_one_place_in_the_queue(make_bench: MakeBench) -> None:
    """Its acceptance is written a second time, and changes nothing."""
    bench = make_bench(settings(requests=request_settings(has_journal=True))).serve(2)
    bench.lose("w0")
    bench.lose("w1")
    ask(bench, "waits")
    queue = bench.state.waiting
    before = len(queue), queue.num_waiting(bench.state.requests["waits"].tenant)
    bench.feed(LOST)
    assert before == (1, 1)
    assert (len(queue), queue.num_waiting(bench.state.requests["waits"].tenant)) == before


def test_who_comes_meanwhile_is_refused_until_it_is_whole(bench: Bench) -> None:
    """It could not be promised anything."""
    bench.held = {WriteAcceptance, WriteTokens, WriteEnd, FinishJournalRewrite}
    bench.feed(LOST)
    (refused,) = said(ask(bench, "late", b"other"), Rejected)
    assert isinstance(refused, Rejected)
    assert refused.code == "journal"
    bench.write_out()
    bench.held = set()
    bench.feed(JournalMended())
    assert any(isinstance(action, WriteAcceptance) for action in ask(bench, "late", b"other"))


def test_numbers_that_the_new_one_uses_are_passed_over(bench: Bench) -> None:
    """It gave some to sequences that were lost."""
    bench.feed(JournalRenewed("x", 1000))
    assert bench.state.next_sequence == 1000


def test_it_is_said(bench: Bench) -> None:
    """In the log at once, in reports from then on; the latest notes only, should it happen again and again."""
    done = bench.feed(LOST)
    (note,) = [a for a in done if isinstance(a, WriteLog) and a.event == "journal_begun_anew"]
    assert (note.level, note.fields["what"]) == ("error", LOST.note)
    for number in range(MAX_NOTES + 3):
        bench.feed(JournalRenewed(f"note {number}", 3))
    (report,) = said(bench.say(Query(what="status")), Report)
    assert isinstance(report, Report)
    assert report.body["journal_notes"] == [f"note {number}" for number in range(3, MAX_NOTES + 3)]


def test_an_epoch_under_way_is_announced_once(make_bench: MakeBench) -> None:
    """It waits for the journal, is told to it once more with the rest, and what was asked first is what counts."""
    bench = make_bench().serve(2)
    bench.held = {WriteEpoch}
    bench.lose("w1")
    bench.feed(JournalBroke("x"))
    (anew,) = [a for a in bench.feed(LOST) if isinstance(a, FinishJournalRewrite)]
    assert anew.epoch.epoch == bench.state.plans.epoch
    assert bench.state.plans.journaled_epoch < anew.epoch.epoch
    assert orders(bench.write_out())
    assert not orders(bench.feed(AcceptanceWritten("nobody", (99,))))
    assert bench.state.plans.journaled_epoch == anew.epoch.epoch


def test_tokens_without_any_are_not_written(bench: Bench) -> None:
    """A request that has none yet has no part to write."""
    bench.feed(JournalMended())
    ask(bench, "new", max_tokens=4)
    bench.feed(JournalBroke("x"))
    written = [new for a in bench.feed(LOST) if isinstance(a, WriteTokens) for new in a.tokens]
    assert all(isinstance(new, NewTokens) and new.ids for new in written)
    logprobs = next(new.logprobs for new in written if new.logprobs)
    assert all(isinstance(each, TokenLogprob) for row in logprobs for each in row)


def test_who_was_cancelled_at_the_door_takes_no_place_in_the_new_one(make_bench: MakeBench) -> None:
    """Their acceptance went with the old journal: nobody will ever say that it is written."""
    bench = make_bench(settings(requests=request_settings(has_journal=True, max_queue=2))).serve(2)
    bench.held = {WriteAcceptance}
    for number in range(2):
        ask(bench, f"cancelled {number}", b"%d" % number)
        bench.say(Cancel(request_id=f"cancelled {number}"), b"%d" % number)
    (refused,) = said(ask(bench, "late"), Rejected)
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    bench.pending.clear()
    bench.held = set()
    bench.feed(JournalBroke("the journal was deleted"))
    bench.feed(LOST)
    bench.feed(JournalMended())
    assert any(isinstance(action, WriteAcceptance) for action in ask(bench, "late"))
