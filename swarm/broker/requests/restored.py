"""Requests made again of what the journal has: after a restart, or when somebody asks for one that has ended."""

from __future__ import annotations

from swarm.broker.state import Request, Sequence
from swarm.broker.state.past import RequestRecord


def derive_seed(seed: int, index: int) -> int:
    """Derive a continuation's seed: each draws differently and reproducibly, the first as if it were alone."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % 2**63


def remembered(record: RequestRecord, now: float) -> Request:
    """Make a request of what the journal has; nobody reads it yet, and nothing counts as sent."""
    submit, arrived_at = record.submit, now - record.age_s
    deadline_at = None if submit.deadline_s is None else arrived_at + submit.deadline_s
    request = Request(
        submit, None, arrived_at, deadline_at, record.tenant, accepted=True, detached_at=now, restored=True
    )
    for each in record.sequences:
        sequence = Sequence(
            id=each.id,
            request=request,
            index=each.index,
            seed=derive_seed(submit.seed, each.index),
            tokens=[*submit.prompt, *each.tokens],
            limit=len(submit.prompt) + submit.params.max_tokens,
            logprobs=each.logprobs if submit.params.logprobs is not None else [()] * len(each.tokens),
            hops=each.hops,
            num_restored=len(each.tokens),
        )
        sequence.commit(sequence.sampled)
        if each.reason is not None:
            sequence.end(each.reason, each.detail, now - (record.ended_age_s or 0.0))
            sequence.end_is_written()
        request.sequences.append(sequence)
    return request


def was_taken_back(record: RequestRecord) -> bool:
    """Whether its own client cancelled it: then it never was, and its id is free. (One that nobody waited for any more
    has a reason beside that; and one that has no end here, though it is not in memory, is about to get one.)"""
    return any(each.reason in (None, "cancelled") and not each.detail for each in record.sequences)
