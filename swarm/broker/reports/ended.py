"""Requests that have ended and are in the journal, but no longer in memory: how they become values for reports, and
requests again when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from swarm.broker.reports.scheduling import class_name
from swarm.broker.state import Request
from swarm.broker.state import Sequence as BrokerSequence
from swarm.broker.state.past import RequestRecord
from swarm.wire.messages import Json

NO_TIMES = (
    "where the time of its tokens went is not known: its steps are not in the journal (any more), or the machine was "
    "started again meanwhile"
)


def derive_seed(seed: int, index: int) -> int:
    """Continuations of one prompt draw differently, each reproducibly; the first draws as if it were alone."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % 2**63


def remembered(record: RequestRecord, now: float) -> Request:
    """The request as the journal has it; nobody reads it yet, and nothing counts as sent."""
    submit, arrived_at = record.submit, now - record.age_s
    deadline_at = None if submit.deadline_s is None else arrived_at + submit.deadline_s
    request = Request(
        submit, None, arrived_at, deadline_at, record.tenant, accepted=True, detached_at=now, restored=True
    )
    for each in record.sequences:
        sequence = BrokerSequence(
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
    """Its own client cancelled it: it is as if it had never been, and its id is free. (One that nobody waited for any
    more has a reason beside that; and one that has no end here, though it is not in memory, is about to get one.)"""
    return any(each.reason in (None, "cancelled") and not each.detail for each in record.sequences)


def row_of(record: RequestRecord) -> Json:
    """One line of ``swarmctl requests``, and what a trace of it can still tell."""
    submit = record.submit
    return {
        "request_id": submit.request_id,
        "state": "ended",
        "reasons": [each.reason for each in record.sequences],
        "num_prompt": len(submit.prompt),
        "num_tokens": sum(len(each.tokens) for each in record.sequences),
        "max_tokens": submit.params.max_tokens,
        "n": len(record.sequences),
        "class": class_name(submit.priority),
        "tenant": record.tenant,
        "detached": submit.detached,
        "age_s": round(record.age_s, 3),
        "ended_age_s": round(record.ended_age_s or 0.0, 3),
        "sequences": [
            {
                "index": each.index,
                "state": "ended",
                "reason": each.reason,
                "detail": each.detail,
                "num_prompt": len(submit.prompt),
                "num_tokens": len(each.tokens),
            }
            for each in record.sequences
        ],
    }


def listed(rows: Iterable[Json], under_way: Iterable[str]) -> list[Json]:
    """Those that memory does not know better."""
    known = set(under_way)
    return [row | {"sequences": []} for row in rows if row["request_id"] not in known]


def traced(row: Json, trace: Json) -> Json:
    """The row of a request with where its time went."""
    known, times = cast("list[Json]", row["sequences"]), cast("list[Json]", trace["sequences"])
    together = [each | more for each, more in zip(known, times, strict=True)]
    return row | {"times": trace["times"], "sequences": together}


def trace(asked: str, rows: Sequence[Json]) -> Json:
    """What the journal can tell of the request whose id begins so; "" is the one that ended last."""
    exact = [row for row in rows if row["request_id"] == asked]
    found = exact or list(rows)
    if not found:
        what = f"no request {asked!r} is known: it is not" if asked else "no request is known: none is"
        return {"error": f"{what} under way, nor in the journal (any more)"}
    if len(found) > 1:
        return {"error": f"several requests begin with {asked!r}: give more of the id"}
    names = ("request_id", "state", "age_s", "ended_age_s", "sequences", "times")
    return {"times": NO_TIMES} | {name: found[0][name] for name in names if name in found[0]}
