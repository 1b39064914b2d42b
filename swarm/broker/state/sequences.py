"""Requests and their sequences, as the broker knows them.

A sequence's positions (see ``Sequence``) obey, at every moment::

    kv <= scheduled <= sampled        sent <= committed <= sampled        delivered <= sent
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from swarm.wire.messages import FinishReason, Hop, LayerRange, Submit, Timing, TokenLogprob


class SequenceState(enum.Enum):
    WAITING = "waiting"  # no room in the stages yet, or none any more
    RUNNING = "running"  # holds room in the stages
    ENDED = "ended"


@dataclass(slots=True)
class Rebuild:
    """Layers of one sequence that lag behind: to be brought from ``done`` to ``stop`` positions.

    ``source`` has the log of what ``through`` begins with; None: the tokens, at layer 0. ``num_lost`` of these layers
    really lag, the others lie between them and the log.
    """

    source: str | None
    through: LayerRange
    num_lost: int
    stop: int
    start: int
    done: int

    @property
    def cost(self) -> int:
        """Layers times positions to be computed."""
        return (self.stop - self.done) * len(self.through)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt. Lengths count tokens of the whole sequence, prompt included."""

    id: int
    request: Request
    index: int
    seed: int
    tokens: list[int]
    limit: int  # the most positions it can come to hold
    state: SequenceState = SequenceState.WAITING
    committed: int = 0  # tokens in the journal: what a client may see
    sent: int = 0  # tokens sent to the attached client
    delivered: int = 0  # tokens that the client has acknowledged
    scheduled: int = 0  # positions dispatched in this epoch
    kv: int = 0  # positions whose keys and values every stage has acknowledged
    told: bool = False  # the stages of this epoch know the sequence
    rebuilds: list[Rebuild] = field(default_factory=list)  # layers that must come level before it goes on
    truncate: bool = False  # the next step must cut the stages to ``kv`` first
    fork_of: int | None = None  # its first ``kv`` positions are to be copied from this sequence when it is opened
    reason: FinishReason | None = None
    detail: str = ""
    blocks: int = 0  # room that is kept for it in the stages
    stay: int = 0  # how often it has left them without an end: what was sent before then is known by a smaller number
    num_preempted: int = 0  # how often it had to give its room to another
    stop_at: int | None = None  # where its client found a stop string, in tokens that are still to be drawn again
    num_deaths: int = 0  # worker deaths at which it was in flight
    num_restored: int = 0  # tokens that a broker before this one had drawn
    not_finite: list[str] = field(default_factory=list)  # workers that sent such hidden states of it, one per time
    num_recomputed: int = 0
    num_passed: int = 0  # how many came later and were let in while it was the first to wait for room
    passed_since: float | None = None
    unfit_s: float = 0.0  # for how long it has waited while plans served that could not hold it even alone
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    finish_sent: bool = False
    end_written: bool = False  # its end is in the journal, and all its tokens
    unsure: bool = False  # where its reader stands is not known before the reader says so
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    sent_at: array[float] = field(default_factory=lambda: array("d"))  # when each generated token was first sent

    @property
    def priority(self) -> int:
        return self.request.submit.priority

    @property
    def rank(self) -> tuple[int, int]:
        """Who has the better claim to room: the higher class, then who came first."""
        return (self.request.submit.priority, -self.id)

    @property
    def most_to_come(self) -> int:
        """Tokens that it may still grow by."""
        return self.limit - len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.submit.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sampled(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens that the next steps must carry: none as long as layers are being rebuilt."""
        return 0 if self.rebuilds else len(self.tokens) - self.scheduled

    @property
    def in_flight(self) -> bool:
        return self.scheduled > self.kv

    @property
    def is_decoding(self) -> bool:
        return self.scheduled >= self.num_prompt and self.pending == 1

    def cut_to(self, position: int) -> None:
        """What lies beyond ``position`` in the stages no longer counts (a new epoch, or room given back)."""
        if self.scheduled > position:
            self.num_recomputed += 1
        self.kv = self.scheduled = position
        self.told = False
        self.truncate = True
        self.fork_of = None
        self.rebuilds.clear()

    def wait_again(self) -> None:
        """It holds nothing in the stages any more. What of it is still in the pipe belongs to an earlier stay."""
        self.cut_to(0)
        self.truncate = False
        self.stay += 1
        self.state = SequenceState.WAITING

    def timing(self, now: float) -> Timing:
        """A sequence without a token has no time of a first one: 0. One that never started was queued all the time. If
        a broker before this one had drawn tokens of it, only the total is known; the rest is 0."""
        arrived = self.request.arrived_at
        is_forgotten = self.num_restored > 0

        def since_arrival(moment: float | None) -> float:
            return max(0.0, (now if moment is None else moment) - arrived)

        return Timing(
            0.0 if is_forgotten else since_arrival(self.started_at),
            0.0 if is_forgotten or self.first_token_at is None else since_arrival(self.first_token_at),
            since_arrival(self.ended_at),
            self.num_recomputed,
        )


@dataclass(slots=True, eq=False)
class Request:
    submit: Submit
    client: bytes | None
    arrived_at: float
    deadline_at: float | None
    tenant: str = ""  # on whose account it is computed
    sequences: list[Sequence] = field(default_factory=list)
    accepted: bool = False
    owner: bytes | None = None  # who submitted it last
    detached_at: float | None = None
    stuck: bool = False  # its reader is there and does not read: what was sent last did not go out
    restored: bool = False  # it was in the journal only, for a while
    read_at: float | None = None  # when it was read from there because somebody asked for it

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def listener(self) -> bytes | None:
        """Whom to tell of it now."""
        return None if self.stuck else self.client

    @property
    def ended(self) -> bool:
        return all(s.state is SequenceState.ENDED for s in self.sequences)

    @property
    def ended_at(self) -> float:
        return max(s.ended_at or 0.0 for s in self.sequences)

    @property
    def end_written(self) -> bool:
        return all(s.end_written for s in self.sequences)

    @property
    def fully_delivered(self) -> bool:
        return self.ended and all(s.finish_sent and s.delivered >= s.sampled for s in self.sequences)
