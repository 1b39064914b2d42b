"""Requests and their sequences, as the broker tracks them.

Code outside of ``state`` never assigns a sequence's fields; it calls the sequence's methods. Until a sequence ends, its
positions satisfy these rules (checked by ``Sequence.check``; the second line also holds after the end)::

    kv <= scheduled <= sampled        sent <= committed <= sampled        delivered <= sent

Proposed tokens (``proposed``) are in flight beyond ``scheduled``, and only when all known tokens are scheduled. They
become known one by one, as the last stage draws the same tokens; the first draw that differs removes the rest.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

from swarm.broker.state.lifecycle import ALLOWED_STATES, TRANSITIONS, Rebuild, SequenceState
from swarm.errors import IllegalMove
from swarm.params import ImageSpan
from swarm.wire.messages import BLOCK, FinishReason, Hop, Submit, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of one prompt. Lengths and positions count tokens of the whole sequence, prompt included."""

    id: int
    request: Request
    index: int  # index among the request's sequences (``n`` completions of one prompt)
    seed: int
    tokens: list[int]
    limit: int  # maximum number of positions
    state: SequenceState = SequenceState.WAITING
    committed: int = 0  # tokens in the journal; only these may be sent to the client
    sent: int = 0  # tokens sent to the attached client
    delivered: int = 0  # tokens that the client has acknowledged
    scheduled: int = 0  # positions dispatched in this epoch
    kv: int = 0  # positions whose keys and values every stage has acknowledged
    # last multiple of BLOCK at which every layer holds a state once the rows in flight are computed; 0: unknown
    block_state: int = 0
    proposed: list[int] = field(default_factory=list)  # tokens in flight beyond ``scheduled``, not verified yet
    may_speculate: bool = True  # False after a failure of a step with its proposed tokens
    is_open_in_stages: bool = False  # the stages of this epoch have opened the sequence
    rebuilds: list[Rebuild] = field(default_factory=list)  # layers that must be rebuilt before the sequence runs again
    is_restoring: bool = False  # it waits for what the stages read of it from disk
    truncate: bool = False  # the next step must first truncate the stages' state to ``kv``
    fork_of: int | None = None  # the sequence from which its first ``kv`` positions are copied when the stages open it
    reason: FinishReason | None = None  # None until the sequence ends
    detail: str = ""
    blocks: int = 0  # KV blocks reserved for it in the stages
    # Residency counter, incremented on preemption. Acknowledgements with a smaller value are stale and ignored.
    residency: int = 0
    num_preempted: int = 0  # times it was preempted
    # generated length at which the client found a stop string, if some of these tokens must be drawn again first
    stop_at: int | None = None
    num_deaths: int = 0  # worker deaths at which it was in flight
    num_restored: int = 0  # tokens drawn by an earlier broker process and restored from the journal
    num_cached: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    # workers that sent NaN or infinite hidden states of it, one entry per occurrence
    not_finite: list[str] = field(default_factory=list)
    num_recomputed: int = 0  # times that keys and values were computed again
    num_overtaken: int = 0  # later sequences admitted while this one was first in line for KV blocks
    overtaken_since: float | None = None  # since when ``num_overtaken`` is counted; None while it is not first in line
    unfit_s: float = 0.0  # seconds it has waited under plans that could not hold it even alone
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    end_sent: bool = False  # the client has been sent the end
    end_written: bool = False  # the journal has its end and all its tokens
    # after a restart: the position up to which the client has read is unknown until it attaches and reports it
    reader_position_unknown: bool = False
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    vector: bytes = b""  # the answer, if the request asks for a vector
    # log probabilities of the prompt's tokens from the second one on, and the number of these tokens
    prompt_logprobs: bytearray = field(default_factory=bytearray)
    num_scored: int = 0
    # those that came before the step in front of them, by the position of their first token
    early_logprobs: dict[int, bytes] = field(default_factory=dict)
    # time at which each generated token was first sent
    sent_at: array[float] = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        """Count the prompt as committed, sent and delivered: the client has it already."""
        self.committed = self.sent = self.delivered = self.num_prompt

    @property
    def priority(self) -> int:
        return self.request.submit.priority

    @property
    def rank(self) -> tuple[int, int]:
        """Key for the right to KV blocks: the higher class first, then the earlier arrival."""
        return (self.request.submit.priority, -self.id)

    @property
    def max_remaining(self) -> int:
        """Maximum number of tokens that the sequence can still grow by."""
        return self.limit - len(self.tokens)

    @property
    def adapter(self) -> str:
        """Name of the adapter that changes the model's layers; empty if there is none."""
        return self.request.submit.params.adapter

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images in its prompt."""
        return self.request.submit.params.images

    def pixels(self, start: int, stop: int) -> dict[str, bytes]:
        """Return the pixels of the images of which these positions have tokens, by digest."""
        every = zip(self.images, self.request.submit.pixels, strict=True)
        return {image.digest: pixels for image, pixels in every if image.overlaps(start, stop)} if self.images else {}

    @property
    def num_prompt(self) -> int:
        return len(self.request.submit.prompt)

    @property
    def keeps_sum(self) -> bool:
        """Whether the last stage adds up its positions. The sum is that of one residency in one epoch, so the sequence
        always begins at position 0: it starts from no prefix, and resumes nowhere."""
        return self.request.submit.params.vector == "mean"

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the request asks for log probabilities of its prompt, and some are missing. The last stage returns
        them with each row. The first sequence gets them for all continuations."""
        return (
            self.request.submit.params.prompt_logprobs is not None
            and self.index == 0
            and self.num_scored < self.num_prompt - 1
        )

    @property
    def has_scored_prompt(self) -> bool:
        """Whether the request asks for log probabilities of its prompt, and the stages need not return any more."""
        return self.request.submit.params.prompt_logprobs is not None and not self.lacks_prompt_logprobs

    @property
    def starts_from_nothing(self) -> bool:
        """Whether it must be computed from position 0 on when it starts: what the last stage returns needs each
        position."""
        return self.keeps_sum or self.lacks_prompt_logprobs

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sampled(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens that the next steps must process; 0 while layers are being rebuilt or read from disk."""
        return 0 if self.rebuilds or self.is_restoring else len(self.tokens) - self.scheduled

    @property
    def is_decoding(self) -> bool:
        return self.scheduled >= self.num_prompt and self.pending == 1

    def describe(self) -> str:
        """Return the state and the positions in one line, for errors and logs."""
        positions = ("kv", "scheduled", "sampled", "committed", "sent", "delivered", "limit", "blocks", "residency")
        described = ", ".join(f"{name} {getattr(self, name)}" for name in positions)
        proposed = f", {len(self.proposed)} proposed" if self.proposed else ""
        return f"sequence {self.id} of {self.request.id} is {self.state.value}: {described}{proposed}"

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        error = self._length_error()
        num_dispatched = self.scheduled + len(self.proposed)
        if error is None and self.state is SequenceState.RUNNING and num_dispatched > self.blocks * BLOCK:
            error = "it has too few blocks for its dispatched positions"
        if error is None and self.proposed:
            error = self._proposal_error()
        if error is None and self.state is not SequenceState.RUNNING and self.blocks:
            error = "it holds blocks but does not run"
        return None if error is None else f"{error}: {self.describe()}"

    def _length_error(self) -> str | None:
        """Return what is inconsistent about positions, tokens, log probabilities and hops; None if nothing is."""
        sampled = len(self.tokens)
        if self.state is not SequenceState.ENDED and not 0 <= self.kv <= self.scheduled <= sampled:
            return "kv <= scheduled <= sampled does not hold"
        if not self.delivered <= self.sent <= self.committed <= sampled:
            return "delivered <= sent <= committed <= sampled does not hold"
        if sampled > max(self.limit, self.num_prompt):
            return "it has grown past its limit"
        if len(self.logprobs) != self.num_generated or len(self.hops) > self.num_generated:
            return f"its tokens, logprobs ({len(self.logprobs)}) and hops ({len(self.hops)}) differ in number"
        return None

    def _proposal_error(self) -> str | None:
        """Return what is wrong about proposed tokens in flight; None if nothing is."""
        if self.state is not SequenceState.RUNNING or self.scheduled != len(self.tokens):
            return "its proposed tokens do not follow its last known token"
        if self.truncate or self.rebuilds or self.is_restoring:
            return "it has proposed tokens in flight, and must be truncated or completed first"
        return "its proposed tokens reach its limit" if len(self.tokens) + len(self.proposed) >= self.limit else None

    def _transition(self, target: SequenceState) -> None:
        if target not in TRANSITIONS[self.state]:
            raise IllegalMove(f"it can't become {target.value}: {self.describe()}")
        self.state = target

    def _allow(self, operation: str) -> None:
        """Raise ``IllegalMove`` if this operation is not allowed in the current state."""
        if self.state not in ALLOWED_STATES[operation]:
            raise IllegalMove(f"it can't {operation.replace('_', ' ')}: {self.describe()}")

    # --- entering and leaving the stages -----------------------------------------------------------------------------

    def admit(self, fork: tuple[int, int] | None) -> None:
        """Start running. ``fork`` is (sequence, position): the sequence whose first positions are copied, and their
        number."""
        self._transition(SequenceState.RUNNING)
        if fork is not None:
            self.fork_of, self.kv = fork
            self.scheduled = self.kv
            if self.started_at is None and not self.num_restored:
                self.num_cached = min(self.kv, self.num_prompt)

    def start(self, now: float) -> bool:
        """Stop counting overtakes. Return whether the sequence runs for the first time."""
        self._allow("start")
        self.num_overtaken, self.overtaken_since = 0, None
        if self.started_at is not None:
            return False
        self.started_at = now
        if self.num_restored:  # it ran under an earlier broker, and no stage holds its keys and values
            self.num_recomputed += 1
        return True

    def resume(self, position: int, now: float) -> None:
        """Resume from what the workers still hold of the sequence, after a restart of the broker."""
        self._transition(SequenceState.RUNNING)
        self.kv = self.scheduled = position
        self.is_open_in_stages, self.truncate = False, True
        if self.started_at is None:
            self.started_at = now

    def start_counting_overtakes(self, now: float) -> None:
        """Note that the sequence is first in line and lacks KV blocks: from now on overtakes are counted."""
        self._allow("start_counting_overtakes")
        self.overtaken_since = now if self.overtaken_since is None else self.overtaken_since

    def count_overtake(self) -> None:
        """Count a later sequence that was admitted before this one."""
        self._allow("count_overtake")
        self.num_overtaken += 1

    def mark_fitting(self) -> None:
        """Note that the plan could hold the sequence."""
        self._allow("mark_fitting")
        self.unfit_s = 0.0

    def add_unfit_time(self, elapsed_s: float) -> None:
        """Add to the time during which the plan could not hold the sequence even alone."""
        self._allow("add_unfit_time")
        self.unfit_s += elapsed_s

    def requeue(self) -> None:
        """Return to waiting: the stages hold nothing of it any more. Its steps that are still in flight belong to the
        previous residency."""
        self._transition(SequenceState.WAITING)
        self._truncate_to(0)
        self.truncate = False
        self.residency += 1

    def end(self, reason: FinishReason, detail: str, now: float) -> None:
        self._transition(SequenceState.ENDED)
        self.proposed.clear()
        self.early_logprobs.clear()
        if self.lacks_prompt_logprobs:  # a part is no answer
            self.prompt_logprobs.clear()
        self.reason, self.detail, self.ended_at = reason, detail, now

    # --- through the stages ------------------------------------------------------------------------------------------

    def dispatch(self, count: int, proposed: tuple[int, ...] = ()) -> int:
        """Schedule ``count`` more tokens, and then proposed ones; the stages open the sequence with this step. Return
        the position of the first token."""
        self._allow("dispatch")
        start = self.scheduled
        self.is_open_in_stages, self.truncate = True, False
        self.scheduled = start + count
        last = self.scheduled // BLOCK * BLOCK
        self.block_state = last if last >= start or last == self.block_state else 0
        self.proposed.extend(proposed)
        return start

    def refuse_proposals(self) -> None:
        """Remove the proposed tokens that the last stage has not drawn; the next step truncates them in the stages."""
        self._allow("refuse_proposals")
        self.proposed.clear()
        self.truncate = True

    def _restart_from(self, position: int) -> None:
        """Compute everything after ``position`` again."""
        self.kv = self.scheduled = position
        self.proposed.clear()

    def acknowledge(self, position: int) -> None:
        """Note that every stage has computed the sequence up to ``position``."""
        self._allow("acknowledge")
        self.kv = min(max(self.kv, position), self.scheduled)

    def drop_kv(self) -> None:
        """Discard the keys and values: the next step computes everything again."""
        self._allow("drop_kv")
        self._restart_from(0)
        self.truncate = True
        if self.has_scored_prompt:
            self.is_open_in_stages = False  # opened again without: the stages would return them with each token

    def redraw_last(self) -> None:
        """Compute the last position again in the next step, for a draw that was postponed."""
        self._allow("redraw_last")
        self._restart_from(self.sampled - 1)
        self.truncate = True

    def truncate_to(self, position: int) -> None:
        """Discard everything beyond ``position`` in the stages (after a new epoch or a preemption)."""
        self._allow("truncate_to")
        self._truncate_to(position)

    def _truncate_to(self, position: int) -> None:
        if self.scheduled > position:
            self.num_recomputed += 1
        self._restart_from(position)
        self.block_state = 0  # stages that take layers over may lack it
        self.is_open_in_stages = self.is_restoring = False
        self.truncate = True
        if self.fork_of is not None:  # the stages never opened it, so nothing has been copied
            self.fork_of = None
            if not self.num_generated:  # from the first token on, the journal has recorded ``num_cached``
                self.num_cached = 0
        self.rebuilds.clear()

    def recompute_from(self, position: int) -> None:
        """Compute everything after ``position`` again, like a prompt."""
        self._allow("recompute_from")
        self.num_recomputed += 1
        self._restart_from(position)

    def start_rebuild(self, rebuilds: list[Rebuild]) -> None:
        """Wait until layers that changed hands have been rebuilt."""
        self._allow("start_rebuild")
        self.num_recomputed += 1
        self.rebuilds[:] = rebuilds

    def finish_rebuild(self, rebuild: Rebuild) -> None:
        """Remove a rebuild that is complete."""
        self._allow("finish_rebuild")
        self.rebuilds.remove(rebuild)

    def start_restore(self) -> None:
        """Wait for what the stages read of the sequence from disk."""
        self._allow("start_restore")
        self.is_restoring = True

    def finish_restore(self, position: int) -> None:
        """Go on from a position that all stages have reached; they are cut to it."""
        self._allow("finish_restore")
        self.is_restoring = False
        self._restart_from(position)
        self.truncate = True
        if not self.num_generated:  # from the first token on, the journal has recorded ``num_cached``
            self.num_cached = min(position, self.num_prompt)

    def cancel_rebuilds(self) -> None:
        self.rebuilds.clear()

    def count_deaths(self, num: int = 1) -> None:
        """Count worker deaths during which the sequence was in flight."""
        self.num_deaths += num

    def record_not_finite(self, worker: str) -> None:
        """Record the worker that sent NaN or infinite hidden states of this sequence."""
        self._allow("record_not_finite")
        self.not_finite.append(worker)

    def stop_speculation(self) -> None:
        """Propose no more tokens for this sequence: a step that carried some has failed."""
        self.may_speculate = False

    # --- its tokens --------------------------------------------------------------------------------------------------

    def append_token(
        self, token: int, logprobs: tuple[TokenLogprob, ...], hops: tuple[Hop, ...] | None, now: float
    ) -> bool:
        """Add a drawn token. Return whether it was proposed: then the stages hold its position already."""
        self._allow("append_token")
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        if hops is not None:  # None if the client did not ask for hops
            self.hops.append(hops)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        if not self.proposed:
            return False
        if self.proposed[0] != token:
            self.refuse_proposals()
            return False
        del self.proposed[0]
        self.scheduled += 1
        self.kv += 1
        return True

    def set_vector(self, vector: bytes) -> None:
        """Note the vector that the last stage has returned."""
        self._allow("set_vector")
        self.vector = vector

    def add_prompt_logprobs(self, position: int, values: bytes, size: int) -> None:
        """Add log probabilities of the prompt's tokens from ``position`` on, of ``size`` bytes each. Repeated ones are
        dropped; those behind a gap wait, since results of steps may arrive in another order."""
        self._allow("add_prompt_logprobs")
        if len(values) > len(self.early_logprobs.get(position, b"")):
            self.early_logprobs[position] = values
        while self.early_logprobs and (first := min(self.early_logprobs)) <= self.num_scored + 1:
            values = self.early_logprobs.pop(first)
            new = values[(self.num_scored + 1 - first) * size :]
            self.prompt_logprobs += new
            self.num_scored += len(new) // size

    def drop_unscored(self) -> None:
        """Count no position behind log probabilities that are missing: the steps that would bring them are lost."""
        self._allow("drop_unscored")
        self.early_logprobs.clear()
        if self.lacks_prompt_logprobs:
            self.kv = min(self.kv, self.num_scored)

    def commit(self, position: int) -> None:
        """Note that the journal has the sequence up to ``position``: these tokens may be sent to the client."""
        self.committed = max(self.committed, min(position, self.sampled))

    def mark_sent(self, stop: int, now: float) -> None:
        """Note that the tokens up to ``stop`` are sent to the client."""
        self.sent = stop
        num_sent = stop - self.num_prompt
        if num_sent > len(self.sent_at):
            self.sent_at.extend((now,) * (num_sent - len(self.sent_at)))

    def mark_delivered(self, num_generated: int) -> None:
        """Note how many generated tokens the client has acknowledged."""
        self.delivered = max(self.delivered, min(self.num_prompt + num_generated, self.sent))

    def resume_reading(self, next_index: int) -> None:
        """Continue sending at the index that the reader asks for. It may lie before what an earlier reader has
        received."""
        self.delivered = self.sent = min(self.num_prompt + next_index, self.committed)
        self.reader_position_unknown = self.end_sent = False

    def await_reader_position(self) -> None:
        """Stop sending until the reader has reported its position."""
        self.reader_position_unknown = True

    def mark_end_sent(self) -> None:
        """Note that the end was sent to the client."""
        self._allow("mark_end_sent")
        self.end_sent = True

    def mark_end_written(self) -> None:
        """Note that the journal has the sequence's end and all its tokens."""
        self._allow("mark_end_written")
        self.end_written = True

    def expect_stop(self, num_generated: int) -> None:
        """Set the end of the sequence at ``num_generated`` tokens, some of which must first be generated again."""
        self._allow("expect_stop")
        self.stop_at = num_generated

    def lower_limit(self, limit: int) -> None:
        """Lower the limit to the maximum number of positions of the model."""
        self._allow("lower_limit")
        self.limit = min(self.limit, limit)

    def resend(self) -> None:
        """Send again all tokens that were not acknowledged, and the end."""
        self.sent, self.end_sent = self.delivered, False

    def truncate_answer(self, num_generated: int) -> None:
        """Drop all tokens after the first ``num_generated``, with their log probabilities and hops: a stop string ends
        there."""
        self._allow("truncate_answer")
        keep = self.num_prompt + num_generated
        del self.tokens[keep:], self.logprobs[num_generated:], self.hops[num_generated:], self.sent_at[num_generated:]
        self.committed = min(self.committed, keep)
        self.sent = min(self.sent, keep)
        self.delivered = min(self.delivered, keep)


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request with its sequences and its reader."""

    submit: Submit
    client: bytes | None  # routing id of the current reader; None while there is none
    arrived_at: float  # The three times are in seconds of the broker's clock.
    deadline_at: float | None
    tenant: str = ""  # tenant that is charged for it
    sequences: list[Sequence] = field(default_factory=list)
    accepted: bool = False  # the journal has the submission, and the client has been informed
    owner: bytes | None = None  # routing id of the client that submitted it last
    detached_at: float | None = None  # time at which its last reader left
    grace_s: float = 0.0  # seconds for which it runs on without a reader after ``detached_at``
    is_blocked: bool = False  # its reader is connected but does not read: the last message could not be sent
    was_restored: bool = False  # it was read back from the journal
    read_at: float | None = None  # time at which a client's question caused it to be read from the journal

    @property
    def id(self) -> str:
        return self.submit.request_id

    def drop_pixels(self) -> None:
        """Drop the pixels of its images: nothing is computed of it any more."""
        if self.submit.pixels:
            self.submit = msgspec.structs.replace(self.submit, pixels=())

    def start_grace(self, grace_s: float, now: float) -> None:
        """Detach the request from its reader. It runs for another ``grace_s`` seconds, in which a client may attach to
        it."""
        self.client, self.is_blocked = None, False
        self.detached_at, self.grace_s = now, grace_s

    def shift_deadlines(self, pause_s: float) -> None:
        """Postpone the deadline and the end of the client's grace period by a pause of the broker."""
        if self.deadline_at is not None:
            self.deadline_at += pause_s
        if self.detached_at is not None:
            self.detached_at += pause_s

    @property
    def reachable_client(self) -> bytes | None:
        """The client to send updates to; None if there is none or its connection is blocked."""
        return None if self.is_blocked else self.client

    @property
    def has_ended(self) -> bool:
        return all(s.state is SequenceState.ENDED for s in self.sequences)

    @property
    def ended_at(self) -> float:
        return max(s.ended_at or 0.0 for s in self.sequences)

    @property
    def is_end_written(self) -> bool:
        return all(s.end_written for s in self.sequences)

    @property
    def is_fully_delivered(self) -> bool:
        return self.has_ended and all(s.end_sent and s.delivered >= s.sampled for s in self.sequences)
