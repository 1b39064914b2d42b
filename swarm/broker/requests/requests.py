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
from swarm.broker.reports.statistics import Latencies
from swarm.broker.reports.trace import Tracer
from swarm.broker.requests.durability import Durability, derive_seed, remembered, was_taken_back
from swarm.broker.requests.endings import Ends, RequestSettings
from swarm.broker.requests.intake import Intake, limit_of, no_journal, taken, tenant_of
from swarm.broker.requests.lookups import LookUps
from swarm.broker.requests.tokens import MAX_TOKENS_PER_MESSAGE, WINDOW, Delivery, Growth, finished
from swarm.broker.state import Request, Sequence, SequenceState, State
from swarm.broker.state.archive import RETRY_S, SUPERSEDED, About, Account, Question, Refusal, may_see
from swarm.broker.state.past import RequestRecord
from swarm.wire.messages import Accepted, Ack, Attach, Cancel, Detach, LookUp, Recall, Stop, Submit

__all__ = ["MAX_TOKENS_PER_MESSAGE", "WINDOW", "RequestSettings", "Requests", "derive_seed"]

_CROWDED = Refusal("overloaded", "too many requests are being looked up in the journal", 1.0)
_SLOW = Refusal("journal", "this request can't be looked up now: the journal is slow", RETRY_S)
TRY_AGAIN_S = 0.5  # seconds until unacknowledged tokens are sent again to a client whose queue was full


class Requests:
    """Handles all messages of clients about requests. Methods append actions to ``out``."""

    def __init__(
        self, state: State, settings: RequestSettings, out: Outbox, *, tracer: Tracer, latencies: Latencies
    ) -> None:
        self._state = state
        self._settings = settings
        self._out = out
        self._intake = Intake(state, settings.max_queue, settings.too_large_patience_s)
        self._delivery = Delivery(state, out, has_journal=settings.has_journal)
        self._lookups = LookUps(out, self._delivery)
        self.ends = Ends(state, settings, out, tracer=tracer, latencies=latencies, delivery=self._delivery)
        self.growth = Growth(state, out, delivery=self._delivery, end=self.ends.end, latencies=latencies)
        self.durability = Durability(
            state,
            settings,
            out,
            intake=self._intake,
            delivery=self._delivery,
            ends=self.ends,
            growth=self.growth,
        )

    # --- submission --------------------------------------------------------------------------------------------------

    def submit(self, client: bytes, submit: Submit, account: Account | None, now: float) -> None:
        known = self._seen(submit.request_id, account)
        if known is not None:
            self._resubmit(known, client, submit)
        elif submit.request_id in self._state.requests:
            self._delivery.reject(client, submit.request_id, taken(submit))
        elif not self._ask_journal(client, submit, account):
            self._admit(client, submit, account, now)

    def _admit(self, client: bytes, submit: Submit, account: Account | None, now: float) -> None:
        """Accept or reject a request with a new id."""
        tenant = tenant_of(submit, client, account)
        refusal = self._intake.refusal(client, tenant, submit, now)
        if refusal is not None:
            self._delivery.reject(client, submit.request_id, refusal)
            return
        request = self._make_request(client, tenant, submit, now)
        self._intake.let_in(client, request)
        self._out.append(WriteAcceptance(submit, tuple(s.id for s in request.sequences), request.tenant))

    def _make_request(self, client: bytes, tenant: str, submit: Submit, now: float) -> Request:
        assert self._state.manifest is not None
        deadline_at = None if submit.deadline_s is None else now + submit.deadline_s
        request = Request(submit, client, now, deadline_at, tenant, owner=client)
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
            self._state.next_sequence += 1
            self._state.sequences[sequence.id] = sequence
            request.sequences.append(sequence)
        self._state.requests[request.id] = request
        self.ends.keep_deadline(request)
        return request

    def _resubmit(self, known: Request, client: bytes, submit: Submit) -> None:
        if known.submit != msgspec.structs.replace(submit, v=known.submit.v):
            reason = f"request id {submit.request_id} is in use for another request: choose a new one"
            self._delivery.reject(client, submit.request_id, Refusal("conflict", reason))
            return
        known.owner = client
        self._adopt(known, client)
        if known.accepted:
            self._delivery.say(known, Accepted(request_id=known.id))
            self._read_from(known, (0,) * len(known.sequences))

    def accepted(self, request_id: str, sequences: tuple[int, ...]) -> None:
        """Announce and queue a request that the journal has written."""
        self._intake.written(sequences)
        request = self._state.requests.get(request_id)
        if request is None or tuple(s.id for s in request.sequences) != sequences:
            return  # cancelled meanwhile, and perhaps submitted again: then the new one is not in the journal yet
        if request.accepted:
            return  # written again, to a journal that was started over
        request.accepted = True
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING:
                self._state.waiting.add(sequence)
        self._delivery.say(request, Accepted(request_id=request_id))
        for sequence in request.sequences:
            self._delivery.deliver(sequence)

    # --- readers
    # ---------------------------------------------------------------------------------------------------------

    def look_up(self, client: bytes, question: Question, account: Account | None = None) -> None:
        """Answer a question about a request; the client need not be its reader."""
        request = self._seen(question.request_id, account)
        if request is not None:
            self._lookups.answer(client, question, request)
        elif not self._ask_journal(client, question, account):
            self._lookups.refuse(client, question, self._absence(question.request_id, account))

    def attach(self, client: bytes, attach: Attach, account: Account | None = None) -> None:
        request = self._seen(attach.request_id, account)
        if request is not None:
            self._attach(request, client, attach)
        elif not self._ask_journal(client, attach, account):
            self._delivery.reject(client, attach.request_id, self._absence(attach.request_id, account))

    def _attach(self, request: Request, client: bytes, attach: Attach) -> None:
        if len(attach.next_index) != len(request.sequences):
            reason = f"the request has {len(request.sequences)} continuations, not {len(attach.next_index)}"
            self._delivery.reject(client, request.id, Refusal("unknown", reason))
        elif attach.again and request.client not in (None, client):
            self._delivery.reject(client, request.id, SUPERSEDED)
        else:
            self._adopt(request, client)
            self._read_from(request, attach.next_index)

    def _read_from(self, request: Request, next_index: tuple[int, ...]) -> None:
        for sequence, index in zip(request.sequences, next_index, strict=True):
            sequence.read_from(index)
            self._delivery.deliver(sequence)

    def _adopt(self, request: Request, client: bytes) -> None:
        """Make this client the reader. There is one at a time; the previous reader is notified."""
        if request.client not in (None, client):
            self._delivery.reject(request.client, request.id, SUPERSEDED)
        request.client, request.stuck = client, False
        request.detached_at = None

    def ack(self, client: bytes, ack: Ack, account: Account | None = None) -> None:
        if ack.request_id not in self._state.requests and self._state.archive.dropped.get(ack.request_id) == client:
            # if the lookup has no capacity now, the client attaches again after a while
            self._ask_journal(client, ack, account)
            return
        sequence = self._find(ack.request_id, ack.index, account)
        if sequence is None:
            return
        if sequence.request.client is None and self._state.archive.dropped.get(ack.request_id) == client:
            self._adopt(sequence.request, client)  # a look-up has brought it back into memory meanwhile
        if sequence.request.client not in (None, client):
            # from a previous reader: they do not apply to the position of the current one
            self._state.count("late_acks")
            return
        if sequence.unsure:
            sequence.read_from(ack.next_index)
        sequence.be_read(ack.next_index)
        if sequence.request.stuck:
            self._go_on(sequence.request)
        self._delivery.deliver(sequence)
        self.ends.forget_if_done(sequence.request, client)

    def _go_on(self, request: Request) -> None:
        """Resume sending to a reader that reads again. Everything unacknowledged is sent again, because some was
        dropped."""
        request.stuck = False
        for sequence in request.sequences:
            sequence.send_again()
            self._delivery.deliver(sequence)

    def detach(self, client: bytes, detach: Detach, account: Account | None, now: float) -> None:
        """Release a reader that leaves on purpose."""
        if account is None or self._state.archive.dropped.get(detach.request_id) == client:
            self._state.archive.dropped.pop(detach.request_id, None)
        self._state.archive.withdraw(client, detach.request_id)
        request = self._seen(detach.request_id, account)
        if request is None:
            self._state.count("unknown_requests")
        elif request.client == client:
            self.ends.leave_alone(request, now, on_purpose=True)

    def unreachable(self, client: bytes, now: float) -> None:
        """Keep the requests of a client that has disconnected. It receives everything after its Attach, if that comes
        within the grace period."""
        self._state.archive.withdraw_keyed(client)
        for request in self._state.requests.values():
            if request.client == client:
                self.ends.leave_alone(request, now)

    def stuck(self, client: bytes, now: float) -> None:
        """Stop sending to a client that is connected but does not read; its requests run on as for any slow reader. If
        it never reads again, its connection breaks eventually."""
        self._state.stuck.setdefault(client, now + TRY_AGAIN_S)
        for request in self._state.requests.values():
            if request.client == client:
                request.stuck = True

    def tick(self, now: float) -> None:
        """Retry blocked clients, since a client that reads again may have no reason to send a message. Then handle what
        is due."""
        for client in [client for client, due in self._state.stuck.items() if now >= due]:
            del self._state.stuck[client]
            for request in self._state.requests.values():
                if request.stuck and request.client == client:
                    self._go_on(request)
        for client, question in self._state.archive.overdue(now):
            self._lookups.refuse(client, question, _SLOW)
        self.ends.tick(now)

    # --- ending requests
    # -------------------------------------------------------------------------------------------------

    def stop(self, stop: Stop, account: Account | None, now: float) -> None:
        """End a sequence in which the client found a stop string: the answer is the tokens before ``at_index``."""
        sequence = self._find(stop.request_id, stop.index, account)
        if sequence is None:
            return
        if sequence.state is SequenceState.ENDED:
            self._state.count("late_stops")
            return
        if stop.at_index > sequence.num_generated:
            # the journal lost tokens that the client has received; they are drawn again first
            sequence.expect_stop(stop.at_index)
            return
        sequence.cut_answer(stop.at_index)
        self.ends.end(sequence, "stop", now)

    def cancel(self, client: bytes, cancel: Cancel, account: Account | None, now: float) -> None:
        """Cancel a request. If its reader cancels, the rest is not needed, and the request is forgotten immediately. A
        previous reader (``if_reader``) cancels nothing: it has not received the notice yet that it was superseded."""
        if self._state.archive.withdraw(client, cancel.request_id):
            self._delivery.reject(
                client, cancel.request_id, Refusal("cancelled", "it was cancelled before it was accepted")
            )
        request = self._seen(cancel.request_id, account)
        if request is None:
            self._state.count("unknown_requests")
            return
        if cancel.if_reader and request.client not in (None, client):
            self._delivery.reject(client, request.id, SUPERSEDED)
            return
        by_reader = request.client == client
        self.ends.end_all(request, "cancelled", "" if by_reader else "another client cancelled it", now)
        if not by_reader:
            return
        request.stuck = False
        for sequence in request.sequences:
            if not sequence.finish_sent:
                self._delivery.say(request, finished(sequence))
        self.ends.forget(request)

    # --- answers of the journal
    # ------------------------------------------------------------------------------------------

    def read(self, request_id: str, record: RequestRecord | None, problem: str, now: float) -> None:
        """Handle the messages that waited until the journal was searched for this request."""
        asked = self._state.archive.take(request_id)
        if record is not None and was_taken_back(record):
            record = None
        for client, message, account in asked:
            # For each message: the client answered before may have taken everything, and the request left memory again.
            if record is not None and request_id not in self._state.requests:
                self._take_from_journal(record, account, now)
            if isinstance(message, Submit) and record is not None and not may_see(account, record.tenant):
                self._delivery.reject(client, request_id, taken(message))
            else:
                self._answer(client, message, account, problem, now)
        self.ends.make_room()

    def _take_from_journal(self, record: RequestRecord, account: Account | None, now: float) -> None:
        """Bring a request back into memory, if this account may see it."""
        if not may_see(account, record.tenant):
            return
        request = remembered(record, now)
        request.read_at = now
        for sequence in request.sequences:
            sequence.be_unsure()
        self.durability.enter(request, now)

    def _answer(self, client: bytes, message: About, account: Account | None, problem: str, now: float) -> None:
        request = self._seen(message.request_id, account)
        unread = Refusal("journal", f"this request can't be looked up now: {problem}", RETRY_S)
        refusal = unread if problem else self._absence(message.request_id, account)
        match message:
            case Submit() if request is not None:
                self._resubmit(request, client, message)
            case Submit() if message.request_id in self._state.requests:
                self._delivery.reject(client, message.request_id, taken(message))
            case Submit() if problem:
                self._delivery.reject(client, message.request_id, no_journal(problem))
            case Submit():
                self._admit(client, message, account, now)
            case Recall() | LookUp() if request is not None:
                self._lookups.answer(client, message, request)
            case Recall() | LookUp():
                self._lookups.refuse(client, message, refusal)
            case Attach() if request is not None:
                self._attach(request, client, message)
            case Ack() if request is not None:
                self._adopt(request, client)
                self.ack(client, message, account)
            case Attach() | Ack():
                self._delivery.reject(client, message.request_id, refusal)

    def _seen(self, request_id: str, account: Account | None) -> Request | None:
        """Return a request that is in memory and visible to this account."""
        request = self._state.requests.get(request_id)
        return request if request is not None and may_see(account, request.tenant) else None

    def _absence(self, request_id: str, account: Account | None) -> Refusal:
        """Return the reason why this request is not available."""
        return self._state.gone.answer(request_id, self._state.journal_problem, account)

    def _ask_journal(self, client: bytes, message: About, account: Account | None) -> bool:
        """Ask the journal for the request of this message. Return False if there is no journal."""
        if not self._settings.has_journal:
            return False
        first = self._state.archive.ask(client, message, account, now=self._state.now)
        if first is None and isinstance(message, Question):
            self._lookups.refuse(client, message, _CROWDED)
        elif first is None:
            self._delivery.reject(client, message.request_id, _CROWDED)
        elif first:
            self._out.append(ReadRequest(message.request_id))
        return True

    def _find(self, request_id: str, index: int, account: Account | None) -> Sequence | None:
        request = self._seen(request_id, account)
        if request is None or index >= len(request.sequences):
            self._state.count("unknown_requests")
            return None
        return request.sequences[index]
