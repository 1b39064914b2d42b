"""Chunks of keys and values on the disk: which are written, when, and what a stage makes of those that it reads."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from swarm.stage import actions as act
from swarm.stage.actions import CHUNK
from swarm.stage.events import ChunkSpilled, KvTurn, OrderArrived, SpilledRead, SpilledStored, StageTick
from swarm.stage.kv_spill import chunk_names, extend_name
from swarm.stage.shell import spill_moves, spill_thread
from swarm.stage.shell.spill_files import ChunkFile, SpillFiles
from swarm.stage.shell.spill_moves import PART_S
from swarm.wire.messages import Fence, LayerRange, Row, SequencePosition
from tests.unit.stage.bench import StageBench, opened, step_of
from tests.unit.stage.spill_bench import TOKENS, SpillBench

MakeStage = Callable[..., StageBench]
MakeDisk = Callable[..., SpillBench]


@pytest.fixture
def make_disk(make_stage: MakeStage, tmp_path: Path) -> MakeDisk:
    """Stages, active in epoch 1 with orders to write; all share a folder."""

    def make(first: int = 0, stop: int = 3, **fields: object) -> SpillBench:
        stage = make_stage(first, stop)
        stage.executor.capacity = 1 << 14
        stage.activate()
        bench = SpillBench(stage, tmp_path / "kv", **fields)  # type: ignore[arg-type]
        bench.order_spilling()
        return bench

    return make


@pytest.fixture
def disk(make_disk: MakeDisk) -> SpillBench:
    return make_disk()


def spans(chunks: list[act.SpillChunk]) -> list[tuple[int, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_depends_on_all_tokens_up_to_the_end_and_on_nothing_behind() -> None:
    names = chunk_names(TOKENS, 1000)
    assert len(names) == len(set(names)) == 3
    assert chunk_names(TOKENS[:800], 800) == names
    other = chunk_names((99, *TOKENS[1:]), 1000)
    assert not set(other) & set(names)
    assert extend_name(names[1], TOKENS[512:768]) == names[2] != extend_name("", TOKENS[512:768])


# --- writing ---------------------------------------------------------------------------------------------------------


def test_whole_chunks_of_long_sequences_are_written_in_order(disk: SpillBench) -> None:
    disk.open(1)
    disk.compute(1, 0, 511)
    assert disk.write_all() == []
    disk.compute(1, 511, 512)
    chunks = disk.write_all()
    assert spans(chunks) == [(1, 0, 256), (1, 256, 512)]
    assert [chunk.name for chunk in chunks] == chunk_names(TOKENS, 512)
    disk.compute(1, 512, 767)
    assert disk.write_all() == []
    disk.compute(1, 767, 800)
    assert spans(disk.write_all()) == [(1, 512, 768)]


def test_sequences_take_turns(disk: SpillBench) -> None:
    for sequence in (1, 2):
        disk.open(sequence)
        disk.compute(sequence, 0, 512)
    assert [span[:2] for span in spans(disk.write_all())] == [(1, 0), (2, 0), (1, 256), (2, 256)]


def test_nothing_is_written_without_an_order_or_after_its_plan(disk: SpillBench, make_stage: MakeStage) -> None:
    disk.open(1)
    disk.compute(1, 0, 512)
    disk.stage.order(Fence(epoch=2))
    assert disk.turn() == []
    disk.stage.activate(2, disk.next_step, ((1, 512),))
    assert disk.turn() == []
    disk.order_spilling(epoch=2)
    assert spans(disk.write_all()) == [(1, 0, 256), (1, 256, 512)]


def test_sequences_of_other_bits_and_what_begins_like_them_are_left_out(disk: SpillBench) -> None:
    disk.order_spilling(excluded=(1,))
    disk.open(1)
    disk.compute(1, 0, 512)
    disk.fork(2, source=1, shared=512)
    disk.compute(2, 512, 768)
    assert disk.write_all() == []
    disk.stage.run(step_of(disk.next_step, release=(1, 2)))
    disk.open(1)  # the number has another sequence now
    disk.compute(1, 0, 512)
    assert len(disk.write_all()) == 2


def test_sequences_that_begin_like_them_before_the_order_arrives_are_left_out(disk: SpillBench) -> None:
    """A plan's first steps and its order come over different connections."""
    disk.open(1)
    disk.compute(1, 0, 512)
    disk.stage.order(Fence(epoch=2))
    disk.stage.activate(2, disk.next_step, ((1, 512),))
    disk.fork(2, source=1, shared=512, epoch=2)
    disk.fork(3, source=2, shared=512, epoch=2)
    disk.stage.run(step_of(disk.next_step, release=(2,), epoch=2))
    disk.open(4, epoch=2)
    disk.compute(4, 0, 512, epoch=2)
    disk.order_spilling(epoch=2, excluded=(1,))
    assert {chunk.sequence for chunk in disk.write_all()} == {4}


def test_a_truncated_sequence_is_written_again_from_where_it_differs(disk: SpillBench) -> None:
    disk.open(1)
    disk.compute(1, 0, 768)
    disk.write_all()
    disk.stage.run(step_of(disk.next_step, truncate=(SequencePosition(1, 300),)))
    other = tuple(500 + position for position in range(468))
    disk.compute(1, 300, 768, tokens=other)
    chunks = disk.write_all()
    assert spans(chunks) == [(1, 256, 512), (1, 512, 768)]
    assert [chunk.name for chunk in chunks] == chunk_names(TOKENS[:300] + other, 768)[1:]


def test_steps_that_wait_leave_it_two_percent_of_the_time(disk: SpillBench) -> None:
    disk.open(1)
    disk.compute(1, 0, 7 * CHUNK)
    busy = KvTurn(is_idle=False, may_spill=True)
    core, took_s, num = disk.stage.core, 0.01, 0
    for _ in range(1000):
        disk.stage.now += 0.001
        if any(isinstance(action, act.SpillChunk) for action in disk.stage.feed(busy)):
            num += 1
            disk.stage.feed(ChunkSpilled(1, took_s, is_taken=True))
    assert num == 4, "one second, of which 2 % and what was saved up may be spent"
    assert not core.wants_kv_turn(KvTurn(is_idle=True), disk.stage.now), "the disk's thread accepts nothing"
    assert core.wants_kv_turn(KvTurn(is_idle=True, may_spill=True), disk.stage.now)


def test_a_stage_writes_beside_a_step_of_its_own(disk: SpillBench) -> None:
    disk.open(1)
    disk.compute(1, 0, 2 * CHUNK)
    disk.feed_step(step_of(disk.next_step, Row(1, 2 * CHUNK, 1, False)))
    disk.stage.now += 1.0
    assert any(isinstance(action, act.SpillChunk) for action in disk.stage.feed(KvTurn(is_idle=True, may_spill=True)))


def test_idle_time_leaves_it_a_quarter(disk: SpillBench) -> None:
    """Other stages may compute on the same cores."""
    disk.open(1)
    disk.compute(1, 0, 7 * CHUNK)
    idle, num = KvTurn(is_idle=True, may_spill=True), 0
    for _ in range(1000):
        disk.stage.now += 0.001
        if any(isinstance(action, act.SpillChunk) for action in disk.stage.feed(idle)):
            num += 1
            disk.stage.feed(ChunkSpilled(1, 0.05, is_taken=True))
    assert num == 6, "one second, of which a quarter and what was saved up may be spent"


def test_a_chunk_that_was_not_read_or_not_written_is_tried_again(disk: SpillBench) -> None:
    disk.open(1)
    disk.compute(1, 0, 512)
    idle = KvTurn(is_idle=True, may_spill=True)
    assert disk.stage.feed(idle)
    disk.stage.feed(ChunkSpilled(1, 0.001, is_taken=False))
    assert not disk.stage.core.wants_kv_turn(idle, disk.stage.now), "it rests until the sequence has grown"
    disk.compute(1, 512, 768)
    assert spans(disk.write_all()) == [(1, 0, 256), (1, 256, 512), (1, 512, 768)]


def test_a_full_disk_loses_nothing_but_time(make_disk: MakeDisk) -> None:
    disk = make_disk(limit_bytes=1000)
    disk.open(1)
    disk.compute(1, 0, 768)
    assert spans(disk.write_all()) == [(1, 0, 256)]
    assert disk.turn() == [], "it rests"
    disk.clock.advance(11.0)
    disk.files.limit_bytes = 1 << 20
    assert spans(disk.write_all()) == [(1, 0, 256), (1, 256, 512), (1, 512, 768)]
    values = disk.traffic.values()
    assert (values["spill_chunks_written"], values["spill_chunks_dropped"]) == (3, 1)


def slow(disk: SpillBench, monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, int, int]]:
    """One layer is a unit, and reading a block of it, or storing it, takes two thirds of a turn. The calls: sequence,
    first layer, position."""
    calls, executor = [], type(disk.stage.executor)
    whole = getattr(executor, name)

    def take_time(own: Any, sequence: int, *arguments: Any) -> Any:
        disk.clock.advance(PART_S * 2 / 3)
        disk.stage.now += PART_S * 4
        result = whole(own, sequence, *arguments)
        data = arguments[1] if name == "write_kv" else result
        assert len(data.layers) == 1
        calls.append((sequence, data.layers.first, data.start))
        return result

    monkeypatch.setattr(spill_moves, "UNIT_BYTES", CHUNK)
    monkeypatch.setattr(executor, name, take_time)
    return calls


def test_a_step_waits_for_a_part_of_a_chunk_only(
    disk: SpillBench, make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sequence in (1, 2):
        disk.open(sequence)
        disk.compute(sequence, 0, 512)
    computed, calls = disk.chain(1), slow(disk, monkeypatch, "read_kv")
    assert spans(disk.turn()) == [(1, 0, 256)]
    assert calls == [(1, 0, 0), (1, 0, 32)]
    while disk.turn():
        disk.disk.work()
    assert calls[:24] == [(1, layer, start) for layer in range(3) for start in range(0, 256, 32)]
    monkeypatch.undo()
    later = make_disk()
    later.open(5)
    later.restore(5)
    later.read_all()
    assert later.chain(5) == {layer: states[:512] for layer, states in computed.items()}


def test_a_chunk_that_changes_while_it_is_read_is_read_again(
    disk: SpillBench, make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.open(1)
    disk.compute(1, 0, 512)
    calls = slow(disk, monkeypatch, "read_kv")
    for _ in range(3):
        assert disk.turn()
    disk.stage.run(step_of(disk.next_step, truncate=(SequencePosition(1, 100),)))
    other = tuple(500 + position for position in range(412))
    disk.compute(1, 100, 512, tokens=other)
    del calls[:]
    assert [chunk.name for chunk in disk.turn()] == chunk_names(TOKENS[:100] + other, 256)
    assert calls == [(1, 0, 0), (1, 0, 32)]
    monkeypatch.undo()
    disk.write_all()
    later = make_disk()
    later.open(5, tokens=TOKENS[:100] + other)
    later.restore(5)
    later.read_all()
    assert later.reports[0].position == 512
    assert later.chain(5) == disk.chain(1)


def test_the_memory_that_waits_for_the_disk_is_bounded(disk: SpillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.open(1)
    disk.compute(1, 0, 512)
    calls = slow(disk, monkeypatch, "read_kv")
    while disk.turn():
        pass
    assert len(calls) == 2 * 8, "two layers of a chunk, which the disk's thread has not written"


def test_figures_of_the_disk_are_right_after_a_restart(make_disk: MakeDisk) -> None:
    """Files that are there were not written, and count from the start."""
    written(make_disk)
    disk = make_disk()
    disk.disk.tidy()
    size = sum(path.stat().st_size for path in disk.folder.glob("*/*/*"))
    assert disk.traffic.values()["spill_bytes"] == size > 0
    disk.open(1)
    disk.compute(1, 0, 1024)
    assert len(disk.write_all()) == 4
    assert disk.traffic.values()["spill_chunks_written"] == 1


def test_a_folder_that_cannot_be_read_is_reported(make_disk: MakeDisk) -> None:
    disk = make_disk()
    disk.folder.mkdir(exist_ok=True)
    disk.folder.chmod(0o777)
    with capture_logs() as logs:
        disk.disk.tidy()
    assert [entry["event"] for entry in logs] == ["kv_not_spilled"]
    assert "others may write" in logs[0]["reason"]


# --- reading ---------------------------------------------------------------------------------------------------------


def written(make_disk: MakeDisk, first: int = 0, stop: int = 3, positions: int = 800) -> dict[int, list[int]]:
    """Another process has written the chunks of these layers. What it had computed."""
    before = make_disk(first, stop)
    before.open(1)
    before.compute(1, 0, positions)
    before.write_all()
    return before.chain(1)


def test_what_was_written_is_what_would_be_computed(make_disk: MakeDisk) -> None:
    computed = written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.read_all()
    assert disk.chain(5) == {layer: states[:768] for layer, states in computed.items()}
    (report,) = disk.reports
    assert (report.sequence, report.ticket, report.position, report.epoch) == (5, 7, 768, 1)
    disk.compute(5, 768, 800, truncate=(SequencePosition(5, 768),))
    assert disk.chain(5) == computed
    assert disk.stage.core.counters["spill_positions_restored"] == 768


def test_a_cut_of_a_sequence_that_the_step_opens_leaves_its_tokens(make_disk: MakeDisk) -> None:
    """After the loss of all workers, the broker cuts every sequence that ran before, also those that begin again."""
    computed = written(make_disk)
    disk = make_disk()
    disk.open(5, truncate=(SequencePosition(5, 0),))
    disk.restore(5)
    disk.read_all()
    assert [report.position for report in disk.reports] == [768]
    disk.compute(5, 768, 800, truncate=(SequencePosition(5, 768),))
    assert disk.chain(5) == computed
    assert tuple(disk.stage.core.sequences[5].history) == TOKENS[:800]


def test_a_restored_sequence_is_not_written_again(make_disk: MakeDisk) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.read_all()
    disk.compute(5, 768, 1024)
    assert spans(disk.write_all()) == [(5, 768, 1024)]


def test_layers_are_separate_so_another_cut_finds_them(make_disk: MakeDisk) -> None:
    first, second = written(make_disk, 0, 2), written(make_disk, 2, 4)
    disk = make_disk(1, 4)
    disk.open(5)
    disk.restore(5)
    disk.read_all()
    assert disk.reports[0].position == 768
    expected = {1: first[1], 2: second[2], 3: second[3]}
    assert disk.chain(5) == {layer: states[:768] for layer, states in expected.items()}


def test_reading_ends_where_a_layer_lacks_a_chunk(make_disk: MakeDisk) -> None:
    written(make_disk, 0, 2)
    written(make_disk, 2, 3, positions=600)
    disk = make_disk(0, 3)
    disk.open(5)
    disk.restore(5)
    disk.read_all()
    assert [report.position for report in disk.reports] == [512]


def test_all_damaged_layers_of_a_chunk_are_written_again(make_disk: MakeDisk) -> None:
    """A power cut tears several files; here with their size, so that only reading shows it."""
    written(make_disk)
    for path in make_disk().folder.glob("*/*/00001-*"):
        path.write_bytes(bytes(path.stat().st_size))
    for expected in (256, 768):
        disk = make_disk()
        disk.open(5)
        disk.restore(5)
        disk.read_all()
        assert [report.position for report in disk.reports] == [expected]
        assert disk.files.num_damaged == (3 if expected == 256 else 0)
        disk.compute(5, expected, 800)
        disk.write_all()


def test_a_sequence_goes_on_from_a_copied_beginning(make_disk: MakeDisk) -> None:
    """Within a chunk, of which only the blocks behind are stored."""
    computed = written(make_disk)
    disk = make_disk()
    disk.open(1)
    disk.compute(1, 0, 320)
    item = opened(5, tokens=TOKENS, num_prompt=2000, limit=2048)
    fork = type(item)(5, item.params, 5, 2000, 2048, TOKENS, source=1, shared=320)
    disk.stage.run(step_of(disk.next_step, open=(fork,)))
    disk.restore(5, start=320)
    stored = []
    while disk.disk.work():
        stored += [data.start for event in disk.take_all() if isinstance(event, SpilledRead) for data in event.blocks]
    assert stored == list(range(320, 768, 32))
    assert disk.reports[0].position == 768
    assert disk.chain(5) == {layer: states[:768] for layer, states in computed.items()}


def test_nothing_beyond_the_order_is_read(make_disk: MakeDisk) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5, tokens=TOKENS[:700])
    disk.restore(5, stop=699)
    disk.read_all()
    assert disk.reports[0].position == 512


@pytest.mark.parametrize("why", ["unknown", "other position", "too short", "retired"])
def test_what_cannot_be_restored_is_reported_at_once(disk: SpillBench, why: str) -> None:
    disk.open(5)
    if why == "other position":
        disk.compute(5, 0, 32)
    if why == "retired":
        disk.compute(5, 0, 32)
        disk.stage.run(step_of(disk.next_step, retire=(SequencePosition(5, 32),)))
    disk.restore(6 if why == "unknown" else 5, stop=255 if why == "too short" else 2000)
    assert [report.position for report in disk.reports] == [0]
    assert not disk.disk.work()


def test_an_order_of_another_plan_is_not_followed(disk: SpillBench) -> None:
    disk.open(5)
    disk.stage.order(Fence(epoch=2))
    disk.restore(5)
    assert (disk.reports, disk.disk.work()) == ([], False)
    assert disk.stage.core.counters["stale_orders"] == 1


@pytest.mark.parametrize("end", ["row", "truncate", "release", "fence"])
def test_what_is_read_after_the_end_is_dropped(make_disk: MakeDisk, end: str) -> None:
    computed = written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.disk.work()
    disk.take_all()
    disk.disk.work()
    late = disk.disk.take()
    assert late is not None
    if end == "row":
        disk.compute(5, 256, 288)
    elif end == "truncate":
        disk.feed_step(step_of(disk.next_step, truncate=(SequencePosition(5, 0),)))
    elif end == "release":
        disk.feed_step(step_of(disk.next_step, release=(5,)))
    else:
        disk.feed(OrderArrived(Fence(epoch=2)))
    disk.feed(late)
    disk.read_all()
    assert disk.reports == []
    assert disk.stage.core.counters["spill_reads_late"] == 1
    assert "spill_positions_restored" not in disk.stage.core.counters
    if end == "truncate":
        disk.compute(5, 0, 800)
        assert disk.chain(5) == computed


def test_time_ends_it_with_what_has_been_read(make_disk: MakeDisk) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5, within_s=0.5)
    disk.disk.work()
    disk.take_all()
    disk.stage.now += 0.4
    disk.feed(StageTick(1 << 20))
    assert disk.reports == []
    disk.stage.now += 0.2
    disk.feed(StageTick(1 << 20))
    assert [report.position for report in disk.reports] == [256]
    assert not disk.disk.work(), "nobody reads on"


def test_the_time_ends_it_between_two_ticks_too(make_disk: MakeDisk) -> None:
    """The broker waits for a fifth longer, which is less than a tick where computing is fast."""
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    assert disk.stage.core.next_deadline == inf
    disk.restore(5, within_s=0.04)
    assert disk.stage.core.next_deadline == pytest.approx(disk.stage.now + 0.04)
    disk.disk.work()
    disk.take_all()
    disk.disk.work()
    disk.stage.now += 0.05
    disk.take_all()
    assert [report.position for report in disk.reports] == [256]
    assert disk.stage.core.next_deadline == inf
    assert disk.stage.core.counters["spill_reads_overdue"] == 1


def test_what_is_stored_when_the_time_is_over_counts(make_disk: MakeDisk) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5, within_s=0.04)
    disk.disk.work()
    disk.begin_storing()
    disk.stage.now += 0.05
    stored = disk.store()
    assert stored is not None
    disk.feed(stored)
    assert [report.position for report in disk.reports] == [256]


def test_what_is_not_stored_does_not_count(make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.disk.work()
    disk.take_all()
    disk.disk.work()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(disk.stage.executor), "write_kv", fail)
    disk.take_all()
    assert [report.position for report in disk.reports] == [256]
    assert disk.stage.core.sequences[5].position() == 256
    assert disk.stage.core.counters["spill_reads_not_stored"] == 1


def test_a_step_waits_for_a_part_of_what_is_stored_only(make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = written(make_disk)
    disk = make_disk()
    disk.open(5)
    calls = slow(disk, monkeypatch, "write_kv")
    moves = disk.traffic._disk
    assert moves is not None
    for ticket in (7, 8):
        disk.restore(5, ticket=ticket)
        disk.disk.work()
        disk.begin_storing()
        del calls[:]
        assert moves.next_event() is None
        assert calls == [(5, 0, 0), (5, 1, 0)]
    disk.restore(5, ticket=9)  # it ends the one before
    assert not moves.is_storing
    disk.read_all()
    assert [(report.ticket, report.position) for report in disk.reports] == [(9, 768)]
    assert disk.chain(5) == {layer: states[:768] for layer, states in computed.items()}


def test_a_large_chunk_is_read_only_when_none_waits(make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    written(make_disk)
    for ahead_bytes, expected in ((3 * CHUNK, 2), (3 * CHUNK - 1, 1)):
        monkeypatch.setattr(spill_thread, "AHEAD_BYTES", ahead_bytes)
        disk = make_disk()
        disk.open(5)
        disk.restore(5)
        num = 0
        while disk.disk.work():
            num += 1
        assert num == expected


def test_a_disk_that_hangs_is_asked_nothing_more(make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that come meanwhile are answered at once, and the end of the process need not wait."""
    written(make_disk)
    disk = make_disk()
    for sequence in (5, 6):
        disk.open(sequence)
    whole, num_reads = SpillFiles.read, 0

    def hang(own: SpillFiles, file: ChunkFile) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            disk.clock.advance(0.9)
            disk.restore(6, ticket=8)
            assert disk.take_all() == []
            disk.clock.advance(0.2)
            with capture_logs() as logs:
                disk.restore(6, ticket=9)
            assert [entry["reason"] for entry in logs] == ["the disk does not answer"]
            disk.take_all()
            assert [(report.ticket, report.position) for report in disk.reports] == [(9, 0)]
            disk.disk.stop_reading(7)
        return whole(own, file)

    monkeypatch.setattr(SpillFiles, "read", hang)
    disk.restore(5)
    disk.disk.work()
    assert num_reads == 1, "the order was ended meanwhile"
    disk.restore(6, ticket=10)
    disk.read_all()
    assert [(report.ticket, report.position) for report in disk.reports] == [(9, 0), (10, 768)]


def test_only_what_joins_in_all_layers_is_stored(make_disk: MakeDisk) -> None:
    """Whatever the disk's thread hands over."""
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.disk.work()
    event = disk.disk.take()
    assert isinstance(event, SpilledRead)
    actions = disk.feed(SpilledRead(7, 5, event.blocks[1:], is_last=False))
    assert not [action for action in actions if isinstance(action, act.StoreSpilled)]
    assert [report.position for report in disk.reports] == [0]
    disk.restore(5, ticket=8)
    part = event.blocks[0]
    foreign = type(part)(LayerRange(0, 2), part.start, part.stop, part.dtype, part.numbers)
    disk.feed(SpilledRead(8, 5, (foreign,), is_last=False))
    assert [report.position for report in disk.reports] == [0, 0]
    assert disk.stage.core.counters["spill_reads_unfit"] == 2


def test_an_answer_of_an_earlier_order_changes_nothing(make_disk: MakeDisk) -> None:
    written(make_disk)
    disk = make_disk()
    disk.open(5)
    disk.restore(5)
    disk.restore(5, ticket=8)
    disk.feed(SpilledRead(7, 5, (), is_last=True))
    disk.feed(SpilledStored(7, 5))
    assert disk.reports == []
    disk.read_all()
    assert [(report.ticket, report.position) for report in disk.reports] == [(8, 768)]


def test_chunks_have_whole_blocks() -> None:
    assert CHUNK % 32 == 0
