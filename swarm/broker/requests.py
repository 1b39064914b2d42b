"""The client door: a request's way from submission to its end, and each token's way to the client.

Submitted -> (journalled) -> accepted -> waiting -> running -> ended -> delivered -> forgotten. A client sees a token
once it is in the journal, at most ``WINDOW`` unacknowledged ones at a time: whoever reads slowly holds up nobody, and
the broker keeps no buffer for it beside the tokens themselves. Terminal states win: what arrives for an ended sequence
is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.broker.actions import Action, SayClient, WriteAcceptance, WriteEnd, WriteTokens
from swarm.broker.admission import Places, Refusal, check_submit, limit_of, tenant_of, too_large
from swarm.broker.answers import finished, summary
from swarm.broker.queue import Unwritten
from swarm.broker.state import PlanPhase, Request, Sequence, SequenceState, State
from swarm.broker.timers import Timers, TurnedAway
from swarm.broker.trace import Tracer
from swarm.wire.messages import (
    Accepted,
    Ack,
    Attach,
    Cancel,
    Finished,
    FinishReason,
    Hop,
    Manifest,
    Rejected,
    Sampled,
    Stop,
    Submit,
    Tokens,
)

WINDOW = 256  # tokens of one continuation that may be on their way, unacknowledged
MAX_TOKENS_PER_MESSAGE = 128
NOT_SERVING_S = 5.0  # as long as no plan serves nobody knows when places become free: at least this is to be waited


@dataclass(frozen=True, slots=True)
class RequestSettings:
    max_queue: int = 1024  # shared out as ``Places`` says
    client_grace_s: float = 10.0
    retain_s: float = 60.0
    too_large_patience_s: float = 30.0  # a worker that was lost is back within seconds, and the room with it


class Requests:
    """All requests. Methods append what is to be done to ``out``."""

    def __init__(self, state: State, settings: RequestSettings, out: list[Action], tracer: Tracer) -> None:
        self._state = state
        self._tracer = tracer
        self._settings = settings
        self._out = out
        self._turned_away = TurnedAway()
        self._timers = Timers()
        self._ticked_at = 0.0
        self._places = Places(settings.max_queue)
        self._unwritten = Unwritten()

    # --- what clients say ------------------------------------------------------------------------------------------

    def submit(self, client: bytes, submit: Submit, now: float) -> None:
        known = self._state.requests.get(submit.request_id)
        if known is not None:
            self._resubmit(known, client, submit)
            return
        refusal = self._refusal(client, submit, now)
        if refusal is not None:
            self._reject(client, submit.request_id, refusal)
            return
        request = self._make_request(client, submit, now)
        self._turned_away.forget(client)
        self._unwritten.add(request)
        self._out.append(WriteAcceptance(submit, tuple(s.id for s in request.sequences)))

    def accepted(self, request_id: str, sequences: tuple[int, ...]) -> None:
        """The journal has it: it may be announced and served."""
        self._unwritten.remove(sequences)
        request = self._state.requests.get(request_id)
        if request is None or tuple(s.id for s in request.sequences) != sequences:
            return  # cancelled meanwhile, and perhaps asked for anew: then that one is not in the journal yet
        request.accepted = True
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING:
                self._state.waiting.add(sequence)
        self._say(request, Accepted(request_id=request_id))
        for sequence in request.sequences:
            self._deliver(sequence)

    def attach(self, client: bytes, attach: Attach) -> None:
        request = self._state.requests.get(attach.request_id)
        if request is None or len(attach.next_index) != len(request.sequences):
            reason = "the broker does not know this request: it ended long ago, or the broker was restarted"
            self._reject(client, attach.request_id, Refusal("unknown", reason))
            return
        self._adopt(request, client)
        for sequence, next_index in zip(request.sequences, attach.next_index, strict=True):
            position = min(sequence.num_prompt + next_index, sequence.committed)
            sequence.delivered = sequence.sent = position  # the new reader may have less than the one before
            sequence.finish_sent = False
            self._deliver(sequence)

    def ack(self, ack: Ack) -> None:
        sequence = self._find(ack.request_id, ack.index)
        if sequence is None:
            return
        position = min(sequence.num_prompt + ack.next_index, sequence.sent)
        sequence.delivered = max(sequence.delivered, position)
        self._deliver(sequence)
        self._forget_if_done(sequence.request)

    def stop(self, stop: Stop, now: float) -> None:
        """The client found a stop string: the tokens before ``at_index`` are the answer."""
        sequence = self._find(stop.request_id, stop.index)
        if sequence is None:
            return
        if sequence.state is SequenceState.ENDED:
            self._state.count("late_stops")
            return
        keep = sequence.num_prompt + min(stop.at_index, sequence.num_generated)
        del sequence.tokens[keep:]
        sequence.committed = min(sequence.committed, keep)
        sequence.sent = min(sequence.sent, keep)
        sequence.delivered = min(sequence.delivered, keep)
        self.end(sequence, "stop", now)

    def cancel(self, client: bytes, cancel: Cancel, now: float) -> None:
        """If the reader itself cancels, nobody will ask for the rest: the request is forgotten at once."""
        request = self._state.requests.get(cancel.request_id)
        if request is None:
            self._state.count("unknown_requests")
            return
        self.end_all(request, "cancelled", "", now)
        if request.client != client:
            return
        for sequence in request.sequences:
            if not sequence.finish_sent:
                self._say(request, finished(sequence))
        self._forget(request)

    def unreachable(self, client: bytes, now: float) -> None:
        """What could not be sent will be sent again after the client's Attach, if that comes within the grace."""
        for request in self._state.requests.values():
            if request.client == client:
                request.client = None
                request.detached_at = now
                self._timers.add(now + self._settings.client_grace_s, request.id)

    # --- what the stages say ---------------------------------------------------------------------------------------

    def sampled(self, sampled: tuple[Sampled, ...], hops: tuple[Hop, ...], now: float) -> None:
        """New tokens. They are journalled, then sent; the next step needs neither."""
        written: list[tuple[int, int, tuple[int, ...]]] = []
        ends: list[tuple[Sequence, FinishReason]] = []
        for item in sampled:
            sequence = self._state.sequences.get(item.sequence)
            if sequence is None or sequence.state is SequenceState.ENDED:
                self._state.count("late_tokens")
                continue
            if item.position != sequence.sampled:
                self._state.count("misplaced_tokens")
                continue
            written.append((sequence.id, item.position, (item.token,)))
            self._append(sequence, item, hops, now)
            reason = self._end_reason(sequence)
            if reason is not None:
                ends.append((sequence, reason))
        if written:
            self._out.append(WriteTokens(tuple(written)))
        for sequence, reason in ends:
            self.end(sequence, reason, now)

    def committed(self, committed: tuple[tuple[int, int], ...]) -> None:
        for sequence_id, position in committed:
            sequence = self._state.sequences.get(sequence_id)
            if sequence is not None:
                sequence.committed = max(sequence.committed, min(position, sequence.sampled))
                self._deliver(sequence)

    def _append(self, sequence: Sequence, item: Sampled, hops: tuple[Hop, ...], now: float) -> None:
        sequence.tokens.append(item.token)
        sequence.logprobs.append(item.logprobs)
        if sequence.request.submit.hops:
            sequence.hops.append(hops)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        self._state.waiting.charge(sequence.request.tenant, 1)
        if sequence.state is SequenceState.RUNNING:  # else it had to give way meanwhile, and keeps the token
            self._state.running.refresh(sequence)
        self._state.count("tokens")

    def _end_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the newest token is the last."""
        params, manifest = sequence.request.submit.params, self._state.manifest
        token = sequence.tokens[-1]
        is_eos = manifest is not None and token in manifest.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return "stop"
        if sequence.num_generated >= params.max_tokens or sequence.sampled >= sequence.limit:
            return "length"
        return None

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence, reason: FinishReason, now: float, detail: str = "") -> None:
        """A sequence reaches its one end; its room in the stages goes back with the next step."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._state.leave_stages(sequence)
        else:
            self._state.waiting.remove(sequence)
        sequence.state = SequenceState.ENDED
        sequence.reason, sequence.detail, sequence.ended_at = reason, detail, now
        self._state.count(f"sequences_{reason}")
        self._out.append(WriteEnd(sequence.id, reason, sequence.num_generated))
        if reason in ("stop", "length"):
            self._state.pace.sequence_done(sequence.num_generated, sequence.request.submit.params.max_tokens)
        self._deliver(sequence)
        if sequence.request.ended:
            self._timers.add(now + self._settings.retain_s, sequence.request.id)
            self._out.append(summary(sequence.request, now))

    def end_all(self, request: Request, reason: FinishReason, detail: str, now: float) -> None:
        for sequence in request.sequences:
            self.end(sequence, reason, now, detail)

    def too_late(self, sequence: Sequence, now: float) -> None:
        """Its turn has come (again), but even the quickest steps would not finish it by its deadline."""
        self._state.count("sequences_too_late")
        detail = "the deadline can't be kept any more, even by the quickest steps: allow more time, or ask for less"
        self.end_all(sequence.request, "failed", detail, now)

    def tick(self, now: float) -> None:
        """Deadlines, clients that did not come back, what fits nowhere, and requests that nobody will ask for again."""
        for request_id in self._timers.due(now):
            request = self._state.requests.get(request_id)
            if request is not None:
                self._look_at(request, now)
        self._end_the_too_large(now)

    def _look_at(self, request: Request, now: float) -> None:
        if not request.ended and request.deadline_at is not None and now >= request.deadline_at:
            self._state.count("sequences_too_late")
            self.end_all(request, "failed", "the deadline passed before the request was finished", now)
        if not request.ended and self._is_abandoned(request, now):
            self.end_all(request, "cancelled", "the client went away and did not come back", now)
        if request.ended and now - request.ended_at >= self._settings.retain_s:
            self._forget(request)

    def _end_the_too_large(self, now: float) -> None:
        """What was accepted under another plan may fit no longer. Only time in which a plan serves counts: between two
        plans nobody knows what the next one will hold."""
        passed_s, self._ticked_at = now - self._ticked_at, now
        if self._state.book.phase is not PlanPhase.SERVING:
            return
        for sequence in list(self._state.waiting.parked.values()):
            refusal = too_large(sequence.limit, self._state.book.kv_blocks)
            sequence.unfit_s = sequence.unfit_s + passed_s if refusal is not None else 0.0
            if refusal is not None and sequence.unfit_s > self._settings.too_large_patience_s:
                self._state.count("sequences_too_large")
                self.end(sequence, "failed", now, refusal.reason)

    def forgive(self, pause_s: float) -> None:
        """The broker itself stood still: that is nobody's lateness."""
        self._ticked_at += pause_s
        for request in self._state.requests.values():
            if request.deadline_at is not None:
                request.deadline_at += pause_s
                self._timers.add(request.deadline_at, request.id)
            if request.detached_at is not None:
                request.detached_at += pause_s
                self._timers.add(request.detached_at + self._settings.client_grace_s, request.id)

    def live(self) -> Iterator[Sequence]:
        return (s for s in self._state.sequences.values() if s.state is not SequenceState.ENDED)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refusal(self, client: bytes, submit: Submit, now: float) -> Refusal | None:
        manifest = self._state.manifest
        if manifest is None:
            waits_for = self._state.book.waits_for
            return Refusal("unavailable", f"the swarm has no model yet, it waits for {waits_for}", 1.0)
        return (
            self._places.too_many(submit.params.n, submit.priority)
            or self._no_places(client, submit, now)
            or check_submit(submit, manifest)
            or self._too_large(submit, manifest)
        )

    def _no_places(self, client: bytes, submit: Submit, now: float) -> Refusal | None:
        """The queue has none for this request now."""
        waiting, tenant = self._state.waiting, tenant_of(submit, client)
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
        least_s = max(least_s, waiting.patience_left(num_sequences - num_turns, self._settings.too_large_patience_s))
        if rate is None or not num_turns:
            return round(min(3600.0, max(1.0, least_s)), 1)
        drain_s = waiting.work(pace.fill) / rate
        after_s = self._turned_away.add(client, num_sequences, drain_s / num_turns, drain_s, now)
        return round(min(3600.0, max(least_s, after_s)), 1)

    def _too_large(self, submit: Submit, manifest: Manifest) -> Refusal | None:
        """A plan is in force, and even empty it could not hold a sequence of this length."""
        book = self._state.book
        return too_large(limit_of(submit, manifest), book.kv_blocks) if book.serving else None

    def _make_request(self, client: bytes, submit: Submit, now: float) -> Request:
        assert self._state.manifest is not None
        deadline_at = None if submit.deadline_s is None else now + submit.deadline_s
        request = Request(submit, client, now, deadline_at, tenant_of(submit, client))
        limit = limit_of(submit, self._state.manifest)
        for index in range(submit.params.n):
            sequence = Sequence(
                id=self._state.next_sequence,
                request=request,
                index=index,
                seed=derive_seed(submit.seed, index),
                tokens=list(submit.prompt),
                limit=limit,
            )
            sequence.committed = sequence.sent = sequence.delivered = len(submit.prompt)
            self._state.next_sequence += 1
            self._state.sequences[sequence.id] = sequence
            request.sequences.append(sequence)
        self._state.requests[request.id] = request
        if deadline_at is not None:
            self._timers.add(deadline_at, request.id)
        return request

    def _resubmit(self, known: Request, client: bytes, submit: Submit) -> None:
        if known.submit != submit:
            reason = f"request id {submit.request_id} is in use for another request: choose a new one"
            self._reject(client, submit.request_id, Refusal("conflict", reason))
            return
        self._adopt(known, client)
        if known.accepted:
            self._say(known, Accepted(request_id=known.id))
            self.attach(client, Attach(request_id=known.id, next_index=(0,) * len(known.sequences)))

    def _adopt(self, request: Request, client: bytes) -> None:
        request.client = client
        request.detached_at = None

    def _is_abandoned(self, request: Request, now: float) -> bool:
        return request.detached_at is not None and now - request.detached_at >= self._settings.client_grace_s

    def _find(self, request_id: str, index: int) -> Sequence | None:
        request = self._state.requests.get(request_id)
        if request is None or index >= len(request.sequences):
            self._state.count("unknown_requests")
            return None
        return request.sequences[index]

    def _reject(self, client: bytes, request_id: str, refusal: Refusal) -> None:
        self._state.count(f"rejected_{refusal.code}")
        message = Rejected(
            request_id=request_id, code=refusal.code, reason=refusal.reason, retry_after_s=refusal.retry_after_s
        )
        self._out.append(SayClient(client, message))

    def _say(self, request: Request, message: Accepted | Tokens | Finished) -> None:
        if request.client is not None:
            self._out.append(SayClient(request.client, message))

    def _deliver(self, sequence: Sequence) -> None:
        """Send what is committed and within the window, then the end if there is one."""
        request = sequence.request
        if request.client is None or not request.accepted:
            return
        while sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:
            self._say(request, self._next_tokens(sequence))
        if sequence.state is SequenceState.ENDED and sequence.sent >= sequence.sampled and not sequence.finish_sent:
            sequence.finish_sent = True
            self._say(request, finished(sequence))

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
        sequence.sent = stop
        if end > len(sequence.sent_at):
            sequence.sent_at.extend((self._state.now,) * (end - len(sequence.sent_at)))
        return message

    def _forget_if_done(self, request: Request) -> None:
        if request.fully_delivered:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._tracer.forgotten(request)
        del self._state.requests[request.id]
        for sequence in request.sequences:
            del self._state.sequences[sequence.id]


def derive_seed(seed: int, index: int) -> int:
    """Continuations of one prompt draw differently, each reproducibly; the first draws as if it were alone."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % 2**63
