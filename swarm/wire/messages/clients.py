"""Messages of the client channel: requests of clients, ``swarmctl`` and hosts, and the broker's answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.params import MAX_IMAGES, SamplingParams, SpeculationMode
from swarm.wire.messages.common import (
    Json,
    Message,
    Name,
    Names,
    Position,
    PromptLogprobBytes,
    Record,
    RequestId,
    Seconds,
    Text,
    TokenIds,
    VectorBytes,
    Version,
    Whole,
)
from swarm.wire.messages.keys import BrokerKey, Enrolled, KeyMessage, RotateKey
from swarm.wire.messages.manifest import AdapterName, AssetPart, Manifest
from swarm.wire.messages.records import Hop, LayerRange, TokenLogprob

MAX_MEMO = 64 << 10  # characters
MAX_KEEP_S = 86_400.0  # For which a request may continue without a reader.


class PlanWhatIf(Record, frozen=True):
    """Hypothetical changes for a plan preview: without these workers, with this objective, with ``more`` workers
    similar to ``like``."""

    without: Names = ()
    objective: Literal["", "auto", "throughput", "latency"] = ""
    more: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    like: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Submit(Message, frozen=True, kw_only=True):
    """Submission of a generation request. The same id with the same body is the same request; another body is a
    conflict.

    ``tenant``: account that the request is charged to; tenants get equal shares; empty: the tenant of the connection.
    ``detached``: the request continues when its client disappears. ``keep_s``: whenever a reader leaves, the broker
    keeps the request running for this time and cancels it if no reader has attached by then; 0: no such grace period.
    ``speculation``: the proposers that may guess tokens; None: those of the broker's setting. ``pixels``: of each image
    in ``params``, a byte per number: patches in the order in which they are merged, each colour by colour.
    """

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
    speculation: SpeculationMode | None = None
    pixels: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_IMAGES)] = ()
    v: Version = 3


class GetRequest(Message, frozen=True, tag="recall"):
    """Query for the parameters of a request, for a client that resumes reading from another process. The answer is
    ``RequestDetails``, or a ``Report`` ("recall") with the reason why there are none."""

    request_id: RequestId


class LookUp(Message, frozen=True, kw_only=True):
    """Query for the tokens of continuation ``index`` from ``start`` on. Nothing changes: the request keeps its reader,
    and the reader its position. The answer is a ``TokensSnapshot``, or a ``Report`` ("look_up") with the reason why
    there is none. ``question``: a number chosen by the client, which the answer repeats."""

    question: Whole
    request_id: RequestId
    index: Position = 0
    start: Position = 0
    v: Version = 3


class Attach(Message, frozen=True):
    """Request to receive everything from ``next_index[i]`` on of continuation ``i``. The latest attachment wins, and
    the previous reader gets ``Rejected`` ("superseded"). ``again``: the sender was the reader before and attaches only
    if no other reader has attached meanwhile."""

    request_id: RequestId
    next_index: Annotated[tuple[Position, ...], msgspec.Meta(max_length=64)]
    again: bool = False


class Ack(Message, frozen=True):
    """Acknowledgement: everything before ``next_index`` of continuation ``index`` has arrived."""

    request_id: RequestId
    index: Position
    next_index: Position


class Stop(Message, frozen=True):
    """Report that a stop string was found in the text: only tokens before ``at_index`` count, and the finish reason is
    "stop"."""

    request_id: RequestId
    index: Position
    at_index: Position


class Cancel(Message, frozen=True, kw_only=True):
    """End of a request by its client. ``if_reader``: only if this client is the request's only reader; otherwise the
    answer is ``Rejected`` ("superseded")."""

    request_id: RequestId
    if_reader: bool = False
    v: Version = 3


class Detach(Message, frozen=True):
    """Notice that the client stops reading. A detached request continues; another one continues for its ``keep_s``, or
    without ``keep_s`` for as long as a client may be disconnected."""

    request_id: RequestId


class Describe(Message, frozen=True):
    """Query for the model and the limits."""


class GetAsset(Message, frozen=True):
    """Query for a part of a tokenizer file."""

    name: Name
    offset: Whole


class Query(Message, frozen=True):
    """Query by ``swarmctl`` for a report.

    ``request_id``: for ``trace``, the id of the request or its prefix; for ``requests``, the full id of the only
    request to report, if it is still in memory (empty: all). ``suppose``: with ``plan``, report the plan for these
    hypothetical changes; nothing changes. ``all``: with ``requests``, include ended requests, as many as the journal
    still has and one answer holds.
    """

    what: Literal["status", "nodes", "plan", "recoveries", "stats", "requests", "trace", "keys"]
    request_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    suppose: PlanWhatIf | None = None
    all: bool = False


# Device of a worker, as in the setting worker.device; empty: the host's default.
DeviceName = Annotated[str, msgspec.Meta(max_length=16)]


class Join(Message, frozen=True):
    """Request by ``swarmctl`` that a host (a running ``swarm up``) start workers."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: Whole | None = None
    device: DeviceName = ""


class StopWorker(Message, frozen=True, kw_only=True):
    """Request by ``swarmctl`` that a worker hand over its layers and leave. ``force``: even if no other worker can take
    them. ``again``: its supervisor shall restart it."""

    worker: Name
    force: bool = False
    v: Version = 2
    again: bool = False


class Pin(Record, frozen=True):
    """Assignment of exactly these layers to a worker."""

    worker: Name
    layers: LayerRange


class Cap(Record, frozen=True):
    """Upper limit for the number of layers of a worker."""

    worker: Name
    most: Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class PlanOverrides(Record, frozen=True):
    """Operator's rules for plans; they take precedence over the settings."""

    pins: Annotated[tuple[Pin, ...], msgspec.Meta(max_length=1024)] = ()
    caps: Annotated[tuple[Cap, ...], msgspec.Meta(max_length=1024)] = ()
    exclude: Names = ()
    objective: Literal["", "auto", "throughput", "latency"] = ""


class PlanCommand(Message, frozen=True, tag="steer"):
    """Command by ``swarmctl`` that changes placement: cordon, uncordon or drain ``worker``, replace the operator's
    rules by ``by_hand``, or make a new plan. ``force``: even if the new plan is not faster. ``dry_run``: report the
    plan without applying it."""

    verb: Literal["cordon", "uncordon", "drain", "rebalance", "plan"]
    worker: Annotated[str, msgspec.Meta(max_length=128)] = ""
    by_hand: PlanOverrides = PlanOverrides()
    force: bool = False
    dry_run: bool = False


class AdapterCommand(Message, frozen=True, kw_only=True, tag="adapters"):
    """Command by ``swarmctl`` about adapters at run time: list them, load one under ``name`` from ``source``, which is
    a folder that each worker has or a name on a hub, or drop one. The answer is a ``Report`` ("adapters")."""

    verb: Literal["list", "load", "drop"]
    name: AdapterName | None = None
    source: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    v: Version = 4


class ShowSettings(Message, frozen=True):
    """Query by ``swarmctl`` for the settings of a process: the worker of this name, or the broker (empty). The answer
    is a ``Report`` ("settings")."""

    v: Version = 2
    worker: Annotated[str, msgspec.Meta(max_length=128)] = ""


class HostHello(Message, frozen=True):
    """Registration of a running ``swarm up`` as a host that can start workers."""

    host: Name
    pid: Whole


class HostDone(Message, frozen=True):
    """Result of a ``StartWorkers``: the names of the started workers, or an error."""

    ticket: Whole
    started: Names
    error: Text = ""


RequestMessage = Submit | GetRequest | LookUp | Attach | Ack | Stop | Cancel | Detach
ClientMessage = (
    RequestMessage
    | Describe
    | GetAsset
    | Query
    | Join
    | StopWorker
    | PlanCommand
    | AdapterCommand
    | ShowSettings
    | HostHello
    | HostDone
    | KeyMessage
)


class Accepted(Message, frozen=True):
    """Confirmation that the request is in the journal; it will end exactly once."""

    request_id: RequestId


class RequestDetails(Message, frozen=True, tag="recalled"):
    """Answer to ``GetRequest``: the original submission."""

    submit: Submit


class Rejected(Message, frozen=True):
    """Refusal of a request. ``code`` is a stable name; ``retry_after_s``: when to try again."""

    request_id: RequestId
    code: Name
    reason: Text
    retry_after_s: Seconds | None = None


class Tokens(Message, frozen=True):
    """Tokens of continuation ``index``, the first of them at ``start``. ``hops``: one entry per token if the request
    asked for them."""

    request_id: RequestId
    index: Position
    start: Position
    ids: TokenIds
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()


class Timing(Record, frozen=True):
    """Seconds from the request's arrival to its start, its first token and its end; and how often it was recomputed.

    ``first_token_s`` is 0 if unknown: there is no token, or the first one was drawn before the broker restarted. In
    that case ``queued_s`` 0 means unknown, too. ``total_s`` is always valid.
    """

    queued_s: Seconds
    first_token_s: Seconds
    total_s: Seconds
    num_recomputed: Whole


# Details of "failed" that clients recognise by their text.
TOO_LATE = "the deadline passed before the request was finished"
TOO_SHORT = "the deadline can't be kept any more, even by the quickest steps: allow more time, or ask for less"

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class Finished(Message, frozen=True):
    """End of continuation ``index`` after ``num_tokens`` tokens. ``detail``: the cause if the reason is "failed".
    ``num_cached``: prompt tokens that were found in the prefix cache at the first admission. ``vector``: the answer of
    a request for a vector. ``prompt_logprobs``: with the first continuation of a request that asked for them, in the
    form of ``wire.prompt_logprobs``."""

    request_id: RequestId
    index: Position
    reason: FinishReason
    num_prompt: Position
    num_tokens: Position
    timing: Timing
    detail: Text = ""
    num_cached: Position = 0
    vector: VectorBytes | None = None
    prompt_logprobs: PromptLogprobBytes | None = None


class TokensSnapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """Answer to ``LookUp``: tokens of continuation ``index`` from ``start`` on, as many as one message holds.
    ``num_tokens``: length of the continuation. ``finished``: its end, sent with its last tokens. ``submit``: the
    original submission, sent with the first tokens of the first continuation."""

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
    """The model and the limits. ``manifest`` is None until a worker has supplied one."""

    manifest: Manifest | None
    state: Name
    waits_for: Text
    max_context: Position
    max_queue: Whole
    swarm_version: Name


class Report(Message, frozen=True):
    """Answer to ``Query`` and to commands. ``body`` is what ``--json`` prints."""

    what: Name
    ok: bool
    body: Json


class StartWorkers(Message, frozen=True):
    """Order from the broker to a host: start workers."""

    ticket: Whole
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: Whole | None = None
    device: DeviceName = ""


class Malformed(Message, frozen=True):
    """Answer to a message that can't be decoded. ``reason`` names the faulty field."""

    reason: Text


ServerMessage = (
    Accepted
    | RequestDetails
    | TokensSnapshot
    | Rejected
    | Tokens
    | Finished
    | Description
    | AssetPart
    | Report
    | StartWorkers
    | Enrolled
    | BrokerKey
    | RotateKey
    | Malformed
)
