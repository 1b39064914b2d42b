"""When the journal's files can't be believed any more, and what is done then: by what is seen, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.broker.journal.database import DamagedJournal, FullDisk, UnsyncedJournal
from swarm.broker.journal.integrity import (
    MIN_INTERVAL_S,
    TIME_DIVISOR,
    FileState,
    FileStates,
    JournalIntegrity,
    NextAction,
    stat_files,
)
from swarm.errors import JournalError

FILE = FileState((1, 10), 4096, 100)
LOG = FileState((1, 11), 8192, 200)
AS_LEFT: FileStates = {"journal.db": FILE, "journal.db-wal": LOG}


@pytest.fixture
def doubts() -> JournalIntegrity:
    doubts = JournalIntegrity(Path("/state/journal.db"))
    doubts.record(AS_LEFT)
    return doubts


def test_what_is_as_we_left_it_is_believed(doubts: JournalIntegrity) -> None:
    """However long ago that was."""
    doubts.compare(AS_LEFT)
    assert (doubts.next_action(1e9), doubts.reason) == (NextAction.WRITE, "")


@pytest.mark.parametrize("name", list(AS_LEFT))
@pytest.mark.parametrize("found", [None, FileState((1, 99), 4096, 100)], ids=["gone", "another"])
@pytest.mark.parametrize("while_we_write", [False, True])
def test_a_file_that_is_gone_or_another(
    doubts: JournalIntegrity, name: str, found: FileState | None, while_we_write: bool
) -> None:
    """Whichever of the two it is: what we write is found by nobody."""
    (doubts.record if while_we_write else doubts.compare)({**AS_LEFT, name: found})
    assert doubts.next_action(0.0) is NextAction.RENEW
    assert f"deleted or replaced while it was in use ({name})" in doubts.reason


@pytest.mark.parametrize("name", list(AS_LEFT))
def test_what_somebody_else_wrote_is_examined(doubts: JournalIntegrity, name: str) -> None:
    """Longer, shorter or of the same length; and that takes no more than its share of the time."""
    was = AS_LEFT[name]
    assert was is not None
    for found in (FileState(was.number, was.size, was.changed_ns + 1), FileState(was.number, 0, was.changed_ns)):
        doubts.record(AS_LEFT)
        doubts.compare({**AS_LEFT, name: found})
    assert doubts.next_action(5.0) is NextAction.EXAMINE
    doubts.record_examination(5.0, 7.0, done=True)
    assert doubts.next_action(7.0) is NextAction.WRITE
    doubts.compare({**AS_LEFT, name: FileState(was.number, 1, 1)})
    assert doubts.next_action(6.9 + TIME_DIVISOR * 2.0) is NextAction.WRITE
    assert doubts.next_action(7.0 + TIME_DIVISOR * 2.0) is NextAction.EXAMINE


def test_what_could_not_be_examined_is_examined_later(doubts: JournalIntegrity) -> None:
    """Another process may hold the file."""
    doubts.compare({**AS_LEFT, "journal.db": FileState((1, 10), 1, 1)})
    doubts.record_examination(5.0, 5.0, done=False)
    assert doubts.next_action(5.0) is NextAction.WRITE
    assert doubts.next_action(5.0 + MIN_INTERVAL_S) is NextAction.EXAMINE


@pytest.mark.parametrize("kind", [DamagedJournal, UnsyncedJournal])
def test_damage_and_a_failed_sync_end_belief(doubts: JournalIntegrity, kind: type[JournalError]) -> None:
    """At once, and for good: no later success counts."""
    doubts.record_error(kind("page 4"))
    doubts.compare(AS_LEFT)
    doubts.record(AS_LEFT)
    assert (doubts.next_action(0.0), doubts.reason) == (NextAction.RENEW, "page 4")


@pytest.mark.parametrize("kind", [FullDisk, JournalError])
def test_a_disk_that_refuses_is_no_reason(doubts: JournalIntegrity, kind: type[JournalError]) -> None:
    """What is in the file is what was written."""
    doubts.record_error(kind("no room"))
    assert doubts.next_action(0.0) is NextAction.WRITE


def test_beginning_anew_is_tried_again_and_not_all_the_time(doubts: JournalIntegrity) -> None:
    """A failure soon; a success that did not last after twenty times as long as it took."""
    doubts.distrust("page 4")
    doubts.record_renewal(0.0, 3.0, done=False)
    assert doubts.next_action(3.0 + MIN_INTERVAL_S / 2) is NextAction.WAIT
    assert doubts.next_action(3.0 + MIN_INTERVAL_S) is NextAction.RENEW
    doubts.record_renewal(4.0, 7.0, done=True)
    assert doubts.next_action(7.0) is NextAction.WRITE
    doubts.compare({"journal.db": FILE})
    assert doubts.next_action(7.0) is NextAction.WRITE, "these are other files"
    doubts.distrust("page 5")
    assert doubts.next_action(6.9 + TIME_DIVISOR * 3.0) is NextAction.WAIT
    assert doubts.next_action(7.0 + TIME_DIVISOR * 3.0) is NextAction.RENEW


def test_files_are_seen_as_they_are(tmp_path: Path) -> None:
    """Which file it is, how long, and when it was changed; one that is not there is None."""
    path = tmp_path / "journal.db"
    path.write_bytes(b"abc")
    found = stat_files(path)
    assert found["journal.db-wal"] is None
    file = found["journal.db"]
    assert file is not None
    assert (file.number, file.size) == ((path.stat().st_dev, path.stat().st_ino), 3)
    path.rename(tmp_path / "other")
    path.write_bytes(b"abc")
    again = stat_files(path)["journal.db"]
    assert again is not None
    assert again.number != file.number
