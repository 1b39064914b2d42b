"""What all messages share: the protocol's version, the bounds, the types of fields, and the two roots.

Types and limits stand in the annotations; the codec refuses whatever does not fit them and names the field. Small
records that repeat (rows, hops, positions) are arrays on the wire, everything else is a map with names.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

PROTOCOL_VERSION: Final = 3
OLDEST_VERSION: Final = 1  # that is spoken with, too; what each added is in ``wire.versions``

# Bounds. They are generous for any real use; what matters is that there are some, checked before anything is allocated.
MAX_HEADER_BYTES = 8 << 20  # a prompt of a million token ids is about 5 MB
MAX_TENSOR_BYTES = 1 << 30
MAX_TOKENS = 1 << 20
MAX_ROWS = 4096
MAX_SEQUENCES = 1 << 16
MAX_LAYERS = 1 << 12
MAX_TEXT = 4096
MAX_STAGES = 1 << 10
MAX_NAME = 128
# The part of what the weights leave that a worker gives to keys and values, if it doesn't say otherwise.
KV_SHARE: Final = 0.25
BLOCK: Final = 32  # positions: the unit in which room for keys and values is counted, by broker and stages alike
ASSET_PART_BYTES = 1 << 20
MAX_ASSET_BYTES = 64 << 20  # of a tokenizer's file; brokers keep them in memory, and the largest known have some 30 MB

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
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]  # of a whole
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
PublicKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # of CURVE; its secret half stays where it was made
Ticket = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]  # by which the relay knows a door; empty: no relay
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
Json = dict[str, object]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A small value inside messages; an array on the wire."""


class Lineage(Record, frozen=True):
    """Whose life a message is of: which journal, and which opening of it. Numbers of epochs, steps and sequences mean
    something within one life only. ``journal``: random, drawn when the journal was made. ``generation`` grows with
    every opening, by a random amount: two journals one of which was a copy of the other don't come to the same."""

    journal: Digest = ""
    generation: Whole = 0


NOBODYS: Final = Lineage()


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
    empty where nobody would look for it. ``lineage``: of the broker's life that the epoch is of, between processes of
    the swarm; a worker's Hello tells of which life it was told last. ``v``: the version of the protocol that gave this
    kind the fields that it has."""

    v: Version = 1
    epoch: Epoch = 0
    lineage: Lineage = NOBODYS
    cause: Annotated[str, msgspec.Meta(max_length=32)] = ""


def num_blocks(positions: int) -> int:
    """How many blocks hold so many positions."""
    return -(-positions // BLOCK)
