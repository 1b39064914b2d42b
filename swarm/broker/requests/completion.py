"""End of requests: deadlines, lost clients, and how long an ended request stays in memory.

Terminal states are final: a sequence has one end, which is in the journal before it is reported. Requests also end by
time: the deadline passes, the client does not come back, or no plan has enough KV blocks. An ended request stays in
memory until it was delivered, until it is old, or until there are too many (``state.ended_requests``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.broker.actions import Outbox, WriteLog
from swarm.broker.reports.statistics import RequestLatencies
from swarm.broker.reports.trace import RequestTracer
from swarm.broker.requests.admission import refuse_outdated, refuse_too_large
from swarm.broker.requests.tokens import TokenDelivery, make_end_record
from swarm.broker.state import PlanPhase, Request, Sequence, SequenceState, State
from swarm.wire.messages import TOO_LATE, TOO_SHORT, FinishReason


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Limits and retention times of requests."""

    max_queue: int = 1024  # queue length; divided by ``QueueQuota``
    client_grace_s: float = 10.0  # seconds for which a request without a reader runs on
    retain_s: float = 60.0  # seconds for which an ended request stays in memory
    has_journal: bool = False  # ended requests can be read from the journal
    # seconds; a lost worker is usually back within seconds, and its KV blocks with it
    too_large_patience_s: float = 30.0


class Completer:
    """Ends sequences and requests, and drops them from memory. Methods append actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: RequestSettings,
        out: Outbox,
        *,
        tracer: RequestTracer,
        latencies: RequestLatencies,
        delivery: TokenDelivery,
    ) -> None:
        self._state = state
        self._settings = settings
        self._out = out
        self._tracer = tracer
        self._latencies = latencies
        self._delivery = delivery

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence, reason: FinishReason, now: float, detail: str = "") -> None:
        """End a sequence; its KV blocks are freed with the next step."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._state.release_ended(sequence)
        else:
            self._state.waiting.remove(sequence)
        sequence.end(reason, detail, now)
        self._state.count(f"sequences_{reason}")
        self._out.append(make_end_record(sequence, reason))
        max_answer = sequence.request.submit.params.max_answer
        if reason in ("stop", "length") and max_answer:
            self._state.costs.record_sequence(sequence.num_generated, max_answer)
        self._delivery.deliver(sequence)
        if sequence.request.has_ended:
            self._latencies.record_end(sequence.request, now)
            if not self._settings.has_journal:
                sequence.request.drop_pixels()
            self.retain(sequence.request, now)
            self._out.append(summarize(sequence.request, now))

    def end_all(self, request: Request, reason: FinishReason, detail: str, now: float) -> None:
        for sequence in request.sequences:
            self.end(sequence, reason, now, detail)

    def end_everything(self, detail: str, now: float) -> None:
        """Fail all requests that have not ended."""
        for request in [r for r in self._state.requests.values() if not r.has_ended]:
            self.end_all(request, "failed", detail, now)

    def fail_too_late(self, sequence: Sequence, now: float) -> None:
        """Fail a request that is next in line but cannot meet its deadline even with the quickest steps."""
        self._state.count("sequences_too_late")
        self.end_all(sequence.request, "failed", TOO_SHORT, now)

    # --- time --------------------------------------------------------------------------------------------------------

    def start_grace(self, request: Request, now: float, *, on_purpose: bool = False) -> None:
        """Start the time for which a request runs without a reader. A reader whose connection broke (not
        ``on_purpose``) gets at least the grace period, also if the request asked for less."""
        keep_s = request.submit.keep_s
        grace_s = keep_s if on_purpose and keep_s else max(keep_s, self._settings.client_grace_s)
        request.start_grace(grace_s, now)
        self._state.timers.add(now + grace_s, request.id)

    def schedule_deadline(self, request: Request) -> None:
        """Set a timer for the deadline, if there is one."""
        if request.deadline_at is not None:
            self._state.timers.add(request.deadline_at, request.id)

    def tick(self, now: float) -> None:
        """End requests that are past their deadline, abandoned or too large for the plan, and drop old ones."""
        for request_id in self._state.timers.pop_due(now):
            request = self._state.requests.get(request_id)
            if request is not None:
                self._check_due(request, now)
        self._state.timers.drop_stale(self._state.requests)
        self._fail_too_large(now)

    def _check_due(self, request: Request, now: float) -> None:
        if not request.has_ended and request.deadline_at is not None and now >= request.deadline_at:
            self._state.count("sequences_too_late")
            self.end_all(request, "failed", TOO_LATE, now)
        if not request.has_ended and self._is_abandoned(request, now):
            self.end_all(request, "cancelled", "the client went away and did not come back", now)
        if request.has_ended and self._is_old(request, now):
            if self.awaits_journal(request):
                self._state.timers.add(now + self._settings.retain_s, request.id)
            else:
                self._drop(request)

    def _is_abandoned(self, request: Request, now: float) -> bool:
        if request.submit.detached or request.detached_at is None:
            return False
        return now - request.detached_at >= request.grace_s

    def _is_old(self, request: Request, now: float) -> bool:
        # a request read from the journal is kept from that time on
        retained_since = request.ended_at if request.read_at is None else request.read_at
        return now - retained_since >= self._settings.retain_s

    def awaits_journal(self, request: Request) -> bool:
        """Whether the journal does not have the whole request yet, so that a part of it exists only in memory."""
        return self._settings.has_journal and request.accepted and not request.is_end_written

    def _fail_too_large(self, now: float) -> None:
        """Fail requests that were accepted under another plan and do not fit into this one. Only time during which a
        plan serves counts, because the capacity of the next plan is not known."""
        elapsed_s = now - self._state.ticked_at
        if self._state.plans.phase is not PlanPhase.SERVING:
            return
        for sequence in list(self._state.waiting.aside.values()):
            refusal = refuse_too_large(sequence.limit, self._state.plans.kv_blocks) or refuse_outdated(
                self._state, sequence.request.submit.params
            )
            if refusal is None:
                sequence.mark_fitting()
            else:
                sequence.add_unfit_time(elapsed_s)
            if refusal is not None and sequence.unfit_s > self._settings.too_large_patience_s:
                self._state.count("sequences_too_large")
                self.end(sequence, "failed", now, refusal.reason)

    # --- memory ------------------------------------------------------------------------------------------------------

    def retain(self, request: Request, now: float) -> None:
        """Keep an ended request in memory for a while."""
        retained_since = request.ended_at if request.read_at is None else request.read_at
        self._state.timers.add(max(now, retained_since + self._settings.retain_s), request.id)
        self._state.ended_requests.add(request)
        self.drop_excess()

    def drop_excess(self) -> None:
        """Drop the oldest ended requests while there are too many."""
        if not self._state.ended_requests.exceeds_limits:
            return
        for request_id in self._state.ended_requests.iter_oldest():
            request = self._state.requests[request_id]
            if all(self._delivery.is_end_durable(sequence) for sequence in request.sequences):
                self._drop(request)
            if not self._state.ended_requests.exceeds_limits:
                return

    def _drop(self, request: Request) -> None:
        """Drop a request from memory, though its reader may not have all of it."""
        self._state.count("requests_dropped")
        if self._settings.has_journal:
            self._state.journal_lookups.record_dropped(request)
        self._state.forgotten.record_dropped(request, has_journal=self._settings.has_journal)
        self.forget(request)

    def forget_if_delivered(self, request: Request, reader: bytes | None) -> None:
        """Remove a request from memory once its whole answer has been delivered and, with a journal, written.

        Other readers then get the answer from the journal. Without a journal, the request is kept until the client that
        submitted it has the whole answer.
        """
        if not request.is_fully_delivered:
            return
        if request.owner not in (None, reader):
            self._state.forgotten.record_read_by_another(request)
        # no one needs the copy in memory
        is_spare = request.is_end_written if self._settings.has_journal else reader == request.owner
        if is_spare:
            self.forget(request)

    def forget(self, request: Request) -> None:
        self._tracer.drop(request)
        self._state.ended_requests.remove(request.id)
        del self._state.requests[request.id]
        for sequence in request.sequences:
            del self._state.sequences[sequence.id]


def summarize(request: Request, now: float) -> WriteLog:
    """Return the log line of an ended request. Times are seconds from its arrival; None if the event never happened, or
    happened under an earlier broker. ``tokens_per_s`` excludes the time in the queue; ``recomputed`` counts how often a
    sequence of it was computed again, ``preempted`` how often because it was preempted."""
    first = request.sequences[0]
    num_tokens = sum(s.num_generated for s in request.sequences)
    was_restored = any(s.num_restored for s in request.sequences)
    started_at = None if was_restored else _earliest(s.started_at for s in request.sequences)
    first_token_at = None if was_restored else _earliest(s.first_token_at for s in request.sequences)
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
    return WriteLog("request_ended", "info", fields)


def _earliest(moments: Iterable[float | None]) -> float | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else round(moment - request.arrived_at, 4)
