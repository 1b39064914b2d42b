"""What requests had to wait for, spread over fixed buckets; how they ended, and how many tokens they had.

A sequence's waiting for its turn, its first token and its prompt's tokens are counted when its first token is known:
what never had one counts among the outcomes alone. Times are the broker's: from a request's arrival, and between the
moments at which two tokens of a sequence were known here, so a recovery shows in them. Tokens that a broker before this
one drew are in none of them.
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

from swarm.broker.state import Request, Sequence
from swarm.series import LONG_S, SHORT_S, Histogram
from swarm.wire.messages import FinishReason, Json

# A request with several continuations has the outcome that comes first here.
WORST_FIRST: tuple[FinishReason, ...] = ("failed", "cancelled", "length", "stop")
assert set(WORST_FIRST) == set(get_args(FinishReason))


class Latencies:
    """One addition and one search in a short tuple per token."""

    __slots__ = ("_num_cached", "_num_prompt", "_outcomes", "between_tokens", "first_token", "queue", "whole")

    def __init__(self) -> None:
        self.queue = Histogram(LONG_S)
        self.first_token = Histogram(LONG_S)
        self.between_tokens = Histogram(SHORT_S)
        self.whole = Histogram(LONG_S)
        self._num_prompt = 0
        self._num_cached = 0
        self._outcomes: Counter[str] = Counter()

    def token(self, sequence: Sequence, now: float) -> None:
        """A token of it is known; the sequence has not been told yet."""
        before = sequence.last_token_at
        if before is not None:
            self.between_tokens.add(now - before)
        elif not sequence.num_restored:
            self._first(sequence, now)

    def _first(self, sequence: Sequence, now: float) -> None:
        arrived_at = sequence.request.arrived_at
        self.first_token.add(max(0.0, now - arrived_at))
        if sequence.started_at is not None:
            self.queue.add(max(0.0, sequence.started_at - arrived_at))
        self._num_prompt += sequence.num_prompt
        self._num_cached += sequence.num_cached

    def ended(self, request: Request, now: float) -> None:
        """The last of its sequences has ended. What is whole counts with its time, too; what was never accepted counts
        nowhere."""
        if not request.accepted:
            return
        reasons = {sequence.reason for sequence in request.sequences}
        outcome = next(reason for reason in WORST_FIRST if reason in reasons)
        self._outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self.whole.add(max(0.0, now - request.arrived_at))

    def counts(self) -> Json:
        """Tell how many ended in which way, and tokens of the prompts that were answered."""
        ended: Json = {outcome: self._outcomes[outcome] for outcome in WORST_FIRST}
        return {"ended": ended, "prompt_tokens": self._num_prompt, "cached_prompt_tokens": self._num_cached}

    def histograms(self) -> Json:
        return {
            "queue_s": self.queue.body(),
            "first_token_s": self.first_token.body(),
            "between_tokens_s": self.between_tokens.body(),
            "request_s": self.whole.body(),
        }
