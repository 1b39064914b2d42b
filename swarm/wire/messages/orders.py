"""What the broker tells workers at the control door."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.wire.messages.common import (
    MAX_NAME,
    MAX_SEQUENCES,
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
from swarm.wire.messages.data import Open, Trial
from swarm.wire.messages.locks import BrokerKey, RotateYours
from swarm.wire.messages.records import Edge, LayerRange, LayerRanges, SequencePosition


class Welcome(Message, frozen=True):
    """The worker is a member. ``wants``: assets of the manifest that the broker asks this worker to send."""

    beat_endpoint: Endpoint
    data_endpoint: Endpoint
    beat_interval_s: Seconds
    lease_s: Seconds
    wants: Names


class Denied(Message, frozen=True, kw_only=True):
    """The worker can't be a member; knocking again will not help. ``dtype``: it would, with weights of this type."""

    reason: Text
    v: Version = 3
    dtype: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Prepare(Message, frozen=True):
    """Load these layers beside what is held now. The old epoch runs on. ``standby``: leave room for these beside them,
    without KV; what is warm of them stays so, the rest is asked for with ``Keep`` when nobody waits for it.
    ``before``: the key of who sends the steps of this plan, for doors that go by keys; nobody else is heard once it is
    in force. ``relay``: where its steps are waited for beside the own door, ``tcp://HOST:PORT/TICKET``; the host is
    ``*`` for the broker's own machine."""

    layers: LayerRange
    standby: LayerRanges
    edge: Edge
    max_sequences: Whole
    before: PublicKey | None = None
    relay: Endpoint = ""


class Expect(Message, frozen=True, tag="expect"):
    """Hear who has this key too, until the next fence: it will send a part of a recheck."""

    key: PublicKey


class Shun(Message, frozen=True, tag="shun"):
    """Whoever has this key is out: hear it no more, and send it nothing, also of what is under way. (A fence comes with
    the next plan; there may be none.)"""

    key: PublicKey


class Keep(Message, frozen=True, tag="keep"):
    """Load these layers, without KV, and keep them warm for the case that their holder dies; forget any others that no
    plan needs. Steps, and plans, go before."""

    layers: LayerRanges


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


class Recheck(Message, frozen=True):
    """Send the logged inputs of layer ``boundary`` at positions before ``stop`` to the first leg of the trial. At
    boundary 0 that is the receiver itself, and the tokens are what goes in. ``open`` tells of the sequence, with the
    tokens at all these positions, and nothing of it is opened."""

    boundary: LayerIndex
    stop: Position
    open: Open
    trial: Trial


class TellDigest(Message, frozen=True, tag="tell_digest"):
    """Tell the digest of the logged inputs of layer ``boundary`` at positions before ``stop``."""

    ticket: Whole
    sequence: SequenceId
    boundary: LayerIndex
    stop: Position


class Copy(Message, frozen=True):
    """Copy a sequence's KV of these layers to another stage."""

    sequence: SequenceId
    layers: LayerRange
    to: Edge


class Release(Message, frozen=True, kw_only=True):
    """Leave: drop everything and end. ``again``: so that whoever started it starts it anew."""

    reason: Text
    v: Version = 2
    again: bool = False


class Alive(Message, frozen=True, tag="alive"):
    """The broker lives: the worker's lease is renewed."""


class Dismiss(Message, frozen=True, tag="dismiss"):
    """The plan of ``epoch`` does without this worker: forget all sequences and logs, keep the layers."""


class Probed(Message, frozen=True):
    """The answer to a probe."""

    ticket: Whole


class Rejoin(Message, frozen=True):
    """The worker was declared out, yet it lives: it shall say Hello with what it holds."""

    reason: Text


Order = (
    Welcome
    | Denied
    | Probed
    | Prepare
    | Expect
    | Shun
    | Keep
    | Fence
    | Activate
    | Replay
    | Recheck
    | TellDigest
    | Copy
    | Release
    | Alive
    | Dismiss
    | Rejoin
    | BrokerKey
    | RotateYours
)
