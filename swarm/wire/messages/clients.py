"""The client door: what clients, ``swarmctl`` and hosts say, and what the broker answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.params import SamplingParams
from swarm.wire.messages.common import (
    Json,
    Message,
    Name,
    Names,
    Position,
    Record,
    RequestId,
    Seconds,
    Text,
    TokenIds,
    Version,
    Whole,
)
from swarm.wire.messages.locks import BrokerKey, Enrolled, LockMessage, RotateYours
from swarm.wire.messages.manifest import AssetPart, Manifest
from swarm.wire.messages.records import Hop, LayerRange, TokenLogprob

MAX_MEMO = 64 << 10  # characters
MAX_KEEP_S = 86_400.0  # for which a request may run on without a reader


class Suppose(Record, frozen=True):
    """What would the plan be without these workers, with this objective, with ``more`` workers like this one?"""

    without: Names = ()
    objective: Literal["", "auto", "throughput", "latency"] = ""
    more: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    like: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Submit(Message, frozen=True, kw_only=True):
    """A request. The same id with the same body is the same request; with another body it is a conflict. ``tenant``: on
    whose account it is computed; tenants get equal shares. Empty: that of the connection. ``detached``: it runs on when
    its client vanishes. ``keep_s``: each time that a reader leaves it, the broker lets it run on for so many seconds,
    and cancels it if nobody has attached to it by then. 0: a reader that leaves has no such time."""

    request_id: RequestId
    prompt: TokenIds
    params: SamplingParams
    seed: Whole
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tenant: Annotated[str, msgspec.Meta(max_length=128)] = ""
    hops: bool = False
    detached: bool = False
    memo: Annotated[str, msgspec.Meta(max_length=MAX_MEMO)] = ""
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_KEEP_S)] = 0.0
    v: Version = 3


class Recall(Message, frozen=True, tag="recall"):
    """What request is that? Whoever reads on from another process must know what was asked for. The answer is
    ``Recalled``, or a ``Report`` ("recall") that says why there is none."""

    request_id: RequestId


class LookUp(Message, frozen=True, kw_only=True):
    """Read tokens of continuation ``index`` from ``start`` on, and change nothing: the request keeps its reader, and
    the reader its place. The answer is a ``Snapshot``, or a ``Report`` ("look_up") that says why there is none.
    ``question``: a number of the asker's own that comes back with the answer."""

    question: Whole
    request_id: RequestId
    index: Position = 0
    start: Position = 0
    v: Version = 3


class Attach(Message, frozen=True):
    """Send what comes from ``next_index[i]`` on of continuation ``i`` to me from now on; the latest attachment wins,
    and the reader before it is told (``Rejected``, "superseded"). ``again``: I am a reader already, and only want to go
    on, if nobody else has come meanwhile."""

    request_id: RequestId
    next_index: Annotated[tuple[Position, ...], msgspec.Meta(max_length=64)]
    again: bool = False


class Ack(Message, frozen=True):
    """Everything before ``next_index`` of continuation ``index`` has arrived."""

    request_id: RequestId
    index: Position
    next_index: Position


class Stop(Message, frozen=True):
    """A stop string was found in the text: tokens before ``at_index`` count, the reason is "stop"."""

    request_id: RequestId
    index: Position
    at_index: Position


class Cancel(Message, frozen=True, kw_only=True):
    """End a request. ``if_reader``: only if nobody but this client reads it; else the answer is ``Rejected``
    ("superseded")."""

    request_id: RequestId
    if_reader: bool = False
    v: Version = 3


class Detach(Message, frozen=True):
    """I read no further. A detached request runs on; another one for its ``keep_s``, or without that for as long as a
    client may be away."""

    request_id: RequestId


class Describe(Message, frozen=True):
    """Ask for the model and the limits."""


class GetAsset(Message, frozen=True):
    """Ask for a part of a tokenizer file."""

    name: Name
    offset: Whole


class Query(Message, frozen=True):
    """``swarmctl`` asks for a report. ``request_id``: for ``trace``, the request meant, or how its id begins; for
    ``requests``, the only one to be told of, by its whole id, if memory has it (none given: all).
    ``suppose``: with ``plan``, the plan that would be made if things were so; nothing is changed. ``all``: with
    ``requests``, as many of those that have ended as the journal still has and one answer holds."""

    what: Literal["status", "nodes", "plan", "recoveries", "stats", "requests", "trace", "keys"]
    request_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    suppose: Suppose | None = None
    all: bool = False


class Join(Message, frozen=True):
    """``swarmctl`` asks a host (a running ``swarm up``) to start workers."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: Whole | None = None


class StopWorker(Message, frozen=True, kw_only=True):
    """``swarmctl`` asks a worker to hand over its layers and leave; ``force``: even if nobody else can take them;
    ``again``: to be started anew by whoever started it."""

    worker: Name
    force: bool = False
    v: Version = 2
    again: bool = False


class Pin(Record, frozen=True):
    """A worker gets exactly these layers."""

    worker: Name
    layers: LayerRange


class Cap(Record, frozen=True):
    """A worker gets at most so many layers."""

    worker: Name
    most: Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class ByHand(Record, frozen=True):
    """What an operator wants of plans, before the settings."""

    pins: Annotated[tuple[Pin, ...], msgspec.Meta(max_length=1024)] = ()
    caps: Annotated[tuple[Cap, ...], msgspec.Meta(max_length=1024)] = ()
    exclude: Names = ()
    objective: Literal["", "auto", "throughput", "latency"] = ""


class Steer(Message, frozen=True, tag="steer"):
    """``swarmctl`` says who gets layers: ``worker`` is cordoned, drained or free again; plans go by ``by_hand``; or the
    plan is made anew. ``force``: also if that makes nothing quicker. ``dry_run``: only tell what plan would be made."""

    verb: Literal["cordon", "uncordon", "drain", "rebalance", "plan"]
    worker: Annotated[str, msgspec.Meta(max_length=128)] = ""
    by_hand: ByHand = ByHand()
    force: bool = False
    dry_run: bool = False


class ShowSettings(Message, frozen=True):
    """``swarmctl`` asks by which settings a process runs: the broker's own, or those of the worker of this name. The
    answer is a ``Report`` ("settings")."""

    v: Version = 2
    worker: Annotated[str, msgspec.Meta(max_length=128)] = ""


class HostHello(Message, frozen=True):
    """A running ``swarm up`` says that it can start workers."""

    host: Name
    pid: Whole


class HostDone(Message, frozen=True):
    """The host started (or could not start) what a ``StartWorkers`` asked for."""

    ticket: Whole
    started: Names
    error: Text = ""


RequestMessage = Submit | Recall | LookUp | Attach | Ack | Stop | Cancel | Detach
ClientMessage = (
    RequestMessage
    | Describe
    | GetAsset
    | Query
    | Join
    | StopWorker
    | Steer
    | ShowSettings
    | HostHello
    | HostDone
    | LockMessage
)


class Accepted(Message, frozen=True):
    """The request is in the journal; it will reach exactly one end."""

    request_id: RequestId


class Recalled(Message, frozen=True, tag="recalled"):
    """The answer to ``Recall``: what was asked for."""

    submit: Submit


class Rejected(Message, frozen=True):
    """The request was not taken. ``code`` is a stable name; ``retry_after_s`` says when it may be."""

    request_id: RequestId
    code: Name
    reason: Text
    retry_after_s: Seconds | None = None


class Tokens(Message, frozen=True):
    """Tokens ``start`` … of continuation ``index``. ``hops``: one entry per token if the request asked for them."""

    request_id: RequestId
    index: Position
    start: Position
    ids: TokenIds
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()


class Timing(Record, frozen=True):
    """Seconds from the request's arrival: to its start, its first token, its end; and how often it was recomputed.

    ``first_token_s`` is 0 where it isn't known: there is no token, or the first was drawn before the broker was started
    again. Then ``queued_s`` isn't known, either, if it is 0. The total always is.
    """

    queued_s: Seconds
    first_token_s: Seconds
    total_s: Seconds
    num_recomputed: Whole


# Details of "failed" that clients know by their words.
TOO_LATE = "the deadline passed before the request was finished"
TOO_SHORT = "the deadline can't be kept any more, even by the quickest steps: allow more time, or ask for less"

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class Finished(Message, frozen=True):
    """Continuation ``index`` ended: ``num_tokens`` were generated. ``detail`` says why when the reason is "failed".
    ``num_cached`` of the prompt's tokens were found in the prefix cache when it was first let in."""

    request_id: RequestId
    index: Position
    reason: FinishReason
    num_prompt: Position
    num_tokens: Position
    timing: Timing
    detail: Text = ""
    num_cached: Position = 0


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """The answer to ``LookUp``: tokens ``start`` … of continuation ``index``, as many as one message holds.
    ``num_tokens``: how many the continuation has. ``finished``: how it ended; given with its last tokens. ``submit``:
    what was asked for; given with the first tokens of the first continuation."""

    question: Whole
    request_id: RequestId
    index: Position
    start: Position
    ids: TokenIds
    num_tokens: Position
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()
    finished: Finished | None = None
    submit: Submit | None = None
    v: Version = 3


class Description(Message, frozen=True):
    """The model and the limits. ``manifest`` is None until a worker has brought one."""

    manifest: Manifest | None
    state: Name
    waits_for: Text
    max_context: Position
    max_queue: Whole
    swarm_version: Name


class Report(Message, frozen=True):
    """The answer to ``Query``, ``Join``, ``StopWorker`` and ``Steer``. ``body`` is what ``--json`` prints."""

    what: Name
    ok: bool
    body: Json


class StartWorkers(Message, frozen=True):
    """Broker → host: start workers."""

    ticket: Whole
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: Whole | None = None


class Malformed(Message, frozen=True):
    """The answer to a message that can't be understood. ``field`` names what is wrong."""

    reason: Text


ServerMessage = (
    Accepted
    | Recalled
    | Snapshot
    | Rejected
    | Tokens
    | Finished
    | Description
    | AssetPart
    | Report
    | StartWorkers
    | Enrolled
    | BrokerKey
    | RotateYours
    | Malformed
)
