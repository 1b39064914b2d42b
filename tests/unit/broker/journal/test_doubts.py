"""When the journal's files can't be believed any more, and what is done then: by what is seen, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.broker.journal.database import DamagedJournal, FullDisk, UnsyncedJournal
from swarm.broker.journal.doubts import LEAST_S, SHARE, Doubts, FileSeen, Next, Seen, seen
from swarm.errors import JournalError

FILE = FileSeen((1, 10), 4096, 100)
LOG = FileSeen((1, 11), 8192, 200)
AS_LEFT: Seen = {"journal.db": FILE, "journal.db-wal": LOG}


@pytest.fixture
def doubts() -> Doubts:
    doubts = Doubts(Path("/state/journal.db"))
    doubts.left(AS_LEFT)
    return doubts


def test_what_is_as_we_left_it_is_believed(doubts: Doubts) -> None:
    """However long ago that was."""
    doubts.find(AS_LEFT)
    assert (doubts.next(1e9), doubts.reason) == (Next.GO_ON, "")


@pytest.mark.parametrize("name", list(AS_LEFT))
@pytest.mark.parametrize("found", [None, FileSeen((1, 99), 4096, 100)], ids=["gone", "another"])
@pytest.mark.parametrize("while_we_write", [False, True])
def test_a_file_that_is_gone_or_another(
    doubts: Doubts, name: str, found: FileSeen | None, while_we_write: bool
) -> None:
    """Whichever of the two it is: what we write is found by nobody."""
    (doubts.left if while_we_write else doubts.find)({**AS_LEFT, name: found})
    assert doubts.next(0.0) is Next.RENEW
    assert f"deleted or replaced while it was in use ({name})" in doubts.reason


@pytest.mark.parametrize("name", list(AS_LEFT))
def test_what_somebody_else_wrote_is_examined(doubts: Doubts, name: str) -> None:
    """Longer, shorter or of the same length; and that takes no more than its share of the time."""
    was = AS_LEFT[name]
    assert was is not None
    for found in (FileSeen(was.number, was.size, was.changed_ns + 1), FileSeen(was.number, 0, was.changed_ns)):
        doubts.left(AS_LEFT)
        doubts.find({**AS_LEFT, name: found})
    assert doubts.next(5.0) is Next.EXAMINE
    doubts.examined(5.0, 7.0, done=True)
    assert doubts.next(7.0) is Next.GO_ON
    doubts.find({**AS_LEFT, name: FileSeen(was.number, 1, 1)})
    assert doubts.next(6.9 + SHARE * 2.0) is Next.GO_ON
    assert doubts.next(7.0 + SHARE * 2.0) is Next.EXAMINE


def test_what_could_not_be_examined_is_examined_later(doubts: Doubts) -> None:
    """Another process may hold the file."""
    doubts.find({**AS_LEFT, "journal.db": FileSeen((1, 10), 1, 1)})
    doubts.examined(5.0, 5.0, done=False)
    assert doubts.next(5.0) is Next.GO_ON
    assert doubts.next(5.0 + LEAST_S) is Next.EXAMINE


@pytest.mark.parametrize("kind", [DamagedJournal, UnsyncedJournal])
def test_damage_and_a_failed_sync_end_belief(doubts: Doubts, kind: type[JournalError]) -> None:
    """At once, and for good: no later success counts."""
    doubts.failed(kind("page 4"))
    doubts.find(AS_LEFT)
    doubts.left(AS_LEFT)
    assert (doubts.next(0.0), doubts.reason) == (Next.RENEW, "page 4")


@pytest.mark.parametrize("kind", [FullDisk, JournalError])
def test_a_disk_that_refuses_is_no_reason(doubts: Doubts, kind: type[JournalError]) -> None:
    """What is in the file is what was written."""
    doubts.failed(kind("no room"))
    assert doubts.next(0.0) is Next.GO_ON


def test_beginning_anew_is_tried_again_and_not_all_the_time(doubts: Doubts) -> None:
    """A failure soon; a success that did not last after twenty times as long as it took."""
    doubts.arise("page 4")
    doubts.renewed(0.0, 3.0, done=False)
    assert doubts.next(3.0 + LEAST_S / 2) is Next.WAIT
    assert doubts.next(3.0 + LEAST_S) is Next.RENEW
    doubts.renewed(4.0, 7.0, done=True)
    assert doubts.next(7.0) is Next.GO_ON
    doubts.find({"journal.db": FILE})
    assert doubts.next(7.0) is Next.GO_ON, "these are other files"
    doubts.arise("page 5")
    assert doubts.next(6.9 + SHARE * 3.0) is Next.WAIT
    assert doubts.next(7.0 + SHARE * 3.0) is Next.RENEW


def test_files_are_seen_as_they_are(tmp_path: Path) -> None:
    """Which file it is, how long, and when it was changed; one that is not there is None."""
    path = tmp_path / "journal.db"
    path.write_bytes(b"abc")
    found = seen(path)
    assert found["journal.db-wal"] is None
    file = found["journal.db"]
    assert file is not None
    assert (file.number, file.size) == ((path.stat().st_dev, path.stat().st_ino), 3)
    path.rename(tmp_path / "other")
    path.write_bytes(b"abc")
    again = seen(path)["journal.db"]
    assert again is not None
    assert again.number != file.number
