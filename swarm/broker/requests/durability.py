"""Requests and the journal: restore requests after a restart, report ends once they are written, and keep serving while
the journal is broken.

While the journal cannot be written, running requests continue and no new ones are accepted. Tokens that were dropped
meanwhile are missing in the journal, which asks for them before it accepts an end. A journal that was started over
receives everything in memory.
"""

from __future__ import annotations

from swarm.broker.actions import NewTokens, Outbox, WriteAcceptance, WriteTokens
from swarm.broker.requests.admission import RequestAdmission, refuse_without_journal
from swarm.broker.requests.completion import Completer, RequestSettings
from swarm.broker.requests.tokens import TokenCollector, TokenDelivery, make_end_record
from swarm.broker.state import Request, Sequence, SequenceState, State
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord


class RequestDurability:
    """Restores requests from the journal and handles its confirmations. Methods append actions to ``out``."""

    def __init__(
        self,
        state: State,
        settings: RequestSettings,
        out: Outbox,
        *,
        intake: RequestAdmission,
        delivery: TokenDelivery,
        ends: Completer,
        growth: TokenCollector,
    ) -> None:
        self._state = state
        self._settings = settings
        self._out = out
        self._intake = intake
        self._delivery = delivery
        self._ends = ends
        self._growth = growth

    # --- after a restart ---------------------------------------------------------------------------------------------

    def restore(self, snapshot: JournalSnapshot, now: float) -> None:
        """Restore requests from the journal. Every client must come back within its grace period; requests that are
        kept without a reader are kept for as long again."""
        self._state.next_sequence = snapshot.next_sequence
        blames = dict(snapshot.blames)
        for record in snapshot.requests:
            if record.has_ended and was_withdrawn(record):
                continue
            request = restore_request(record, now)
            for sequence in request.sequences:
                sequence.count_deaths(blames.get(sequence.id, 0))
            self.add_restored(request, now)
            self._ends.start_grace(request, now)
            self._ends.schedule_deadline(request)

    def add_restored(self, request: Request, now: float) -> None:
        """Add a request from the journal to the state."""
        self._state.requests[request.id] = request
        for sequence in request.sequences:
            self._state.sequences[sequence.id] = sequence
            if sequence.state is SequenceState.WAITING:
                self._state.waiting.add(sequence)
        if request.has_ended:
            self._ends.retain(request, now)

    def on_model_known(self, now: float) -> None:
        """Apply the model's limits to restored sequences, once the first worker has joined. The last token may have
        been an end that the previous broker did not write."""
        assert self._state.manifest is not None
        for sequence in [s for s in self._state.sequences.values() if s.state is SequenceState.WAITING]:
            sequence.lower_limit(self._state.manifest.context)
            if (unknown := self._state.adapter_error(sequence.adapter)) is not None:
                self._ends.end(sequence, "failed", now, unknown)
                continue
            reason = self._growth.end_reason(sequence) if sequence.num_generated else None
            if reason is not None:
                self._ends.end(sequence, reason, now)

    # --- ends --------------------------------------------------------------------------------------------------------

    def on_end_written(self, sequence_id: int) -> None:
        """Report an end that the journal has written now; memory may drop the request."""
        self._state.forgotten.record_end(sequence_id, is_written=True)
        sequence = self._state.sequences.get(sequence_id)
        if sequence is None or not self._settings.has_journal:
            return
        sequence.mark_end_written()
        if sequence.request.is_end_written:
            sequence.request.drop_pixels()
        self._delivery.deliver(sequence)
        self._ends.forget_if_delivered(sequence.request, sequence.request.client)
        self._ends.drop_excess()

    def on_end_not_written(self, sequence_id: int) -> None:
        """Write all tokens and the end again: the journal lacks tokens that were dropped while it could not be written.
        This is impossible if they have left memory too."""
        self._state.forgotten.record_end(sequence_id, is_written=False)
        sequence = self._state.sequences.get(sequence_id)
        if sequence is None or sequence.reason is None or sequence.end_written:
            return
        self._write_whole(sequence)

    def _write_whole(self, sequence: Sequence) -> None:
        """Write all tokens of a sequence, and its end if it has one."""
        submit = sequence.request.submit
        new = NewTokens(
            sequence=sequence.id,
            position=sequence.num_prompt,
            first=0,
            ids=tuple(sequence.tokens[sequence.num_prompt :]),
            logprobs=tuple(sequence.logprobs) if submit.params.logprobs is not None else (),
            hops=tuple(sequence.hops) if submit.hops else (),
            num_cached=sequence.num_cached,
            prompt_logprobs=bytes(sequence.prompt_logprobs),
        )
        if new.ids:
            self._out.append(WriteTokens((new,)))
        if sequence.reason is not None:
            self._out.append(make_end_record(sequence, sequence.reason))

    # --- without a journal -------------------------------------------------------------------------------------------

    def on_journal_broken(self, reason: str, now: float) -> None:
        """Continue without a journal: running requests go on, and their tokens are sent though they are not written. If
        this broker dies too, the next one computes the same tokens again. Requests that waited for acceptance are
        rejected."""
        self._state.journal_problem = reason
        self._intake.release_all()
        refusal = refuse_without_journal(reason)
        for request in [r for r in self._state.requests.values() if not r.accepted]:
            if request.client is not None:
                self._delivery.reject(request.client, request.id, refusal)
            self._ends.end_all(request, "cancelled", "", now)
            self._ends.forget(request)
        self._growth.on_committed(tuple((sequence.id, sequence.sampled) for sequence in self._state.sequences.values()))

    def on_journal_renewed(self, next_sequence: int, now: float) -> None:
        """Write everything in memory to a journal that was started over; it may also hold what was salvaged from the
        old one. All requests are written with their true age. (Requests that were not accepted yet were rejected when
        the old one broke.)"""
        self._state.next_sequence = max(self._state.next_sequence, next_sequence)
        for request in self._state.requests.values():
            sequence_ids = tuple(sequence.id for sequence in request.sequences)
            self._out.append(WriteAcceptance(request.submit, sequence_ids, request.tenant, now - request.arrived_at))
            for sequence in request.sequences:
                self._write_whole(sequence)

    def on_journal_mended(self) -> None:
        """Return to normal operation: everything that was held back has been written."""
        self._state.journal_problem = ""


# --- requests as they were under the previous broker -----------------------------------------------------------------


def derive_seed(seed: int, index: int) -> int:
    """Return a sequence's seed. Sequences of one request draw differently and reproducibly, the first as if it were
    alone."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % 2**63


def restore_request(record: RequestRecord, now: float) -> Request:
    """Build a request from its record. It has no reader, and nothing counts as sent."""
    submit, arrived_at = record.submit, now - record.age_s
    deadline_at = None if submit.deadline_s is None else arrived_at + submit.deadline_s
    request = Request(
        submit, None, arrived_at, deadline_at, record.tenant, accepted=True, detached_at=now, was_restored=True
    )
    for item in record.sequences:
        sequence = Sequence(
            id=item.id,
            request=request,
            index=item.index,
            seed=derive_seed(submit.seed, item.index),
            tokens=[*submit.prompt, *item.tokens],
            limit=len(submit.prompt) + submit.params.max_answer,
            logprobs=item.logprobs if submit.params.logprobs is not None else [()] * len(item.tokens),
            hops=item.hops,
            num_restored=len(item.tokens),
            num_cached=item.num_cached,
            vector=item.vector,
            prompt_logprobs=bytearray(item.prompt_logprobs),
            num_scored=len(submit.prompt) - 1 if item.prompt_logprobs else 0,
        )
        sequence.commit(sequence.sampled)
        if item.reason is not None:
            sequence.end(item.reason, item.detail, now - (record.ended_age_s or 0.0))
            sequence.mark_end_written()
        request.sequences.append(sequence)
    return request


def was_withdrawn(record: RequestRecord) -> bool:
    """Whether the request was cancelled by its own client, so that its id is free again. A request ended by the broker
    as abandoned has a detail text in addition. A sequence without an end, though not in memory, is about to be
    cancelled."""
    return any(each.reason in (None, "cancelled") and not each.detail for each in record.sequences)
