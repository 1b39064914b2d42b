"""The store of batches: what one gateway has written, the next one finds; an answer once, whatever is repeated."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.gateway.batches import store as store_module
from swarm.gateway.batches.database import StoreFailed
from swarm.gateway.batches.objects import PAGE_BYTES, Answer, BatchRecord, BatchStatus, NewBatch
from swarm.gateway.batches.runner import BatchChecked, Move, Write
from swarm.gateway.batches.store import (
    MAX_UNFINISHED,
    BatchStore,
    StoreConflict,
    StoreFull,
    TooManyBatches,
)

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path, 1 << 30)
    store.open()
    yield store
    store.close()


def line(number: int) -> bytes:
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": {}}).encode() + b"\n"


def add_file(store: BatchStore, lines: list[bytes], owner: str = "alice") -> str:
    file_id = store.begin_file(owner, "", 1000.5)
    store.add_lines(file_id, 1, lines)
    return store.finish_file(file_id, "in.jsonl", 5000).id


def add_batch(store: BatchStore, lines: list[bytes], owner: str = "alice") -> BatchRecord:
    file_id = add_file(store, lines, owner)
    record = store.create_batch(NewBatch(owner, owner, CHAT, file_id, "1h", {"a": "b"}, output_age_s=9000), 2000)
    assert record is not None
    return record


def check(store: BatchStore, record: BatchRecord, max_lines: int = 100) -> BatchChecked:
    result = [step for step in store.check_batch(record.id, max_lines) if step is not None]
    return result[0]


def read(store: BatchStore, file_id: str | None, owner: str = "alice") -> bytes:
    content, last = b"", 0
    while (page := store.read_content(file_id or "", owner, last)) is not None and page[0]:
        content, last = content + page[0], page[1]
    return content


def again(store: BatchStore, tmp_path: Path) -> BatchStore:
    """The next gateway's, after the end of this one."""
    store.close()
    opened = BatchStore(tmp_path, 1 << 30)
    opened.open()
    return opened


def good(number: int) -> Answer:
    return Answer(False, f"good {number}\n".encode())


def test_a_file_is_read_back_as_it_came_in_pages(store: BatchStore) -> None:
    lines = [b"x" * (PAGE_BYTES // 3) + b"\n" for _ in range(10)] + [b"\n", b"no break"]
    file_id = add_file(store, lines)
    record = store.file(file_id, "alice")
    assert record is not None
    assert record.to_json() | {"id": ""} == {
        "id": "", "object": "file", "bytes": sum(map(len, lines)), "created_at": 1000, "expires_at": 5000,
        "filename": "in.jsonl", "purpose": "batch", "status": "processed", "status_details": None,
    }  # fmt: skip
    assert read(store, file_id) == b"".join(lines)


def test_nobody_but_the_owner_can_read_the_store(store: BatchStore, tmp_path: Path) -> None:
    add_file(store, [line(1)])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "batches").iterdir()}
    assert set(modes) >= {"batches.db", "batches.db-wal", "batches.lock"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "batches").stat().st_mode) == 0o700


def test_a_store_that_others_may_read_is_refused(store: BatchStore, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "batches" / "batches.db").chmod(0o644)
    with pytest.raises(StoreFailed, match="chmod 600"):
        store.open()


def test_an_owner_finds_only_its_own(store: BatchStore) -> None:
    record = add_batch(store, [line(1)])
    assert store.file(record.input_file_id, "bob") is None
    assert store.read_content(record.input_file_id, "bob", 0) is None
    assert not store.delete_file(record.input_file_id, "bob")
    assert store.list_files("bob", None, None, 10, ascending=False) == ([], False)
    assert store.batch(record.id, "bob") is None
    assert store.cancel_batch(record.id, "bob", 0) is None
    assert store.list_batches("bob", None, 10) == ([], False)
    assert store.create_batch(NewBatch("bob", "bob", CHAT, record.input_file_id, "1h", {}), 0) is None


def test_lists_have_pages_in_both_orders(store: BatchStore) -> None:
    ids = [add_file(store, [line(1)]) for _ in range(5)]

    def page(after: str | None, limit: int, *, ascending: bool) -> tuple[list[str], bool]:
        found = store.list_files("alice", "batch", after, limit, ascending=ascending)
        assert found is not None
        return [record.id for record in found[0]], found[1]

    assert page(None, 2, ascending=True) == (ids[:2], True)
    assert page(ids[1], 3, ascending=True) == (ids[2:], False)
    assert page(None, 5, ascending=False) == (ids[::-1], False)
    assert page(ids[3], 2, ascending=False) == ([ids[2], ids[1]], True)
    assert store.list_files("alice", None, "file-none", 2, ascending=True) is None
    assert store.list_files("alice", "batch_output", None, 2, ascending=True) == ([], False)


def test_an_interrupted_upload_is_invisible_and_gone_after_a_restart(store: BatchStore, tmp_path: Path) -> None:
    file_id = store.begin_file("alice", "", 0)
    store.add_lines(file_id, 1, [line(1)])
    assert store.file(file_id, "alice") is None
    store = again(store, tmp_path)
    with sqlite3.connect(tmp_path / "batches" / "batches.db") as db:
        assert db.execute("SELECT (SELECT COUNT(*) FROM files), (SELECT COUNT(*) FROM lines)").fetchone() == (0, 0)
    store.close()


def test_a_dropped_upload_leaves_nothing_and_a_whole_file_is_not_dropped(store: BatchStore) -> None:
    file_id = store.begin_file("alice", "", 0)
    store.add_lines(file_id, 1, [line(1)])
    store.drop_upload(file_id)
    whole = add_file(store, [line(1)])
    store.drop_upload(whole)
    assert read(store, whole) == line(1)


def test_all_files_and_answers_together_have_a_limit(tmp_path: Path) -> None:
    """Answers are stored beyond it, but count; deleting makes room."""
    store = BatchStore(tmp_path, 3 * len(line(1)))
    store.open()
    record = add_batch(store, [line(1), line(2)])
    check(store, record)
    store.write(Write(((record.id, 1, Answer(False, line(1))),)), 0)
    upload = store.begin_file("bob", "", 0)
    with pytest.raises(StoreFull, match=r"batch\.max_stored"):
        store.add_lines(upload, 1, [line(1)])
    store.write(Write(((record.id, 2, Answer(True, line(2) * 9)),), (Move(record.id, BatchStatus.completed),)), 0)
    ended = store.batch(record.id, "alice")
    assert ended is not None
    assert store.delete_file(ended.error_file_id or "", "alice")
    assert store.delete_file(record.input_file_id, "alice")
    store.add_lines(upload, 1, [line(1)])
    store.close()


def test_an_answer_is_stored_and_counted_once(store: BatchStore, tmp_path: Path) -> None:
    """Also if the write is repeated, with other bytes, by the next gateway."""
    record = add_batch(store, [line(1), b"\n", line(3), line(4)])
    assert check(store, record) == BatchChecked(record.id, (1, 3, 4))
    first = Write(((record.id, 1, good(1)), (record.id, 3, Answer(True, b"bad\n"))))
    store.write(first, 0)
    store.write(first, 0)
    store = again(store, tmp_path)
    [loaded] = store.load_batches()
    assert loaded.pending == (4,)
    last = Write(((record.id, 1, good(99)), (record.id, 4, good(4))), (Move(record.id, BatchStatus.completed),))
    for _ in range(2):
        [ended] = store.write(last, 3000)
    assert (ended.num_total, ended.num_completed, ended.num_failed) == (3, 2, 1)
    assert read(store, ended.output_file_id) == b"good 1\ngood 4\n"
    assert read(store, ended.error_file_id) == b"bad\n"
    output = store.file(ended.output_file_id or "", "alice")
    assert output is not None
    assert (output.num_bytes, output.purpose) == (14, "batch_output")
    assert ended.times == {"in_progress_at": 3000, "completed_at": 3000, "finalizing_at": 3000}
    assert store.load_batches() == []
    store.close()


def codes(content: bytes) -> list[tuple[str, Any, str]]:
    read = [json.loads(line) for line in content.splitlines()]
    return [(line["custom_id"], line["response"], line["error"]["code"]) for line in read]


@pytest.mark.parametrize(
    ("status", "code"), [(BatchStatus.expired, "batch_expired"), (BatchStatus.cancelled, "batch_cancelled")]
)
def test_a_batch_that_ends_early_answers_every_line(store: BatchStore, status: BatchStatus, code: str) -> None:
    record = add_batch(store, [line(number) for number in (1, 2, 3)])
    check(store, record)
    [ended] = store.write(Write(((record.id, 2, good(2)),), (Move(record.id, status),)), 0)
    assert (ended.status, ended.num_completed, ended.num_failed) == (status, 1, 2)
    assert read(store, ended.output_file_id) == b"good 2\n"
    assert codes(read(store, ended.error_file_id)) == [("c1", None, code), ("c3", None, code)]


def test_a_batch_that_ends_after_its_cancellation_is_cancelled(store: BatchStore) -> None:
    """The order of the client was acknowledged; the runner had not received it yet."""
    record = add_batch(store, [line(1)])
    check(store, record)
    cancelled = store.cancel_batch(record.id, "alice", 2500)
    assert cancelled is not None
    assert cancelled.status is BatchStatus.cancelling
    [still] = store.write(Write((), (Move(record.id, BatchStatus.in_progress),)), 2600)
    assert still.status is BatchStatus.cancelling
    [ended] = store.write(Write(((record.id, 1, good(1)),), (Move(record.id, BatchStatus.completed),)), 2600)
    assert ended.status is BatchStatus.cancelled
    assert ended.times["cancelled_at"] == 2600
    assert store.cancel_batch(record.id, "alice", 2700) == ended


def test_the_limit_of_unfinished_batches_is_each_owners_own(store: BatchStore) -> None:
    records = [add_batch(store, [line(1)]) for _ in range(MAX_UNFINISHED)]
    with pytest.raises(TooManyBatches, match=str(MAX_UNFINISHED)):
        add_batch(store, [line(1)])
    add_batch(store, [line(1)], "bob")
    store.write(Write((), (Move(records[0].id, BatchStatus.failed),)), 0)
    add_batch(store, [line(1)])


def test_an_ended_batch_cannot_be_cancelled(store: BatchStore) -> None:
    record = add_batch(store, [line(1)])
    check(store, record)
    store.write(Write(((record.id, 1, good(1)),), (Move(record.id, BatchStatus.completed),)), 0)
    with pytest.raises(StoreConflict, match="completed"):
        store.cancel_batch(record.id, "alice", 0)


def test_a_file_is_not_deleted_while_a_batch_reads_it(store: BatchStore) -> None:
    record = add_batch(store, [line(1)])
    with pytest.raises(StoreConflict, match=record.id):
        store.delete_file(record.input_file_id, "alice")
    store.write(Write((), (Move(record.id, BatchStatus.failed),)), 0)
    assert store.delete_file(record.input_file_id, "alice")
    assert store.file(record.input_file_id, "alice") is None


def test_expired_files_are_deleted_and_then_the_records_of_their_batches(store: BatchStore) -> None:
    """A file stays as long as an unfinished batch reads it."""
    new = NewBatch("alice", "alice", CHAT, add_file(store, [line(1)]), "1h", {}, output_age_s=9000)
    record = store.create_batch(new, 2000)
    assert record is not None
    check(store, record)

    def delete(now: float) -> int:
        number = 0
        while store.delete_expired(now):
            number += 1
        return number

    assert delete(5000) == 0
    [ended] = store.write(Write(((record.id, 1, good(1)),), (Move(record.id, BatchStatus.completed),)), 4000)
    output = store.file(ended.output_file_id or "", "alice")
    assert output is not None
    assert output.expires_at == 13_000
    assert delete(4999) == 0
    assert delete(5000) == 1
    assert store.file(record.input_file_id, "alice") is None
    assert delete(12_999) == 0
    assert read(store, output.id) == b"good 1\n"
    assert delete(13_000) == 1
    assert store.file(output.id, "alice") is None
    assert store.batch(record.id, "alice") is not None
    assert delete(record.expires_at + 9000) == 0
    assert store.batch(record.id, "alice") is None
    assert store._opened.execute("SELECT (SELECT COUNT(*) FROM lines), (SELECT COUNT(*) FROM answers)").fetchone() == (
        0,
        0,
    )


def test_the_deletion_of_a_file_costs_the_same_beside_many_others(store: BatchStore) -> None:
    """Counted in steps of SQLite's machine."""

    def num_steps(now: float) -> int:
        steps: list[None] = []
        store._opened.set_progress_handler(lambda: steps.append(None), 1)
        assert store.delete_expired(now)
        store._opened.set_progress_handler(None, 0)
        return len(steps)

    def add(number: int, expires_at: int) -> None:
        rows = [(f"file-{expires_at}-{each}", expires_at) for each in range(number)]
        store._opened.executemany(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at, is_whole) "
            "VALUES (?, 'alice', '', 'batch', 0, 0, ?, 1)",
            rows,
        )

    add(1, 1000)
    alone = num_steps(1000)
    add(1000, 9000)
    for _ in range(20):
        record = add_batch(store, [line(1)])
        store.write(Write((), (Move(record.id, BatchStatus.failed),)), 0)
    add(1, 1000)
    assert num_steps(1000) < 2 * alone


def test_all_unfinished_batches_together_have_a_limit_of_requests(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their line numbers are kept in memory. Blank lines don't count."""
    monkeypatch.setattr(store_module, "MAX_QUEUED", 3)
    first = add_batch(store, [line(1), b"\n", line(2)])
    with pytest.raises(TooManyBatches, match="2 requests"):
        add_batch(store, [line(1), line(2)], "bob")
    store.write(Write((), (Move(first.id, BatchStatus.failed),)), 0)
    add_batch(store, [line(1), line(2)], "bob")


def test_long_lines_are_checked_in_portions(store: BatchStore) -> None:
    """A file is never in memory as a whole; a duplicate is found however far away it is."""
    long = [line(number)[:-1] + b" " * (PAGE_BYTES // 2) + b"\n" for number in (1, 2, 3, 4, 1)]
    record = add_batch(store, long)
    steps = list(store.check_batch(record.id, 100))
    assert steps[:-1] == [None] * 4  # the last portion is empty
    last = steps[-1]
    assert last is not None
    assert [(error.code, error.line) for error in last.errors] == [("duplicate_custom_id", 5)]


def test_a_failed_batch_shows_its_errors(store: BatchStore, tmp_path: Path) -> None:
    record = add_batch(store, [line(1), line(1)])
    checked = check(store, record)
    assert checked.pending == ()
    store.write(Write((), (Move(record.id, BatchStatus.failed, checked.errors),)), 0)
    store = again(store, tmp_path)
    failed = store.batch(record.id, "alice")
    assert failed is not None
    [error] = failed.to_json()["errors"]["data"]
    assert (error["code"], error["line"]) == ("duplicate_custom_id", 2)
    store.close()


def test_two_gateways_do_not_share_a_store(store: BatchStore, tmp_path: Path) -> None:
    second = BatchStore(tmp_path, 1 << 30)
    with pytest.raises(StoreFailed, match="another gateway"):
        second.open()
    store.close()
    second.open()
    second.close()


def test_a_full_disk_is_one_sentence_and_changes_nothing(store: BatchStore) -> None:
    record = add_batch(store, [line(1), line(2)])
    check(store, record)
    store.write(Write(((record.id, 1, good(1)),)), 0)
    pages = store._opened.execute("PRAGMA page_count").fetchone()[0]
    store._opened.execute(f"PRAGMA max_page_count = {pages}")
    large = Write(((record.id, 2, Answer(False, b"x" * 1_000_000)),), (Move(record.id, BatchStatus.completed),))
    with pytest.raises(StoreFailed, match=r"full.*free disk space; nothing is lost"):
        store.write(large, 0)
    now = store.batch(record.id, "alice")
    assert now is not None
    assert (now.status, now.num_completed) == (BatchStatus.validating, 1)
    store._opened.execute("PRAGMA max_page_count = 1000000")
    [ended] = store.write(large, 0)
    assert (ended.status, ended.num_completed) == (BatchStatus.completed, 2)


def test_a_damaged_store_is_reported(store: BatchStore, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "batches" / "batches.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreFailed, match="backup"):
        store.open()


@pytest.mark.parametrize("version", [1, 99])
def test_a_store_of_another_version_is_left_alone(store: BatchStore, tmp_path: Path, version: int) -> None:
    store.close()
    with sqlite3.connect(tmp_path / "batches" / "batches.db") as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreFailed, match="another version"):
        store.open()
