"""Messages from the broker to workers, on the control channel."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.wire.messages.common import (
    MAX_NAME,
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STAGES,
    Endpoint,
    LayerIndex,
    Message,
    Names,
    Position,
    PublicKey,
    Seconds,
    SequenceId,
    StepNumber,
    Text,
    Version,
    Whole,
)
from swarm.wire.messages.data import Open, RecheckRoute
from swarm.wire.messages.keys import BrokerKey, RotateKey
from swarm.wire.messages.manifest import AdapterEntries
from swarm.wire.messages.records import (
    Edge,
    KvSource,
    KvTarget,
    LayerRange,
    LayerRanges,
    SequencePosition,
    SequenceRange,
    SharedPrefix,
)


class Welcome(Message, frozen=True):
    """Admission of a worker as a member. ``wants``: assets of the manifest that the worker shall send to the broker."""

    beat_endpoint: Endpoint
    data_endpoint: Endpoint
    beat_interval_s: Seconds
    lease_s: Seconds
    wants: Names


class Denied(Message, frozen=True, kw_only=True):
    """Refusal of a worker as a member; reconnecting will not help. ``dtype``: type of weights with which it would be
    admitted."""

    reason: Text
    v: Version = 3
    dtype: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Prepare(Message, frozen=True):
    """Order to load these layers, in addition to what is loaded now. The old epoch continues meanwhile.

    ``standby``: reserve memory for these layers, without KV. Those that are already warm stay loaded; the broker orders
    the rest with ``KeepWarm`` when no request is waiting. ``before``: key of the upstream stage of this plan, where
    keys are used; no other sender is accepted once the plan is active. ``relay``: where to wait for its steps in
    addition to the own listener, ``tcp://HOST:PORT/TICKET``; host ``*`` means the broker's machine.
    """

    layers: LayerRange
    standby: LayerRanges
    edge: Edge
    max_sequences: Whole
    before: PublicKey | None = None
    relay: Endpoint = ""


class AllowKey(Message, frozen=True, tag="expect"):
    """Order to accept data from this key, too, until the next fence: its owner will send a part of a recheck."""

    key: PublicKey


class BlockKey(Message, frozen=True, tag="shun"):
    """Order to block this key: its owner has left the swarm. Accept nothing more from it and send it nothing, not even
    what is queued. (Blocking does not wait for the fence of the next plan: there may be no next plan.)"""

    key: PublicKey


class KeepWarm(Message, frozen=True, tag="keep"):
    """Order to load these layers without KV and keep them warm, in case their holder dies; and to unload other layers
    that no plan needs. Steps and plans have priority."""

    layers: LayerRanges


class SetAdapters(Message, frozen=True, kw_only=True):
    """Order to load these adapters, in addition to those of the worker's settings, and to drop others once no sequence
    has them. A worker that is not welcomed yet sends Hello again when it has them. ``number`` names the order in its
    answer, ``AdaptersSet``."""

    number: Whole
    adapters: AdapterEntries
    v: Version = 4


class Fence(Message, frozen=True):
    """From now on only messages of ``epoch`` and later epochs are valid."""


class Activate(Message, frozen=True):
    """The prepared plan of ``epoch`` becomes active. Truncate the ``live`` sequences to their positions, drop all
    others.

    Steps of this epoch are numbered without gaps from ``first_step`` on. ``share_unit``: the unit by which forked
    sequences share positions in every stage (``wire.shared_positions``); 0: the broker counts each sequence in full.
    ``shared``: the prefixes that live sequences still share, in an order in which every source comes before those that
    share with it. Layers that lack such a prefix get it from the source, once that has it in all layers.
    """

    first_step: StepNumber
    live: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    share_unit: Position = 0
    shared: Annotated[tuple[SharedPrefix, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()


class Replay(Message, frozen=True):
    """Order to send the logged inputs of layer ``boundary`` at positions ``start`` … ``stop`` through the layers
    ``through``. ``more``: positions of other sequences, in the same step."""

    sequence: SequenceId
    boundary: LayerIndex
    start: Position
    stop: Position
    through: LayerRange
    alone: bool = False
    more: Annotated[tuple[SequenceRange, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()


class Recheck(Message, frozen=True):
    """Order to send the logged inputs of layer ``boundary`` at positions before ``stop`` to the first hop of the route.

    At boundary 0 the receiver itself is the first hop, and the inputs are the tokens. ``open`` describes the sequence,
    with the tokens at all these positions; no sequence is opened.
    """

    boundary: LayerIndex
    stop: Position
    open: Open
    trial: RecheckRoute


class GetDigest(Message, frozen=True, tag="tell_digest"):
    """Query for the digest of the logged inputs of layer ``boundary`` at positions before ``stop``."""

    ticket: Whole
    sequence: SequenceId
    boundary: LayerIndex
    stop: Position


class SendKv(Message, frozen=True, kw_only=True):
    """Order to send copies of keys and values to these workers while the plan of ``epoch`` serves. It replaces the
    earlier order; without targets, sending ends."""

    targets: Annotated[tuple[KvTarget, ...], msgspec.Meta(max_length=MAX_STAGES)]
    v: Version = 4


class ReceiveKv(Message, frozen=True, kw_only=True):
    """Order to accept copies of keys and values from these workers while the plan of ``epoch`` serves. It replaces the
    earlier order; copies of other layers are dropped. ``awaited``: report with ``KvHeld`` as soon as all these
    positions are held in the awaited layers. ``ended``: drop the copies of these sequences, whose end a worker without
    a part in the plan does not see."""

    sources: Annotated[tuple[KvSource, ...], msgspec.Meta(max_length=MAX_STAGES)]
    v: Version = 4
    awaited: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    ended: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()


class SpillKv(Message, frozen=True, kw_only=True):
    """Order to write keys and values to the local disk while the plan of ``epoch`` serves: those of sequences with at
    least ``num_positions`` positions, except ``excluded`` ones. ``bits``: the same at all stages of the plan, so that
    equal tokens have equal keys and values."""

    num_positions: Position
    bits: Text
    v: Version = 4
    excluded: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()


class RestoreKv(Message, frozen=True, kw_only=True):
    """Order to read keys and values of a sequence from the local disk, from position ``start`` on, which it has reached
    in every layer, up to at most ``stop``. Answered by ``KvRestored``, after ``within_s`` seconds with what is there by
    then."""

    sequence: SequenceId
    ticket: Whole
    start: Position
    stop: Position
    within_s: Seconds
    v: Version = 4


class Release(Message, frozen=True, kw_only=True):
    """Order to drop everything and exit. ``again``: exit in a way that makes the worker's supervisor restart it."""

    reason: Text
    v: Version = 2
    again: bool = False


class LeaseRenewed(Message, frozen=True, tag="alive"):
    """Renewal of the worker's lease: the broker is alive."""


class Unassign(Message, frozen=True, tag="dismiss"):
    """The plan of ``epoch`` does not use this worker: drop all sequences and logs, keep the layers."""


class Probed(Message, frozen=True):
    """Answer to a ``Probe``."""

    ticket: Whole


class Rejoin(Message, frozen=True):
    """Request to a worker that was declared out but is alive: send Hello again, with everything that it holds."""

    reason: Text


Order = (
    Welcome
    | Denied
    | Probed
    | Prepare
    | AllowKey
    | BlockKey
    | KeepWarm
    | Fence
    | SetAdapters
    | Activate
    | Replay
    | Recheck
    | GetDigest
    | SendKv
    | ReceiveKv
    | SpillKv
    | RestoreKv
    | Release
    | LeaseRenewed
    | Unassign
    | Rejoin
    | BrokerKey
    | RotateKey
)
