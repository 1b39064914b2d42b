"""The door for new requests: who is let in, and when whoever is turned away may come again."""

from __future__ import annotations

from swarm.broker.requests.admission import Places, Refusal, check_submit, limit_of, too_large
from swarm.broker.requests.gone import RETRY_S
from swarm.broker.state import Request, State
from swarm.broker.state.queue import Unwritten
from swarm.broker.state.timers import TurnedAway
from swarm.wire.messages import Manifest, Submit

NOT_SERVING_S = 5.0  # as long as no plan serves nobody knows when places become free: at least this is to be waited
MOST_S = 60.0  # further ahead the pace of the moment tells nothing: come again by then, and be told anew


class Intake:
    """``patience_s``: how long what fits nowhere keeps its place in the queue."""

    def __init__(self, state: State, max_queue: int, patience_s: float) -> None:
        self._state = state
        self._patience_s = patience_s
        self._places = Places(max_queue)
        self._unwritten = Unwritten()
        self._turned_away = TurnedAway()

    def let_in(self, client: bytes, request: Request) -> None:
        """It has a place from now on: until the journal has it, here, then in the queue."""
        self._turned_away.forget(client)
        self._unwritten.add(request)

    def written(self, sequences: tuple[int, ...]) -> None:
        """The journal has these of one request, or never will."""
        self._unwritten.remove(sequences)

    def broke(self) -> None:
        """The journal takes nothing: nobody waits for it at the door any more, not even who was cancelled there."""
        self._unwritten.clear()

    def refusal(self, client: bytes, tenant: str, submit: Submit, now: float) -> Refusal | None:
        """Why this request is not let in now; None: it may come in."""
        manifest = self._state.manifest
        if self._state.journal_problem:
            return no_journal(self._state.journal_problem)
        if manifest is None:
            waits_for = self._state.book.waits_for
            return Refusal("unavailable", f"the swarm has no model yet, it waits for {waits_for}", 1.0)
        return (
            self._places.too_many(submit.params.n, submit.priority)
            or self._no_places(client, tenant, submit, now)
            or check_submit(submit, manifest)
            or self._too_large(submit, manifest)
        )

    def _no_places(self, client: bytes, tenant: str, submit: Submit, now: float) -> Refusal | None:
        """The queue has none for this request now."""
        waiting = self._state.waiting
        reason = self._places.taken(
            submit.params.n,
            submit.priority,
            len(waiting) + len(self._unwritten),
            waiting.num_of(tenant) + self._unwritten.num_of(tenant),
        )
        if reason is None:
            return None
        return Refusal("overloaded", reason, self._retry_after(client, submit.params.n, now))

    def _retry_after(self, client: bytes, num_sequences: int, now: float) -> float:
        """When there will be places: those who were turned away before will have come back by then. Who is parked
        makes none before the plan changes or its patience ends."""
        pace, waiting = self._state.pace, self._state.waiting
        rate = pace.tokens_per_s
        num_turns = len(waiting) - len(waiting.parked)
        least_s = 0.1 if self._state.book.serving else NOT_SERVING_S
        least_s = max(least_s, waiting.patience_left(num_sequences - num_turns, self._patience_s))
        if rate is None or not num_turns:
            return round(min(MOST_S, max(1.0, least_s)), 1)
        drain_s = waiting.work(pace.fill) / rate
        after_s = self._turned_away.add(client, num_sequences, drain_s / num_turns, drain_s, now)
        return round(min(MOST_S, max(least_s, after_s)), 1)

    def _too_large(self, submit: Submit, manifest: Manifest) -> Refusal | None:
        """A plan is in force, and even empty it could not hold a sequence of this length."""
        book = self._state.book
        return too_large(limit_of(submit, manifest), book.kv_blocks) if book.serving else None


def no_journal(reason: str) -> Refusal:
    """While nothing can be written nobody is let in."""
    return Refusal("journal", f"no request can be accepted, since it could not be written down: {reason}", RETRY_S)
