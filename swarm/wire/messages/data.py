"""The data path: steps along the stages, what the last one answers, and what stages send each other in pieces."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from swarm.params import SamplingParams
from swarm.wire.messages.common import (
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STAGES,
    MAX_TOKENS,
    Message,
    Name,
    Position,
    Record,
    SequenceId,
    StepNumber,
    Text,
    TokenId,
    TokenIds,
    Whole,
)
from swarm.wire.messages.records import Edge, Hop, LayerRange, SequencePosition, TensorSpec, TokenLogprob

REPLAY_STEP: Final = 0  # of every step that is a replay: these have no number among the broker's


class Row(Record, frozen=True):
    """``count`` tokens of a sequence from position ``start`` on. ``sample``: draw a token after the last of them."""

    sequence: SequenceId
    start: Position
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    sample: bool


class Open(Record, frozen=True):
    """A sequence enters the stages (or is told to them again, in a new epoch). ``tokens``: prompt and drawn ones, so
    that penalties and grammars can be rebuilt; the first ``num_prompt`` of them are the prompt. ``limit``: the most
    positions that the sequence can come to hold, which the broker has counted against every stage's capacity.
    ``source``: begin with a copy of the first ``shared`` positions of this sequence, which every stage holds."""

    sequence: SequenceId
    params: SamplingParams
    seed: Whole
    num_prompt: Position
    limit: Position
    tokens: TokenIds
    source: SequenceId | None = None
    shared: Position = 0


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


class Leg(Record, frozen=True):
    """A worker that computes some layers again, and where its data come in."""

    to: Edge
    layers: LayerRange


class Trial(Record, frozen=True):
    """A check of what another worker computed: by whom it goes on, layers in order, the first of them now. The last one
    tells the broker. ``drawn``: how many tokens it draws at the end, if these are the model's last layers."""

    ticket: Whole
    legs: Annotated[tuple[Leg, ...], msgspec.Meta(max_length=16)]
    drawn: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class Step(Message, frozen=True):
    """One micro-batch on its way. What must be ordered with it travels in it: opens, truncations, releases.

    A stage applies ``retire`` (cut to this position and reserve no more than that), ``release``, ``open`` and
    ``truncate`` in this order, then computes ``rows``. ``tokens``: ids of all
    rows' positions, one after the other. ``tensor``: the rows' hidden states, [tokens, hidden]; None at stage 0.
    ``alone``: no other step was in flight when this one was sent, so every stage may use all cores of its host. A
    replay's: its stages share cores, and take turns.
    ``trial``: nothing of this is the receiver's to hold; it computes it again for a comparison, when it has time.
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
    trial: Trial | None = None
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    tensor: TensorSpec | None = None


class StepDone(Message, frozen=True):
    """The last stage's answer to every step, also to one that samples nothing. ``late``: sequences whose grammar is not
    compiled yet. They have computed their rows, and are drawn for when their last position comes again."""

    step: StepNumber
    kv: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_ROWS)]
    sampled: Annotated[tuple[Sampled, ...], msgspec.Meta(max_length=MAX_ROWS)]
    failed: Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_ROWS)]
    hops: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_STAGES)]
    late: Annotated[tuple[SequenceId, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()


class KvPart(Message, frozen=True):
    """One block of keys and values on its way to another stage."""

    sequence: SequenceId
    layers: LayerRange
    block: Whole
    tensor: TensorSpec


class WeightPart(Message, frozen=True):
    """A piece of a weight on its way to another worker."""

    name: Name
    offset: Whole
    tensor: TensorSpec


DataMessage = Step | StepDone | KvPart | WeightPart
