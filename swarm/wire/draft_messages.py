"""Messages between the broker and the process of its draft model, over the process's stdin and stdout.

The broker starts the process itself, so both are of the same version. A frame is its length in four bytes, the highest
first, and a message in msgpack. The broker sends :class:`AskProposals`, one at a time; everything else comes from the
draft process. ``position`` and ``start`` count tokens of the whole sequence, prompt included.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

from swarm.errors import WireError
from swarm.params import SamplingParams
from swarm.wire.messages import MAX_PROPOSED, Asset
from swarm.wire.messages.common import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    Name,
    Position,
    Record,
    Seconds,
    SequenceId,
    Text,
    TokenId,
    TokenIds,
    Whole,
)

LENGTH_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 16 << 20
MAX_ASKED: Final = 256  # sequences of one request
CATCH_UP: Final = 64  # positions, of all sequences together, that a request computes before its first draws
NUM_CLASSES: Final = 16  # classes of log probabilities

_SequenceIds = Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]


class DraftOpening(Record, frozen=True):
    """What decides a sequence's draws, besides its tokens. ``params``: without what a draft does not need.
    ``limit``: maximum number of positions."""

    params: SamplingParams
    seed: Whole
    num_prompt: Position
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class AskedSequence(Record, frozen=True):
    """A sequence for which up to ``most`` tokens are to be proposed. ``tokens``: its tokens from ``start`` on; those
    before were sent earlier. ``opening``: with the first tokens."""

    sequence: SequenceId
    start: Position
    tokens: TokenIds
    most: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROPOSED)]
    opening: DraftOpening | None = None


class DraftedTokens(Record, frozen=True):
    """Proposed tokens of a sequence from position ``start`` on, with the draft model's log probability of each."""

    sequence: SequenceId
    start: Position
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_PROPOSED)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_PROPOSED)]


class _DraftMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class of the messages."""


def class_of(logprob: float) -> int:
    """Return the class of a log probability: 0 for a certain token, the last for everything improbable."""
    return min(NUM_CLASSES - 1, int(5 * math.sqrt(max(0.0, -logprob)))) if logprob > -math.inf else NUM_CLASSES - 1


class AskProposals(_DraftMessage, frozen=True):
    """Request for proposals.

    ``acceptance``: how likely the stages draw a proposed token too, by the class of its log probability, if they have
    drawn those before it. A proposal ends with the token at which the product of these falls below ``least``.
    ``forget``: sequences that have ended, which the draft process drops first.
    """

    number: Whole
    least: float
    acceptance: Annotated[tuple[float, ...], msgspec.Meta(min_length=NUM_CLASSES, max_length=NUM_CLASSES)]
    sequences: Annotated[tuple[AskedSequence, ...], msgspec.Meta(max_length=MAX_ASKED)]
    forget: _SequenceIds = ()


class Proposals(_DraftMessage, frozen=True):
    """Answer to the request with this number.

    ``behind``: sequences whose tokens the draft model is still computing; ``CaughtUp`` or ``Dropped`` follows.
    ``lost``: sequences that the process does not have, which must be sent from the beginning. ``refused``: sequences
    that it can't compute. ``dropped``: any sequences that it had, and dropped for lack of memory. ``passes``: passes
    through the model, which took ``seconds`` together.
    """

    number: Whole
    drafted: Annotated[tuple[DraftedTokens, ...], msgspec.Meta(max_length=MAX_ASKED)]
    behind: _SequenceIds = ()
    lost: _SequenceIds = ()
    refused: _SequenceIds = ()
    dropped: _SequenceIds = ()
    passes: Whole = 0
    seconds: Seconds = 0.0


class CaughtUp(_DraftMessage, frozen=True):
    """The draft model has computed all tokens of this sequence but the last: it can be proposed for."""

    sequence: SequenceId


class Dropped(_DraftMessage, frozen=True):
    """The process has dropped this sequence for lack of memory, before it had caught up."""

    sequence: SequenceId


class DraftLoaded(_DraftMessage, frozen=True):
    """The draft model is loaded. ``assets``: its tokenizer's files, with their digests."""

    name: Name
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    context: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    assets: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=64)]
    weight_bytes: Whole
    load_s: Seconds


class DraftUnusable(_DraftMessage, frozen=True):
    """The draft model can't be loaded; the process ends, and another start would not help."""

    reason: Text


DraftMessage = Proposals | CaughtUp | Dropped | DraftLoaded | DraftUnusable

_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(AskProposals)
_message_decoder: msgspec.msgpack.Decoder[DraftMessage] = msgspec.msgpack.Decoder(DraftMessage)


def encode_frame(message: AskProposals | DraftMessage) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes for the draft model exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_length(head: bytes) -> int:
    """Return the length of the message after these bytes. Raises ``WireError`` if it is too long."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of the draft model's pipe has {length} bytes, at most {MAX_FRAME_BYTES}")
    return length


def decode_ask(body: bytes) -> AskProposals:
    """Decode a message of the broker. Raises ``WireError``."""
    try:
        return _ask_decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message for the draft model can't be decoded: {error}") from None


def decode_message(body: bytes) -> DraftMessage:
    """Decode a message of the draft process. Raises ``WireError``."""
    try:
        return _message_decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message of the draft model can't be decoded: {error}") from None
