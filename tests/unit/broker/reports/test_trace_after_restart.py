"""Traces by a broker that has not seen all of a request: they keep what is known, and say what is not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarm.broker.actions import NewTokens, ReadList, WriteAcceptance, WriteEnd, WriteTokens
from swarm.broker.events import ListRead
from swarm.broker.journal.reader import JournalReader
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.broker.reports.ended_requests import NO_TIMES
from swarm.broker.reports.trace import PARTS, RESTORED
from swarm.ctl import render_trace
from swarm.wire.messages import Hop, LayerRange, Query, Report
from tests.unit.broker.bench import Bench, said, submit
from tests.unit.broker.journal.test_journal import NOW, accept
from tests.unit.broker.recovery.test_restored import JOURNALLED, begin, past, record

MakeBench = Callable[..., Bench]
HOPS = (
    Hop("w0", LayerRange(0, 3), 0.001, 0.002, 0.0, 0.5, 100, 0.004),
    Hop("w1", LayerRange(3, 6), 0.0, 0.003, 0.001, 0.5, 200, 0.0045),
)
HELD = [
    {"worker": "w0", "layers": [0, 3], "wait_s": 0.002, "compute_s": 0.004, "sample_s": 0.0, "wire_bytes": 200},
    {"worker": "w1", "layers": [3, 6], "wait_s": 0.0, "compute_s": 0.006, "sample_s": 0.002, "wire_bytes": 400},
]


@pytest.fixture
def store(tmp_path: Path) -> JournalStore:
    return JournalStore(tmp_path)


def answered(store: JournalStore, request_id: str) -> ListRead:
    """What the reader's thread says when it is asked for a trace."""
    reader = JournalReader(store, lambda found: None, lambda error: None)
    found = reader._answer(ReadList(b"ctl", Query(what="trace", request_id=request_id)))
    assert isinstance(found, ListRead)
    return found


def body_of(actions: Any) -> dict[str, Any]:
    (report,) = said(actions)
    assert isinstance(report, Report)
    return json.loads(json.dumps(report.body))


def ask(bench: Bench, request_id: str = "") -> dict[str, Any]:
    """Memory answers by itself."""
    return body_of(bench.say(Query(what="trace", request_id=request_id), b"ctl"))


def asked_of_the_journal(bench: Bench, request_id: str = "") -> ReadList:
    (read,) = bench.say(Query(what="trace", request_id=request_id), b"ctl")
    assert isinstance(read, ReadList)
    return read


def at(tick: float) -> Timestamp:
    return Timestamp(NOW.wall + tick, tick, NOW.boot)


def ended(store: JournalStore, request_id: str = "r", hops: bool = False) -> None:
    """Two tokens after three of a prompt."""
    store.write([WriteAcceptance(submit(request_id, hops=hops), (1,), "")], at(50.0))
    store.write([WriteTokens((NewTokens(1, 3, 0, (7, 8), hops=(HOPS, HOPS) if hops else ()),))], at(109.0))
    store.write([WriteEnd(1, "length", 2)], at(110.0))


# --- known to the journal alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [False, True])
def test_one_that_has_left_memory(make_bench: MakeBench, store: JournalStore, hops: bool) -> None:
    """Positions and end are told, who held what if it was submitted with hops; and that there are no times any more."""
    ended(store, hops=hops)
    bench = make_bench(JOURNALLED)
    assert asked_of_the_journal(bench, "r") == ReadList(b"ctl", Query(what="trace", request_id="r"))
    body = body_of(bench.feed(answered(store, "r")))
    (sequence,) = body["sequences"]
    assert (body["request_id"], body["state"], body["times"]) == ("r", "ended", NO_TIMES)
    assert (sequence["num_prompt"], sequence["num_tokens"], sequence["reason"]) == (3, 2, "length")
    assert sequence.get("stages") == (HELD if hops else None)
    assert ("w1" in shown(body)) is hops


def test_the_last_that_ended(make_bench: MakeBench, store: JournalStore) -> None:
    """Without an id: memory has none, so the journal is asked, and tells of the one that ended last."""
    store.write([accept("older", 2), WriteEnd(2, "length", 0)], at(52.0))
    ended(store)
    bench = make_bench(JOURNALLED)
    assert asked_of_the_journal(bench) == ReadList(b"ctl", Query(what="trace"))
    assert body_of(bench.feed(answered(store, "")))["request_id"] == "r"


def test_none_has_ended(make_bench: MakeBench, store: JournalStore) -> None:
    """Nor is one under way: that is said."""
    bench = make_bench(JOURNALLED)
    asked_of_the_journal(bench)
    body = body_of(bench.feed(answered(store, "")))
    assert body["error"].startswith("no request is running or in the journal")


def test_the_id_itself_before_its_beginning(store: JournalStore) -> None:
    """However many others begin like it."""
    for number, name in enumerate(("r", "ra", "rb", "rc"), 1):
        store.write([accept(name, number), WriteEnd(number, "length", 0)], at(50.0 + number))
    assert [row["request_id"] for row in answered(store, "r").rows] == ["r"]
    assert [row["request_id"] for row in answered(store, "").rows] == ["rc"]
    assert len(answered(store, "ra").rows) == 1


def test_one_that_comes_into_memory_meanwhile(make_bench: MakeBench) -> None:
    """Memory knows best."""
    bench = make_bench(JOURNALLED).serve(1)
    read = asked_of_the_journal(bench, "r")
    begin(bench, submit())
    body = body_of(bench.feed(ListRead(b"ctl", read.query, ())))
    assert (body["state"], "times" in body) == ("running", False)


def test_a_journal_that_can_not_be_read(make_bench: MakeBench) -> None:
    """That is said beside what follows from it."""
    bench = make_bench(JOURNALLED)
    read = asked_of_the_journal(bench, "r")
    body = body_of(bench.feed(ListRead(b"ctl", read.query, (), "no")))
    assert (body["problem"], "error" in body) == ("no", True)


def test_what_memory_knows_is_not_asked_of_the_journal(make_bench: MakeBench) -> None:
    """Several that run and begin alike are told as such, with a journal or without."""
    bench = make_bench(JOURNALLED).serve(1)
    for name in ("abc", "abd"):
        begin(bench, submit(name))
    assert "2 requests begin with 'ab'" in ask(bench, "ab")["error"]


# --- in memory again after a restart ---------------------------------------------------------------------------------


def test_one_that_ended_before_the_restart(make_bench: MakeBench) -> None:
    """Memory tells what the journal told it, and that no times are known; for people, too."""
    found = record(submit(hops=True), 7, 8, reason="length")
    found.sequences[0].hops.extend((HOPS, HOPS))
    body = ask(make_bench(JOURNALLED, past(found)), "r")
    (sequence,) = body["sequences"]
    assert (body["state"], body["times"]) == ("ended", RESTORED)
    assert (sequence["num_tokens"], sequence["num_traced"], sequence["tokens"]) == (2, 0, [])
    assert (sequence["admitted_s"], sequence["stages"]) == (None, HELD)
    assert RESTORED[:40] in shown(body)
    assert "no token is traced" in shown(body)


def test_one_that_runs_on(make_bench: MakeBench) -> None:
    """The tokens that this broker saw from beginning to end have their times, whole; no earlier one is guessed."""
    bench = make_bench(JOURNALLED, past(record(submit(max_tokens=6, ignore_eos=True), 7, 8, 9)))
    bench.serve(2)
    while bench.pipe:
        bench.now += 0.1
        bench.finish(hops=HOPS)
    body = ask(bench, "r")
    (sequence,) = body["sequences"]
    assert (body["times"], sequence["num_tokens"], sequence["num_traced"]) == (RESTORED, 6, 2)
    assert [token["index"] for token in sequence["tokens"]] == [4, 5]
    assert all(token["total_s"] == pytest.approx(0.1) for token in sequence["tokens"])
    assert all(
        sum(each[part] for part in PARTS) == pytest.approx(each["total_s"], abs=1e-5)
        for each in (*sequence["tokens"], sequence["sums"])
    )


def test_one_that_had_no_token_yet(make_bench: MakeBench) -> None:
    """All its tokens are this broker's: their time goes from its arrival, when there was another."""
    bench = make_bench(JOURNALLED, past(record(submit(max_tokens=2), age_s=5.0)))
    bench.serve(1)
    bench.run_dry()
    (sequence,) = ask(bench, "r")["sequences"]
    assert [token["index"] for token in sequence["tokens"]] == [0, 1]
    assert sequence["tokens"][0]["queue_s"] >= 5.0


def shown(body: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_trace.trace(body))
    return console.export_text()
