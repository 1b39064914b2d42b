"""Messages of the data path: steps along the stages, results of the last stage, and transfers between stages."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from swarm.params import ImageSpan, SamplingParams
from swarm.wire.messages.common import (
    MAX_NAME,
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STAGES,
    MAX_TOKENS,
    Message,
    Position,
    PromptLogprobBytes,
    Record,
    SequenceId,
    StepNumber,
    Text,
    TokenId,
    TokenIds,
    VectorBytes,
    Version,
    Whole,
)
from swarm.wire.messages.records import Edge, Hop, LayerRange, SequencePosition, TensorSpec, TokenLogprob

MAX_PROPOSED: Final = 64  # proposed tokens of one sequence in a step
REPLAY_STEP: Final = 0  # Step number of every replay: replays are not among the broker's numbered steps.


class Row(Record, frozen=True):
    """``count`` tokens of a sequence from position ``start`` on. ``sample``: draw a token after the last of them."""

    sequence: SequenceId
    start: Position
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    sample: bool


class Open(Record, frozen=True):
    """Entry of a sequence into the stages (repeated in a new epoch).

    ``tokens``: prompt and generated tokens, so that penalties and grammars can be rebuilt; the first ``num_prompt`` are
    the prompt. ``limit``: maximum number of positions of the sequence, which the broker has counted against every
    stage's capacity. ``source``: begin with a copy of the first ``shared`` positions of this sequence, which every
    stage holds.
    """

    sequence: SequenceId
    params: SamplingParams
    seed: Whole
    num_prompt: Position
    limit: Position
    tokens: TokenIds
    source: SequenceId | None = None
    shared: Position = 0


class ProposedTail(Record, frozen=True):
    """The last ``count`` tokens of a sequence's row are proposals: guesses of the tokens that will be drawn there."""

    sequence: SequenceId
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROPOSED)]


class ForcedTokens(Record, frozen=True):
    """The tokens with which a sequence's grammar continues, because it leaves only one text."""

    sequence: SequenceId
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_PROPOSED)]


class Sampled(Record, frozen=True):
    """A sampled token and its position. ``logprobs``: the token's own first, then the requested alternatives."""

    sequence: SequenceId
    position: Position
    token: TokenId
    logprobs: Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=64)]


class SequenceVector(Record, frozen=True):
    """The vector that a request asked for, computed from the positions before ``position``."""

    sequence: SequenceId
    position: Position
    vector: VectorBytes


class PromptLogprobs(Record, frozen=True):
    """Log probabilities of a prompt's tokens from ``position`` on, in the form of ``wire.prompt_logprobs``."""

    sequence: SequenceId
    position: Position
    values: PromptLogprobBytes


class Failure(Record, frozen=True):
    """A sequence that can't continue, with the reason."""

    sequence: SequenceId
    reason: Text


class RecheckHop(Record, frozen=True):
    """One worker of a recheck: the layers that it computes again, and its data endpoint."""

    to: Edge
    layers: LayerRange


class RecheckRoute(Record, frozen=True):
    """Route of a recheck of another worker's results: the hops in layer order, beginning with the receiver.

    The last hop reports to the broker. ``drawn``: number of tokens to sample at the end if the hops include the model's
    last layer.
    """

    ticket: Whole
    legs: Annotated[tuple[RecheckHop, ...], msgspec.Meta(max_length=16)]
    drawn: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class ImagePixels(Record, frozen=True):
    """Pixels of an image, in the form of ``Submit``, and the digest of its ``ImageSpan``."""

    digest: Annotated[str, msgspec.Meta(max_length=64)]
    pixels: bytes


class ImageParts(Record, frozen=True):
    """Parts ``first`` up to ``stop`` of the vision tower's work on an image of a sequence (``Vision``). ``stop`` 0: no
    later step needs the image, so what is kept of it may go."""

    sequence: SequenceId
    image: ImageSpan
    first: Whole
    stop: Whole


class Step(Message, frozen=True):
    """One micro-batch on its way. Changes that must be ordered with it travel in it: opens, truncations, releases.

    A stage applies ``retire`` (truncate to this position and shrink the reservation to it), ``release``, ``open`` and
    ``truncate`` in this order, then computes ``rows``. ``tokens``: token ids of all rows' positions, concatenated.
    ``tensor``: the rows' hidden states, [tokens, hidden]; None at stage 0. ``alone``: no other step was in flight at
    dispatch, so every stage may use all cores of its host; in a replay: its stages share cores and run one at a time.
    ``trial``: the step is a recheck. The receiver computes it when idle, for a comparison, and stores nothing of it.
    ``unshared``: the opened sequences of which every stage copies the source's positions and shares none;
    not in the frame if there are none, because stages of older protocols refuse it and never share.
    ``proposed``: the rows that end in proposed tokens. The last stage draws after the row's last certain token and
    after each proposal that equals the token drawn before it, and stops at the first that differs. Not in the frame if
    there are none, because stages of older protocols refuse it.
    ``pixels``: to the first stage, of each image of which the rows have tokens, or whose work begins; not in the frame
    if there are none.
    ``image_parts``: to the first stage, what it computes of images before the rows, and keeps for later steps. It only
    saves time: tokens of an image that was not computed before are computed from its pixels. Not in the frame if empty.
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
    trial: RecheckRoute | None = None
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    tensor: TensorSpec | None = None
    unshared: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = msgspec.UNSET
    proposed: Annotated[tuple[ProposedTail, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = msgspec.UNSET
    pixels: Annotated[tuple[ImagePixels, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = msgspec.UNSET
    image_parts: Annotated[tuple[ImageParts, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class StepDone(Message, frozen=True):
    """Result of the last stage for every step, even without sampled tokens. ``late``: sequences whose grammar is still
    being compiled; their rows are computed, and a token is sampled when their last position is sent again.

    ``kv``: for each row, the position up to which its tokens are certain: without the proposals that were refused.
    ``sampled``: in the order of the rows, and within a row by position. ``forced``: tokens that are certain to follow
    by the grammar, which the broker may propose; not in the frame if there are none. ``vectors`` and
    ``prompt_logprobs``: likewise.
    """

    step: StepNumber
    kv: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]
    sampled: Annotated[tuple[Sampled, ...], msgspec.Meta(max_length=MAX_ROWS)]
    failed: Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_ROWS)]
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)]
    late: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    forced: Annotated[tuple[ForcedTokens, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = msgspec.UNSET
    vectors: Annotated[tuple[SequenceVector, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], msgspec.Meta(max_length=MAX_ROWS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class KvPart(Message, frozen=True, kw_only=True):
    """Keys and values of one sequence in some layers, for a worker that is to hold a copy.

    ``block``: number of the block of ``BLOCK`` positions with which the part begins. ``tokens``: the tokens at its
    positions, of which the last block may be unfinished. ``open``: the sequence, without tokens. ``tensor``: layer
    after layer, first the keys, then the values of all these positions, ``[heads, positions, size]`` each, as they are
    stored; then the state of each layer that keeps one, at the end of these positions. ``sender``: incarnation of the
    worker that computed them.
    """

    sequence: SequenceId
    layers: LayerRange
    block: Whole
    tensor: TensorSpec
    v: Version = 4
    tokens: TokenIds = ()
    open: Open | None = None
    sender: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


DataMessage = Step | StepDone | KvPart
