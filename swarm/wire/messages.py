"""What machines say to each other: one frozen struct per message.

A message travels as a multipart ZeroMQ message. Frame 0 is a msgpack map: ``v`` (protocol version), ``kind`` (the
struct's name in snake case), ``epoch``, and the struct's own fields. A message with a ``tensor`` (or ``payload``) field
that is not None has exactly one more frame, the raw bytes that the field describes.

Types and limits stand in the annotations; the codec refuses whatever does not fit them and names the field. Small
records that repeat (rows, hops, positions) are arrays on the wire, everything else is a map with names.

Doors:

* client door: ``Submit … ClientMessage`` from clients and ``swarmctl``, ``Accepted … ServerMessage`` back.
* control door: ``Hello … WorkerMessage`` from workers, ``Welcome … Order`` back.
* beat door: ``Beat`` from workers, nothing back.
* data: ``Step`` along the stages, ``StepDone`` from the last one to the broker.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from swarm.params import SamplingParams

PROTOCOL_VERSION: Final = 1
REPLAY_STEP: Final = 0  # of every step that is a replay: these have no number among the broker's

# Bounds. They are generous for any real use; what matters is that there are some, checked before anything is allocated.
MAX_HEADER_BYTES = 8 << 20  # a prompt of a million token ids is about 5 MB
MAX_TENSOR_BYTES = 1 << 30
MAX_TOKENS = 1 << 20
MAX_ROWS = 4096
MAX_SEQUENCES = 1 << 16
MAX_LAYERS = 1 << 12
MAX_STAGES = 1 << 10
ASSET_PART_BYTES = 1 << 20

_Int = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Epoch = _Int
StepNumber = _Int
SequenceId = _Int
Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_TOKENS)]
LayerIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
RequestId = Name
Incarnation = Name
Endpoint = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
Json = dict[str, object]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A small value inside messages; an array on the wire."""


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=lambda name: "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_"),
):
    """The root of all messages. ``epoch`` is 0 where none applies (everything on the client door). ``cause``: the id of
    the event at the broker that this message follows from, so that log lines of several machines can be told together;
    empty where nobody would look for it."""

    v: Literal[1] = 1
    epoch: Epoch = 0
    cause: Annotated[str, msgspec.Meta(max_length=32)] = ""


# --- records ---------------------------------------------------------------------------------------------------------


class LayerRange(Record, frozen=True):
    """Layers ``first`` up to, not including, ``stop``."""

    first: LayerIndex
    stop: LayerIndex

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        """For people: the first and the last layer. One that is empty, which is a mistake, shows its bounds."""
        return f"{self.first}–{self.stop - 1}" if self.first < self.stop else f"[{self.first}, {self.stop})"


class TensorSpec(Record, frozen=True):
    """The frame that follows: raw little-endian elements in C order. ``checksum``: the low 63 bits of the
    bytes' xxh3-64, 0 if checksums are off."""

    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**40)], ...], msgspec.Meta(max_length=4)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSOR_BYTES)]
    checksum: _Int


class PayloadSpec(Record, frozen=True):
    """The frame that follows: raw bytes of an asset."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=ASSET_PART_BYTES)]
    checksum: _Int


class Row(Record, frozen=True):
    """``count`` tokens of a sequence from position ``start`` on. ``sample``: draw a token after the last of them."""

    sequence: SequenceId
    start: Position
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    sample: bool


class Open(Record, frozen=True):
    """A sequence enters the stages (or is told to them again, in a new epoch). ``tokens``: prompt and committed tokens,
    so that penalties and grammars can be rebuilt; the first ``num_prompt`` of them are the prompt. ``limit``: the most
    positions that the sequence can come to hold, which the broker has counted against every stage's capacity.
    ``source``: begin with a copy of the first ``shared`` positions of this sequence, which every stage holds."""

    sequence: SequenceId
    params: SamplingParams
    seed: _Int
    num_prompt: Position
    limit: Position
    tokens: TokenIds
    source: SequenceId | None = None
    shared: Position = 0


class SequencePosition(Record, frozen=True):
    sequence: SequenceId
    position: Position


class RangePosition(Record, frozen=True):
    """How many positions of a sequence have keys and values in these layers."""

    layers: LayerRange
    position: Position


class HeldSequence(Record, frozen=True):
    """What a stage holds of one sequence: KV per range of layers, and the boundary inputs it has logged."""

    sequence: SequenceId
    kv: Annotated[tuple[RangePosition, ...], msgspec.Meta(max_length=MAX_LAYERS)]


class LogRange(Record, frozen=True):
    """A sender's log holds the inputs of layer ``boundary`` at positions ``start`` up to, not including, ``stop``."""

    sequence: SequenceId
    boundary: LayerIndex
    start: Position
    stop: Position


class TokenLogprob(Record, frozen=True):
    token: TokenId
    logprob: float


class Sampled(Record, frozen=True):
    """A drawn token and the position it will stand at. ``logprobs``: its own first, then the alternatives asked for."""

    sequence: SequenceId
    position: Position
    token: TokenId
    logprobs: Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=64)]


class Failure(Record, frozen=True):
    """A sequence that can't go on, and why."""

    sequence: SequenceId
    reason: Text


class Hop(Record, frozen=True):
    """One stage's share of one step. ``wait_s``: from arrival to the start of the work; ``idle_s``: how long the stage
    had nothing to do before; ``wire_bytes``: what it received; ``held_s``: from arrival to handing on, all of it, so
    that a step's time outside of the stages can be told."""

    worker: Name
    layers: LayerRange
    wait_s: Seconds
    compute_s: Seconds
    sample_s: Seconds
    idle_s: Seconds
    wire_bytes: _Int
    held_s: Seconds = 0.0


class Asset(Record, frozen=True):
    """A file that clients need (tokenizer, chat template), by name, size and xxh3-128."""

    name: Name
    num_bytes: _Int
    digest: Digest


class LayerCost(Record, frozen=True):
    """Measured at join. ``prefill``: seconds for one layer to take ``rows`` positions of one sequence with ``context``
    positions before them. ``decode``: for one layer to take one more position of ``rows`` sequences of that length.
    ``stage``: what a step of so many rows takes beside its layers. ``head``, ``embed``: for so many rows. ``alone``:
    with all cores of the host, as in a step that is the only one."""

    kind: Literal["prefill", "decode", "stage", "head", "embed"]
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    context: Position
    seconds: Seconds
    alone: bool


class LinkCost(Record, frozen=True):
    """Measured at join between a worker and the broker, over the worker's own connection: there and back, and bytes."""

    round_trip_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]


class Suppose(Record, frozen=True):
    """What would the plan be without these workers, with this objective, with ``more`` workers like this one?"""

    without: Names = ()
    objective: Literal["", "auto", "throughput", "latency"] = ""
    more: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    like: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Edge(Record, frozen=True):
    """Where a stage sends its output: the next stage's data endpoint, or the broker's after the last."""

    to: Name
    endpoint: Endpoint


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What everybody must agree on about the model; the broker has no other knowledge of it."""

    name: Name
    architecture: Name
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    hidden_size: Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    context: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    eos_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)]
    dtype: Name
    layer_bytes: Annotated[tuple[_Int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    embed_bytes: _Int
    head_bytes: _Int
    kv_bytes_per_token: Annotated[tuple[_Int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    files: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=4096)]
    assets: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=64)]

    def difference(self, other: Manifest) -> str | None:
        """Name the first field that differs, with both values; None if the two are the same.

        The name doesn't count: a model's folder may be called as one likes.
        """
        for name in self.__struct_fields__[1:]:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name in ("files", "assets"):
                return f"{name}: {_unlike(mine, theirs)}"
            return f"{name}: {mine} here, {theirs} there"
        return None


def _unlike(mine: tuple[Asset, ...], theirs: tuple[Asset, ...]) -> str:
    """Which files are not the same; or can't be compared, because large ones are known by digests of two kinds."""
    mine_by, theirs_by = ({asset.name: asset for asset in side} for side in (mine, theirs))
    names = sorted(name for name in mine_by.keys() | theirs_by.keys() if mine_by.get(name) != theirs_by.get(name))
    if all(_are_of_two_kinds(mine_by.get(name), theirs_by.get(name)) for name in names):
        return (
            f"{', '.join(names)} can't be compared: one side has them from a hub, the other as a plain copy; name the "
            "model in the same way for all workers"
        )
    return f"{', '.join(names)} differ in size or content"


def _are_of_two_kinds(mine: Asset | None, theirs: Asset | None) -> bool:
    if mine is None or theirs is None:
        return False
    return mine.num_bytes == theirs.num_bytes and len(mine.digest) != len(theirs.digest)


# --- client door -----------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """A request. The same id with the same body is the same request; with another body it is a conflict. ``tenant``: on
    whose account it is computed; tenants get equal shares. Empty: that of the connection."""

    request_id: RequestId
    prompt: TokenIds
    params: SamplingParams
    seed: _Int
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tenant: Annotated[str, msgspec.Meta(max_length=128)] = ""
    hops: bool = False


class Attach(Message, frozen=True):
    """Send what comes from ``next_index[i]`` on of continuation ``i`` to me from now on; the latest attachment wins."""

    request_id: RequestId
    next_index: Annotated[tuple[Position, ...], msgspec.Meta(max_length=64)]


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


class Cancel(Message, frozen=True):
    request_id: RequestId


class Describe(Message, frozen=True):
    """Ask for the model and the limits."""


class GetAsset(Message, frozen=True):
    """Ask for a part of a tokenizer file."""

    name: Name
    offset: _Int


class Query(Message, frozen=True):
    """``swarmctl`` asks for a report. ``request_id``: for ``trace``, the request meant, or how its id begins.
    ``suppose``: with ``plan``, the plan that would be made if things were so; nothing is changed."""

    what: Literal["status", "nodes", "plan", "stats", "requests", "trace"]
    request_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    suppose: Suppose | None = None


class Join(Message, frozen=True):
    """``swarmctl`` asks a host (a running ``swarm up``) to start workers."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: _Int | None = None


class StopWorker(Message, frozen=True):
    """``swarmctl`` asks a worker to hand over its layers and leave; ``force``: even if nobody else can take them."""

    worker: Name
    force: bool = False


class HostHello(Message, frozen=True):
    """A running ``swarm up`` says that it can start workers."""

    host: Name
    pid: _Int


class HostDone(Message, frozen=True):
    """The host started (or could not start) what a ``StartWorkers`` asked for."""

    ticket: _Int
    started: Names
    error: Text = ""


ClientMessage = (
    Submit | Attach | Ack | Stop | Cancel | Describe | GetAsset | Query | Join | StopWorker | HostHello | HostDone
)


class Accepted(Message, frozen=True):
    """The request is in the journal; it will reach exactly one end."""

    request_id: RequestId


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
    """Seconds from the request's arrival: to its start, its first token, its end; and how often it was recomputed."""

    queued_s: Seconds
    first_token_s: Seconds
    total_s: Seconds
    num_recomputed: _Int


FinishReason = Literal["stop", "length", "cancelled", "failed"]


class Finished(Message, frozen=True):
    """Continuation ``index`` ended: ``num_tokens`` were generated. ``detail`` says why when the reason is "failed"."""

    request_id: RequestId
    index: Position
    reason: FinishReason
    num_prompt: Position
    num_tokens: Position
    timing: Timing
    detail: Text = ""


class Description(Message, frozen=True):
    """The model and the limits. ``manifest`` is None until a worker has brought one."""

    manifest: Manifest | None
    state: Name
    waits_for: Text
    max_context: Position
    max_queue: _Int
    swarm_version: Name


class AssetPart(Message, frozen=True):
    """Bytes of an asset from ``offset`` on (also worker → broker, when the broker asks for its assets)."""

    name: Name
    offset: _Int
    total: _Int
    payload: PayloadSpec


class Report(Message, frozen=True):
    """The answer to ``Query``, ``Join`` and ``StopWorker``. ``body`` is what ``--json`` prints."""

    what: Name
    ok: bool
    body: Json


class StartWorkers(Message, frozen=True):
    """Broker → host: start workers."""

    ticket: _Int
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory_limit: _Int | None = None


class Malformed(Message, frozen=True):
    """The answer to a message that can't be understood. ``field`` names what is wrong."""

    reason: Text


ServerMessage = Accepted | Rejected | Tokens | Finished | Description | AssetPart | Report | StartWorkers | Malformed


# --- control door ----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A worker introduces itself, at its first contact and after every reconnection, with all it holds.

    ``epoch`` is the last one it heard of, so that a broker that has forgotten its own can go above it.
    """

    name: Name
    incarnation: Incarnation
    pid: _Int
    host: Name
    wire_versions: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
    schema: Annotated[str, msgspec.Meta(max_length=64)]
    device: Name
    dtype: Name
    cores: _Int
    endpoint: Endpoint
    memory_bytes: _Int
    kv_budget_bytes: _Int
    costs: Annotated[tuple[LayerCost, ...], msgspec.Meta(max_length=64)]
    manifest: Manifest
    held_layers: LayerRange | None
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    logs: Annotated[tuple[LogRange, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    link: LinkCost | None = None


class Probe(Message, frozen=True):
    """A worker measures its way to the broker: this is answered at once, before it is a member."""

    ticket: _Int
    payload: PayloadSpec | None = None


class Prepared(Message, frozen=True):
    """The layers of ``epoch`` are loaded and warm. ``kv_capacity``: positions that fit, all sequences together.
    ``kernels``: what multiplies here, in which dtype, exact or not."""

    incarnation: Incarnation
    kv_capacity: _Int
    max_sequences: _Int
    load_s: Seconds
    warm_up_s: Seconds
    resident_bytes: _Int
    kernels: Text = ""


class Refused(Message, frozen=True):
    """The plan of ``epoch`` can't be carried out here."""

    incarnation: Incarnation
    reason: Text


class Activated(Message, frozen=True):
    """The plan of ``epoch`` is in force here; this is what survived the truncation."""

    incarnation: Incarnation
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    logs: Annotated[tuple[LogRange, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]


class ReplayDone(Message, frozen=True):
    """These layers now hold the sequence's keys and values up to ``kv``."""

    incarnation: Incarnation
    sequence: SequenceId
    layers: LayerRange
    kv: Position


class ReplayMissing(Message, frozen=True):
    """A replay can't be made here: the log starts only at ``has_from`` (or there is none: ``has_from`` is the stop)."""

    incarnation: Incarnation
    sequence: SequenceId
    boundary: LayerIndex
    has_from: Position


class CopyDone(Message, frozen=True):
    """KV of a sequence has been copied to another stage."""

    incarnation: Incarnation
    sequence: SequenceId
    layers: LayerRange
    to: Incarnation
    kv: Position


class Leaving(Message, frozen=True):
    """The worker wants to leave in good order."""

    incarnation: Incarnation
    reason: Text


class LoadProgress(Message, frozen=True):
    """Loading goes on: bytes read of bytes to read."""

    incarnation: Incarnation
    loaded_bytes: _Int
    total_bytes: _Int


class Stats(Message, frozen=True):
    """Counters of a stage, for ``swarmctl stats``. They only grow within an incarnation, gauges aside."""

    incarnation: Incarnation
    values: Annotated[dict[Name, float], msgspec.Meta(max_length=256)]


class Trouble(Message, frozen=True):
    """Something that can't be repaired in place happened on the data path: the broker shall make a new epoch."""

    incarnation: Incarnation
    reason: Text


WorkerMessage = (
    Hello
    | Probe
    | Prepared
    | Refused
    | Activated
    | ReplayDone
    | ReplayMissing
    | CopyDone
    | Leaving
    | LoadProgress
    | Stats
    | Trouble
    | AssetPart
)


class Welcome(Message, frozen=True):
    """The worker is a member. ``wants``: assets of the manifest that the broker asks this worker to send."""

    beat_endpoint: Endpoint
    data_endpoint: Endpoint
    beat_interval_s: Seconds
    lease_s: Seconds
    wants: Names


class Denied(Message, frozen=True):
    """The worker can't be a member; knocking again will not help."""

    reason: Text


class Prepare(Message, frozen=True):
    """Load these layers beside what is held now; ``standby`` layers too, without KV. The old epoch runs on."""

    layers: LayerRange
    standby: tuple[LayerRange, ...]
    edge: Edge
    max_sequences: _Int


class Fence(Message, frozen=True):
    """From now on, only ``epoch`` and newer count."""


class Activate(Message, frozen=True):
    """The prepared plan of ``epoch`` is in force. Truncate ``live`` sequences to their positions, drop all others.

    Steps of this epoch are numbered from ``first_step`` on without a gap.
    """

    first_step: StepNumber
    live: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]


class Replay(Message, frozen=True):
    """Send the logged inputs of layer ``boundary`` at positions ``start`` … ``stop`` into the layers ``through``."""

    sequence: SequenceId
    boundary: LayerIndex
    start: Position
    stop: Position
    through: LayerRange
    alone: bool = False


class Copy(Message, frozen=True):
    """Copy a sequence's KV of these layers to another stage."""

    sequence: SequenceId
    layers: LayerRange
    to: Edge


class Release(Message, frozen=True):
    """Leave: drop everything and end."""

    reason: Text


class Park(Message, frozen=True):
    """Keep everything, send nothing, until an ``Activate``."""


class Alive(Message, frozen=True):
    """The broker lives: the worker's lease is renewed."""


class Dismiss(Message, frozen=True):
    """The plan of ``epoch`` does without this worker: forget all sequences and logs, keep the layers."""


class Probed(Message, frozen=True):
    """The answer to a probe."""

    ticket: _Int


class Rejoin(Message, frozen=True):
    """The worker was declared out, yet it lives: it shall say Hello with what it holds."""

    reason: Text


Order = (
    Welcome | Denied | Probed | Prepare | Fence | Activate | Replay | Copy | Release | Park | Alive | Dismiss | Rejoin
)


# --- beat door -------------------------------------------------------------------------------------------------------


class Beat(Message, frozen=True):
    """A worker's pulse, from a thread of its own. ``progress`` grows with every piece of work that the compute thread
    finishes (a layer, a loaded tensor); ``since_s``: how long the state has lasted."""

    incarnation: Incarnation
    progress: _Int
    state: Literal["idle", "loading", "computing", "blocked", "parked"]
    blocked_on: Annotated[str, msgspec.Meta(max_length=128)]
    since_s: Seconds
    loop_lag_s: Seconds
    memory_bytes: _Int
    kv_used: _Int
    kv_capacity: _Int


# --- data ------------------------------------------------------------------------------------------------------------


class Step(Message, frozen=True):
    """One micro-batch on its way. What must be ordered with it travels in it: opens, truncations, releases.

    A stage applies ``retire`` (cut to this position and reserve no more than that), ``release``, ``open`` and
    ``truncate`` in this order, then computes ``rows``. ``tokens``: ids of all
    rows' positions, one after the other. ``tensor``: the rows' hidden states, [tokens, hidden]; None at stage 0.
    ``alone``: no other step was in flight when this one was sent, so every stage may use all cores of its host.
    """

    step: StepNumber
    rows: Annotated[tuple[Row, ...], msgspec.Meta(max_length=MAX_ROWS)]
    tokens: TokenIds
    retire: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    release: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    open: Annotated[tuple[Open, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    truncate: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    replay: bool = False
    through: LayerRange | None = None
    alone: bool = False
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    tensor: TensorSpec | None = None


class StepDone(Message, frozen=True):
    """The last stage's answer to every step, also to one that samples nothing."""

    step: StepNumber
    kv: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]
    sampled: Annotated[tuple[Sampled, ...], msgspec.Meta(max_length=MAX_ROWS)]
    failed: Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_ROWS)]
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)]


class KvPart(Message, frozen=True):
    """One block of keys and values on its way to another stage."""

    sequence: SequenceId
    layers: LayerRange
    block: _Int
    tensor: TensorSpec


class WeightPart(Message, frozen=True):
    """A piece of a weight on its way to another worker."""

    name: Name
    offset: _Int
    tensor: TensorSpec


DataMessage = Step | StepDone | KvPart | WeightPart
