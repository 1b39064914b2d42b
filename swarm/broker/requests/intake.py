"""New requests: who is let in, and when whoever is turned away may come again."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Request, State
from swarm.broker.state.archive import RETRY_S, Account, Refusal
from swarm.errors import InvalidRequest
from swarm.params import PRIORITIES
from swarm.wire.messages import BLOCK, Manifest, Submit, num_blocks

NOT_SERVING_S = 5.0  # as long as no plan serves nobody knows when places become free: at least this is to be waited
MOST_S = 60.0  # further ahead the pace of the moment tells nothing: come again by then, and be told anew


@dataclass(frozen=True, slots=True)
class Places:
    """How the ``num`` places of the queue are given away. What was accepted is never put out again for somebody better;
    so some places are kept for those who may still come:

    * one tenant holds at most three quarters of the places;
    * the last twentieth is for classes above "normal";
    * the last tenth, at least one place, is for classes above "low".

    In a queue of one place, all may have that.
    """

    num: int

    @property
    def of_tenant(self) -> int:
        """How many sequences of one tenant may wait."""
        return -(-3 * self.num // 4)

    def of_class(self, priority: int) -> int:
        """How many sequences, of whatever class, may wait with the last one of this class."""
        if priority > PRIORITIES["normal"]:
            return self.num
        kept = self.num // 20 if priority > PRIORITIES["low"] else max(1, self.num // 10)
        return max(1, self.num - kept)

    def too_many(self, num: int, priority: int) -> Refusal | None:
        """Whether so many sequences of one request would not even find places in an empty queue."""
        most = min(self.of_tenant, self.of_class(priority))
        if num <= most:
            return None
        return Refusal("invalid", f"n is {num}, but at most {most} sequences of one request may wait: ask for fewer")

    def taken(self, num: int, priority: int, num_waiting: int, num_of_tenant: int) -> str | None:
        """Why there are no places now for so many more sequences; None: there are."""
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
    """``patience_s``: how long what fits nowhere keeps its place in the queue."""

    def __init__(self, state: State, max_queue: int, patience_s: float) -> None:
        self._state = state
        self._patience_s = patience_s
        self._places = Places(max_queue)

    def let_in(self, client: bytes, request: Request) -> None:
        """Give a request its place: until the journal has it, here, then in the queue."""
        self._state.turned_away.forget(client)
        self._state.unwritten.add(request)

    def written(self, sequences: tuple[int, ...]) -> None:
        """The journal has these of one request, or never will."""
        self._state.unwritten.remove(sequences)

    def broke(self) -> None:
        """The journal takes nothing: nobody waits for it at the door any more, not even who was cancelled there."""
        self._state.unwritten.clear()

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
            len(waiting) + len(self._state.unwritten),
            waiting.num_of(tenant) + self._state.unwritten.num_of(tenant),
        )
        if reason is None:
            return None
        return Refusal("overloaded", reason, self._retry_after(client, submit.params.n, now))

    def _retry_after(self, client: bytes, num_sequences: int, now: float) -> float:
        """When there will be places: those who were turned away before will have come back by then. Who is set aside
        makes none before the plan changes or its patience ends."""
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
        """A plan is in force, and even empty it could not hold a sequence of this length."""
        book = self._state.book
        return too_large(limit_of(submit, manifest), book.kv_blocks) if book.serving else None


def no_journal(reason: str) -> Refusal:
    """While nothing can be written nobody is let in."""
    return Refusal("journal", f"no request can be accepted, since it could not be written down: {reason}", RETRY_S)


def tenant_of(submit: Submit, client: bytes, account: Account | None = None) -> str:
    """On whose account a request is computed: that of its client's key; without one its tenant's, or the client's
    itself if it names none."""
    if account is not None:
        return account.tenant_of(submit.tenant)
    return submit.tenant or f"client {client.hex()}"


def check_submit(submit: Submit, manifest: Manifest) -> Refusal | None:
    """Whether this model can serve this request at all; None means yes."""
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
    """Another tenant has this id. That is all that is said of it."""
    return Refusal("conflict", f"request id {submit.request_id} is taken: choose a new one")


def limit_of(submit: Submit, manifest: Manifest) -> int:
    """The most positions a sequence of this request can come to hold."""
    return min(len(submit.prompt) + submit.params.max_tokens, manifest.context)


def too_large(limit: int, kv_blocks: int) -> Refusal | None:
    """Whether stages with so many blocks, even empty, have no room for so many positions; None means that they have."""
    if num_blocks(limit) <= kv_blocks:
        return None
    reason = (
        f"prompt and max_tokens make {limit} positions, the stages hold {kv_blocks * BLOCK}: "
        f"ask for fewer tokens, or give the workers more memory"
    )
    return Refusal("too_large", reason)
