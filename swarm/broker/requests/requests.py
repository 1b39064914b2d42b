"""Requests as clients drive them: from submission to the end, and delivery of the tokens.

Submitted -> (in the journal) -> accepted -> waiting -> running -> ended -> delivered -> forgotten. ``admission``
decides whether a request is accepted. A client receives a token once it is in the journal, and has a limited window of
unacknowledged tokens, so that a slow reader delays no other (``tokens``). Terminal states are final (``completion``):
messages for an ended sequence are counted and dropped.

A request stays available under its id as long as the journal keeps it, in memory or not (``state.ended_requests``).
With a journal, messages about an id that is not in memory therefore wait until the journal has been searched.
"""

from __future__ import annotations

import msgspec

from swarm.broker.actions import Outbox, ReadRequest, WriteAcceptance
from swarm.broker.reports.statistics import RequestLatencies
from swarm.broker.reports.trace import RequestTracer
from swarm.broker.requests.admission import (
    RequestAdmission,
    max_positions,
    refuse_taken_id,
    refuse_without_journal,
    tenant_of,
)
from swarm.broker.requests.completion import Completer, RequestSettings
from swarm.broker.requests.durability import RequestDurability, derive_seed, restore_request, was_withdrawn
from swarm.broker.requests.lookups import RequestLookups
from swarm.broker.requests.tokens import TokenCollector, TokenDelivery, build_finished
from swarm.broker.state import Request, Sequence, SequenceState, State
from swarm.broker.state.adapters import with_plain_name
from swarm.broker.state.ended_requests import (
    RETRY_S,
    SUPERSEDED,
    ClientAccount,
    RequestMessage,
    RequestQuestion,
    RequestRefusal,
    can_see,
)
from swarm.broker.state.journal_snapshot import RequestRecord
from swarm.wire.messages import Accepted, Ack, Attach, Cancel, Detach, GetRequest, LookUp, Stop, Submit

_TOO_MANY_LOOKUPS = RequestRefusal("overloaded", "too many requests are being looked up in the journal", 1.0)
_JOURNAL_SLOW = RequestRefusal("journal", "this request can't be looked up now: the journal is slow", RETRY_S)
RETRY_BLOCKED_S = 0.5  # seconds until unacknowledged tokens are sent again to a client whose queue was full


class RequestHandler:
    """Handles all messages of clients about requests. Methods append actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: RequestSettings,
        out: Outbox,
        *,
        tracer: RequestTracer,
        latencies: RequestLatencies,
    ) -> None:
        self._state = state
        self._settings = settings
        self._out = out
        self._admission = RequestAdmission(state, settings.max_queue, settings.too_large_patience_s)
        self._delivery = TokenDelivery(state, out, has_journal=settings.has_journal)
        self._lookups = RequestLookups(out, self._delivery)
        self.completer = Completer(state, settings, out, tracer=tracer, latencies=latencies, delivery=self._delivery)
        self.collector = TokenCollector(
            state, out, delivery=self._delivery, on_end=self.completer.end, latencies=latencies
        )
        self.durability = RequestDurability(
            state,
            settings,
            out,
            intake=self._admission,
            delivery=self._delivery,
            ends=self.completer,
            growth=self.collector,
        )

    # --- submission --------------------------------------------------------------------------------------------------

    def submit(self, client: bytes, submit: Submit, account: ClientAccount | None, now: float) -> None:
        existing = self._get_visible(submit.request_id, account)
        if existing is not None:
            self._resubmit(existing, client, submit)
        elif submit.request_id in self._state.requests:
            self._delivery.reject(client, submit.request_id, refuse_taken_id(submit))
        elif not self._ask_journal(client, submit, account):
            self._admit(client, submit, account, now)

    def _admit(self, client: bytes, submit: Submit, account: ClientAccount | None, now: float) -> None:
        """Accept or reject a request with a new id. The adapters may have changed since it came, and was looked up."""
        submit = self._state.adapters.resolve(submit)
        tenant = tenant_of(submit, client, account)
        refusal = self._admission.check(client, tenant, submit, now)
        if refusal is not None:
            self._delivery.reject(client, submit.request_id, refusal)
            return
        request = self._make_request(client, tenant, submit, now)
        self._admission.reserve(client, request)
        self._out.append(WriteAcceptance(submit, tuple(s.id for s in request.sequences), request.tenant))

    def _make_request(self, client: bytes, tenant: str, submit: Submit, now: float) -> Request:
        assert self._state.manifest is not None
        deadline_at = None if submit.deadline_s is None else now + submit.deadline_s
        request = Request(submit, client, now, deadline_at, tenant, owner=client)
        limit = max_positions(submit, self._state.manifest)
        for index in range(submit.params.n):
            sequence = Sequence(
                id=self._state.next_sequence,
                request=request,
                index=index,
                seed=derive_seed(submit.seed, index),
                tokens=list(submit.prompt),
                limit=limit,
            )
            self._state.next_sequence += 1
            self._state.sequences[sequence.id] = sequence
            request.sequences.append(sequence)
        self._state.requests[request.id] = request
        self.completer.schedule_deadline(request)
        return request

    def _resubmit(self, existing: Request, client: bytes, submit: Submit) -> None:
        # by the adapter's name, because it may have been dropped since; the digests of images stand for their pixels,
        # which an ended request lacks
        new = msgspec.structs.replace(submit, v=existing.submit.v, pixels=existing.submit.pixels)
        if with_plain_name(existing.submit) != with_plain_name(new):
            reason = f"request id {submit.request_id} is in use for another request: choose a new one"
            self._delivery.reject(client, submit.request_id, RequestRefusal("conflict", reason))
            return
        existing.owner = client
        self._set_reader(existing, client)
        if existing.accepted:
            self._delivery.send(existing, Accepted(request_id=existing.id))
            self._resume_reading(existing, (0,) * len(existing.sequences))

    def on_accepted(self, request_id: str, sequences: tuple[int, ...]) -> None:
        """Announce and queue a request that the journal has written."""
        self._admission.release(sequences)
        request = self._state.requests.get(request_id)
        if request is None or tuple(s.id for s in request.sequences) != sequences:
            return  # cancelled meanwhile, and perhaps submitted again: then the new one is not in the journal yet
        if request.accepted:
            return  # written again, to a journal that was started over
        request.accepted = True
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING:
                self._state.waiting.add(sequence)
        self._delivery.send(request, Accepted(request_id=request_id))
        for sequence in request.sequences:
            self._delivery.deliver(sequence)

    # --- readers -----------------------------------------------------------------------------------------------------

    def look_up(self, client: bytes, question: RequestQuestion, account: ClientAccount | None = None) -> None:
        """Answer a question about a request; the client need not be its reader."""
        request = self._get_visible(question.request_id, account)
        if request is not None:
            self._lookups.answer(client, question, request)
        elif not self._ask_journal(client, question, account):
            self._lookups.refuse(client, question, self._absence_reason(question.request_id, account))

    def attach(self, client: bytes, attach: Attach, account: ClientAccount | None = None) -> None:
        request = self._get_visible(attach.request_id, account)
        if request is not None:
            self._attach(request, client, attach)
        elif not self._ask_journal(client, attach, account):
            self._delivery.reject(client, attach.request_id, self._absence_reason(attach.request_id, account))

    def _attach(self, request: Request, client: bytes, attach: Attach) -> None:
        if len(attach.next_index) != len(request.sequences):
            reason = f"the request has {len(request.sequences)} continuations, not {len(attach.next_index)}"
            self._delivery.reject(client, request.id, RequestRefusal("unknown", reason))
        elif attach.again and request.client not in (None, client):
            self._delivery.reject(client, request.id, SUPERSEDED)
        else:
            self._set_reader(request, client)
            self._resume_reading(request, attach.next_index)

    def _resume_reading(self, request: Request, next_index: tuple[int, ...]) -> None:
        for sequence, index in zip(request.sequences, next_index, strict=True):
            sequence.resume_reading(index)
            self._delivery.deliver(sequence)

    def _set_reader(self, request: Request, client: bytes) -> None:
        """Make this client the reader. There is one at a time; the previous reader is notified."""
        if request.client not in (None, client):
            self._delivery.reject(request.client, request.id, SUPERSEDED)
        request.client, request.is_blocked = client, False
        request.detached_at = None

    def ack(self, client: bytes, ack: Ack, account: ClientAccount | None = None) -> None:
        if (
            ack.request_id not in self._state.requests
            and self._state.journal_lookups.dropped_readers.get(ack.request_id) == client
        ):
            # if the lookup has no capacity now, the client attaches again after a while
            self._ask_journal(client, ack, account)
            return
        sequence = self._find_sequence(ack.request_id, ack.index, account)
        if sequence is None:
            return
        if (
            sequence.request.client is None
            and self._state.journal_lookups.dropped_readers.get(ack.request_id) == client
        ):
            self._set_reader(sequence.request, client)  # a look-up has brought it back into memory meanwhile
        if sequence.request.client not in (None, client):
            # from a previous reader: they do not apply to the position of the current one
            self._state.count("late_acks")
            return
        if sequence.reader_position_unknown:
            sequence.resume_reading(ack.next_index)
        sequence.mark_delivered(ack.next_index)
        if sequence.request.is_blocked:
            self._resume_sending(sequence.request)
        self._delivery.deliver(sequence)
        self.completer.forget_if_delivered(sequence.request, client)

    def _resume_sending(self, request: Request) -> None:
        """Resume sending to a reader that reads again. Everything unacknowledged is sent again, because some was
        dropped."""
        request.is_blocked = False
        for sequence in request.sequences:
            sequence.resend()
            self._delivery.deliver(sequence)

    def detach(self, client: bytes, detach: Detach, account: ClientAccount | None, now: float) -> None:
        """Release a reader that leaves on purpose."""
        if account is None or self._state.journal_lookups.dropped_readers.get(detach.request_id) == client:
            self._state.journal_lookups.dropped_readers.pop(detach.request_id, None)
        self._state.journal_lookups.withdraw(client, detach.request_id)
        request = self._get_visible(detach.request_id, account)
        if request is None:
            self._state.count("unknown_requests")
        elif request.client == client:
            self.completer.start_grace(request, now, on_purpose=True)

    def on_client_unreachable(self, client: bytes, now: float) -> None:
        """Keep the requests of a disconnected client for the grace period. A client that sends Attach within it
        receives the rest of the answer."""
        self._state.journal_lookups.drop_authenticated(client)
        for request in self._state.requests.values():
            if request.client == client:
                self.completer.start_grace(request, now)

    def on_client_blocked(self, client: bytes, now: float) -> None:
        """Stop sending to a client that is connected but does not read; its requests run on as for any slow reader. If
        it never reads again, its connection breaks eventually."""
        self._state.blocked_clients.setdefault(client, now + RETRY_BLOCKED_S)
        for request in self._state.requests.values():
            if request.client == client:
                request.is_blocked = True

    def tick(self, now: float) -> None:
        """Retry blocked clients, since a client that reads again may have no reason to send a message. Then handle what
        is due."""
        for client in [client for client, due in self._state.blocked_clients.items() if now >= due]:
            del self._state.blocked_clients[client]
            for request in self._state.requests.values():
                if request.is_blocked and request.client == client:
                    self._resume_sending(request)
        for client, question in self._state.journal_lookups.take_overdue(now):
            self._lookups.refuse(client, question, _JOURNAL_SLOW)
        self.completer.tick(now)

    # --- ending requests ---------------------------------------------------------------------------------------------

    def stop(self, stop: Stop, account: ClientAccount | None, now: float) -> None:
        """End a sequence in which the client found a stop string: the answer is the tokens before ``at_index``."""
        sequence = self._find_sequence(stop.request_id, stop.index, account)
        if sequence is None:
            return
        if sequence.state is SequenceState.ENDED or not sequence.request.submit.params.max_answer:
            self._state.count("late_stops")  # or one for an answer without text
            return
        if stop.at_index > sequence.num_generated:
            # the journal lost tokens that the client has received; they are drawn again first
            sequence.expect_stop(stop.at_index)
            return
        sequence.truncate_answer(stop.at_index)
        self.completer.end(sequence, "stop", now)

    def cancel(self, client: bytes, cancel: Cancel, account: ClientAccount | None, now: float) -> None:
        """Cancel a request. If its reader cancels, the rest is not needed, and the request is forgotten immediately. A
        previous reader (``if_reader``) cancels nothing: it has not received the notice yet that it was superseded."""
        if self._state.journal_lookups.withdraw(client, cancel.request_id):
            self._delivery.reject(
                client, cancel.request_id, RequestRefusal("cancelled", "it was cancelled before it was accepted")
            )
        request = self._get_visible(cancel.request_id, account)
        if request is None:
            self._state.count("unknown_requests")
            return
        if cancel.if_reader and request.client not in (None, client):
            self._delivery.reject(client, request.id, SUPERSEDED)
            return
        is_reader = request.client == client
        self.completer.end_all(request, "cancelled", "" if is_reader else "another client cancelled it", now)
        if not is_reader:
            return
        request.is_blocked = False
        for sequence in request.sequences:
            if not sequence.end_sent:
                self._delivery.send(request, build_finished(sequence))
        self.completer.forget(request)

    # --- answers of the journal --------------------------------------------------------------------------------------

    def on_request_read(self, request_id: str, record: RequestRecord | None, problem: str, now: float) -> None:
        """Handle the messages that waited until the journal was searched for this request."""
        waiting = self._state.journal_lookups.take(request_id)
        if record is not None and was_withdrawn(record):
            record = None
        for client, message, account in waiting:
            # For each message: the client answered before may have taken everything, and the request left memory again.
            if record is not None and request_id not in self._state.requests:
                self._restore_from_journal(record, account, now)
            if isinstance(message, Submit) and record is not None and not can_see(account, record.tenant):
                self._delivery.reject(client, request_id, refuse_taken_id(message))
            else:
                self._answer(client, message, account, problem, now)
        self.completer.drop_excess()

    def _restore_from_journal(self, record: RequestRecord, account: ClientAccount | None, now: float) -> None:
        """Bring a request back into memory, if this account may see it."""
        if not can_see(account, record.tenant):
            return
        request = restore_request(record, now)
        request.read_at = now
        for sequence in request.sequences:
            sequence.await_reader_position()
        self.durability.add_restored(request, now)

    def _answer(
        self, client: bytes, message: RequestMessage, account: ClientAccount | None, problem: str, now: float
    ) -> None:
        request = self._get_visible(message.request_id, account)
        unread = RequestRefusal("journal", f"this request can't be looked up now: {problem}", RETRY_S)
        refusal = unread if problem else self._absence_reason(message.request_id, account)
        match message:
            case Submit() if request is not None:
                self._resubmit(request, client, message)
            case Submit() if message.request_id in self._state.requests:
                self._delivery.reject(client, message.request_id, refuse_taken_id(message))
            case Submit() if problem:
                self._delivery.reject(client, message.request_id, refuse_without_journal(problem))
            case Submit():
                self._admit(client, message, account, now)
            case GetRequest() | LookUp() if request is not None:
                self._lookups.answer(client, message, request)
            case GetRequest() | LookUp():
                self._lookups.refuse(client, message, refusal)
            case Attach() if request is not None:
                self._attach(request, client, message)
            case Ack() if request is not None:
                self._set_reader(request, client)
                self.ack(client, message, account)
            case Attach() | Ack():
                self._delivery.reject(client, message.request_id, refusal)

    def _get_visible(self, request_id: str, account: ClientAccount | None) -> Request | None:
        """Return a request that is in memory and visible to this account."""
        request = self._state.requests.get(request_id)
        return request if request is not None and can_see(account, request.tenant) else None

    def _absence_reason(self, request_id: str, account: ClientAccount | None) -> RequestRefusal:
        """Return the reason why this request is not available."""
        return self._state.forgotten.refusal_for(request_id, self._state.journal_problem, account)

    def _ask_journal(self, client: bytes, message: RequestMessage, account: ClientAccount | None) -> bool:
        """Ask the journal for the request of this message. Return False if there is no journal."""
        if not self._settings.has_journal:
            return False
        first = self._state.journal_lookups.enqueue(client, message, account, now=self._state.now)
        if first is None and isinstance(message, RequestQuestion):
            self._lookups.refuse(client, message, _TOO_MANY_LOOKUPS)
        elif first is None:
            self._delivery.reject(client, message.request_id, _TOO_MANY_LOOKUPS)
        elif first:
            self._out.append(ReadRequest(message.request_id))
        return True

    def _find_sequence(self, request_id: str, index: int, account: ClientAccount | None) -> Sequence | None:
        request = self._get_visible(request_id, account)
        if request is None or index >= len(request.sequences):
            self._state.count("unknown_requests")
            return None
        return request.sequences[index]
