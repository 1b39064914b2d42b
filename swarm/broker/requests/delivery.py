"""The way of tokens to their clients: what the journal has, within the client's window, and the end behind them.

The broker keeps no buffer for a client beside the tokens themselves. Whoever doesn't acknowledge gets a window's worth
and no more; what was sent and not acknowledged is sent again when the client attaches. A client that does not even take
that from its connection, whose queue has become full, is *stuck*: it is told nothing more before it says something, or
is tried again after a moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.broker.actions import Note, Outbox, SayClient
from swarm.broker.state import Request, Sequence, SequenceState, State
from swarm.broker.state.archive import Refusal
from swarm.wire.messages import Accepted, Finished, Rejected, Tokens

WINDOW = 256  # tokens of one continuation that may be on their way, unacknowledged
MAX_TOKENS_PER_MESSAGE = 128


class Delivery:
    """Methods append what is to be said to ``out``. ``has_journal``: an end is told once that is in the journal."""

    def __init__(self, state: State, out: Outbox, *, has_journal: bool) -> None:
        self._state = state
        self._out = out
        self._has_journal = has_journal

    def say(self, request: Request, message: Accepted | Tokens | Finished) -> None:
        if request.listener is not None:
            self._out.append(SayClient(request.listener, message))

    def reject(self, client: bytes, request_id: str, refusal: Refusal) -> None:
        """Not this, not now, or not any more: to the client that said it."""
        self._state.count(f"rejected_{refusal.code}")
        message = Rejected(
            request_id=request_id, code=refusal.code, reason=refusal.reason, retry_after_s=refusal.retry_after_s
        )
        self._out.append(SayClient(client, message))

    def deliver(self, sequence: Sequence) -> None:
        """Send what is committed and within the window, then the end if there is one."""
        request = sequence.request
        if request.listener is None or not request.accepted or sequence.unsure:
            return
        while sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:
            self.say(request, self._next_tokens(sequence))
        if self._end_is_due(sequence):
            sequence.tell_end()
            self.say(request, finished(sequence))

    def is_safe(self, sequence: Sequence) -> bool:
        """Whether its end is as safe as it gets: in the journal, if there is one that can be written."""
        return sequence.end_written or not self._has_journal or bool(self._state.journal_problem)

    def _end_is_due(self, sequence: Sequence) -> bool:
        if sequence.state is not SequenceState.ENDED or sequence.finish_sent:
            return False
        return sequence.sent >= sequence.sampled and self.is_safe(sequence)

    def _next_tokens(self, sequence: Sequence) -> Tokens:
        room = WINDOW - (sequence.sent - sequence.delivered)
        stop = min(sequence.committed, sequence.sent + min(room, MAX_TOKENS_PER_MESSAGE))
        start = sequence.sent - sequence.num_prompt
        end = stop - sequence.num_prompt
        wants_logprobs = sequence.request.submit.params.logprobs is not None
        message = Tokens(
            request_id=sequence.request.id,
            index=sequence.index,
            start=start,
            ids=tuple(sequence.tokens[sequence.sent : stop]),
            logprobs=tuple(sequence.logprobs[start:end]) if wants_logprobs else (),
            hops=tuple(sequence.hops[start:end]),
        )
        sequence.send(stop, self._state.now)
        return message


# --- how an end is told: to the client, and in one line of the log ---------------------------------------------------


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
