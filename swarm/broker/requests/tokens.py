"""How sequences grow: tokens from the last stage, to the journal and to the client.

A client sees a token once it is in the journal; the next step needs neither.
"""

from __future__ import annotations

from swarm.broker.actions import NewTokens, Outbox, WriteTokens
from swarm.broker.reports.statistics import Latencies
from swarm.broker.requests.delivery import Delivery
from swarm.broker.requests.endings import Ends
from swarm.broker.state import Sequence, SequenceState, State
from swarm.wire.messages import FinishReason, Hop, Sampled


class Growth:
    """Methods append what is to be done to ``out``."""

    def __init__(self, state: State, out: Outbox, *, delivery: Delivery, ends: Ends, latencies: Latencies) -> None:
        self._state = state
        self._out = out
        self._latencies = latencies
        self._delivery = delivery
        self._ends = ends

    def sampled(self, sampled: tuple[Sampled, ...], hops: tuple[Hop, ...], now: float) -> None:
        """New tokens. They are journalled, then sent; the next step needs neither."""
        written: list[NewTokens] = []
        ends: list[tuple[Sequence, FinishReason]] = []
        for item in sampled:
            sequence = self._state.sequences.get(item.sequence)
            if sequence is None or sequence.state is SequenceState.ENDED:
                self._state.count("late_tokens")
                continue
            if item.position != sequence.sampled:
                self._state.count("misplaced_tokens")
                continue
            written.append(self._append(sequence, item, hops, now))
            reason = self.end_reason(sequence)
            if reason is not None:
                ends.append((sequence, reason))
        if written:
            self._out.append(WriteTokens(tuple(written)))
        if written and self._state.journal_problem:
            self.committed(tuple((new.sequence, new.position + len(new.ids)) for new in written))
        for sequence, reason in ends:
            self._ends.end(sequence, reason, now)

    def committed(self, committed: tuple[tuple[int, int], ...]) -> None:
        """The journal has these sequences up to these positions."""
        for sequence_id, position in committed:
            sequence = self._state.sequences.get(sequence_id)
            if sequence is not None:
                sequence.commit(position)
                self._delivery.deliver(sequence)

    def _append(self, sequence: Sequence, item: Sampled, hops: tuple[Hop, ...], now: float) -> NewTokens:
        submit = sequence.request.submit
        new = NewTokens(
            sequence=sequence.id,
            position=item.position,
            first=sequence.num_generated,
            ids=(item.token,),
            logprobs=(item.logprobs,) if submit.params.logprobs is not None else (),
            hops=(hops,) if submit.hops else (),
        )
        self._latencies.token(sequence, now)
        sequence.grow(item.token, item.logprobs, hops if submit.hops else None, now)
        self._state.waiting.charge(sequence.request.tenant, 1)
        if sequence.state is SequenceState.RUNNING:  # else it had to give way meanwhile, and keeps the token
            self._state.running.refresh(sequence)
        self._state.count("tokens")
        return new

    def end_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the newest token is the last."""
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
