"""Reads requests from the journal: rows become records, for a starting broker and for queries.

The tokens of a sequence that has not ended come from two places: the buffer of the last steps (``token_buffer``) and
the table of stored parts. When a sequence ends, its tokens become one value. The functions raise sqlite3.Error or
Damaged, which the store converts.
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
    """Read the state that a starting broker needs: all requests that have not ended, and those that ended within
    ``retained_s``."""
    facts = dict(db.execute("SELECT name, value FROM facts"))
    counted(_fact(facts, "lineage", Lineage, NOBODYS).generation, "the generation")
    rows = db.execute(_SELECT_PAST, old(now, retained_s)).fetchall()
    gathered = recent.read(db, Part)
    return Past(
        epoch=counted(_fact(facts, "epoch", int, 0), "the epoch"),
        workers=_fact(facts, "workers", tuple[str, ...], ()),
        next_sequence=counted(_fact(facts, "next_sequence", int, 1), "the next sequence's number"),
        manifest=_fact(facts, "manifest", Manifest, None),
        blames=_fact(facts, "blames", tuple[tuple[int, int], ...], ()),
        requests=tuple(_record(db, row, now, gathered) for row in rows),
    )


def request(db: sqlite3.Connection, request_id: str, now: Moment) -> RequestRecord | None:
    """Read one request, however long ago it ended."""
    with snapshot(db):  # otherwise its end could be written between two queries
        row = db.execute(f"{_SELECT_REQUESTS} WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else _record(db, row, now)


def beginning(
    db: sqlite3.Connection, prefix: str, now: Moment, limit: int, account: Account | None = None
) -> Iterator[RequestRecord]:
    """Read ended requests whose ids begin with ``prefix``; otherwise like ``list_ended``."""
    whose, names = _whose(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL AND substr(id, 1, ?) = ?{whose} ORDER BY ended_at DESC LIMIT ?",
        (len(prefix), prefix, *names, limit),
    ).fetchall()
    return _readable(db, rows, now)


def ended(db: sqlite3.Connection, now: Moment, limit: int, account: Account | None = None) -> Iterator[RequestRecord]:
    """Read ended requests, the latest first, with their tokens but without log probabilities and hops. With an account,
    only its own."""
    whose, names = _whose(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL{whose} ORDER BY ended_at DESC LIMIT ?", (*names, limit)
    ).fetchall()
    return _readable(db, rows, now)


def _whose(account: Account | None) -> tuple[str, tuple[str | int, ...]]:
    """Return ``ClientAccount.owns`` as an SQL condition and its parameters."""
    if account is None:
        return "", ()
    if not account.may_name_tenants:
        return " AND tenant = ?", (account.tenant,)
    beginning = f"{account.tenant}/"
    return " AND (tenant = ? OR substr(tenant, 1, ?) = ?)", (account.tenant, len(beginning), beginning)


def folded(db: sqlite3.Connection, sequence: int, kind: type[AnyPart]) -> Iterator[tuple[int, AnyPart]]:
    """Read the stored parts of a sequence that has not ended, each with the index of its first token."""
    rows = db.execute("SELECT first, part FROM tokens WHERE sequence = ? ORDER BY first", (sequence,))
    for first, blob in rows.fetchall():
        part = unsealed(blob, kind)
        # otherwise the row's columns are damaged, and the part counts as missing
        if part.place in (None, (sequence, first)):
            yield first, part


def _readable(db: sqlite3.Connection, rows: Iterable[Row], now: Moment) -> Iterator[RequestRecord]:
    """Read the records of these rows, skipping damaged ones."""
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
    """Return the record of a row. ``gathered``: the buffered tokens, if they are read already; ended requests need
    none. ``kind``: the parts of the tokens of ended sequences to decode."""
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
