"""Where the time of tokens went, told by a broker that has not seen it: from the steps in the journal."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from rich.console import Console

from swarm.broker.actions import NewTokens, ReadList, StepTimes, WriteAcceptance, WriteEnd, WriteSteps, WriteTokens
from swarm.broker.events import ListRead, RequestRead, Stopping
from swarm.broker.journal import Write, steps
from swarm.broker.journal.database import FILE, VERSION
from swarm.broker.journal.reader import JournalReader
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import Bounds, Moment, Store
from swarm.broker.journal.values import Damaged, Part, sealed
from swarm.broker.journal.writer import MAX_CHUNKS
from swarm.broker.reports import trace
from swarm.broker.reports.ended import NO_TIMES
from swarm.broker.reports.trace import PARTS
from swarm.ctl import render_trace
from swarm.errors import JournalError
from swarm.wire.messages import Hop, LayerRange, Query, Report, SequencePosition
from tests.unit.broker.bench import Bench, request_settings, said, settings, submit
from tests.unit.broker.journal.test_journal import LATER, NOW, accept, filled, spoil, tokens
from tests.unit.broker.journal_thread import Disk, Thread
from tests.unit.broker.recovery.test_restored import JOURNALLED, begin, past, record

MakeBench = Callable[..., Bench]
HOPS = (
    Hop("w0", LayerRange(0, 3), 0.001, 0.002, 0.0, 0.5, 100, 0.004),
    Hop("w1", LayerRange(3, 6), 0.0, 0.003, 0.001, 0.5, 200, 0.0045),
)


def step(at: float, *rows: tuple[int, int], took_s: float = 0.01) -> StepTimes:
    """Dispatched at that tick, with these (sequence, position)."""
    return StepTimes(at, at + took_s, tuple(SequencePosition(*row) for row in rows), HOPS)


def answered(store: Store, request_id: str, *, only_steps: bool = False) -> ListRead:
    """What the reader's thread says when it is asked for a trace."""
    reader = JournalReader(store, lambda found: None, lambda error: None)
    found = reader._answer(ReadList(b"ctl", Query(what="trace", request_id=request_id), only_steps))
    assert isinstance(found, ListRead)
    return found


def traced(store: Store, request_id: str = "r") -> dict[str, Any]:
    """The one row of it, as JSON would have it."""
    (row,) = answered(store, request_id).rows
    return json.loads(json.dumps(row))


def sums_up(token: dict[str, Any]) -> bool:
    return sum(token.get(part, 0.0) for part in PARTS) == pytest.approx(token["total_s"], abs=1e-5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- what the core hands over ----------------------------------------------------------------------------------------


def written(bench: Bench) -> list[int]:
    return [len(action.steps) for action in bench.log if isinstance(action, WriteSteps)]


def after(bench: Bench, seconds: float, **how: Any) -> None:
    bench.now += seconds
    bench.finish(**how)


def test_steps_are_handed_over_once_a_second(make_bench: MakeBench) -> None:
    """Those that came since, all of them once; nothing if there were none; and the rest when the process ends."""
    bench = make_bench(JOURNALLED).serve(2)
    begin(bench, submit(max_tokens=6, ignore_eos=True))
    for num in (3, 2):
        for _ in range(num):
            after(bench, 0.01)
        bench.tick(1.0)
        bench.tick(1.0)
    assert written(bench) == [3, 2]
    after(bench, 0.01)
    bench.tick(0.5)
    bench.feed(Stopping())
    bench.feed(Stopping())
    assert written(bench) == [3, 2, 1]
    handed = [each for action in bench.log if isinstance(action, WriteSteps) for each in action.steps]
    assert handed == list(bench.core._tracer.steps)


@pytest.mark.parametrize("parts", [{}, {"trace_steps": 0, "requests": request_settings(has_journal=True)}])
def test_nothing_is_handed_over(make_bench: MakeBench, parts: dict[str, Any]) -> None:
    """Without a journal, or if no traces are wanted."""
    bench = make_bench(settings(**parts)).serve(1)
    bench.say(submit(max_tokens=3))
    if parts:
        bench.feed(RequestRead("r", None))
    bench.run_dry()
    bench.tick(2.0)
    bench.feed(Stopping())
    assert written(bench) == []


def test_a_busy_second_is_bounded(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest steps go; and never more than memory keeps."""
    monkeypatch.setattr(trace, "MAX_WRITTEN", 4)
    bench = make_bench(JOURNALLED).serve(1)
    begin(bench, submit(max_tokens=9, ignore_eos=True))
    bench.run_dry()
    bench.tick(2.0)
    (action,) = [action for action in bench.log if isinstance(action, WriteSteps)]
    assert list(action.steps) == list(bench.core._tracer.steps)[-4:]


# --- the table -------------------------------------------------------------------------------------------------------


def test_steps_come_back_as_they_were() -> None:
    """To the microsecond; idle times are not kept. What claims impossible times ends no thread."""
    odd = (changed(HOPS[0], compute_s=math.inf), changed(HOPS[1], wait_s=1e300))
    before = (step(123_456.789012, (1, 5), (2, 9)), step(123_456.8, (1, 6)), StepTimes(123_456.9, 123_457.0, (), odd))
    found = steps.unpacked(steps.packed(before))
    assert [each.kv for each in found] == [each.kv for each in before]
    for one, other in zip(found[:2], before[:2], strict=True):
        assert (one.dispatched_at, one.finished_at) == pytest.approx((other.dispatched_at, other.finished_at), abs=1e-6)
        assert one.hops == tuple(changed(hop, idle_s=0.0) for hop in other.hops)
    assert [(hop.wait_s, hop.compute_s) for hop in found[2].hops] == [(0.001, 0.0), (0.0, 0.003)]


def test_a_spoiled_value_is_known_for_one() -> None:
    blob = bytearray(steps.packed((step(1.0, (1, 5)),)))
    blob[-1] ^= 1
    for spoiled in (bytes(blob), sealed(b"not compressed"), None):
        with pytest.raises(Damaged):
            steps.unpacked(spoiled)


def num_chunks(store: Store) -> int:
    with store.reading() as db:
        return int(db.execute("SELECT count(*) FROM steps").fetchone()[0])


def test_old_steps_go(tmp_path: Path) -> None:
    """As long as ended requests are kept, and no longer."""
    store = Store(tmp_path, Bounds(keep_s=100.0))
    for late_s in (0.0, 60.0):
        steps.write(store, (step(50.0 + late_s, (1, 5)),), Moment(NOW.wall + late_s, NOW.tick + late_s, NOW.boot))
    assert steps.tidy(store, Moment(NOW.wall + 99.0, 149.0, NOW.boot)) == 0
    assert steps.tidy(store, Moment(NOW.wall + 101.0, 151.0, NOW.boot)) == 1
    assert num_chunks(store) == 1


def test_steps_age_by_the_clock_that_nobody_sets(tmp_path: Path) -> None:
    """A wall clock that is wrong, now or then, lets none of them go early or stay for ever."""
    store = Store(tmp_path, Bounds(keep_s=100.0))
    steps.write(store, (step(50.0, (1, 5)),), NOW)
    for step_s in (1e9, -1e9):
        assert steps.tidy(store, Moment(NOW.wall + step_s, 149.0, NOW.boot)) == 0
        assert steps.tidy(store, Moment(NOW.wall + step_s, 149.0, "another one")) == 0
    assert steps.tidy(store, Moment(NOW.wall - 1e9, 151.0, NOW.boot)) == 1


def test_steps_take_an_eighth_at_most(tmp_path: Path) -> None:
    """The oldest go first."""
    store = Store(tmp_path, Bounds(keep_s=1e9, max_bytes=1 << 20))
    many = [tuple(step(at + i / 100, *((s, i * s % 997) for s in range(1, 9))) for i in range(100)) for at in range(60)]
    for chunk in many:
        steps.write(store, chunk, NOW)
    assert steps.tidy(store, NOW) > 0
    with store.reading() as db:
        ((oldest, newest, total),) = db.execute(
            "SELECT min(first_tick), max(first_tick), sum(length(steps)) FROM steps"
        )
    assert (1 << 20) // 16 < total <= (1 << 20) // 8
    assert (oldest > 10.0, newest) == (True, 59.0)


def test_for_want_of_room_steps_go_before_any_request(tmp_path: Path) -> None:
    """All of them, if need be."""
    store = Store(tmp_path, Bounds(keep_s=1e9, max_bytes=1 << 30))
    store.write([accept("a", 1), WriteEnd(1, "length", 0)], NOW)
    before = store.num_bytes
    for at in range(200):
        steps.write(store, tuple(step(at + i / 100, (1, i)) for i in range(100)), NOW)
    store._bounds = Bounds(keep_s=1e9, max_bytes=before + 8192)
    assert steps.tidy(store, NOW) > 190
    assert store.num_bytes <= before + 8192
    assert store.tidy(NOW) == 0
    assert store.request("a", NOW) is not None


def test_the_last_room_is_for_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are steps written that no trace would ask for."""
    assert steps.write(store, (StepTimes(1.0, 1.1, (), HOPS),), NOW) == 0
    monkeypatch.setattr(steps, "FREE_BYTES", 1 << 62)
    assert steps.write(store, (step(1.0, (1, 5)),), NOW) == 0
    assert num_chunks(store) == 0


# --- the thread ------------------------------------------------------------------------------------------------------


def test_steps_wait_for_everything_else(thread: Thread) -> None:
    """What counts goes first, whenever it came; and of steps no more wait than a few seconds bring."""
    thread.disk.gate.clear()
    thread.writer.write(accept("a", 1))
    for at in range(12):
        thread.writer.write_steps((step(float(at), (1, at)),))
        thread.writer.write(tokens(1, at, at))
    assert num_chunks(thread.disk) == 0
    thread.disk.gate.set()
    thread.told(13)
    thread.writer.close()
    store = Store(thread.disk.path.parent)
    with store.reading() as db:
        assert [row[0] for row in db.execute("SELECT first_tick FROM steps")] == [float(at) for at in range(4, 12)]
    assert thread.writer.figures.chunks_dropped == 4
    thread.start(store)  # for the fixture


def test_steps_get_a_turn_where_something_always_waits(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each transaction takes so long that the next write is there already: half of what may wait is
    kept for a quiet moment, the rest is not dropped for want of one."""
    written, chunks = thread.disk.write, []

    def always_another(writes: list[Write], now: Moment) -> set[int]:
        done = written(writes, now)
        chunks.append(thread.writer.figures.chunks.num)
        if len(chunks) < 40:
            thread.writer.write(tokens(1, len(chunks), 7))
        return done

    monkeypatch.setattr(thread.disk, "write", always_another)
    thread.disk.gate.clear()
    thread.writer.write(accept("a", 1))
    for at in range(6):
        thread.writer.write_steps((step(float(at), (1, at)),))
    thread.disk.gate.set()
    thread.told(40)
    assert chunks[-1] >= 6 - MAX_CHUNKS // 2
    thread.writer.close()
    assert (thread.writer.figures.chunks.num, thread.writer.figures.chunks_dropped) == (6, 0)
    thread.start(Store(thread.disk.path.parent))  # for the fixture


def test_a_full_disk_drops_steps_first(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told of them, nothing else is held up, and they are not tried again."""
    refused = threading.Event()

    def refuse(*_: object) -> int:
        refused.set()
        raise JournalError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("swarm.broker.journal.writer.steps.write", refuse)
        thread.writer.write_steps((step(1.0, (1, 5)),))
        assert refused.wait(10.0)
        thread.writer.write(accept("a", 1))
        (fact,) = thread.told(1)
        assert type(fact).__name__ == "AcceptanceWritten"
    thread.disk.full = True
    thread.writer.write(tokens(1, 0, 5))
    assert type(thread.told(1)[0]).__name__ == "JournalBroke"
    thread.writer.write_steps((step(2.0, (1, 5)),))
    thread.disk.full = False
    assert {type(fact).__name__ for fact in thread.told(2)} == {"JournalMended", "TokensWritten"}
    thread.writer.write_steps((step(3.0, (1, 5)),))
    thread.writer.close()
    assert (thread.writer.figures.chunks.num, thread.writer.figures.chunks_dropped) == (1, 2)
    thread.start(Disk(thread.disk.path.parent))  # for the fixture


# --- older journals, and damage --------------------------------------------------------------------------------------

VERSION_1 = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    submit BLOB NOT NULL,
    tenant TEXT NOT NULL,
    accepted_at REAL NOT NULL,
    accepted_tick REAL NOT NULL,
    boot TEXT NOT NULL,
    ended_at REAL
);
CREATE INDEX ended ON requests (ended_at);
CREATE TABLE sequences (
    id INTEGER PRIMARY KEY,
    request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    reason TEXT,
    detail TEXT NOT NULL DEFAULT '',
    tokens BLOB
);
CREATE INDEX of_request ON sequences (request);
CREATE TABLE tokens (
    sequence INTEGER NOT NULL REFERENCES sequences (id) ON DELETE CASCADE,
    first INTEGER NOT NULL,
    part BLOB NOT NULL,
    PRIMARY KEY (sequence, first)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""


def version_1(directory: Path, num: int = 40) -> None:
    """As the first version wrote it: every second request has ended."""
    with sqlite3.connect(directory / FILE) as db:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(VERSION_1)
        db.execute("INSERT INTO facts VALUES ('epoch', ?), ('next_sequence', ?)", (sealed(12), sealed(num + 1)))
        for number in range(1, num + 1):
            has_ended = number % 2 == 0
            head = (number, f"r{number}", sealed(submit(f"r{number}")), "tenant", NOW.wall, NOW.tick, NOW.boot)
            db.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*head, NOW.wall if has_ended else None))
            part = sealed(Part(tuple(range(200))))
            how = ("length", "", part) if has_ended else (None, "", None)
            db.execute("INSERT INTO sequences VALUES (?, ?, 0, ?, ?, ?)", (number, number, *how))
            if not has_ended:
                db.execute("INSERT INTO tokens VALUES (?, 0, ?)", (number, part))
    db.close()


def test_a_journal_of_version_1(tmp_path: Path) -> None:
    """All its requests are there, and go on; it is one of this version from then on."""
    version_1(tmp_path)
    for _ in range(2):
        store, notes = open_or_salvage(tmp_path, Bounds())
        found = store.past(LATER, retained_s=60.0)
        assert notes == ()
        assert (found.epoch, found.next_sequence) == (12, 41)
        assert [r.submit for r in found.requests] == [submit(f"r{number}") for number in range(1, 41)]
        assert all(r.sequences[0].tokens == list(range(200)) for r in found.requests)
        assert [r.ended for r in found.requests] == [False, True] * 20
        with store.reading() as db:
            assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION == 3
        assert "times" not in traced(store, "r2")
        steps.write(store, (step(51.0, (1, 5)),), NOW)
        store.close()
    store = Store(tmp_path)
    store.write([WriteEnd(1, "length", 200)], LATER)
    assert traced(store, "r1")["reasons"] == ["length"]
    assert num_chunks(store) == 2


def test_a_damaged_journal_of_version_1(tmp_path: Path) -> None:
    """What it never had is not missed."""
    version_1(tmp_path)
    spoil(tmp_path, "UPDATE sequences SET tokens = X'0011' WHERE id = 2")
    spoil(tmp_path, "UPDATE requests SET submit = X'0011' WHERE id = 'r3'")
    store, (note,) = open_or_salvage(tmp_path, Bounds(), retained_s=1e9)
    assert ", 3 parts could not be read" in note  # a request, its sequence, and that one's tokens
    found = {r.submit.request_id: r for r in store.past(LATER, retained_s=1e9).requests}
    assert set(found) == {f"r{number}" for number in range(1, 41)} - {"r3"}
    assert not found["r2"].ended


def test_steps_are_saved_from_a_damaged_journal(tmp_path: Path) -> None:
    """Those that are what they were."""
    filled(tmp_path, 3)
    store = Store(tmp_path)
    for at in (51.0, 52.0, 53.0):
        steps.write(store, (step(at, (1, 5)),), NOW)
    store.close()
    spoil(tmp_path, "UPDATE steps SET steps = X'0011' WHERE first_tick = 52.0")
    spoil(tmp_path, "UPDATE requests SET submit = X'0011' WHERE id = 'r3'")
    store, _ = open_or_salvage(tmp_path, Bounds())
    with store.reading() as db:
        assert [row[0] for row in db.execute("SELECT first_tick FROM steps")] == [51.0, 53.0]


# --- reading ---------------------------------------------------------------------------------------------------------


def at(tick: float, boot: str = NOW.boot) -> Moment:
    return Moment(NOW.wall + tick, tick, boot)


def request_of(store: Store, num_tokens: int, *, boot_at_end: str = NOW.boot) -> None:
    """Sequence 1, with three tokens of prompt: accepted at 50, ended a minute later."""
    store.write([WriteAcceptance(submit(), (1,), "")], at(50.0))
    store.write([WriteTokens((NewTokens(1, 3, 0, tuple(range(num_tokens))),))], at(109.0))
    store.write([WriteEnd(1, "length", num_tokens)], at(110.0, boot_at_end))


def test_the_same_trace_as_from_memory(make_bench: MakeBench, store: Store) -> None:
    """Token by token; but when they were sent is not known."""
    bench = make_bench(JOURNALLED).serve(2)
    arrived_at = bench.now
    begin(bench, submit(max_tokens=6, ignore_eos=True, num_prompt=300))
    while bench.pipe:
        after(bench, 0.2, hops=HOPS)
        bench.tick()
    bench.feed(Stopping())
    (report,) = said(bench.say(Query(what="trace", request_id="r"), b"ctl"))
    assert isinstance(report, Report)
    (memory,) = json.loads(json.dumps(report.body))["sequences"]
    sequence = bench.sequence()
    store.write([WriteAcceptance(sequence.request.submit, (sequence.id,), "")], at(arrived_at))
    for action in bench.log:
        if isinstance(action, WriteSteps):
            steps.write(store, action.steps, at(bench.now))
    assert num_chunks(store) > 1
    store.write(
        [WriteTokens((NewTokens(sequence.id, 3, 0, (7,) * 6),)), WriteEnd(sequence.id, "length", 6)], at(bench.now)
    )
    row = traced(store)
    (found,) = row["sequences"]
    assert (found["num_traced"], found["num_tokens"], found["reason"]) == (6, 6, "length")
    assert found["admitted_s"] == pytest.approx(memory["admitted_s"], abs=1e-5)
    for one, other in zip(found["tokens"], memory["tokens"], strict=True):
        assert "broker_s" not in one
        assert sums_up(one)
        assert one["num_steps"] == other["num_steps"]
        for part in ("total_s", "queue_s", "wire_s", "wait_s", "compute_s", "sample_s"):
            assert one[part] == pytest.approx(other[part], abs=1e-5)
    assert [(s["worker"], s["wire_bytes"]) for s in found["stages"]] == [
        (s["worker"], s["wire_bytes"]) for s in memory["stages"]
    ]
    assert "does not know when tokens were sent" in row["times"]
    assert "not known where" not in row["times"]


def test_over_two_chunks(store: Store) -> None:
    """Also a token that began in one and ended in the other; steps of others, before and after it do not count."""
    request_of(store, 4)
    steps.write(store, (step(40.0, (1, 3)), step(41.0, (1, 4))), at(42.0))  # another sequence 1, long gone
    steps.write(store, (step(51.0, (1, 3), (2, 8)), step(52.0, (1, 4)), step(52.5, (2, 9))), at(53.0))
    steps.write(store, (step(53.0, (2, 10)), step(54.0, (1, 5)), step(56.0, (1, 6))), at(57.0))
    steps.write(store, (step(200.0, (1, 7)),), at(201.0))
    (found,) = traced(store)["sequences"]
    assert [token["index"] for token in found["tokens"]] == [0, 1, 2, 3]
    assert [token["total_s"] for token in found["tokens"]] == pytest.approx([1.01, 1.0, 2.0, 2.0], abs=1e-5)
    assert all(sums_up(token) for token in (*found["tokens"], found["sums"]))
    assert "broker_s" not in found["sums"]


def test_lost_steps_are_said(store: Store) -> None:
    """A chunk that is damaged, and one that was never written: sums are over the others."""
    request_of(store, 5)
    for index, moment in enumerate((51.0, 52.0, 53.0, 54.0)):
        steps.write(store, (step(moment, (1, 3 + index)),), at(moment + 1))
    with store.unsynced() as db:
        db.execute("UPDATE steps SET steps = X'0011' WHERE first_tick = 52.0")
    row = traced(store)
    (found,) = row["sequences"]
    assert [token["index"] for token in found["tokens"]] == [0, 3]
    assert (found["num_traced"], found["num_tokens"]) == (2, 5)
    assert "of 3 tokens it is not known where their time went" in row["times"]
    assert found["sums"]["total_s"] == pytest.approx(1.01 + 1.0, abs=1e-5)


def test_another_boot(store: Store) -> None:
    """Its clock is another one: its steps are no steps of this request, and one over a reboot has no times."""
    request_of(store, 1)
    steps.write(store, (step(51.0, (1, 3)),), at(52.0, "another one"))
    assert "times" not in traced(store)
    steps.write(store, (step(51.0, (1, 3)),), at(52.0))
    assert traced(store)["sequences"][0]["num_traced"] == 1
    request_of(store, 1, boot_at_end="another one")
    assert "times" not in traced(store)


def test_the_id_itself_before_its_beginning(store: Store) -> None:
    """However many others begin like it."""
    for number, name in enumerate(("r", "ra", "rb", "rc"), 1):
        store.write([accept(name, number), WriteEnd(number, "length", 0)], at(50.0 + number))
    assert [row["request_id"] for row in answered(store, "r").rows] == ["r"]
    assert [row["request_id"] for row in answered(store, "").rows] == ["rc"]


def test_the_last_that_ended(make_bench: MakeBench, store: Store) -> None:
    """Without an id: memory has none, so the journal is asked, and tells of the one that ended last with its times."""
    request_of(store, 1)
    store.write([accept("older", 2), WriteEnd(2, "length", 0)], at(52.0))
    steps.write(store, (step(51.0, (1, 3)),), at(52.0))
    bench = make_bench(JOURNALLED)
    assert asks(bench) == ReadList(b"ctl", Query(what="trace"))
    assert told(bench, answered(store, ""))["request_id"] == "r"


def test_none_has_ended(make_bench: MakeBench, store: Store) -> None:
    """Nor is one under way: that is said."""
    bench = make_bench(JOURNALLED)
    asks(bench)
    assert told(bench, answered(store, ""))["error"].startswith("no request is known: none is under way")


def test_what_memory_knows_is_not_asked_of_the_journal(make_bench: MakeBench) -> None:
    """Several that run and begin alike are told as such, with a journal or without."""
    bench = make_bench(JOURNALLED).serve(1)
    for name in ("abc", "abd"):
        begin(bench, submit(name))
    (report,) = said(bench.say(Query(what="trace", request_id="ab"), b"ctl"))
    assert isinstance(report, Report)
    assert "2 requests begin with 'ab'" in str(report.body["error"])


# --- after a restart -------------------------------------------------------------------------------------------------


def asks(bench: Bench, request_id: str = "") -> ReadList:
    (ask,) = [a for a in bench.say(Query(what="trace", request_id=request_id), b"ctl") if isinstance(a, ReadList)]
    return ask


def told(bench: Bench, found: ListRead) -> dict[str, Any]:
    (report,) = said(bench.feed(found))
    assert isinstance(report, Report)
    return json.loads(json.dumps(report.body))


def test_one_that_ended_before_the_restart(make_bench: MakeBench, store: Store) -> None:
    """It is in memory again, but not where its time went: the journal is asked, by its whole id."""
    now = Moment.now()
    store.write([WriteAcceptance(submit(), (1,), ""), WriteTokens((NewTokens(1, 3, 0, (7, 8)),))], now)
    steps.write(store, (step(now.tick + 0.1, (1, 3)), step(now.tick + 0.2, (1, 4))), now)
    store.write([WriteEnd(1, "length", 2)], replace(now, tick=now.tick + 1.0, wall=now.wall + 1.0))
    found = store.request("r", now)
    assert found is not None
    bench = make_bench(JOURNALLED, past(found))
    bench.state.requests["r"].arrived_at = now.tick  # the bench has a clock of its own
    ask = asks(bench)
    assert (ask.query.request_id, ask.only_steps) == ("r", True)
    body = told(bench, answered(store, "r", only_steps=True))
    assert [token["total_s"] for token in body["sequences"][0]["tokens"]] == pytest.approx([0.11, 0.1], abs=1e-5)
    assert body["sequences"][0]["num_traced"] == 2
    assert "from the journal" in body["times"]


def test_one_that_runs_on(make_bench: MakeBench) -> None:
    """Its steps of before from the journal, those of now from memory, and none twice; what was lost is left out."""
    bench = make_bench(JOURNALLED, past(record(submit(max_tokens=6, ignore_eos=True), 7, 8, 9)))
    arrived_at = bench.state.requests["r"].arrived_at
    bench.serve(2)
    for _ in range(3):
        after(bench, 0.1)
    seen = list(bench.core._tracer.steps)
    before = (step(arrived_at + 0.2, (5, 3)), step(arrived_at + 0.3, (5, 4)), *steps.unpacked(steps.packed(seen)))
    asks(bench, "r")
    body = told(bench, ListRead(b"ctl", Query(what="trace", request_id="r"), (), steps=before))
    (found,) = body["sequences"]
    assert [token["index"] for token in found["tokens"]] == [0, 1, 4, 5]
    assert [("broker_s" in token) for token in found["tokens"]] == [False, False, True, True]
    assert all(sums_up(token) for token in found["tokens"])
    assert found["admitted_s"] == pytest.approx(0.2, abs=1e-5)
    assert "of 2 tokens" in body["times"]


def test_a_journal_that_can_not_be_read(make_bench: MakeBench) -> None:
    """Memory's own is told, with what is missing and why."""
    bench = make_bench(JOURNALLED, past(record(None, 7, reason="length")))
    asks(bench, "r")
    body = told(bench, ListRead(b"ctl", Query(what="trace", request_id="r"), (), "no", ()))
    assert (body["times"], body["problem"]) == (trace.BEFORE, "no")


def test_the_steps_of_one_that_has_not_ended(tmp_path: Path) -> None:
    """As long as the machine's clock goes on."""
    store = Store(tmp_path)
    now = Moment.now()
    store.write([WriteAcceptance(submit(), (1,), "")], now)
    steps.write(store, (step(now.tick + 1, (1, 3), (2, 4)), step(now.tick + 2, (2, 5))), now)
    found = answered(store, "r", only_steps=True)
    assert found.steps is not None
    assert (found.rows, [each.kv for each in found.steps]) == ((), [(SequencePosition(1, 3),)])
    store.write([WriteAcceptance(submit("x"), (3,), "")], replace(now, boot="another one"))
    steps.write(store, (step(now.tick + 1, (3, 3)),), replace(now, boot="another one"))
    assert answered(store, "x", only_steps=True).steps == ()
    assert answered(store, "unknown", only_steps=True).steps == ()


def test_one_that_leaves_memory_meanwhile(make_bench: MakeBench, store: Store) -> None:
    """The journal is asked once more, for all of it."""
    request_of(store, 1)
    steps.write(store, (step(51.0, (1, 3)),), at(52.0))
    bench = make_bench(JOURNALLED, past(record(None, 7, reason="length", ended_age_s=59.0)))
    first = asks(bench)
    bench.tick(2.0)
    assert bench.state.requests == {}
    bench.core._tracer.ended.clear()
    (second,) = [a for a in bench.feed(ListRead(b"ctl", first.query, (), steps=())) if isinstance(a, ReadList)]
    assert second == ReadList(b"ctl", first.query)
    assert told(bench, answered(store, "r"))["sequences"][0]["num_traced"] == 1


# --- for people ------------------------------------------------------------------------------------------------------


def shown(body: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_trace.trace(body))
    return console.export_text()


def test_what_is_not_known_is_no_nothing(store: Store) -> None:
    """No column for the broker's part if no token has one; and without times, the reason."""
    request_of(store, 2)
    assert NO_TIMES[:40] in shown({"state": "ended", "times": NO_TIMES, "sequences": traced(store)["sequences"]})
    steps.write(store, (step(51.0, (1, 3)), step(52.0, (1, 4))), at(53.0))
    text = shown(traced(store))
    assert "queue" in text
    assert "to the client's socket" not in text
    assert "broker" not in text.split("milliseconds per token")[1]
