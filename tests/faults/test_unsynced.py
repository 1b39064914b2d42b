"""A sync fails, and the broker is killed before it could begin its journal anew; then the machine loses its power. What
the next broker believed is on the disk, and nothing that was told is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import JournalLimits, Timestamp
from tests.faults.bench import long
from tests.faults.platter import Platter

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

# A life: it tells what it believes and what was written, line by line, and is killed.
LIFE = """
import json, os, signal, sys
from pathlib import Path
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import JournalLimits, Timestamp
from swarm.errors import JournalError
from tests.unit.broker.journal.test_journal import accept, tokens

store, _ = open_or_salvage(Path(sys.argv[1]), JournalLimits())
snapshot = store.read_snapshot(Timestamp.now(), retained_s=60.0)
tell = lambda *what: print(json.dumps(what), flush=True)
tell("believed", sorted([r.submit.request_id, r.sequences[0].tokens] for r in snapshot.requests))
try:
    exec(sys.argv[2])
except JournalError as error:
    tell("failed", type(error).__name__)
os.kill(os.getpid(), signal.SIGKILL)
"""
ACCEPT = "store.write([accept('{0}', {1})], Timestamp.now()); tell('accepted', '{0}')\n"
TOKENS = "for at in range({0}): store.write([tokens({1}, at, 5)], Timestamp.now())\n"
FOLD = "store.checkpoint()\n"
MORE = "for at in range(8, 12): store.write([tokens(1, at, 5)], Timestamp.now())\n"
BEFORE = ACCEPT.format("a", 1) + TOKENS.format(8, 1)


def live(platter: Platter, deeds: str = "", **disk: str) -> dict[str, list[object]]:
    """One life; what it told, by kind."""
    command = [sys.executable, "-c", LIFE, str(platter.place), deeds]
    environment = platter.environment(**disk) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told: dict[str, list[object]] = {}
    for kind, what in map(json.loads, done.stdout.splitlines()):
        told.setdefault(kind, []).append(what)
    return told


def on_the_disk(platter: Platter, to: Path) -> list[list[object]]:
    """Read what the first broker finds after the power came back."""
    platter.power_cut(to)
    store, notes = open_or_salvage(to, JournalLimits())
    past = store.read_snapshot(Timestamp.now(), retained_s=60.0)
    store.close()
    assert notes == ()
    return sorted([each.submit.request_id, each.sequences[0].tokens] for each in past.requests)


@pytest.fixture
def platter(tmp_path: Path) -> Platter:
    platter = Platter.made(tmp_path, tmp_path / "state")
    live(platter, BEFORE)
    return platter


# Of the log the first sync is that of opening it, the second that of a new log's head; of the file the first.
@pytest.mark.parametrize(
    ("deeds", "fails", "full"),
    [
        (MORE + ACCEPT.format("b", 2), "-wal@3", ""),
        (MORE + ACCEPT.format("b", 2), "-wal@3", "journal.db"),
        (MORE + FOLD, "-wal@3", "journal.db"),
        (MORE + FOLD, "journal.db@2", ""),
        *long((MORE + FOLD, "-wal@3", ""), (MORE + FOLD, "journal.db@2", "journal.db")),
    ],
)
def test_killed_before_it_is_begun_anew(platter: Platter, tmp_path: Path, deeds: str, fails: str, full: str) -> None:
    """The next one reads what was written, on the disk or not; so it is written again before it counts."""
    told = live(platter, deeds, fails=fails)
    assert told["failed"] == ["UnsyncedJournal"]
    assert platter.losses == 1
    (believed,) = live(platter, full=full)["believed"]
    assert believed != told["believed"][0], "it reads what may not be there"
    assert on_the_disk(platter, tmp_path / "disk") == believed


def test_the_disk_is_as_it_is_believed_to_be(platter: Platter, tmp_path: Path) -> None:
    """Without a fault: what was accepted is there. Else the other tests would show nothing."""
    told = live(platter, ACCEPT.format("b", 2) + TOKENS.format(4, 2))
    assert told["accepted"] == ["b"]
    found = on_the_disk(platter, tmp_path / "disk")
    assert [name for name, _ in found] == ["a", "b"]
    assert found[1] == ["b", []], "tokens are not synced"


# By the writer's thread: tokens until a sync has failed, which is that of the log before it is folded into the file.
WRITER = """
import ctypes, queue
from swarm.broker.journal.writer import JournalWriter
from swarm.clock import SystemClock
lost = ctypes.CDLL(None).getenv
lost.restype = ctypes.c_char_p
facts = queue.Queue()
writer = JournalWriter(store, SystemClock(), lambda new: [facts.put(each) for each in new], print)
writer.start()
for at in range(8, 9000):
    writer.write(tokens(1, at, 5))
    if at % 8 == 0:
        while "TokensWritten" not in (fact := type(facts.get(timeout=30)).__name__): tell("fact", fact)
    if lost(b"PLATTER_LOST"): break
writer.write(accept('b', 2))
while "AcceptanceWritten" not in (fact := type(facts.get(timeout=30)).__name__): tell("fact", fact)
tell("accepted", "b")
"""


def test_a_sync_that_fails_while_the_log_is_folded(platter: Platter, tmp_path: Path) -> None:
    """Whose failures SQLite keeps to itself: what is accepted after that is on the disk, in a journal begun anew."""
    told = live(platter, WRITER, fails="-wal@3")
    assert platter.losses == 1
    assert told["accepted"] == ["b"]
    assert "b" in [name for name, _ in on_the_disk(platter, tmp_path / "disk")]
    assert "JournalRenewed" in told["fact"]
