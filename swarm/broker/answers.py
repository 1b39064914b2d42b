"""How an end is told: to the client, and in one line of the log."""

from __future__ import annotations

from swarm.broker.actions import Note
from swarm.broker.state import Request, Sequence
from swarm.wire.messages import Finished


def finished(sequence: Sequence) -> Finished:
    """How a continuation ended, for its client."""
    assert sequence.reason is not None
    return Finished(
        request_id=sequence.request.id,
        index=sequence.index,
        reason=sequence.reason,
        num_prompt=sequence.num_prompt,
        num_tokens=sequence.num_generated,
        timing=sequence.timing(sequence.ended_at or 0.0),
        detail=sequence.detail,
    )


def summary(request: Request, now: float) -> Note:
    """One line per request."""
    first = request.sequences[0]
    timing = first.timing(now)
    fields: dict[str, object] = {
        "request": request.id,
        "reasons": [s.reason for s in request.sequences],
        "prompt": first.num_prompt,
        "tokens": sum(s.num_generated for s in request.sequences),
        "queued_s": round(timing.queued_s, 4),
        "first_token_s": round(timing.first_token_s, 4),
        "total_s": round(now - request.arrived_at, 4),
        "recomputed": sum(s.num_recomputed for s in request.sequences),
    }
    if first.detail:
        fields["detail"] = first.detail
    return Note("request_ended", "info", fields)
