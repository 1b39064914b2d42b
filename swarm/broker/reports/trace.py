"""Traces: where each token's time went.

The broker always records one tuple per step (times of dispatch and answer, its rows, the stages' times) and the time at
which each token was sent. Everything else is computed when a trace is requested.

Limits: the newest ``max_steps`` steps, if they have no more than ``MAX_ROWS_KEPT`` rows together; eight bytes per token
of requests in memory; a short record of each of the last ``MAX_ENDED`` forgotten requests, for ``retain_s``. With the
default of 4,096 steps and three stages, the steps take 6 MB if they have one row each, and never more than 14 MB
(measured).

A token's time begins when its computation could begin (for the first: when the request arrived; else: when the previous
token arrived) and ends when it was sent to the client. ``began_s`` counts from the request's arrival. It is the sum of

* ``queue_s``: no step with rows of its sequence was in flight (waiting for blocks, for a micro-batch, for a new plan);
* ``wire_s``: a step was in flight, but in no stage: encoding, sockets, networks, decoding;
* ``wait_s``, ``compute_s``, ``sample_s``: as measured by the stages; they wait for other micro-batches;
* ``broker_s``: from the answer to the client's socket: the journal, and slow readers;
* ``unaccounted_s``: the rest, which is other work of the stages (bookkeeping, the log of outputs).

Where steps of one sequence overlap (chunks of a prompt), a step counts until the next one was dispatched.

A restarted broker has the requests from the journal, but no earlier steps. Earlier tokens have no times (``RESTORED``),
and neither has the first token after the restart, whose beginning is unknown.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from msgspec.structs import asdict

from swarm.broker.state import InFlightStep, Request, SequenceState
from swarm.broker.state import Sequence as BrokerSequence
from swarm.broker.state.ended_requests import ClientAccount, can_see
from swarm.wire.messages import Hop, Json, SequencePosition, StepDone

MAX_ROWS_KEPT = 1 << 16  # rows of all recorded steps
MAX_ENDED = 256  # forgotten requests that still have a trace
MAX_LISTED = 1000  # tokens in one answer; sums cover all recorded tokens

RESTORED = (
    "times of steps are only kept in memory: tokens drawn before the broker restarted have no times and are in no sum"
)
PARTS = ("queue_s", "wire_s", "wait_s", "compute_s", "sample_s", "broker_s", "unaccounted_s")


class StepTimes(NamedTuple):
    """A completed step. ``kv``: sequence and final position of each row. ``accepted``: numbers of proposed and of
    accepted tokens, by sequence, where there were any."""

    dispatched_at: float
    finished_at: float
    kv: tuple[SequencePosition, ...]
    hops: tuple[Hop, ...]
    accepted: Mapping[int, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """The data of a sequence that its trace needs."""

    id: int
    index: int
    num_prompt: int
    num_tokens: int
    reason: str | None
    state: str
    arrived_at: float
    started_at: float | None
    sent_at: array[float] = field(default_factory=lambda: array("d"))  # time at which each generated token was sent
    num_restored: int = 0  # number of first tokens that were drawn by an earlier broker
    restored_hops: tuple[Hop, ...] = ()  # hops of those tokens, if the submission asked for hops

    @classmethod
    def from_sequence(cls, sequence: BrokerSequence) -> SequenceTimes:
        return cls(
            sequence.id,
            sequence.index,
            sequence.num_prompt,
            sequence.num_generated,
            sequence.reason,
            sequence.state.value,
            sequence.request.arrived_at,
            sequence.started_at,
            sequence.sent_at,
            sequence.num_restored,
            tuple(hop for hops in sequence.hops[: sequence.num_restored] for hop in hops),
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The data of a request that its trace needs."""

    request_id: str
    ended_at: float | None
    sequences: tuple[SequenceTimes, ...]
    was_restored: bool = False
    tenant: str = ""

    @classmethod
    def from_request(cls, request: Request) -> RequestTimes:
        ended_at = request.ended_at if request.has_ended else None
        return cls(
            request.id,
            ended_at,
            tuple(map(SequenceTimes.from_sequence, request.sequences)),
            request.was_restored,
            request.tenant,
        )


@dataclass(slots=True)
class RequestTracer:
    """Records times of steps and requests (see the module), and computes traces."""

    max_steps: int = 4096
    retain_s: float = 60.0
    steps: deque[StepTimes] = field(default_factory=deque)
    ended: OrderedDict[str, RequestTimes] = field(default_factory=OrderedDict)
    _num_rows: int = 0

    def record_step(self, flight: InFlightStep, now: float, done: StepDone) -> None:
        """Record the times of a completed step."""
        if self.max_steps == 0:
            return
        accepted = {
            row.sequence: (len(proposal.tokens), min(len(proposal.tokens), max(0, row.position - proposal.start)))
            for row in done.kv
            if (proposal := flight.proposals.get(row.sequence)) is not None
        }
        self.steps.append(StepTimes(flight.sent_at, now, done.kv, done.hops, accepted))
        self._num_rows += len(done.kv)
        while len(self.steps) > self.max_steps or self._num_rows > MAX_ROWS_KEPT:
            self._num_rows -= len(self.steps.popleft().kv)

    def drop(self, request: Request) -> None:
        """Keep a short record of a request that is dropped from memory. It replaces an older one with the same id."""
        # a request read from the journal has no times
        if self.max_steps == 0 or not request.has_ended or request.read_at is not None:
            return
        self.ended.pop(request.id, None)
        self.ended[request.id] = RequestTimes.from_request(request)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def forget_old(self, now: float) -> None:
        """Drop records of ended requests after ``retain_s``. They are ordered by their ends only roughly, which is
        sufficient."""
        while self.ended:
            oldest = next(iter(self.ended.values()))
            if oldest.ended_at is not None and now - oldest.ended_at < self.retain_s:
                return
            self.ended.popitem(last=False)

    def report(
        self, prefix: str, requests: Mapping[str, Request], now: float, account: ClientAccount | None = None
    ) -> Json:
        """Return the trace of the request whose id is ``prefix`` or begins with it; "" is the newest. The result has an
        ``error`` if there is none, or none of this account."""
        traceable = self._traceable(requests, account)
        if self.max_steps == 0:
            return {"error": "this broker keeps no traces: set broker.trace_steps above 0"}
        if prefix in traceable:
            names = [prefix]
        else:
            names = [name for name in traceable if name.startswith(prefix)]
            names = names[-1:] if prefix == "" else names
        if not names:
            what = f"no request {prefix!r}" if prefix else "no request"
            return {
                "error": f"{what} found: there are traces of requests that are running (swarmctl requests lists them) "
                f"or ended less than {self.retain_s:g} s ago; with a journal (--state-dir), reports of older ones too"
            }
        if len(names) > 1:
            return {"error": f"{len(names)} requests begin with {prefix!r}: give more of the id"}
        request = traceable[names[0]]
        times = request if isinstance(request, RequestTimes) else RequestTimes.from_request(request)
        return _build_trace(times, self.steps, now)

    def has_trace(self, prefix: str, requests: Mapping[str, Request], account: ClientAccount | None = None) -> bool:
        """Whether at least one request with a trace has an id that begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self._traceable(requests, account))

    def _traceable(
        self, requests: Mapping[str, Request], account: ClientAccount | None
    ) -> dict[str, RequestTimes | Request]:
        ended = {name: times for name, times in self.ended.items() if can_see(account, times.tenant)}
        return {**ended, **{name: each for name, each in requests.items() if can_see(account, each.tenant)}}


def _build_trace(request: RequestTimes, steps: Iterable[StepTimes], now: float) -> Json:
    """Return the request's trace from these steps; ``times`` describes what is missing."""
    steps_by_sequence = _group_steps({sequence.id for sequence in request.sequences}, steps)
    most = max(2, MAX_LISTED // len(request.sequences))
    sequences = [_trace_sequence(s, steps_by_sequence[s.id], most) for s in request.sequences]
    return {
        "request_id": request.request_id,
        "state": _state(request),
        "age_s": round(now - request.sequences[0].arrived_at, 6),
        "ended_age_s": None if request.ended_at is None else round(now - request.ended_at, 6),
        **({"times": RESTORED} if request.was_restored else {}),
        "sequences": sequences,
    }


def _state(request: RequestTimes) -> str:
    states = {sequence.state for sequence in request.sequences}
    order = (SequenceState.RUNNING, SequenceState.WAITING, SequenceState.ENDED)
    return next(state.value for state in order if state.value in states)


def _group_steps(sequences: set[int], steps: Iterable[StepTimes]) -> dict[int, list[tuple[int, StepTimes]]]:
    """Return (position reached, step) for each sequence, in the order of the answers."""
    steps_by_sequence: dict[int, list[tuple[int, StepTimes]]] = {sequence: [] for sequence in sequences}
    for step in steps:
        for row in step.kv:
            if row.sequence in sequences:
                steps_by_sequence[row.sequence].append((row.position, step))
    return steps_by_sequence


def _trace_sequence(sequence: SequenceTimes, steps: Sequence[tuple[int, StepTimes]], most: int) -> Json:
    tokens = list(_trace_tokens(sequence, steps))
    sums = {part: round(sum(token[part] for token in tokens), 6) for part in ("total_s", *PARTS)}  # type: ignore[misc]
    listed = tokens if len(tokens) <= most else [tokens[0], *tokens[1 - most :]]  # the first token and the last ones
    return {
        "index": sequence.index,
        "state": sequence.state,
        "reason": sequence.reason,
        "num_prompt": sequence.num_prompt,
        "num_tokens": sequence.num_tokens,
        "num_traced": len(tokens),
        "admitted_s": _admitted_s(sequence),
        **_sum_acceptance(sequence.id, steps),
        "sums": sums,
        "stages": sum_stages(sequence.restored_hops, tokens),
        "tokens": listed,
    }


def _sum_acceptance(sequence: int, steps: Sequence[tuple[int, StepTimes]]) -> Json:
    """Return what became of proposed tokens in the recorded steps; nothing if none were proposed. ``accepted_lengths``:
    numbers of steps with proposals, by the number of tokens that were accepted."""
    outcomes = [step.accepted[sequence] for _, step in steps if sequence in step.accepted]
    if not outcomes:
        return {}
    lengths = Counter(accepted for _, accepted in outcomes)
    return {
        "proposed": sum(proposed for proposed, _ in outcomes),
        "accepted": sum(accepted for _, accepted in outcomes),
        "accepted_lengths": {str(length): lengths[length] for length in sorted(lengths)},
    }


def _admitted_s(sequence: SequenceTimes) -> float | None:
    """Return the seconds from arrival to the first step; None if there was none yet, or under an earlier broker."""
    if sequence.num_restored or sequence.started_at is None:
        return None
    return round(max(0.0, sequence.started_at - sequence.arrived_at), 6)


def _trace_tokens(sequence: SequenceTimes, steps: Sequence[tuple[int, StepTimes]]) -> Iterator[Json]:
    """Yield an entry per token whose beginning and end are recorded. The first step that ends at a position draws the
    token there; later ones only compute it again. A step with accepted proposals draws the tokens before it, too: the
    first of them took the step's time, the others none."""
    began = None if sequence.num_restored else sequence.arrived_at
    next_index = sequence.num_restored
    own: list[StepTimes] = []
    for position, step in steps:
        own.append(step)
        index = position - sequence.num_prompt
        if index < next_index or index >= sequence.num_tokens:
            continue
        _, num_accepted = step.accepted.get(sequence.id, (0, 0))
        first = max(next_index, index - num_accepted)
        if first != next_index:
            began = None  # steps in between are no longer recorded, so this token's beginning is unknown
        for each in range(first, index + 1):
            if began is not None:
                sent_at = _sent_at(sequence, each, step.finished_at)
                yield {"began_s": round(began - sequence.arrived_at, 6), **_split_token(each, began, own, sent_at)}
            began, own = step.finished_at, []
        next_index = index + 1


def _sent_at(sequence: SequenceTimes, index: int, finished_at: float) -> float:
    """Return the time at which the token was sent; if it was not yet, the time of its last known event."""
    return max(finished_at, sequence.sent_at[index]) if index < len(sequence.sent_at) else finished_at


def _split_token(index: int, began: float, steps: Sequence[StepTimes], ended: float) -> Json:
    """Split the time of one token, which these steps computed, into its parts. Without steps, it came with the token
    before it."""
    finished = steps[-1].finished_at if steps else began
    parts = dict.fromkeys(PARTS, 0.0)
    stages: dict[tuple[str, int, int], dict[str, float]] = {}
    free_at = began  # until then, earlier steps of this token account for the time
    for number, step in enumerate(steps):
        later = steps[number + 1].dispatched_at if number + 1 < len(steps) else step.finished_at
        stop = min(step.finished_at, later)
        parts["queue_s"] += max(0.0, step.dispatched_at - free_at)
        free_at = max(free_at, stop)
        _add_step(step, max(0.0, stop - step.dispatched_at), parts, stages)
    parts["broker_s"] = ended - finished
    total = ended - began
    parts["unaccounted_s"] = total - sum(parts.values())
    body: Json = {"index": index, "total_s": round(total, 6), "num_steps": len(steps)}
    body |= {name: round(value, 6) for name, value in parts.items()}
    body["stages"] = [
        {"worker": worker, "layers": [first, stop], **{name: round(value, 6) for name, value in values.items()}}
        for (worker, first, stop), values in stages.items()
    ]
    return body


def _add_step(
    step: StepTimes, counted_s: float, parts: dict[str, float], stages: dict[tuple[str, int, int], dict[str, float]]
) -> None:
    """Add the step's share to the parts of the token's time."""
    way_s = step.finished_at - step.dispatched_at
    share = counted_s / way_s if way_s > 0 else 0.0
    parts["wire_s"] += share * max(0.0, way_s - sum(hop.whole_s for hop in step.hops))
    for hop in step.hops:
        values = stages.setdefault((hop.worker, hop.layers.first, hop.layers.stop), {})
        for name in ("wait_s", "compute_s", "sample_s"):
            value = share * getattr(hop, name)
            parts[name] += value
            values[name] = values.get(name, 0.0) + value
        values["wire_bytes"] = values.get("wire_bytes", 0) + hop.wire_bytes


def sum_stages(hops: Iterable[Hop], tokens: Iterable[Json] = ()) -> list[Json]:
    """Sum up the times by worker and layers, from a request's stored hops and from traced tokens."""
    sums: dict[tuple[str, int, int], dict[str, float]] = {}
    for hop in hops:
        _add_stage(sums, (hop.worker, hop.layers.first, hop.layers.stop), asdict(hop))
    for token in tokens:
        for stage in token["stages"]:  # type: ignore[attr-defined]
            _add_stage(sums, (stage["worker"], *stage["layers"]), stage)
    return [{"worker": worker, "layers": [first, stop], **values} for (worker, first, stop), values in sums.items()]


def _add_stage(sums: dict[tuple[str, int, int], dict[str, float]], key: tuple[str, int, int], stage: Json) -> None:
    values = sums.setdefault(key, {})
    for name in ("wait_s", "compute_s", "sample_s", "wire_bytes"):
        values[name] = round(values.get(name, 0) + cast(float, stage[name]), 6)
