"""Requests as the journal tells of them: rows become records, for a broker that starts and for whoever asks.

Of what has not ended, tokens are gathered from their three places: those of the last steps (``recent``), parts that
were folded together, and, once a sequence has ended, one value. Whatever is read raises sqlite3.Error or Damaged; the
store says in words what that means.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeVar

from swarm.broker.journal import recent
from swarm.broker.journal.database import is_damage, snapshot
from swarm.broker.journal.moment import Moment, old
from swarm.broker.journal.values import AnyPart, Damaged, Ids, Part, counted, joined, unsealed
from swarm.broker.state.archive import Account
from swarm.broker.state.past import Past, RequestRecord, SequenceRecord
from swarm.log import get_logger
from swarm.wire.messages import NOBODYS, FinishReason, Lineage, Manifest, Submit

T = TypeVar("T")
D = TypeVar("D")

log = get_logger(__name__)

Row = tuple[int, bytes, str, float, float, str, float | None, float | None]
SequenceRow = tuple[int, int, FinishReason | None, str, bytes | None]


def past(db: sqlite3.Connection, now: Moment, retained_s: float) -> Past:
    """Read what a broker must know to go on: all that has not ended, and what ended within ``retained_s``."""
    facts = dict(db.execute("SELECT name, value FROM facts"))
    counted(_fact(facts, "lineage", Lineage, NOBODYS).generation, "its generation")
    rows = db.execute(_SELECT_PAST, old(now, retained_s)).fetchall()
    gathered = recent.read(db, Part)
    return Past(
        epoch=counted(_fact(facts, "epoch", int, 0), "its epoch"),
        workers=_fact(facts, "workers", tuple[str, ...], ()),
        next_sequence=counted(_fact(facts, "next_sequence", int, 1), "its next sequence's number"),
        manifest=_fact(facts, "manifest", Manifest, None),
        blames=_fact(facts, "blames", tuple[tuple[int, int], ...], ()),
        requests=tuple(_record(db, row, now, gathered) for row in rows),
    )


def request(db: sqlite3.Connection, request_id: str, now: Moment) -> RequestRecord | None:
    """Read one request, however long ago it ended."""
    with snapshot(db):  # else its end might come between two looks at it
        row = db.execute(f"{_SELECT_REQUESTS} WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else _record(db, row, now)


def beginning(
    db: sqlite3.Connection, prefix: str, now: Moment, limit: int, account: Account | None = None
) -> Iterator[RequestRecord]:
    """Read those that have ended and whose ids begin like that; else as ``ended``."""
    whose, names = _whose(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL AND substr(id, 1, ?) = ?{whose} ORDER BY ended_at DESC LIMIT ?",
        (len(prefix), prefix, *names, limit),
    ).fetchall()
    return _readable(db, rows, now)


def ended(db: sqlite3.Connection, now: Moment, limit: int, account: Account | None = None) -> Iterator[RequestRecord]:
    """Read those that have ended, the latest first; with their tokens, and nothing that was asked for beside them.
    ``account``: only its own."""
    whose, names = _whose(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL{whose} ORDER BY ended_at DESC LIMIT ?", (*names, limit)
    ).fetchall()
    return _readable(db, rows, now)


def _whose(account: Account | None) -> tuple[str, tuple[str | int, ...]]:
    """Put what ``Account.owns`` says into a query."""
    if account is None:
        return "", ()
    if not account.may_name_tenants:
        return " AND tenant = ?", (account.tenant,)
    beginning = f"{account.tenant}/"
    return " AND (tenant = ? OR substr(tenant, 1, ?) = ?)", (account.tenant, len(beginning), beginning)


def folded(db: sqlite3.Connection, sequence: int, kind: type[AnyPart]) -> Iterator[tuple[int, AnyPart]]:
    """Read the parts of a sequence that has not ended, each with the index of its first token."""
    rows = db.execute("SELECT first, part FROM tokens WHERE sequence = ? ORDER BY first", (sequence,))
    for first, blob in rows.fetchall():
        part = unsealed(blob, kind)
        if part.place in (None, (sequence, first)):  # else its columns are damaged: it is as if it were missing
            yield first, part


def _readable(db: sqlite3.Connection, rows: Iterable[Row], now: Moment) -> Iterator[RequestRecord]:
    """Pass over what is damaged: a list is none the worse for one of them."""
    for row in rows:
        try:
            yield _record(db, row, now, {}, kind=Ids)
        except Damaged as error:
            log.warning("journal_row_skipped", number=row[0], reason=str(error))
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            log.warning("journal_row_skipped", number=row[0], reason=str(error))


def _record(
    db: sqlite3.Connection,
    row: Row,
    now: Moment,
    gathered: recent.Parts[Part] | None = None,
    kind: type[Part] | type[Ids] = Part,
) -> RequestRecord:
    """Make the record of a row. ``gathered``: tokens of the last steps, if read already; what has ended needs none of
    them. ``kind``: what of an ended one's tokens is wanted."""
    number, submit, tenant, wall, tick, boot, ended_at, ended_tick = row
    found = db.execute(
        "SELECT id, place, reason, detail, tokens FROM sequences WHERE request = ? ORDER BY place", (number,)
    ).fetchall()
    if gathered is None:
        is_open = any(tokens is None for *_, tokens in found)
        gathered = recent.read(db, Part) if is_open else {}
    return RequestRecord(
        submit=unsealed(submit, Submit),
        tenant=tenant,
        age_s=now.age_s(wall, tick, boot),
        sequences=[_sequence(db, each, gathered, kind) for each in found],
        ended_age_s=None if ended_at is None else now.age_s(ended_at, ended_tick, boot),
    )


def _sequence(
    db: sqlite3.Connection, row: SequenceRow, gathered: recent.Parts[Part], kind: type[Part] | type[Ids]
) -> SequenceRecord:
    number, place, reason, detail, tokens = row
    counted(number, "a sequence's number")
    if tokens is not None and kind is Ids:
        return SequenceRecord(number, place, list(unsealed(tokens, Ids).ids), reason=reason, detail=detail)
    if tokens is not None:
        part = unsealed(tokens, Part)
    else:
        parts = [*folded(db, number, Part), *gathered.get(number, [])]
        part = joined(sorted(parts, key=itemgetter(0)), Part)
    return SequenceRecord(
        number, place, list(part.ids), list(part.logprobs), list(part.hops), reason, detail, part.num_cached
    )


def _fact(facts: dict[str, bytes], name: str, kind: type[T], default: D) -> T | D:
    return unsealed(facts[name], kind) if name in facts else default


_SELECT_REQUESTS = "SELECT number, submit, tenant, accepted_at, accepted_tick, boot, ended_at, ended_tick FROM requests"
_SELECT_PAST = (
    f"{_SELECT_REQUESTS} WHERE ended_at IS NULL OR CASE WHEN boot = :boot AND ended_tick IS NOT NULL "
    "THEN ended_tick > :tick_limit ELSE ended_at > :wall_limit END ORDER BY number"
)
