"""Messages from workers to the broker: answers and reports on the control channel, heartbeats on the heartbeat
channel."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from swarm.wire.messages.common import (
    KV_SHARE,
    MAX_LAYERS,
    MAX_ROWS,
    MAX_SEQUENCES,
    Digest,
    Endpoint,
    Incarnation,
    LayerIndex,
    Message,
    Name,
    Part,
    Position,
    PublicKey,
    Record,
    Seconds,
    SequenceId,
    Text,
    Ticket,
    TokenId,
    Version,
    Whole,
)
from swarm.wire.messages.keys import BrokerKeyKept
from swarm.wire.messages.manifest import AdapterEntries, AssetPart, Manifest
from swarm.wire.messages.records import LayerRange, LayerRanges, PayloadSpec, SequencePosition, Setting


class RangePosition(Record, frozen=True):
    """Number of positions of a sequence for which these layers have keys and values."""

    layers: LayerRange
    position: Position


class HeldSequence(Record, frozen=True):
    """A sequence's keys and values on a stage, per range of layers.

    In a Hello, and after copies were taken over, it also has ``digests`` of the tokens that they were computed from
    (``wire.digests``), and the ``limit`` that the reservation was made for: the keys and values are valid only for
    these tokens and a sequence of this limit.
    """

    sequence: SequenceId
    kv: Annotated[tuple[RangePosition, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    digests: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=64)] = ()
    limit: Position = 0


class LogRange(Record, frozen=True):
    """Inputs of layer ``boundary`` at positions ``start`` up to, not including, ``stop`` that a sender's activation log
    holds."""

    sequence: SequenceId
    boundary: LayerIndex
    start: Position
    stop: Position


class NotFinite(Record, frozen=True):
    """Report of infinite or NaN hidden states: the sending worker, its layers, and the affected sequences with the
    first such position of each."""

    worker: Name
    layers: LayerRange
    rows: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]


class StepFailure(Record, frozen=True):
    """Report of a step that raised: the layers, and the end position of each of its rows. ``is_memory``: the device ran
    out of memory, even after the worker had freed what it could."""

    layers: LayerRange
    rows: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]
    is_memory: bool


class LayerCost(Record, frozen=True):
    """A cost measured at join.

    ``prefill``: seconds for one layer to process ``rows`` positions of one sequence after ``context`` earlier
    positions. ``decode``: seconds for one layer to process one more position of ``rows`` sequences of length
    ``context``. ``stage``: overhead of a step of ``rows`` rows in addition to its layers. ``head``, ``embed``: seconds
    for ``rows`` rows. ``alone``: measured with all cores of the host, as in a step that is the only one in flight.
    """

    kind: Literal["prefill", "decode", "stage", "head", "embed"]
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    context: Position
    seconds: Seconds
    alone: bool


# Above this the measurement is meaningless: a large message took no longer than a small one.
MEASURABLE_BYTES_PER_S: Final = 1e11


class LinkCost(Record, frozen=True):
    """Cost of the connection between a worker and the broker, measured at join over the worker's own connection: round
    trip and throughput."""

    round_trip_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]


class Hello(Message, frozen=True, kw_only=True):
    """Introduction of a worker, at its first contact and after every reconnection, with everything it holds.

    ``key``: its public key, by which other workers authenticate it. ``ticket``: identifies its listener at the relay,
    if it needs one. ``build``: its release of Swarm. ``kv_share``: fraction of ``memory_bytes`` left by the weights
    that it uses for keys and values. ``settings``: its settings, for operators who ask. ``kv_endpoint``: its listener
    for copies of keys and values; empty: it takes none. ``bits``: as in ``Prepared``, if it has loaded anything.
    ``spill_from``: length from which it writes sequences to disk; 0: none. ``adapters``: those loaded at run time.
    ``dtypes``: types of weights that it can compute with, as its settings allow; empty: an older build, which does not
    report them.

    ``epoch`` is the last one the worker received, in the lineage ``lineage``. The broker never adopts numbers from a
    worker: a worker that is welcomed by another lineage starts over with that lineage's numbers.
    """

    name: Name
    incarnation: Incarnation
    pid: Whole
    host: Name
    wire_versions: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
    schema: Annotated[str, msgspec.Meta(max_length=64)]
    device: Name
    dtype: Name
    cores: Whole
    endpoint: Endpoint
    memory_bytes: Whole
    costs: Annotated[tuple[LayerCost, ...], msgspec.Meta(max_length=64)]
    manifest: Manifest
    held_layers: LayerRange | None
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    logs: Annotated[tuple[LogRange, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    kept: LayerRanges = ()
    link: LinkCost | None = None
    key: PublicKey | None = None
    ticket: Ticket = ""
    v: Version = 2
    build: Annotated[str, msgspec.Meta(max_length=64)] = ""
    kv_share: Part = KV_SHARE
    settings: Annotated[tuple[Setting, ...], msgspec.Meta(max_length=256)] = ()
    kv_endpoint: Endpoint = ""
    bits: Text = ""
    spill_from: Position = 0
    dtypes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=8)] = ()
    adapters: AdapterEntries = ()


class Probe(Message, frozen=True):
    """Measurement of the connection to the broker. The broker answers immediately, even before the worker is a
    member."""

    ticket: Whole
    payload: PayloadSpec | None = None


class Prepared(Message, frozen=True):
    """Report that the layers of ``epoch`` are loaded and warm.

    ``kv_capacity``: positions that fit, over all sequences. ``kernels``: the matrix multiplication in use, its dtype,
    and whether it is exact. ``bits``: stages with equal values compute bit-identical results. ``share_unit``: positions
    of a chunk that sequences can share (``wire.shared_positions``); 0: it guarantees no sharing. ``share_mappings``:
    number of mappings that sharing sequences may take.
    """

    incarnation: Incarnation
    kv_capacity: Whole
    max_sequences: Whole
    load_s: Seconds
    warm_up_s: Seconds
    resident_bytes: Whole
    kernels: Text = ""
    bits: Text = ""
    share_unit: Position = 0
    share_mappings: Whole = 0


class Refused(Message, frozen=True):
    """Report that this worker can't carry out the plan of ``epoch``. ``cant_reach``: the peer whose listener is
    unreachable from here, if that is the cause."""

    incarnation: Incarnation
    reason: Text
    cant_reach: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Activated(Message, frozen=True):
    """Report that the plan of ``epoch`` is active, with what survived the truncation. ``kept``: warm layers in addition
    to the plan's. ``copies``: copies of other workers' keys and values, in layers that are not the plan's."""

    incarnation: Incarnation
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    logs: Annotated[tuple[LogRange, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    kept: LayerRanges = ()
    copies: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()


class KvHeld(Message, frozen=True, kw_only=True):
    """Report of the copies of other workers' keys and values held here, in addition to those of the plan's own layers.

    Sent when they have changed, at most once a second, and immediately when the positions that ``ReceiveKv`` awaits are
    complete. ``num_bytes``: memory that they take; ``free_bytes``: memory left for more.
    """

    incarnation: Incarnation
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    v: Version = 4
    num_bytes: Whole = 0
    free_bytes: Whole = 0
    is_complete: bool = False


class KvRestored(Message, frozen=True, kw_only=True):
    """Answer to ``RestoreKv``: the position up to which all layers of this stage have the sequence's keys and
    values."""

    incarnation: Incarnation
    sequence: SequenceId
    ticket: Whole
    position: Position
    v: Version = 4


class KeptWarm(Message, frozen=True, tag="kept"):
    """Report of the standby layers: ``layers`` are warm in addition to the plan's, and no others. Layers in ``wanted``
    that are not in ``layers`` could not be loaded. ``bits``: as in ``Prepared``, for all that is loaded."""

    incarnation: Incarnation
    layers: LayerRanges
    wanted: LayerRanges
    load_s: Seconds
    bits: Text = ""


class ReplayDone(Message, frozen=True):
    """Report that these layers have the sequence's keys and values up to ``kv``. ``more``: other sequences of the same
    step, each with its position."""

    incarnation: Incarnation
    sequence: SequenceId
    layers: LayerRange
    kv: Position
    more: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()


class ReplayMissing(Message, frozen=True):
    """Report that a replay is impossible here: the log starts at ``has_from`` (equal to the stop if there is no
    log)."""

    incarnation: Incarnation
    sequence: SequenceId
    boundary: LayerIndex
    has_from: Position


class AdaptersSet(Message, frozen=True, kw_only=True):
    """Answer to ``SetAdapters`` number ``number``: the adapters that it named, with their digests; or the ``problem``
    because of which one of them is not loaded."""

    incarnation: Incarnation
    number: Whole
    adapters: AdapterEntries = ()
    problem: Text = ""
    v: Version = 4


class Leaving(Message, frozen=True):
    """Request of a worker to leave in an orderly way."""

    incarnation: Incarnation
    reason: Text


class Rechecked(Message, frozen=True):
    """Result of a recheck: ``digest`` of the hidden states, or the ``tokens`` sampled after the model's last layer. If
    the recheck was impossible, ``problem`` has the reason and the other fields are empty."""

    incarnation: Incarnation
    ticket: Whole
    digest: Digest = ""
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] = ()
    problem: Text = ""


class LogDigest(Message, frozen=True, tag="digested"):
    """Digest of the logged inputs; empty if the log does not hold all of them."""

    incarnation: Incarnation
    ticket: Whole
    digest: Digest


class LoadProgress(Message, frozen=True):
    """Progress of loading: bytes read out of bytes to read."""

    incarnation: Incarnation
    loaded_bytes: Whole
    total_bytes: Whole


class Stats(Message, frozen=True):
    """Counters of a stage, for ``swarmctl stats``. Except for gauges they only grow within an incarnation."""

    incarnation: Incarnation
    values: Annotated[dict[Name, float], msgspec.Meta(max_length=256)]


class DataPathError(Message, frozen=True, kw_only=True, tag="trouble"):
    """Report of an error on the data path that can't be repaired in place: the broker must start a new epoch.

    ``damaged``: a message was altered or lost in transit; no worker and no request is to blame. ``not_finite``: the
    received values were sent that way, so the sender computed wrongly. ``failed``: a step, or a chunk of a replay,
    raised here. ``kv_overfull``: the worker's keys and values need more memory than the broker counts, because the
    worker can't share what the plan counts as shared. ``misplaced``: a step or a replay does not fit what is stored
    here. No request is to blame for these two.
    """

    incarnation: Incarnation
    reason: Text
    damaged: bool = False
    not_finite: NotFinite | None = None
    failed: StepFailure | None = None
    kv_overfull: bool = False
    misplaced: bool = False
    v: Version = 3


class SelfTested(Message, frozen=True, kw_only=True):
    """Result of a device test that a worker runs after a failed step. ``problem``: why the test failed; empty: it
    passed, and a Hello follows."""

    incarnation: Incarnation
    problem: Text = ""
    v: Version = 3


WorkerMessage = (
    Hello
    | Probe
    | Prepared
    | Refused
    | Activated
    | KeptWarm
    | AdaptersSet
    | KvHeld
    | KvRestored
    | Rechecked
    | LogDigest
    | ReplayDone
    | ReplayMissing
    | Leaving
    | LoadProgress
    | Stats
    | DataPathError
    | SelfTested
    | AssetPart
    | BrokerKeyKept
)


class Heartbeat(Message, frozen=True, tag="beat"):
    """Heartbeat of a worker, sent by a thread of its own.

    ``progress`` grows with every piece of work that the compute thread finishes (a layer, a loaded tensor).
    ``since_s``: how long the state has lasted. ``asleep_s``: how long the worker has been computing without progress
    while none of its threads ran or waited for a core.
    """

    incarnation: Incarnation
    progress: Whole
    state: Literal["idle", "loading", "computing", "blocked", "parked"]
    blocked_on: Annotated[str, msgspec.Meta(max_length=128)]
    since_s: Seconds
    asleep_s: Seconds
    loop_lag_s: Seconds
    memory_bytes: Whole
    kv_used: Whole
    kv_capacity: Whole
