"""How an end is told: to the client, and in one line of the log."""

from __future__ import annotations

from collections.abc import Iterable

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
        num_cached=sequence.num_cached,
    )


def summary(request: Request, now: float) -> Note:
    """One line per request. Times are seconds from its arrival; None where that never came, or came under a broker
    before this one. ``tokens_per_s`` is from its start on, waiting in the queue left out; ``recomputed`` is how often a
    sequence of it was computed again, ``preempted`` how often because it had to give its room to another."""
    first = request.sequences[0]
    num_tokens = sum(s.num_generated for s in request.sequences)
    is_forgotten = any(s.num_restored for s in request.sequences)
    started_at = None if is_forgotten else _earliest(s.started_at for s in request.sequences)
    first_token_at = None if is_forgotten else _earliest(s.first_token_at for s in request.sequences)
    busy_s = 0.0 if started_at is None else now - started_at
    fields: dict[str, object] = {
        "request": request.id,
        "client": None if request.client is None else request.client.hex(),
        "reasons": [s.reason for s in request.sequences],
        "prompt": first.num_prompt,
        "tokens": num_tokens,
        "queued_s": _since(request, started_at),
        "first_token_s": _since(request, first_token_at),
        "total_s": round(now - request.arrived_at, 4),
        "tokens_per_s": round(num_tokens / busy_s, 1) if busy_s > 0 else None,
        "recomputed": sum(s.num_recomputed for s in request.sequences),
        "preempted": sum(s.num_preempted for s in request.sequences),
    }
    detail = next((s.detail for s in request.sequences if s.detail), "")
    if detail:
        fields["detail"] = detail
    return Note("request_ended", "info", fields)


def _earliest(moments: Iterable[float | None]) -> float | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else round(moment - request.arrived_at, 4)
