"""Buffer for the tokens of the last steps: one row per step, however many sequences took part.

With one row per sequence, every step would change as many pages of the file as there are sequences. Therefore a step's
tokens are appended together to a table of their own. Every ``FLUSH_STEPS`` steps, and when a sequence ends, the
buffered tokens are moved to the table that has each sequence's tokens.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from swarm.broker.actions import NewTokens
from swarm.broker.journal.values import AnyPart, DamagedValue, Part, RawPart, decode, encode, join_parts
from swarm.log import get_logger

FLUSH_STEPS = 64  # steps

log = get_logger(__name__)

Row = tuple[tuple[int, int, AnyPart], ...]  # one step: (sequence, index of the first token, tokens)
Parts = dict[int, list[tuple[int, AnyPart]]]  # by sequence: (index of the first token, tokens)


def append(db: sqlite3.Connection, tokens: Iterable[NewTokens]) -> int:
    """Append the tokens of one or a few steps in one statement. Return the approximate number of rows in the buffer."""
    row = tuple(
        (
            new.sequence,
            new.first,
            Part(new.ids, new.logprobs, new.hops, None, new.num_cached, prompt_logprobs=new.prompt_logprobs),
        )
        for new in tokens
    )
    return db.execute("INSERT INTO recent (tokens) VALUES (?)", (encode(row),)).lastrowid or 0


def flush(db: sqlite3.Connection) -> None:
    """Move the buffered tokens to the table of each sequence's tokens; must run inside a transaction."""
    for sequence, parts in read_buffered(db, RawPart).items():
        for first, run in _join_runs(parts):
            if not _is_shorter(db, sequence, first, run):
                placed = replace(run, place=(sequence, first))
                db.execute(_INSERT, (sequence, first, encode(placed), sequence))
    db.execute("DELETE FROM recent")


def read_buffered(db: sqlite3.Connection, kind: type[AnyPart]) -> Parts[AnyPart]:
    """Return the buffered tokens by sequence. Damaged rows are skipped: their tokens will be computed again, or written
    again when the end of the sequence is refused without them."""
    gathered: Parts[AnyPart] = {}
    for number, blob in db.execute("SELECT number, tokens FROM recent ORDER BY number"):
        try:
            row = decode(blob, Row[kind])  # type: ignore[valid-type]
        except DamagedValue as error:
            log.warning("journal_row_skipped", table="recent", number=number, reason=str(error))
            continue
        for sequence, first, part in row:
            gathered.setdefault(sequence, []).append((first, part))
    return gathered


def highest_sequence(blob: object) -> int:
    """Return the highest sequence number in a row. Raises DamagedValue."""
    return max((sequence for sequence, _, _ in decode(blob, Row[RawPart])), default=0)


def _join_runs(parts: list[tuple[int, RawPart]]) -> Iterator[tuple[int, RawPart]]:
    """Join parts that follow one another without a gap."""
    start = end = parts[0][0]
    run: list[tuple[int, RawPart]] = []
    for first, part in parts:
        if first != end:
            yield start, join_parts(run, RawPart)
            start, run = first, []
        run.append((first - start, part))
        end = first + len(part.ids)
    yield start, join_parts(run, RawPart)


def _is_shorter(db: sqlite3.Connection, sequence: int, first: int, run: RawPart) -> bool:
    """Whether these tokens are fewer than in the stored part with the same first token."""
    row = db.execute("SELECT part FROM tokens WHERE sequence = ? AND first = ?", (sequence, first)).fetchone()
    try:
        return row is not None and len(decode(row[0], RawPart).ids) > len(run.ids)
    except DamagedValue:
        return False


# Tokens of a sequence that has ended or is not in the journal are dropped.
_INSERT = (
    "INSERT OR REPLACE INTO tokens (sequence, first, part) SELECT ?, ?, ? WHERE EXISTS "
    "(SELECT 1 FROM sequences WHERE id = ? AND reason IS NULL)"
)
