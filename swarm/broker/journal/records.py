"""Reads requests from the journal: rows become records, for a starting broker and for queries.

The tokens of a sequence that has not ended come from two places: the buffer of the last steps (``token_buffer``) and
the table of stored parts. When a sequence ends, its tokens become one value. The functions raise sqlite3.Error or
DamagedValue, which the store converts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeVar

from swarm.broker.journal import token_buffer
from swarm.broker.journal.database import is_corruption, read_transaction
from swarm.broker.journal.timestamps import Timestamp, age_limits
from swarm.broker.journal.values import AnyPart, DamagedValue, Ids, Part, check_count, decode, join_parts
from swarm.broker.state.ended_requests import ClientAccount
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.log import get_logger
from swarm.wire.messages import NO_LINEAGE, AdapterEntry, FinishReason, Lineage, Manifest, Submit

T = TypeVar("T")
D = TypeVar("D")

log = get_logger(__name__)

Row = tuple[int, bytes, str, float, float, str, float | None, float | None]
SequenceRow = tuple[int, int, FinishReason | None, str, bytes | None]


def read_snapshot(db: sqlite3.Connection, now: Timestamp, retained_s: float) -> JournalSnapshot:
    """Read the state that a starting broker needs: all requests that have not ended, and those that ended within
    ``retained_s``."""
    facts = dict(db.execute("SELECT name, value FROM facts"))
    check_count(_decode_fact(facts, "lineage", Lineage, NO_LINEAGE).generation, "the generation")
    rows = db.execute(_SELECT_PAST, age_limits(now, retained_s)).fetchall()
    gathered = token_buffer.read_buffered(db, Part)
    return JournalSnapshot(
        epoch=check_count(_decode_fact(facts, "epoch", int, 0), "the epoch"),
        workers=_decode_fact(facts, "workers", tuple[str, ...], ()),
        next_sequence=check_count(_decode_fact(facts, "next_sequence", int, 1), "the next sequence's number"),
        manifest=_decode_fact(facts, "manifest", Manifest, None),
        adapters=_decode_fact(facts, "adapters", tuple[AdapterEntry, ...], ()),
        dropped_adapters=_decode_fact(facts, "dropped_adapters", tuple[str, ...], ()),
        blames=_decode_fact(facts, "blames", tuple[tuple[int, int], ...], ()),
        requests=tuple(_build_record(db, row, now, gathered) for row in rows),
    )


def read_request(db: sqlite3.Connection, request_id: str, now: Timestamp) -> RequestRecord | None:
    """Read one request, however long ago it ended."""
    with read_transaction(db):  # otherwise its end could be written between two queries
        row = db.execute(f"{_SELECT_REQUESTS} WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else _build_record(db, row, now)


def find_by_prefix(
    db: sqlite3.Connection, prefix: str, now: Timestamp, limit: int, account: ClientAccount | None = None
) -> Iterator[RequestRecord]:
    """Read ended requests whose ids begin with ``prefix``; otherwise like ``list_ended``."""
    condition, names = _account_condition(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL AND substr(id, 1, ?) = ?{condition}"
        " ORDER BY ended_at DESC LIMIT ?",
        (len(prefix), prefix, *names, limit),
    ).fetchall()
    return _read_undamaged(db, rows, now)


def list_ended(
    db: sqlite3.Connection, now: Timestamp, limit: int, account: ClientAccount | None = None
) -> Iterator[RequestRecord]:
    """Read ended requests, the latest first, with their tokens but without log probabilities and hops. With an account,
    only its own."""
    condition, names = _account_condition(account)
    rows = db.execute(
        f"{_SELECT_REQUESTS} WHERE ended_at IS NOT NULL{condition} ORDER BY ended_at DESC LIMIT ?", (*names, limit)
    ).fetchall()
    return _read_undamaged(db, rows, now)


def _account_condition(account: ClientAccount | None) -> tuple[str, tuple[str | int, ...]]:
    """Return ``ClientAccount.owns`` as an SQL condition and its parameters."""
    if account is None:
        return "", ()
    if not account.may_name_tenants:
        return " AND tenant = ?", (account.tenant,)
    prefix = f"{account.tenant}/"
    return " AND (tenant = ? OR substr(tenant, 1, ?) = ?)", (account.tenant, len(prefix), prefix)


def read_stored_parts(db: sqlite3.Connection, sequence: int, kind: type[AnyPart]) -> Iterator[tuple[int, AnyPart]]:
    """Read the stored parts of a sequence that has not ended, each with the index of its first token."""
    rows = db.execute("SELECT first, part FROM tokens WHERE sequence = ? ORDER BY first", (sequence,))
    for first, blob in rows.fetchall():
        part = decode(blob, kind)
        # otherwise the row's columns are damaged, and the part counts as missing
        if part.place in (None, (sequence, first)):
            yield first, part


def _read_undamaged(db: sqlite3.Connection, rows: Iterable[Row], now: Timestamp) -> Iterator[RequestRecord]:
    """Read the records of these rows, skipping damaged ones."""
    for row in rows:
        try:
            yield _build_record(db, row, now, {}, kind=Ids)
        except DamagedValue as error:
            log.warning("journal_row_skipped", number=row[0], reason=str(error))
        except sqlite3.Error as error:
            if not is_corruption(error):
                raise
            log.warning("journal_row_skipped", number=row[0], reason=str(error))


def _build_record(
    db: sqlite3.Connection,
    row: Row,
    now: Timestamp,
    gathered: token_buffer.Parts[Part] | None = None,
    kind: type[Part] | type[Ids] = Part,
) -> RequestRecord:
    """Return the record of a row. ``gathered``: the buffered tokens, if they are read already; ended requests need
    none. ``kind``: the parts of the tokens of ended sequences to decode."""
    number, submit, tenant, wall, tick, boot, ended_at, ended_tick = row
    sequence_rows = db.execute(
        "SELECT id, place, reason, detail, tokens FROM sequences WHERE request = ? ORDER BY place", (number,)
    ).fetchall()
    if gathered is None:
        is_open = any(tokens is None for *_, tokens in sequence_rows)
        gathered = token_buffer.read_buffered(db, Part) if is_open else {}
    return RequestRecord(
        submit=decode(submit, Submit),
        tenant=tenant,
        age_s=now.age_s(wall, tick, boot),
        sequences=[_build_sequence(db, each, gathered, kind) for each in sequence_rows],
        ended_age_s=None if ended_at is None else now.age_s(ended_at, ended_tick, boot),
    )


def _build_sequence(
    db: sqlite3.Connection, row: SequenceRow, gathered: token_buffer.Parts[Part], kind: type[Part] | type[Ids]
) -> SequenceRecord:
    number, place, reason, detail, tokens = row
    check_count(number, "a sequence's number")
    if tokens is not None and kind is Ids:
        return SequenceRecord(number, place, list(decode(tokens, Ids).ids), reason=reason, detail=detail)
    if tokens is not None:
        part = decode(tokens, Part)
    else:
        parts = [*read_stored_parts(db, number, Part), *gathered.get(number, [])]
        part = join_parts(sorted(parts, key=itemgetter(0)), Part)
    return SequenceRecord(
        number,
        place,
        list(part.ids),
        list(part.logprobs),
        list(part.hops),
        reason,
        detail,
        part.num_cached,
        part.vector,
        part.prompt_logprobs,
    )


def _decode_fact(facts: dict[str, bytes], name: str, kind: type[T], default: D) -> T | D:
    return decode(facts[name], kind) if name in facts else default


_SELECT_REQUESTS = "SELECT number, submit, tenant, accepted_at, accepted_tick, boot, ended_at, ended_tick FROM requests"
_SELECT_PAST = (
    f"{_SELECT_REQUESTS} WHERE ended_at IS NULL OR CASE WHEN boot = :boot AND ended_tick IS NOT NULL "
    "THEN ended_tick > :tick_limit ELSE ended_at > :wall_limit END ORDER BY number"
)
