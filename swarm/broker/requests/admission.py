"""Admission of new requests, and the time after which a rejected client should retry."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Request, State
from swarm.broker.state.ended_requests import RETRY_S, ClientAccount, RequestRefusal
from swarm.errors import InvalidRequest
from swarm.params import MAX_PIXEL_BYTES, PRIORITIES, SamplingParams, image_digest
from swarm.wire.messages import BLOCK, MAX_PROMPT_LOGPROB_BYTES, Manifest, Submit, num_blocks
from swarm.wire.prompt_logprobs import row_bytes

# seconds; minimum retry time while no plan serves, since it is unknown when places become free
MIN_RETRY_NOT_SERVING_S = 5.0
MAX_HELD_PIXELS = 512 << 20  # bytes of the pixels of all requests that have not ended
MAX_RETRY_S = 60.0  # seconds; the current rate predicts nothing beyond that, so the client should retry by then


@dataclass(frozen=True, slots=True)
class QueueQuota:
    """Division of the ``num_places`` places of the queue. An accepted request is never removed for a better one, so
    some places are reserved for requests that may still come:

    * one tenant holds at most three quarters of the places;
    * the last twentieth is for classes above "normal";
    * the last tenth, at least one place, is for classes above "low".

    In a queue of one place, that place is open to all.
    """

    num_places: int

    @property
    def max_per_tenant(self) -> int:
        """Maximum number of waiting sequences of one tenant."""
        return -(-3 * self.num_places // 4)

    def max_for_class(self, priority: int) -> int:
        """Return the maximum total of waiting sequences up to which a sequence of this class may be added."""
        if priority > PRIORITIES["normal"]:
            return self.num_places
        reserved = self.num_places // 20 if priority > PRIORITIES["low"] else max(1, self.num_places // 10)
        return max(1, self.num_places - reserved)

    def refuse_too_many(self, num: int, priority: int) -> RequestRefusal | None:
        """Refuse a request with more sequences than even an empty queue has places for."""
        limit = min(self.max_per_tenant, self.max_for_class(priority))
        if num <= limit:
            return None
        return RequestRefusal(
            "invalid", f"n is {num}, but at most {limit} sequences of one request may wait: ask for fewer"
        )

    def full_reason(self, num: int, priority: int, num_waiting: int, num_of_tenant: int) -> str | None:
        """Return why there are no places for ``num`` more sequences now; None if there are."""
        limit = self.max_for_class(priority)
        if num_waiting + num > limit:
            reserved_text = (
                f"; {self.num_places - limit} more places are kept for higher classes"
                if limit < self.num_places
                else ""
            )
            return f"{num_waiting} sequences are waiting already, at most {limit} may{reserved_text}"
        if num_of_tenant + num > self.max_per_tenant:
            return (
                f"{num_of_tenant} sequences of this tenant are waiting already, at most {self.max_per_tenant} may: "
                f"the other {self.num_places - self.max_per_tenant} places are kept for other tenants"
            )
        return None


class RequestAdmission:
    """Decides whether a new request is accepted. ``patience_s``: how long a sequence that fits into no plan keeps its
    place in the queue."""

    def __init__(self, state: State, max_queue: int, patience_s: float) -> None:
        self._state = state
        self._patience_s = patience_s
        self._quota = QueueQuota(max_queue)

    def reserve(self, client: bytes, request: Request) -> None:
        """Take places for a request that now waits for the journal, before it enters the queue."""
        self._state.retry_after.forget(client)
        self._state.awaiting_journal.add(request)

    def release(self, sequences: tuple[int, ...]) -> None:
        """Release these places: the journal has written the request, or never will."""
        self._state.awaiting_journal.remove(sequences)

    def release_all(self) -> None:
        """Release all places of requests that wait for the journal, cancelled ones included: it writes nothing any
        more."""
        self._state.awaiting_journal.clear()

    def check(self, client: bytes, tenant: str, submit: Submit, now: float) -> RequestRefusal | None:
        """Return why this request is rejected now; None if it is admitted."""
        manifest = self._state.manifest
        if self._state.journal_problem:
            return refuse_without_journal(self._state.journal_problem)
        if manifest is None:
            waits_for = self._state.plans.waits_for
            return RequestRefusal("unavailable", f"the swarm has no model yet, it waits for {waits_for}", 1.0)
        return (
            self._quota.refuse_too_many(submit.params.n, submit.priority)
            or self._refuse_if_full(client, tenant, submit, now)
            or check_submit(submit, manifest)
            or self._refuse_many_pixels(submit)
            or self._refuse_adapter(submit, manifest)
            or refuse_outdated(self._state, submit.params)
            or self._refuse_too_large(submit, manifest)
        )

    def _refuse_many_pixels(self, submit: Submit) -> RequestRefusal | None:
        """Refuse a request with images while those of other requests take all memory that images may take."""
        if not submit.pixels:
            return None
        unended = (request for request in self._state.requests.values() if not request.has_ended)
        held = sum(sum(map(len, request.submit.pixels)) for request in unended)
        if held + sum(map(len, submit.pixels)) <= MAX_HELD_PIXELS:
            return None
        return RequestRefusal("overloaded", f"images of other requests take {held >> 20} MiB already", RETRY_S)

    def _refuse_adapter(self, submit: Submit, manifest: Manifest) -> RequestRefusal | None:
        """Refuse a request for an adapter that is not loaded, or is being dropped."""
        adapter, adapters = submit.params.adapter, self._state.adapters
        if adapter in adapters.keys and adapter not in adapters.dropped:
            return None
        unknown = manifest.adapter_error(adapter.partition("@")[0] if adapter in adapters.dropped else adapter)
        return None if unknown is None else RequestRefusal("invalid", unknown)

    def _refuse_if_full(self, client: bytes, tenant: str, submit: Submit, now: float) -> RequestRefusal | None:
        """Refuse the request if the queue has no places for it now."""
        waiting = self._state.waiting
        reason = self._quota.full_reason(
            submit.params.n,
            submit.priority,
            len(waiting) + len(self._state.awaiting_journal),
            waiting.num_waiting(tenant) + self._state.awaiting_journal.num_waiting(tenant),
        )
        if reason is None:
            return None
        return RequestRefusal("overloaded", reason, self._retry_after_s(client, submit.params.n, now))

    def _retry_after_s(self, client: bytes, num_sequences: int, now: float) -> float:
        """Return the seconds after which a rejected client should retry, when the queue is expected to have room for
        its sequences.

        Clients that were rejected earlier are scheduled first. Sequences that are set aside leave the queue only when
        the plan changes or their patience ends.
        """
        costs, waiting = self._state.costs, self._state.waiting
        rate = costs.tokens_per_s
        num_turns = len(waiting) - len(waiting.aside)
        least_s = 0.1 if self._state.plans.is_serving else MIN_RETRY_NOT_SERVING_S
        least_s = max(least_s, waiting.seconds_until_given_up(num_sequences - num_turns, self._patience_s))
        if rate is None or not num_turns:
            return round(min(MAX_RETRY_S, max(1.0, least_s)), 1)
        drain_s = waiting.pending_tokens(costs.fill_ratio) / rate
        after_s = self._state.retry_after.schedule(client, num_sequences, drain_s / num_turns, drain_s, now)
        return round(min(MAX_RETRY_S, max(least_s, after_s)), 1)

    def _refuse_too_large(self, submit: Submit, manifest: Manifest) -> RequestRefusal | None:
        """Refuse a request that the active plan could not hold even if empty."""
        plans = self._state.plans
        return refuse_too_large(max_positions(submit, manifest), plans.kv_blocks) if plans.is_serving else None


def refuse_without_journal(reason: str) -> RequestRefusal:
    """Return the refusal for requests while the journal cannot be written."""
    return RequestRefusal(
        "journal", f"no request can be accepted, because the journal can't be written: {reason}", RETRY_S
    )


def tenant_of(submit: Submit, client: bytes, account: ClientAccount | None = None) -> str:
    """Return the tenant to charge: that of the client's key; without a key the tenant that it names, or the client
    itself."""
    if account is not None:
        return account.tenant_of(submit.tenant)
    return submit.tenant or f"client {client.hex()}"


def check_submit(submit: Submit, manifest: Manifest) -> RequestRefusal | None:
    """Return why the model cannot serve this request at all; None if it can."""
    try:
        submit.params.check()
    except InvalidRequest as error:
        return RequestRefusal("invalid", str(error))
    if not submit.prompt:
        return RequestRefusal("invalid", "the prompt is empty: give at least one token")
    unable = manifest.why_unable(submit.params.vector)
    if unable is not None:
        return RequestRefusal("unsupported_task", unable)
    return _check_length(submit, manifest) or _check_token_ids(submit, manifest) or _check_images(submit, manifest)


def _check_images(submit: Submit, manifest: Manifest) -> RequestRefusal | None:
    """Refuse images that the model can't see, or that are not what the parameters say: others may start from the
    request's keys and values, by digest and place alone."""
    images, vision = submit.params.images, manifest.vision
    if not images and not submit.pixels:
        return None
    if vision is None:
        return RequestRefusal("unsupported_task", f"{manifest.name} reads text only: leave the images out")
    if len(images) != len(submit.pixels):
        return RequestRefusal("invalid", f"images: {len(images)} are named, and pixels of {len(submit.pixels)} came")
    if sum(map(len, submit.pixels)) > MAX_PIXEL_BYTES:
        return RequestRefusal("invalid", f"images: a request may have {MAX_PIXEL_BYTES >> 20} MiB of pixels: send less")
    for number, (image, pixels) in enumerate(zip(images, submit.pixels, strict=True)):
        if set(submit.prompt[image.start : image.stop]) != {vision.token} or image.stop > len(submit.prompt):
            problem = f"the prompt's tokens from {image.start} up to {image.stop} must be {vision.token}"
        elif len(pixels) != image.num_tokens * vision.token_bytes:
            problem = f"{image.num_tokens} tokens need {image.num_tokens * vision.token_bytes} bytes of pixels"
        elif image_digest(image.rows, image.columns, pixels) != image.digest:
            problem = "the digest is not that of its rows, columns and pixels"
        else:
            continue
        return RequestRefusal("invalid", f"images[{number}]: {problem}")
    return None


def _check_length(submit: Submit, manifest: Manifest) -> RequestRefusal | None:
    has_tokens = submit.params.max_answer > 0
    if len(submit.prompt) + has_tokens > manifest.context:
        rest = ", and at least one must remain for the answer" if has_tokens else ""
        return RequestRefusal(
            "context", f"the prompt has {len(submit.prompt)} tokens; {manifest.name} holds {manifest.context}{rest}"
        )
    if (alternatives := submit.params.prompt_logprobs) is not None:
        each = row_bytes(alternatives, manifest.vocab_size)
        most = MAX_PROMPT_LOGPROB_BYTES // (each * submit.params.n)  # each continuation may be sent with them
        if len(submit.prompt) - 1 > most:
            return RequestRefusal(
                "invalid",
                f"log probabilities of the prompt: with {alternatives} alternatives and n = {submit.params.n} a prompt "
                f"has at most {most + 1} tokens, not {len(submit.prompt)}: ask for less",
            )
    return None


def _check_token_ids(submit: Submit, manifest: Manifest) -> RequestRefusal | None:
    named = (
        ("prompt", submit.prompt),
        ("logit_bias", tuple(submit.params.logit_bias)),
        ("stop_token_ids", submit.params.stop_token_ids),
        ("thinking", () if submit.params.thinking is None else submit.params.thinking.closing),
    )
    for field, ids in named:
        worst = max(ids, default=0)
        if worst >= manifest.vocab_size:
            return RequestRefusal(
                "invalid", f"{field}: token {worst} is out of range, the vocabulary has {manifest.vocab_size}"
            )
    return None


def refuse_taken_id(submit: Submit) -> RequestRefusal:
    """Return the refusal for an id that another tenant uses. It reveals nothing else about that request."""
    return RequestRefusal("conflict", f"request id {submit.request_id} is taken: choose a new one")


def max_positions(submit: Submit, manifest: Manifest) -> int:
    """Return the maximum number of positions of a sequence of this request."""
    return min(len(submit.prompt) + submit.params.max_answer, manifest.context)


def refuse_outdated(state: State, params: SamplingParams) -> RequestRefusal | None:
    """Return a refusal if a stage's worker is too old for what the request asks for."""
    worker = state.outdated_worker(params)
    if not worker:
        return None
    what = "thinking with a budget or a grammar" if params.thinking is not None else "embeddings and scores"
    what = what if params.prompt_logprobs is None else "log probabilities of prompts"
    what = "adapters" if params.adapter else "images" if params.images else what
    return RequestRefusal("unavailable", f"worker {worker} is too old for {what}: upgrade it", RETRY_S)


def refuse_too_large(limit: int, kv_blocks: int) -> RequestRefusal | None:
    """Return a refusal if stages with this many blocks cannot hold a sequence of ``limit`` positions even if empty."""
    if num_blocks(limit) <= kv_blocks:
        return None
    reason = (
        f"prompt and max_tokens make {limit} positions, the stages hold {kv_blocks * BLOCK}: "
        f"ask for fewer tokens, or give the workers more memory"
    )
    return RequestRefusal("too_large", reason)
