"""Where the time of steps went, in the journal: what a trace of a request is made of that memory no longer has.

About once a second the steps that were answered meanwhile become one row, a few tens of bytes for each. Nothing waits
for them and nothing depends on them: they are written when nothing else is to be written, not synced, and not at all
where room is short. They take at most an eighth of the journal, and go before any request does.

Ticks are those of the monotonic clock, which goes on over a restart of the broker; those of another boot of the machine
mean nothing, so each row names its boot. Times are kept to the microsecond, and without what a trace has no use for.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from swarm.broker.actions import StepTimes
from swarm.broker.journal.moment import Moment, old
from swarm.broker.journal.store import Store
from swarm.broker.journal.values import Damaged, sealed, unsealed
from swarm.log import get_logger
from swarm.wire.messages import Hop, LayerRange, SequencePosition

SHARE = 8  # so much of the journal's bound, as a divisor, is for steps
FREE_BYTES = 1 << 25  # with less than this on the disk none are written: what there is belongs to others
MAX_STEPS_READ = 1 << 16  # of one request
_TOGETHER = 64  # rows that go at a time when the whole file is too large
_PAGE = 4096
_MAX_S = 1e9  # what claims to have taken longer is no time
_LEVEL = 1  # zlib's quickest: the rows of one step are nearly those of the step before

log = get_logger(__name__)

Stage = tuple[str, int, int]  # a worker, with its first layer and the one after its last
StageTimes = tuple[int, int, int, int, int, int]  # which stage; microseconds of wait, compute, sample, hold; bytes
Packed = tuple[int, int, tuple[SequencePosition, ...], tuple[StageTimes, ...]]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Some steps. Their times are microseconds after ``start``."""

    start: float
    stages: tuple[Stage, ...]
    steps: tuple[Packed, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """From the acceptance of a request to its end, by the clock of one boot; None: it has not ended."""

    boot: str
    first: float
    last: float | None


def packed(steps: Sequence[StepTimes]) -> bytes:
    """At least one step, as one value."""
    start = steps[0].dispatched_at
    stages: dict[Stage, int] = {}
    found = []
    for step in steps:
        hops = []
        for hop in step.hops:
            number = stages.setdefault((hop.worker, hop.layers.first, hop.layers.stop), len(stages))
            times = (_us(hop.wait_s), _us(hop.compute_s), _us(hop.sample_s), _us(hop.held_s))
            hops.append((number, *times, hop.wire_bytes))
        found.append((_us(step.dispatched_at - start), _us(step.finished_at - start), step.kv, tuple(hops)))
    data = _encode(Chunk(start, tuple(stages), tuple(found)))
    return sealed(zlib.compress(data, _LEVEL))


def unpacked(blob: object) -> tuple[StepTimes, ...]:
    """The steps again. Raises Damaged."""
    try:
        chunk = _decode(zlib.decompress(unsealed(blob, bytes)))
        stages = [(worker, LayerRange(first, stop)) for worker, first, stop in chunk.stages]
        return tuple(
            StepTimes(
                chunk.start + dispatched / 1e6,
                chunk.start + finished / 1e6,
                kv,
                tuple(
                    Hop(*stages[number], wait / 1e6, compute / 1e6, sample / 1e6, 0.0, num_bytes, hold / 1e6)
                    for number, wait, compute, sample, hold, num_bytes in hops
                ),
            )
            for dispatched, finished, kv, hops in chunk.steps
        )
    except (zlib.error, msgspec.DecodeError, IndexError) as error:
        raise Damaged(str(error)) from None


def write(store: Store, steps: Sequence[StepTimes], now: Moment) -> int:
    """How many bytes they took; 0: there is no room for them, or nothing that a trace would ask for. Raises
    JournalError."""
    sequences = {row.sequence for step in steps for row in step.kv}
    if not sequences or not _has_room(store):
        return 0
    blob = packed(steps)
    first, last = min(step.dispatched_at for step in steps), max(step.finished_at for step in steps)
    row = (now.boot, first, last, min(sequences), max(sequences), now.wall, _room_for(blob), blob)
    with store.unsynced() as db:
        db.execute(_INSERT, row)
    return len(blob)


def tidy(store: Store, now: Moment) -> int:
    """Let go what is old, and the oldest beyond the bounds. How many rows went. Raises JournalError."""
    bounds = store.bounds
    with store.unsynced() as db:
        gone = db.execute(_DELETE_OLD, old(now, bounds.keep_s)).rowcount
        gone += _drop_beyond(db, bounds.max_bytes // SHARE)
    while store.num_bytes > bounds.max_bytes and (more := _drop_oldest(store)):
        gone += more
    return gone


def life_of(store: Store, request_id: str) -> Life | None:
    """None: there is no such request, or no clock tells of all of it. Raises JournalError."""
    with store.reading() as db:
        row = db.execute(_SELECT_LIFE, (request_id,)).fetchone()
    if row is None:
        return None
    boot, first, ended_at, last = row
    if not boot or (ended_at is not None and last is None):
        return None
    return Life(boot, first, None if ended_at is None else last)


def read(store: Store, life: Life, sequences: Collection[int]) -> tuple[StepTimes, ...]:
    """The steps that had rows of these sequences, with no other rows, in the order of their answers. What is damaged
    is left out. Raises JournalError."""
    wanted = frozenset(sequences)
    found: list[StepTimes] = []
    for blob in _chunks(store, life, min(wanted), max(wanted)):
        try:
            steps = unpacked(blob)
        except Damaged as error:
            log.warning("journal_steps_skipped", reason=str(error))
            continue
        for step in steps:
            rows = tuple(row for row in step.kv if row.sequence in wanted)
            if rows:
                found.append(step._replace(kv=rows))
        if len(found) >= MAX_STEPS_READ:
            break
    return tuple(found)


def _chunks(store: Store, life: Life, lowest: int, highest: int) -> Iterator[bytes]:
    with store.reading() as db:
        for first, blob in db.execute(_SELECT, (life.boot, life.first, highest, lowest)):
            if life.last is not None and first > life.last:
                return
            yield blob


def _drop_beyond(db: sqlite3.Connection, max_bytes: int) -> int:
    """The sum comes from an index: the rows themselves, with their pages, would take a while."""
    excess = (db.execute("SELECT sum(num_bytes) FROM steps").fetchone()[0] or 0) - max_bytes
    last = None
    for number, num_bytes in db.execute("SELECT number, num_bytes FROM steps ORDER BY number"):
        if excess <= 0:
            break
        excess -= num_bytes
        last = number
    return 0 if last is None else db.execute("DELETE FROM steps WHERE number <= ?", (last,)).rowcount


def _drop_oldest(store: Store) -> int:
    with store.unsynced() as db:
        return db.execute(_DELETE_OLDEST, (_TOGETHER,)).rowcount


def _has_room(store: Store) -> bool:
    try:
        disk = os.statvfs(store.path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize >= FREE_BYTES


def _room_for(blob: bytes) -> int:
    """Large values have pages of their own."""
    size = len(blob) + 128
    return size if size < _PAGE // 2 else -(-size // _PAGE) * _PAGE


def _us(seconds: float) -> int:
    return round(seconds * 1e6) if -_MAX_S < seconds < _MAX_S else 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Chunk).decode
_INSERT = (
    "INSERT INTO steps (boot, first_tick, last_tick, lowest, highest, written_at, num_bytes, steps) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_DELETE_OLD = (
    "DELETE FROM steps WHERE (written_at < :wall_limit OR written_at > :wall) AND CASE WHEN boot = :boot "
    "THEN last_tick < :tick_limit ELSE :knows AND written_at < :wall_limit END"
)
_DELETE_OLDEST = "DELETE FROM steps WHERE number IN (SELECT number FROM steps ORDER BY number LIMIT ?)"
_SELECT_LIFE = "SELECT boot, accepted_tick, ended_at, ended_tick FROM requests WHERE id = ?"
_SELECT = (
    "SELECT first_tick, steps FROM steps WHERE boot = ? AND last_tick >= ? AND lowest <= ? AND highest >= ? "
    "ORDER BY last_tick"
)
