"""The simulation's journal tells a broker what the real one would, and loses what a real one can lose, no more."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.broker.actions import FinishJournalRewrite, NewTokens, WriteAcceptance, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.events import (
    AcceptanceWritten,
    EpochWritten,
    JournalBroke,
    JournalMended,
    JournalRenewed,
    JournalRewritten,
    TokensWritten,
)
from swarm.broker.journal import JournalWrite
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.broker.reports.ended_requests import build_row
from swarm.sim.checks.ledger import Ledger
from swarm.sim.journal import CHECK_S, MAX_BATCH, RETRY_S, SimDisk, SimJournal, SimJournalFact
from swarm.sim.network import Network
from swarm.sim.world import Durations, World
from swarm.testing import fake_manifest
from swarm.wire.messages import TokenLogprob
from tests.unit.broker.bench import submit

UNKNOWN = 99
EPOCH = WriteEpoch(3, ("w0",), fake_manifest(2))


def accept(request_id: str, *sequences: int) -> WriteAcceptance:
    return WriteAcceptance(submit(request_id, n=len(sequences)), sequences, "tenant")


def tokens(sequence: int, first: int, *ids: int) -> WriteTokens:
    logprobs = tuple((TokenLogprob(i, -1.0),) for i in ids)
    return WriteTokens((NewTokens(sequence, 3 + first, first, ids, logprobs, num_cached=0 if first else sequence),))


# --- the ledger ------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[list[JournalWrite]]:
    """Transactions: ids are used again, tokens come with gaps and twice, ends for what is not there or has ended. What
    is drawn twice is the same token, and no sequence has a number that was heard of before."""
    next_sequence = 1
    transactions: list[list[JournalWrite]] = []
    for _ in range(draw(st.integers(1, 6))):
        writes: list[JournalWrite] = []
        for _ in range(draw(st.integers(1, 6))):
            known = st.sampled_from([*range(1, next_sequence), UNKNOWN])
            what = draw(st.sampled_from(["accept", "tokens", "tokens", "tokens", "end", "epoch"]))
            if what == "accept":
                num = draw(st.integers(1, 3))
                accepted = accept(draw(st.sampled_from("abc")), *range(next_sequence, next_sequence + num))
                seeing = msgspec.structs.replace(accepted.submit, pixels=draw(st.sampled_from([(), (b"cat",)])))
                writes.append(replace(accepted, submit=seeing))
                next_sequence += num
            elif what == "tokens":
                sequence, first = draw(known), draw(st.integers(0, 5))
                ids = [7 * sequence + index for index in range(first, first + draw(st.integers(1, 3)))]
                writes.append(tokens(sequence, first, *ids))
            elif what == "end":
                reason = draw(st.sampled_from(["stop", "length", "cancelled", "failed"]))
                num_tokens, detail = draw(st.integers(0, 4)), draw(st.sampled_from(["", "x"]))
                writes.append(WriteEnd(draw(known), reason, num_tokens, detail, has_pixels=draw(st.booleans())))
            else:
                writes.append(
                    WriteEpoch(draw(st.integers(1, 9)), ("w0", "w1"), draw(st.sampled_from([None, EPOCH.manifest])))
                )
        transactions.append(writes)
    return transactions


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(history=histories(), retained_s=st.sampled_from([0.0, 2.5, 100.0]))
def test_the_ledger_tells_what_the_file_tells(history: list[list[JournalWrite]], retained_s: float) -> None:
    """Whatever was written in whatever order: the same past, the same requests, the same list of ended ones."""
    with tempfile.TemporaryDirectory() as directory:
        store, ledger = JournalStore(Path(directory)), Ledger()
        for second, writes in enumerate(history):
            store.write(writes, Timestamp(float(second), float(second), "boot"))
            ledger.write(writes, float(second))
        now = float(len(history))
        moment = Timestamp(now, now, "boot")
        assert ledger.snapshot(now, retained_s) == store.read_snapshot(moment, retained_s=retained_s)
        for request_id in "abc":
            assert ledger.request(request_id, now) == store.read_request(request_id, moment)
        ended = list(ledger.ended_requests(now, 10))
        rows = [build_row(record) for record in sorted(store.list_ended(moment, 10), key=_name)]
        assert [build_row(record) for record in sorted(ended, key=_name)] == rows
        store.close()


def _name(record: object) -> str:
    return record.submit.request_id  # type: ignore[attr-defined, no-any-return]


# --- the disk and the thread -----------------------------------------------------------------------------------------


class Bench:
    """A journal alone, and what it told."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed, Durations())
        self.disk = SimDisk(self.world)
        self.facts: list[SimJournalFact] = []
        news = Network(self.world).link("broker", "disk", "client", (0.0, 0.001))
        self.journal = SimJournal(self.disk, news, self.facts.extend, lambda when, kind: False)

    def run(self, until: float = 1e9) -> None:
        while self.world.now < until and self.world.step():
            pass


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_loses_the_last_of_what_was_not_synced(seed: int) -> None:
    """A beginning of the tokens is left, and what was acknowledged durably is all there."""
    bench = Bench(seed)
    bench.journal.write(accept("a", 1))
    bench.run()
    for number in range(8):
        bench.journal.write(tokens(1, number, number))
        bench.run()
    bench.journal.kill()
    bench.disk.lose_power()
    record = bench.disk.open(60.0).requests[0]
    assert record.sequences[0].tokens == list(range(len(record.sequences[0].tokens)))


def test_a_power_cut_may_lose_all_or_nothing_of_it() -> None:
    """Both ends of what can happen do."""
    lost = set()
    for seed in range(200):
        bench = Bench(seed)
        bench.disk.commit([accept("a", 1)])
        bench.disk.sync()
        bench.disk.commit([tokens(1, 0, 5)])
        bench.disk.commit([tokens(1, 1, 6)])
        lost.add(bench.disk.lose_power())
    assert lost == {0, 1, 2}


@pytest.mark.parametrize("seed", range(40))
def test_a_killed_process_loses_what_waited(seed: int) -> None:
    """What it was told of is there; of the rest, a beginning."""
    bench = Bench(seed)
    bench.journal.write(accept("a", 1))
    for number in range(200):
        bench.journal.write(tokens(1, number, number))
    bench.run(until=0.02 * seed / 40)
    told = max((fact.committed[0][1] - 3 for fact in bench.facts if isinstance(fact, TokensWritten)), default=0)
    bench.journal.kill()
    num_facts = len(bench.facts)
    bench.run()
    assert len(bench.facts) == num_facts
    requests = bench.disk.open(60.0).requests
    kept = requests[0].sequences[0].tokens if requests else []
    assert kept == list(range(len(kept)))
    assert len(kept) >= told
    if AcceptanceWritten("a", (1,)) in bench.facts:
        assert requests


@pytest.mark.parametrize("is_known", [False, True], ids=["before-it-is-known", "afterwards"])
def test_epochs_overtake_what_a_full_disk_refuses(is_known: bool) -> None:
    """In their order, however many writes wait."""
    bench = Bench()
    bench.disk.is_full = True
    for number in range(3 * MAX_BATCH):
        bench.journal.write(tokens(1, number, number))
    if is_known:
        bench.run(until=RETRY_S / 2)
    bench.journal.write(WriteEpoch(5))
    bench.journal.write(WriteEpoch(6))
    bench.run(until=3 * RETRY_S)
    assert [type(fact) for fact in bench.facts] == [JournalBroke, EpochWritten, EpochWritten]
    assert bench.disk.open(60.0).epoch == 6


def test_a_full_disk_keeps_everything_for_later() -> None:
    """Told once that it broke; when there is room again, that it is mended, and then what was written, in order."""
    bench = Bench()
    bench.disk.is_full = True
    bench.journal.write(accept("a", 1))
    bench.journal.write(tokens(1, 0, 5))
    bench.run(until=3 * RETRY_S)
    assert [type(fact) for fact in bench.facts] == [JournalBroke]
    bench.disk.is_full = False
    bench.run()
    assert [type(fact) for fact in bench.facts[1:]] == [JournalMended, AcceptanceWritten, TokensWritten]


# --- a file that is lost ---------------------------------------------------------------------------------------------


def settled(bench: Bench) -> None:
    """Two requests are in the journal, and an epoch."""
    for write in (EPOCH, accept("a", 1), accept("b", 2), tokens(1, 0, 5)):
        bench.journal.write(write)
    bench.run()
    bench.facts.clear()


@pytest.mark.parametrize("how", ["deleted", "damaged", "garbled"])
def test_a_lost_file_is_begun_anew(how: str) -> None:
    """It is noticed without a write; told is that it broke, that there is a new one, and at last that this is whole."""
    bench = Bench()
    settled(bench)
    bench.disk.lose_file(how)
    bench.world.now += CHECK_S
    bench.journal.poll()
    bench.run()
    assert [type(fact) for fact in bench.facts] == [JournalBroke, JournalRenewed]
    assert bench.disk.is_damaged
    for write in (accept("a", 1), accept("b", 2), tokens(1, 0, 5), FinishJournalRewrite(EPOCH, 3)):
        bench.journal.write(write)
    bench.run()
    told = {type(fact) for fact in bench.facts[2:]}
    assert told == {AcceptanceWritten, TokensWritten, JournalMended, JournalRewritten}
    assert not bench.disk.is_damaged
    bench.journal.kill()
    bench.disk.lose_power()
    past = bench.disk.open(60.0)
    assert (past.epoch, len(past.requests), past.requests[0].sequences[0].tokens) == (3, 2, [5])


def test_what_a_lost_file_still_gives() -> None:
    """Deleted, all of it; garbled, nothing."""
    for how, num in (("deleted", 2), ("garbled", 0)):
        bench = Bench()
        settled(bench)
        bench.disk.lose_file(how)
        bench.disk.start_new_file()
        assert len(bench.disk.ledger.requests) == num


def test_after_a_sync_that_failed_nothing_unsynced_is_told() -> None:
    """The acceptance is told once another file has it, synced."""
    bench = Bench()
    settled(bench)
    bench.disk.fails_to_sync = True
    bench.journal.write(accept("c", 3))
    bench.run()
    assert [type(fact) for fact in bench.facts] == [JournalBroke, JournalRenewed, AcceptanceWritten]
    assert "c" in bench.disk.safe.requests


def test_who_dies_before_it_is_noticed_finds_the_file_as_it_was() -> None:
    """No more is promised than that it is noticed."""
    bench = Bench()
    settled(bench)
    bench.disk.lose_file("garbled")
    bench.journal.kill()
    assert len(bench.disk.open(60.0).requests) == 2
    assert not bench.disk.is_damaged
