"""Admission of new requests, and the time after which a rejected client should retry."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Request, State
from swarm.broker.state.archive import RETRY_S, Account, Refusal
from swarm.errors import InvalidRequest
from swarm.params import PRIORITIES
from swarm.wire.messages import BLOCK, Manifest, Submit, num_blocks

NOT_SERVING_S = 5.0  # seconds; minimum retry time while no plan serves, since it is unknown when places become free
MOST_S = 60.0  # seconds; the current rate predicts nothing beyond that, so the client should retry by then


@dataclass(frozen=True, slots=True)
class Places:
    """Division of the ``num_places`` places of the queue. An accepted request is never removed for a better one, so
    some places are reserved for requests that may still come:

    * one tenant holds at most three quarters of the places;
    * the last twentieth is for classes above "normal";
    * the last tenth, at least one place, is for classes above "low".

    In a queue of one place, that place is open to all.
    """

    num: int

    @property
    def of_tenant(self) -> int:
        """Maximum number of waiting sequences of one tenant."""
        return -(-3 * self.num // 4)

    def of_class(self, priority: int) -> int:
        """Return the maximum total of waiting sequences up to which a sequence of this class may be added."""
        if priority > PRIORITIES["normal"]:
            return self.num
        kept = self.num // 20 if priority > PRIORITIES["low"] else max(1, self.num // 10)
        return max(1, self.num - kept)

    def too_many(self, num: int, priority: int) -> Refusal | None:
        """Refuse a request with more sequences than even an empty queue has places for."""
        most = min(self.of_tenant, self.of_class(priority))
        if num <= most:
            return None
        return Refusal("invalid", f"n is {num}, but at most {most} sequences of one request may wait: ask for fewer")

    def taken(self, num: int, priority: int, num_waiting: int, num_of_tenant: int) -> str | None:
        """Return why there are no places for ``num`` more sequences now; None if there are."""
        most = self.of_class(priority)
        if num_waiting + num > most:
            kept = f"; {self.num - most} more places are kept for higher classes" if most < self.num else ""
            return f"{num_waiting} sequences are waiting already, at most {most} may{kept}"
        if num_of_tenant + num > self.of_tenant:
            return (
                f"{num_of_tenant} sequences of this tenant are waiting already, at most {self.of_tenant} may: "
                f"the other {self.num - self.of_tenant} places are kept for other tenants"
            )
        return None


class Intake:
    """Decides whether a new request is accepted. ``patience_s``: how long a sequence that fits into no plan keeps its
    place in the queue."""

    def __init__(self, state: State, max_queue: int, patience_s: float) -> None:
        self._state = state
        self._patience_s = patience_s
        self._places = Places(max_queue)

    def let_in(self, client: bytes, request: Request) -> None:
        """Take places for a request that now waits for the journal, before it enters the queue."""
        self._state.turned_away.forget(client)
        self._state.unwritten.add(request)

    def written(self, sequences: tuple[int, ...]) -> None:
        """Release these places: the journal has written the request, or never will."""
        self._state.unwritten.remove(sequences)

    def broke(self) -> None:
        """Release all places of requests that wait for the journal, cancelled ones included: it writes nothing any
        more."""
        self._state.unwritten.clear()

    def refusal(self, client: bytes, tenant: str, submit: Submit, now: float) -> Refusal | None:
        """Return why this request is rejected now; None if it is admitted."""
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
        """Refuse the request if the queue has no places for it now."""
        waiting = self._state.waiting
        reason = self._places.taken(
            submit.params.n,
            submit.priority,
            len(waiting) + len(self._state.unwritten),
            waiting.num_of(tenant) + self._state.unwritten.num_of(tenant),
        )
        if reason is None:
            return None
        return Refusal("overloaded", reason, self._retry_after(client, submit.params.n, now))

    def _retry_after(self, client: bytes, num_sequences: int, now: float) -> float:
        """Return the seconds after which there should be places. Clients rejected earlier are expected to come back
        before. Sequences set aside free no place before the plan changes or their patience ends."""
        costs, waiting = self._state.costs, self._state.waiting
        rate = costs.tokens_per_s
        num_turns = len(waiting) - len(waiting.aside)
        least_s = 0.1 if self._state.book.serving else NOT_SERVING_S
        least_s = max(least_s, waiting.patience_left(num_sequences - num_turns, self._patience_s))
        if rate is None or not num_turns:
            return round(min(MOST_S, max(1.0, least_s)), 1)
        drain_s = waiting.work(costs.fill) / rate
        after_s = self._state.turned_away.add(client, num_sequences, drain_s / num_turns, drain_s, now)
        return round(min(MOST_S, max(least_s, after_s)), 1)

    def _too_large(self, submit: Submit, manifest: Manifest) -> Refusal | None:
        """Refuse a request that the active plan could not hold even if empty."""
        book = self._state.book
        return too_large(limit_of(submit, manifest), book.kv_blocks) if book.serving else None


def no_journal(reason: str) -> Refusal:
    """Return the refusal for requests while the journal cannot be written."""
    return Refusal("journal", f"no request can be accepted, because the journal can't be written: {reason}", RETRY_S)


def tenant_of(submit: Submit, client: bytes, account: Account | None = None) -> str:
    """Return the tenant to charge: that of the client's key; without a key the tenant that it names, or the client
    itself."""
    if account is not None:
        return account.tenant_of(submit.tenant)
    return submit.tenant or f"client {client.hex()}"


def check_submit(submit: Submit, manifest: Manifest) -> Refusal | None:
    """Return why the model cannot serve this request at all; None if it can."""
    try:
        submit.params.check()
    except InvalidRequest as error:
        return Refusal("invalid", str(error))
    if not submit.prompt:
        return Refusal("invalid", "the prompt is empty: give at least one token")
    if len(submit.prompt) >= manifest.context:
        return Refusal(
            "context",
            f"the prompt has {len(submit.prompt)} tokens; {manifest.name} holds {manifest.context}, "
            f"and at least one must remain for the answer",
        )
    named = (
        ("prompt", submit.prompt),
        ("logit_bias", tuple(submit.params.logit_bias)),
        ("stop_token_ids", submit.params.stop_token_ids),
    )
    for field, ids in named:
        worst = max(ids, default=0)
        if worst >= manifest.vocab_size:
            return Refusal(
                "invalid", f"{field}: token {worst} is out of range, the vocabulary has {manifest.vocab_size}"
            )
    return None


def taken(submit: Submit) -> Refusal:
    """Return the refusal for an id that another tenant uses. It reveals nothing else about that request."""
    return Refusal("conflict", f"request id {submit.request_id} is taken: choose a new one")


def limit_of(submit: Submit, manifest: Manifest) -> int:
    """Return the maximum number of positions of a sequence of this request."""
    return min(len(submit.prompt) + submit.params.max_tokens, manifest.context)


def too_large(limit: int, kv_blocks: int) -> Refusal | None:
    """Return a refusal if stages with this many blocks cannot hold a sequence of ``limit`` positions even if empty."""
    if num_blocks(limit) <= kv_blocks:
        return None
    reason = (
        f"prompt and max_tokens make {limit} positions, the stages hold {kv_blocks * BLOCK}: "
        f"ask for fewer tokens, or give the workers more memory"
    )
    return Refusal("too_large", reason)
