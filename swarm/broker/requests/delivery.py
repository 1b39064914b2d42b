"""The way of tokens to their clients: what the journal has, within the client's window, and the end behind them.

The broker keeps no buffer for a client beside the tokens themselves. Whoever doesn't acknowledge gets a window's worth
and no more; what was sent and not acknowledged is sent again when the client attaches. A client that does not even take
that from its connection, whose queue has become full, is *stuck*: it is told nothing more before it says something, or
is tried again after a moment.
"""

from __future__ import annotations

from swarm.broker.actions import Outbox, SayClient
from swarm.broker.requests.admission import Refusal
from swarm.broker.requests.answers import finished
from swarm.broker.state import Request, Sequence, SequenceState, State
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
        """Its end is as safe as it gets: in the journal, if there is one that can be written."""
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
