"""Tokens on their way from the last stage to the journal, and from there to their clients, followed by the end.

A client receives a token once it is in the journal; the next step waits for neither. The broker keeps no buffer per
client apart from the tokens themselves. A client that does not acknowledge gets one window of tokens; unacknowledged
tokens are sent again when the client attaches. A client is *blocked* if it does not even read from its connection, so
that its queue is full. It is sent nothing until it sends a message or a short delay has passed.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from typing import Protocol

from swarm.broker.actions import NewTokens, Outbox, SendToClient, WriteEnd, WriteTokens
from swarm.broker.reports.statistics import RequestLatencies
from swarm.broker.state import InFlightStep, Request, Sequence, SequenceState, State
from swarm.broker.state.ended_requests import RequestRefusal
from swarm.wire.messages import (
    Accepted,
    Finished,
    FinishReason,
    Hop,
    PromptLogprobs,
    Rejected,
    Sampled,
    SequencePosition,
    SequenceVector,
    Timing,
    Tokens,
)
from swarm.wire.prompt_logprobs import row_bytes

WINDOW = 256  # maximum number of unacknowledged tokens of one sequence
MAX_TOKENS_PER_MESSAGE = 128


class OnEnd(Protocol):
    """Callback that ends a sequence."""

    def __call__(self, sequence: Sequence, reason: FinishReason, now: float, detail: str = "", /) -> None: ...


class TokenCollector:
    """Collects the tokens that the last stage returns. Methods append actions to ``out``; the callback ``on_end`` ends
    a sequence."""

    def __init__(
        self, state: State, out: Outbox, *, delivery: TokenDelivery, on_end: OnEnd, latencies: RequestLatencies
    ) -> None:
        self._state = state
        self._out = out
        self._latencies = latencies
        self._delivery = delivery
        self._on_end = on_end

    def collect(self, sampled: tuple[Sampled, ...], hops: tuple[Hop, ...], flight: InFlightStep, now: float) -> None:
        """Add a step's new tokens to their sequences, write them to the journal, and end sequences that are complete.

        A sequence gets one token, and a further one for each proposed token that was drawn. Others are misplaced.
        """
        added: dict[Sequence, list[Sampled]] = {}  # tokens by sequence, in the order of their first ones
        last_at: dict[Sequence, float | None] = {}  # time of the last token before these
        ends: dict[Sequence, FinishReason] = {}
        for item in sampled:
            sequence = self._find_unended(item.sequence)
            if sequence is None:
                self._state.count("late_tokens")
                continue
            if sequence in ends:  # tokens behind the end of an answer were drawn by chance
                continue
            if sequence.proposed and not flight.is_current(sequence):
                self._state.count("late_tokens")  # a newer step, which is in flight, draws it again
                continue
            if sequence.lacks_prompt_logprobs:
                self._state.count("late_tokens")  # it is drawn again, after the results of an earlier step
                continue
            if not sequence.request.submit.params.max_answer:
                self._state.count("misplaced_tokens")
                continue
            if item.position != sequence.sampled or not _may_follow(sequence, flight, added.get(sequence, ())):
                self._state.count("misplaced_tokens")
                continue
            last_at.setdefault(sequence, sequence.last_token_at)
            self._append(sequence, item, hops, now)
            added.setdefault(sequence, []).append(item)
            reason = self.end_reason(sequence)
            if reason is not None:
                ends[sequence] = reason
        for sequence, items in added.items():
            self._latencies.record_tokens(sequence, len(items), last_at[sequence], now)
        new_tokens = tuple(_new_tokens(sequence, items, hops) for sequence, items in added.items())
        if new_tokens:
            self._out.append(WriteTokens(new_tokens))
        if new_tokens and self._state.journal_problem:
            self.on_committed(tuple((new.sequence, new.position + len(new.ids)) for new in new_tokens))
        for sequence, reason in ends.items():
            self._on_end(sequence, reason, now)

    def collect_vectors(self, vectors: tuple[SequenceVector, ...], now: float) -> None:
        """End the sequences whose vectors a step has returned. A vector is always computed from the whole prompt, so a
        sequence that was preempted meanwhile takes it, too."""
        for item in vectors:
            sequence = self._find_unended(item.sequence)
            if sequence is None:
                self._state.count("late_vectors")
                continue
            kind, manifest = sequence.request.submit.params.vector, self._state.manifest
            is_asked = kind is not None and manifest is not None and len(item.vector) == manifest.vector_bytes(kind)
            if not is_asked or item.position != sequence.sampled:
                self._state.count("misplaced_vectors")
                continue
            sequence.set_vector(item.vector)
            self._state.count("vectors")
            self._on_end(sequence, "stop", now)

    def collect_prompt_logprobs(self, items: tuple[PromptLogprobs, ...], flight: InFlightStep) -> None:
        """Add log probabilities of prompts to their sequences, each token's once, as many as the step has rows. They
        depend on the prompt alone, so those of an earlier residency count, too."""
        counts = {sequence.id: count for sequence, count in flight.sequences}
        for item in items:
            sequence = self._find_unended(item.sequence)
            if sequence is None:
                self._state.count("late_prompt_logprobs")
                continue
            alternatives, manifest = sequence.request.submit.params.prompt_logprobs, self._state.manifest
            if alternatives is None or sequence.index or manifest is None:
                self._state.count("misplaced_prompt_logprobs")
                continue
            size = row_bytes(alternatives, manifest.vocab_size)
            num, rest = divmod(len(item.values), size)
            num_rows = counts.get(item.sequence, 0)
            if rest or num > num_rows or not 1 <= item.position <= item.position + num <= sequence.num_prompt:
                self._state.count("misplaced_prompt_logprobs")
            else:
                sequence.add_prompt_logprobs(item.position, item.values, size)
                self._state.count("prompt_logprobs", num)

    def end_prompts(self, reached: tuple[SequencePosition, ...], flight: InFlightStep, worker: str, now: float) -> None:
        """End sequences without tokens whose prompt is computed, and fail those for which the last stage, ``worker``,
        has returned less than it must: no later step would return it."""
        for sequence_id, position in ((k.sequence, k.position) for k in reached):
            sequence = self._find_unended(sequence_id)
            if sequence is None:
                continue
            params, is_whole = sequence.request.submit.params, position == sequence.num_prompt
            if params.max_answer and params.prompt_logprobs is None:
                continue  # its answer is tokens only
            if sequence.residency != flight.residencies.get(sequence_id):
                continue  # preempted since: its rows are computed again
            if sequence.lacks_prompt_logprobs and position > sequence.num_scored:
                if any(sequence is other for each in self._state.in_flight.values() for other, _ in each.sequences):
                    continue  # its results may arrive in another order
                self._fail_unanswered(sequence, f"{worker} returned no log probabilities of the prompt", now)
            elif is_whole and params.vector is not None:
                self._fail_unanswered(sequence, f"{worker} returned no vector of the model's size", now)
            elif not params.max_answer and not sequence.lacks_prompt_logprobs and params.vector is None:
                self._on_end(sequence, "length", now)

    def _find_unended(self, sequence_id: int) -> Sequence | None:
        sequence = self._state.sequences.get(sequence_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    def _fail_unanswered(self, sequence: Sequence, problem: str, now: float) -> None:
        self._state.count("unanswered")
        self._on_end(sequence, "failed", now, f"worker {problem}: restart it with this version")

    def on_committed(self, committed: tuple[tuple[int, int], ...]) -> None:
        """Send tokens that the journal has written: (sequence, position) pairs."""
        for sequence_id, position in committed:
            sequence = self._state.sequences.get(sequence_id)
            if sequence is not None:
                sequence.commit(position)
                self._delivery.deliver(sequence)

    def _append(self, sequence: Sequence, item: Sampled, hops: tuple[Hop, ...], now: float) -> None:
        wants_hops = sequence.request.submit.hops
        if sequence.append_token(item.token, item.logprobs, hops if wants_hops else None, now):
            self._state.prefix.acknowledge(sequence.id, sequence.tokens, sequence.kv, sequence.adapter, sequence.images)
        self._state.waiting.charge(sequence.request.tenant, 1)
        if sequence.state is SequenceState.RUNNING:  # otherwise it was preempted meanwhile, and keeps the token
            self._state.running.refresh(sequence)
        self._state.count("tokens")

    def end_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return the reason to end after the newest token; None if the sequence continues."""
        params, manifest = sequence.request.submit.params, self._state.manifest
        token = sequence.tokens[-1]
        is_eos = manifest is not None and token in manifest.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return "stop"
        if sequence.stop_at is not None and sequence.num_generated >= sequence.stop_at:
            return "stop"
        if sequence.num_generated >= params.max_tokens or sequence.sampled >= sequence.limit:
            return "length"
        return None


def _may_follow(sequence: Sequence, flight: InFlightStep, before: TokenSequence[Sampled]) -> bool:
    """Whether a step may give a sequence another token after these: its first one, or the one after a proposed token
    that was drawn."""
    if not before:
        return True
    proposal = flight.proposals.get(sequence.id)
    index = len(before) - 1
    return proposal is not None and index < len(proposal.tokens) and proposal.tokens[index] == before[-1].token


def _new_tokens(sequence: Sequence, items: TokenSequence[Sampled], hops: tuple[Hop, ...]) -> NewTokens:
    """Return the record of a sequence's newest tokens, which a step has added, for the journal."""
    submit = sequence.request.submit
    first = items[0].position - sequence.num_prompt
    return NewTokens(
        sequence=sequence.id,
        position=items[0].position,
        first=first,
        ids=tuple(item.token for item in items),
        logprobs=tuple(item.logprobs for item in items) if submit.params.logprobs is not None else (),
        hops=(hops,) * len(items) if submit.hops else (),
        num_cached=0 if first else sequence.num_cached,
        prompt_logprobs=b"" if first else bytes(sequence.prompt_logprobs),
    )


def make_end_record(sequence: Sequence, reason: FinishReason) -> WriteEnd:
    """Return the record of a sequence's end for the journal, with what its first token would have brought."""
    num_tokens = sequence.num_generated
    return WriteEnd(
        sequence.id,
        reason,
        num_tokens,
        sequence.detail,
        sequence.vector,
        0 if num_tokens else sequence.num_cached,
        b"" if num_tokens else bytes(sequence.prompt_logprobs),
        bool(sequence.request.submit.pixels),
    )


class TokenDelivery:
    """Sends tokens and ends to clients. Methods append messages to ``out``. With ``has_journal``, an end is sent once
    it is in the journal."""

    def __init__(self, state: State, out: Outbox, *, has_journal: bool) -> None:
        self._state = state
        self._out = out
        self._has_journal = has_journal

    def send(self, request: Request, message: Accepted | Tokens | Finished) -> None:
        if request.reachable_client is not None:
            self._out.append(SendToClient(request.reachable_client, message))

    def reject(self, client: bytes, request_id: str, refusal: RequestRefusal) -> None:
        """Send a rejection to the client, and count it."""
        self._state.count(f"rejected_{refusal.code}")
        message = Rejected(
            request_id=request_id, code=refusal.code, reason=refusal.reason, retry_after_s=refusal.retry_after_s
        )
        self._out.append(SendToClient(client, message))

    def deliver(self, sequence: Sequence) -> None:
        """Send what is committed and within the window, then the end if it is due."""
        request = sequence.request
        if request.reachable_client is None or not request.accepted or sequence.reader_position_unknown:
            return
        while sequence.sent < sequence.committed and sequence.sent - sequence.delivered < WINDOW:
            self.send(request, self._next_tokens(sequence))
        if self._end_is_due(sequence):
            sequence.mark_end_sent()
            self.send(request, build_finished(sequence))

    def is_end_durable(self, sequence: Sequence) -> bool:
        """Whether the sequence's end is durable: in the journal, or there is no journal that can be written."""
        return sequence.end_written or not self._has_journal or bool(self._state.journal_problem)

    def _end_is_due(self, sequence: Sequence) -> bool:
        if sequence.state is not SequenceState.ENDED or sequence.end_sent:
            return False
        return sequence.sent >= sequence.sampled and self.is_end_durable(sequence)

    def _next_tokens(self, sequence: Sequence) -> Tokens:
        window_left = WINDOW - (sequence.sent - sequence.delivered)
        stop = min(sequence.committed, sequence.sent + min(window_left, MAX_TOKENS_PER_MESSAGE))
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
        sequence.mark_sent(stop, self._state.now)
        return message


def build_finished(sequence: Sequence) -> Finished:
    """Return the message that reports a sequence's end."""
    assert sequence.reason is not None
    return Finished(
        request_id=sequence.request.id,
        index=sequence.index,
        reason=sequence.reason,
        num_prompt=sequence.num_prompt,
        num_tokens=sequence.num_generated,
        timing=build_timing(sequence, sequence.ended_at or 0.0),
        detail=sequence.detail,
        num_cached=sequence.num_cached,
        vector=sequence.vector or None,
        prompt_logprobs=bytes(sequence.prompt_logprobs) or None,
    )


def build_timing(sequence: Sequence, now: float) -> Timing:
    """Return a sequence's times, counted from the arrival of its request. Without a token, the time of the first token
    is 0. A sequence that never started was queued all the time. If an earlier broker had drawn tokens of it, only the
    total is available, and the others are 0."""
    arrived = sequence.request.arrived_at
    was_restored = sequence.num_restored > 0

    def since_arrival(moment: float | None) -> float:
        return max(0.0, (now if moment is None else moment) - arrived)

    return Timing(
        0.0 if was_restored else since_arrival(sequence.started_at),
        0.0 if was_restored or sequence.first_token_at is None else since_arrival(sequence.first_token_at),
        since_arrival(sequence.ended_at),
        sequence.num_recomputed,
    )
