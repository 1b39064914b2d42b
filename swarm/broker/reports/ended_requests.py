"""Reports about ended requests that are in the journal but no longer in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.broker.reports.scheduling import class_name
from swarm.broker.reports.trace import sum_stages
from swarm.broker.state.journal_snapshot import RequestRecord
from swarm.wire.messages import Json

NO_TIMES = (
    "the times of its tokens are not available any more: times of steps are only kept in memory, for "
    "broker.retain_s after a request's end and until the broker restarts"
)


def build_row(record: RequestRecord) -> Json:
    """Return a row for ``swarmctl requests``, with the data that a trace can still show."""
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
                **({"stages": sum_stages(hop for hops in each.hops for hop in hops)} if each.hops else {}),
            }
            for each in record.sequences
        ],
    }


def exclude_in_memory(rows: Iterable[Json], under_way: Iterable[str]) -> list[Json]:
    """Return the rows of requests that are not in memory, which has newer data."""
    in_memory = set(under_way)
    return [row | {"sequences": []} for row in rows if row["request_id"] not in in_memory]


def build_trace(prefix: str, rows: Sequence[Json]) -> Json:
    """Return the trace of the request whose id begins with ``prefix``; "" is the one that ended last."""
    exact = [row for row in rows if row["request_id"] == prefix]
    matches = exact or list(rows)
    if not matches:
        what = f"no request {prefix!r} is" if prefix else "no request is"
        return {"error": f"{what} running or in the journal (any more)"}
    if len(matches) > 1:
        return {"error": f"several requests begin with {prefix!r}: give more of the id"}
    names = ("request_id", "state", "age_s", "ended_age_s", "sequences")
    return {"times": NO_TIMES} | {name: matches[0][name] for name in names}
