"""Proposed tokens in a step: the rows that end in them, and what a stage may rely on before they are verified.

A row with ``k`` proposals ends in ``k`` guessed tokens. All stages compute them like any others. The last stage draws a
token after the last certain one and after each proposal that equals the token drawn before it. The other stages learn
the result from the sequence's next step: whatever comes before the start of its row is verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from swarm.wire.messages import MAX_ROWS

if TYPE_CHECKING:
    from swarm.wire.messages import Row, Step


def proposed_counts(step: Step) -> dict[int, int]:
    """Return the number of proposed tokens at the end of each sequence's row; sequences without any are left out."""
    return {tail.sequence: tail.count for tail in step.proposed or ()}


def proposal_error(step: Step) -> str | None:
    """Return an error text for the first proposal that does not fit the step's rows, or None."""
    tails = step.proposed or ()
    rows = {row.sequence: row for row in step.rows} if tails else {}
    for tail in tails:
        row = rows.pop(tail.sequence, None)
        if row is None:
            return f"tokens are proposed for sequence {tail.sequence}, which has no row in the step, or twice"
        if not row.sample:
            return f"tokens are proposed for sequence {tail.sequence}, whose row draws none"
        if tail.count >= row.count:
            return f"{tail.count} tokens are proposed for sequence {tail.sequence}, whose row has {row.count} positions"
    num_draws = len(step.rows) + sum(tail.count for tail in tails)
    if tails and num_draws > MAX_ROWS:
        return f"{num_draws} tokens may be drawn in the step, which is more than {MAX_ROWS}"
    return None


def certain_rows(step: Step) -> tuple[Row, ...]:
    """Return the step's rows without their proposals."""
    counts = proposed_counts(step)
    if not counts:
        return step.rows
    return tuple(msgspec.structs.replace(row, count=row.count - counts.get(row.sequence, 0)) for row in step.rows)
