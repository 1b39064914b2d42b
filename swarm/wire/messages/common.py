"""Definitions that all messages share: the protocol version, limits, field types, and the two base classes.

Types and limits are in the annotations; the codec rejects everything that violates them and names the field. Small
records that repeat (rows, hops, positions) are arrays on the wire, everything else is a map with field names.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

PROTOCOL_VERSION: Final = 4
OLDEST_VERSION: Final = 1  # The oldest supported version; ``wire.versions`` lists what each one added.

# Limits. They are generous for any real use; their purpose is that sizes are checked before memory is allocated.
MAX_HEADER_BYTES = 24 << 20  # The pixels of a request's images take up to half, a million token ids about 5 MB.
MAX_TENSOR_BYTES = 1 << 30
MAX_TOKENS = 1 << 20
MAX_ROWS = 4096
MAX_SEQUENCES = 1 << 16
MAX_LAYERS = 1 << 12
MAX_TEXT = 4096
MAX_STAGES = 1 << 10
MAX_NAME = 128
# Default share of the memory left by the weights that a worker uses for keys and values.
KV_SHARE: Final = 0.25
BLOCK: Final = 32  # Positions. Unit in which KV capacity is counted, by the broker and the stages alike.
ASSET_PART_BYTES = 1 << 20
# Of a tokenizer file. Brokers keep these in memory; the largest known ones have about 30 MB.
MAX_ASSET_BYTES = 64 << 20

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Epoch = Whole
Version = Annotated[int, msgspec.Meta(ge=OLDEST_VERSION, le=PROTOCOL_VERSION)]
StepNumber = Whole
SequenceId = Whole
Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_TOKENS)]
LayerIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
RequestId = Name
Incarnation = Name
Endpoint = Annotated[str, msgspec.Meta(max_length=256)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]  # A fraction of a whole.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
# CURVE public key. Its secret half never leaves the machine that made it.
PublicKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
# Identifies a listening end at the relay; empty: no relay.
Ticket = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
# Log probabilities of a prompt's tokens (``wire.prompt_logprobs``), of which one message holds all.
MAX_PROMPT_LOGPROB_BYTES: Final = 4 << 20
PromptLogprobBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_PROMPT_LOGPROB_BYTES)]
VectorBytes = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]  # float32, little-endian
Json = dict[str, object]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of small values inside messages; an array on the wire."""


class Lineage(Record, frozen=True):
    """Identity of the broker's life that a message belongs to: which journal, and which opening of it.

    Numbers of epochs, steps and sequences are comparable within one lineage only. ``journal``: random, drawn when the
    journal was created. ``generation`` grows with every opening by a random amount, so that two copies of one journal
    never reach the same lineage.
    """

    journal: Digest = ""
    generation: Whole = 0


NO_LINEAGE: Final = Lineage()  # Lineage of messages outside of any broker's life.


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=lambda name: "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_"),
):
    """Base class of all messages.

    ``epoch`` is 0 where none applies (everywhere on the client channel). ``cause``: id of the broker's event that led
    to this message, to correlate the logs of several machines; empty where that has no use. ``lineage``: the broker's
    life that the epoch belongs to, between processes of the swarm; in a worker's Hello, the last lineage it was part
    of. ``v``: the protocol version that introduced the current fields of this kind.
    """

    v: Version = 1
    epoch: Epoch = 0
    lineage: Lineage = NO_LINEAGE
    cause: Annotated[str, msgspec.Meta(max_length=32)] = ""


def num_blocks(positions: int) -> int:
    """Return the number of blocks that hold this many positions."""
    return -(-positions // BLOCK)
