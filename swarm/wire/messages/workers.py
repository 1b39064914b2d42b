"""What workers tell the broker: answers and news at the control door, the pulse at the beat door."""

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
from swarm.wire.messages.locks import BrokerKeyKept
from swarm.wire.messages.manifest import AssetPart, Manifest
from swarm.wire.messages.records import LayerRange, LayerRanges, PayloadSpec, SequencePosition, Setting


class RangePosition(Record, frozen=True):
    """How many positions of a sequence have keys and values in these layers."""

    layers: LayerRange
    position: Position


class HeldSequence(Record, frozen=True):
    """What a stage holds of one sequence: KV per range of layers. In a Hello also ``digests`` of the tokens that it was
    computed from (``wire.digests``), and the ``limit`` that room was reserved for: keys and values count for these
    tokens and a sequence of that limit, and for no others."""

    sequence: SequenceId
    kv: Annotated[tuple[RangePosition, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    digests: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=64)] = ()
    limit: Position = 0


class LogRange(Record, frozen=True):
    """A sender's log holds the inputs of layer ``boundary`` at positions ``start`` up to, not including, ``stop``."""

    sequence: SequenceId
    boundary: LayerIndex
    start: Position
    stop: Position


class NotFinite(Record, frozen=True):
    """Hidden states that are infinite or no numbers: who sent them, out of which layers, and in which sequences, with
    the first such position of each."""

    worker: Name
    layers: LayerRange
    rows: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]


class StepFailure(Record, frozen=True):
    """A step that raised: out of which layers, and where each of its rows ends. ``is_memory``: the device had too
    little memory for it, also after the worker had dropped what it could."""

    layers: LayerRange
    rows: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]
    is_memory: bool


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


MEASURABLE_BYTES_PER_S: Final = 1e11  # more than this is a large message that took no longer than a small one


class LinkCost(Record, frozen=True):
    """Measured at join between a worker and the broker, over the worker's own connection: there and back, and bytes."""

    round_trip_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]


class Hello(Message, frozen=True, kw_only=True):
    """A worker introduces itself, at its first contact and after every reconnection, with all it holds. ``key``: by
    which others know it when it knocks at their doors. ``ticket``: by which a relay knows its own door, if need be.
    ``build``: of which version of Swarm it is. ``kv_share``: the part of what weights leave of ``memory_bytes`` that it
    gives to keys and values. ``settings``: those that it runs by, for who asks.

    ``epoch`` is the last one it heard of, in the life that ``lineage`` names. The broker takes no number from a worker:
    whoever is welcomed by another life begins anew with that one's.
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


class Probe(Message, frozen=True):
    """A worker measures its way to the broker: this is answered at once, before it is a member."""

    ticket: Whole
    payload: PayloadSpec | None = None


class Prepared(Message, frozen=True):
    """The layers of ``epoch`` are loaded and warm. ``kv_capacity``: positions that fit, all sequences together.
    ``kernels``: what multiplies here, in which dtype, exact or not. ``bits``: stages with equal ones compute the same
    bits."""

    incarnation: Incarnation
    kv_capacity: Whole
    max_sequences: Whole
    load_s: Seconds
    warm_up_s: Seconds
    resident_bytes: Whole
    kernels: Text = ""
    bits: Text = ""


class Refused(Message, frozen=True):
    """The plan of ``epoch`` can't be carried out here. ``cant_reach``: since the door of this one can't be reached from
    here."""

    incarnation: Incarnation
    reason: Text
    cant_reach: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Activated(Message, frozen=True):
    """The plan of ``epoch`` is in force here; this is what survived the truncation. ``kept``: layers that are warm here
    beside those of the plan."""

    incarnation: Incarnation
    held: Annotated[tuple[HeldSequence, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    logs: Annotated[tuple[LogRange, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    kept: LayerRanges = ()


class Kept(Message, frozen=True, tag="kept"):
    """These layers are warm here beside those of the plan, and nothing else is. ``wanted`` and not among them could not
    be loaded."""

    incarnation: Incarnation
    layers: LayerRanges
    wanted: LayerRanges
    load_s: Seconds


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


class Rechecked(Message, frozen=True):
    """What came out of layers that were computed again: ``digest`` of the hidden states, or after the model's last
    layer the ``tokens`` drawn. If it could not be done, ``problem`` says why and all else is empty."""

    incarnation: Incarnation
    ticket: Whole
    digest: Digest = ""
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] = ()
    problem: Text = ""


class Digested(Message, frozen=True, tag="digested"):
    """The digest of what the log holds; empty if it doesn't hold all of it."""

    incarnation: Incarnation
    ticket: Whole
    digest: Digest


class LoadProgress(Message, frozen=True):
    """Loading goes on: bytes read of bytes to read."""

    incarnation: Incarnation
    loaded_bytes: Whole
    total_bytes: Whole


class Stats(Message, frozen=True):
    """Counters of a stage, for ``swarmctl stats``. They only grow within an incarnation, gauges aside."""

    incarnation: Incarnation
    values: Annotated[dict[Name, float], msgspec.Meta(max_length=256)]


class Trouble(Message, frozen=True, kw_only=True, tag="trouble"):
    """Something that can't be repaired in place happened on the data path: the broker shall make a new epoch.

    ``damaged``: a message came that is not what was sent, or none did; that is nobody's work, and no request's fault.
    ``not_finite``: what came was sent like that; its sender computed wrongly. ``failed``: a step, or a chunk of a
    replay, raised here."""

    incarnation: Incarnation
    reason: Text
    damaged: bool = False
    not_finite: NotFinite | None = None
    failed: StepFailure | None = None
    v: Version = 3


class SelfTested(Message, frozen=True, kw_only=True):
    """A worker whose last step failed has tested its device. ``problem``: why the test failed; empty: it passed, and a
    Hello follows."""

    incarnation: Incarnation
    problem: Text = ""
    v: Version = 3


WorkerMessage = (
    Hello
    | Probe
    | Prepared
    | Refused
    | Activated
    | Kept
    | Rechecked
    | Digested
    | ReplayDone
    | ReplayMissing
    | CopyDone
    | Leaving
    | LoadProgress
    | Stats
    | Trouble
    | SelfTested
    | AssetPart
    | BrokerKeyKept
)


class Beat(Message, frozen=True, tag="beat"):
    """A worker's pulse, from a thread of its own. ``progress`` grows with every piece of work that the compute thread
    finishes (a layer, a loaded tensor); ``since_s``: how long the state has lasted; ``asleep_s``: for how long it has
    been computing without progress while none of its threads ran or waited for a core."""

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
