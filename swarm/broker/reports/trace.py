"""Where each token's time went: what is kept for it, and how the answer is made.

Kept, whether anybody asks or not, is one tuple per step (when it was dispatched and answered, whose rows it had, what
the stages said) and the moment at which each token was sent. Everything else is worked out when somebody asks.

Bounds: the newest ``max_steps`` steps, as long as they have no more than ``MAX_ROWS_KEPT`` rows together; eight bytes
per token of the requests that the broker knows; a few words about each of the last ``MAX_ENDED`` requests that it has
forgotten, for ``retain_s``. With the default of 4,096 steps and three stages the steps take 6 MB if they have one row
each, and never more than 14 MB (measured).

A token's time begins when its making could begin (for the first: when the request arrived, else: when the token before
it was known) and ends when it was sent to the client. It is the sum of

* ``queue_s``: no step with rows of its sequence was under way (waiting for room, for a micro-batch, for a new plan);
* ``wire_s``: a step was under way, and in no stage: encoding, sockets, networks, decoding;
* ``wait_s``, ``compute_s``, ``sample_s``: what the stages say; waiting there is for other micro-batches;
* ``broker_s``: from the answer to the client's socket: the journal, and a reader who is slow;
* ``unaccounted_s``: the rest, which is what stages do besides (bookkeeping, the log of outputs).

Where steps of one sequence overlap (chunks of a prompt), a step counts for the part of its way in which no later one
had been dispatched.

With a journal, the steps go there, too (``to_write``), and a broker after this one can still tell where the time went;
but not when tokens were sent: then a token ends with the answer of its step, and has no ``broker_s``.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.broker.actions import StepTimes
from swarm.broker.state import Request, SequenceState
from swarm.broker.state import Sequence as BrokerSequence
from swarm.wire.messages import Json, StepDone

MAX_ROWS_KEPT = 1 << 16
MAX_ENDED = 256
MAX_LISTED = 1000  # tokens in one answer; sums are over all that are known
MAX_WRITTEN = 4096  # steps that go to the journal at a time: the newest
WRITE_S = 1.0  # how often they do
_ROUNDING_S = 1e-6  # what the journal keeps of a moment

BEFORE = "where the time of tokens went that were made before the broker started again is in the journal, if anywhere"
PARTS = ("queue_s", "wire_s", "wait_s", "compute_s", "sample_s", "broker_s", "unaccounted_s")


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """What a trace needs to know of a sequence. ``num_restored``: of so many tokens, the first ones, it is not known
    when they were sent."""

    id: int
    index: int
    num_prompt: int
    num_tokens: int
    reason: str | None
    state: str
    arrived_at: float
    started_at: float | None
    sent_at: array[float] = field(default_factory=lambda: array("d"))
    num_restored: int = 0

    @classmethod
    def of(cls, sequence: BrokerSequence) -> SequenceTimes:
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
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    request_id: str
    ended_at: float | None
    sequences: tuple[SequenceTimes, ...]
    restored: bool = False

    @classmethod
    def of(cls, request: Request) -> RequestTimes:
        ended_at = request.ended_at if request.ended else None
        return cls(request.id, ended_at, tuple(map(SequenceTimes.of, request.sequences)), request.restored)


@dataclass(slots=True)
class Tracer:
    """See the module's text."""

    max_steps: int = 4096
    retain_s: float = 60.0
    steps: deque[StepTimes] = field(default_factory=deque)
    ended: OrderedDict[str, RequestTimes] = field(default_factory=OrderedDict)
    _num_rows: int = 0
    _num_new: int = 0
    _asked_at: float = 0.0

    def finished(self, dispatched_at: float, now: float, done: StepDone) -> None:
        """A step was answered."""
        if self.max_steps == 0:
            return
        self.steps.append(StepTimes(dispatched_at, now, done.kv, done.hops))
        self._num_rows += len(done.kv)
        self._num_new += 1
        while len(self.steps) > self.max_steps or self._num_rows > MAX_ROWS_KEPT:
            self._num_rows -= len(self.steps.popleft().kv)

    def to_write(self, now: float, *, at_once: bool = False) -> tuple[StepTimes, ...]:
        """The steps that came since this was asked last, once there are some and that is a while ago."""
        if not self._num_new or (now - self._asked_at < WRITE_S and not at_once):
            return ()
        num = min(self._num_new, len(self.steps), MAX_WRITTEN)
        self._num_new, self._asked_at = 0, now
        return tuple(self.steps[-place] for place in range(num, 0, -1))

    def forgotten(self, request: Request) -> None:
        """The broker knows this request no longer. One that is asked for anew takes its place."""
        if self.max_steps == 0 or not request.ended or request.read_at is not None:
            return
        self.ended.pop(request.id, None)
        self.ended[request.id] = RequestTimes.of(request)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def forget_old(self, now: float) -> None:
        """In order of their ends, nearly: enough for letting go."""
        while self.ended:
            oldest = next(iter(self.ended.values()))
            if oldest.ended_at is not None and now - oldest.ended_at < self.retain_s:
                return
            self.ended.popitem(last=False)

    def report(self, asked: str, requests: Mapping[str, Request], earlier: Sequence[StepTimes] | None = None) -> Json:
        """The trace of the request whose id is ``asked``, or begins with it; "" is the newest. ``error`` if there is
        none. ``earlier``: what the journal has of its steps; if it was not asked, and might know more, the body has
        ``times``."""
        known = self._known(requests)
        if self.max_steps == 0:
            return {"error": "this broker keeps no traces: set broker.trace_steps above 0"}
        if asked in known:
            found = [asked]
        else:
            found = [name for name in known if name.startswith(asked)]
            found = found[-1:] if asked == "" else found
        if not found:
            what = f"no request {asked!r}" if asked else "no request"
            return {
                "error": f"{what} is known: it would have to be under way (swarmctl requests lists those) or have "
                f"ended less than {self.retain_s:g} s ago, or later with a journal (--state-dir)"
            }
        if len(found) > 1:
            return {"error": f"{len(found)} requests begin with {asked!r}: give more of the id"}
        request = known[found[0]]
        times = request if isinstance(request, RequestTimes) else RequestTimes.of(request)
        if earlier is not None and times.restored:
            return trace_of(times, self._after(earlier))
        return trace_of(times, self.steps) | ({"times": BEFORE} if times.restored else {})

    def knows(self, asked: str, requests: Mapping[str, Request]) -> bool:
        """Is it, or does it begin, the id of one or several that have a report here?"""
        return any(name.startswith(asked) for name in self._known(requests))

    def _known(self, requests: Mapping[str, Request]) -> dict[str, RequestTimes | Request]:
        return {**self.ended, **requests}

    def _after(self, earlier: Sequence[StepTimes]) -> Iterator[StepTimes]:
        """Those, and after them what is in memory: the journal may have some of it already."""
        begin = self.steps[0].finished_at if self.steps else math.inf
        yield from (step for step in earlier if step.finished_at < begin - _ROUNDING_S)
        yield from self.steps


def trace_of(request: RequestTimes, steps: Iterable[StepTimes]) -> Json:
    """What these steps tell of it; ``times`` says what they can't, if there may be such things."""
    found = _steps_of({sequence.id for sequence in request.sequences}, steps)
    most = max(2, MAX_LISTED // len(request.sequences))
    sequences = [_sequence(s, found[s.id], most) for s in request.sequences]
    return {
        "request_id": request.request_id,
        "state": _state(request),
        **({"times": _in_words(request.sequences, sequences)} if request.restored else {}),
        "sequences": sequences,
    }


def _in_words(sequences: Sequence[SequenceTimes], bodies: Sequence[Json]) -> str:
    """What is not known of a request that was in the journal."""
    num_missing = sum(s.num_tokens for s in sequences) - sum(int(str(body["num_traced"])) for body in bodies)
    text = "from the journal, which does not know when tokens were sent: those have no part of the broker's"
    if num_missing:
        text += f"; of {num_missing} tokens it is not known where their time went, and they are in no sum"
    return text


def _state(request: RequestTimes) -> str:
    states = {sequence.state for sequence in request.sequences}
    order = (SequenceState.RUNNING, SequenceState.WAITING, SequenceState.ENDED)
    return next(state.value for state in order if state.value in states)


def _steps_of(wanted: set[int], steps: Iterable[StepTimes]) -> dict[int, list[tuple[int, StepTimes]]]:
    """Each sequence's (position reached, step), in the order of the answers."""
    found: dict[int, list[tuple[int, StepTimes]]] = {sequence: [] for sequence in wanted}
    for step in steps:
        for row in step.kv:
            if row.sequence in wanted:
                found[row.sequence].append((row.position, step))
    return found


def _sequence(sequence: SequenceTimes, steps: Sequence[tuple[int, StepTimes]], most: int) -> Json:
    tokens = list(_tokens(sequence, steps))
    parts = [part for part in ("total_s", *PARTS) if not tokens or any(part in token for token in tokens)]
    sums = {part: round(sum(token.get(part, 0.0) for token in tokens), 6) for part in parts}  # type: ignore[misc]
    listed = tokens if len(tokens) <= most else [tokens[0], *tokens[1 - most :]]
    return {
        "index": sequence.index,
        "state": sequence.state,
        "reason": sequence.reason,
        "num_prompt": sequence.num_prompt,
        "num_tokens": sequence.num_tokens,
        "num_traced": len(tokens),
        "admitted_s": _admitted_s(sequence, tokens, steps),
        "sums": sums,
        "stages": _stages(tokens),
        "tokens": listed,
    }


def _admitted_s(
    sequence: SequenceTimes, tokens: Sequence[Json], steps: Sequence[tuple[int, StepTimes]]
) -> float | None:
    """From the arrival to the first step. What a broker before this one saw, the steps tell, if the first are there."""
    started_at = sequence.started_at
    if sequence.num_restored:
        started_at = steps[0][1].dispatched_at if tokens and tokens[0]["index"] == 0 else None
    return None if started_at is None else round(max(0.0, started_at - sequence.arrived_at), 6)


def _tokens(sequence: SequenceTimes, steps: Sequence[tuple[int, StepTimes]]) -> Iterator[Json]:
    """One entry per token whose beginning and end are known. A step that ends at a position draws the token there, the
    first time that it is reached: later ones only compute it again."""
    began: float | None = sequence.arrived_at
    if sequence.num_restored and steps:  # by a clock that was read before the broker began, so a little late
        began = min(sequence.arrived_at, steps[0][1].dispatched_at)
    next_index = 0
    own: list[StepTimes] = []
    for position, step in steps:
        own.append(step)
        index = position - sequence.num_prompt
        if index < next_index or index >= sequence.num_tokens:
            continue
        if index != next_index:
            began = None  # steps between have been let go of: when this token began is not known
        if began is not None:
            sent_at = None if index < sequence.num_restored else _sent_at(sequence, index, step.finished_at)
            yield _token(index, began, own, sent_at)
        began, next_index, own = step.finished_at, index + 1, []


def _sent_at(sequence: SequenceTimes, index: int, finished_at: float) -> float:
    """One that was not sent yet counts as far as it has come."""
    return max(finished_at, sequence.sent_at[index]) if index < len(sequence.sent_at) else finished_at


def _token(index: int, began: float, steps: Sequence[StepTimes], sent_at: float | None) -> Json:
    """``sent_at`` None: that is not known, so it ends with the answer of its last step."""
    finished = steps[-1].finished_at
    ended = finished if sent_at is None else sent_at
    parts = dict.fromkeys(PARTS, 0.0)
    stages: dict[tuple[str, int, int], dict[str, float]] = {}
    free_at = began
    for number, step in enumerate(steps):
        later = steps[number + 1].dispatched_at if number + 1 < len(steps) else step.finished_at
        stop = min(step.finished_at, later)
        parts["queue_s"] += max(0.0, step.dispatched_at - free_at)
        free_at = max(free_at, stop)
        _add_step(step, max(0.0, stop - step.dispatched_at), parts, stages)
    parts["broker_s"] = ended - finished
    total = ended - began
    parts["unaccounted_s"] = total - sum(parts.values())
    if sent_at is None:
        del parts["broker_s"]
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
    """Its share of what the token's time is made of."""
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


def _stages(tokens: Sequence[Json]) -> list[Json]:
    """The tokens' stages, summed up."""
    sums: dict[tuple[str, int, int], dict[str, float]] = {}
    for token in tokens:
        for stage in token["stages"]:  # type: ignore[attr-defined]
            values = sums.setdefault((stage["worker"], *stage["layers"]), {})
            for name in ("wait_s", "compute_s", "sample_s", "wire_bytes"):
                values[name] = round(values.get(name, 0) + stage[name], 6)
    return [{"worker": worker, "layers": [first, stop], **values} for (worker, first, stop), values in sums.items()]
