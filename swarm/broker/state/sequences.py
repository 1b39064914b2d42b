"""Requests and their sequences, as the broker knows them.

Nobody outside of ``state`` writes a sequence's fields: what can happen to it are its verbs. Until it ends its positions
obey (``Sequence.check``; the second line also afterwards)::

    kv <= scheduled <= sampled        sent <= committed <= sampled        delivered <= sent
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from swarm.broker.state.standing import MOVES, VERBS, Rebuild, SequenceState
from swarm.errors import IllegalMove
from swarm.wire.messages import BLOCK, FinishReason, Hop, Submit, TokenLogprob


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
    num_cached: int = 0  # of its prompt, when it was first let in: found in the prefix cache
    not_finite: list[str] = field(default_factory=list)  # workers that sent such hidden states of it, one per time
    num_recomputed: int = 0
    num_passed: int = 0  # how many came later and were let in while it was the first to wait for room
    passed_since: float | None = None
    unfit_s: float = 0.0  # for how long it has waited while plans served that could not hold it even alone
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    finish_sent: bool = False
    end_written: bool = False  # its end is in the journal, and all its tokens
    unsure: bool = False  # where its reader stands is not known before the reader says so
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    sent_at: array[float] = field(default_factory=lambda: array("d"))  # when each generated token was first sent

    def __post_init__(self) -> None:
        """The prompt is known to everybody."""
        self.committed = self.sent = self.delivered = self.num_prompt

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
    def is_decoding(self) -> bool:
        return self.scheduled >= self.num_prompt and self.pending == 1

    def story(self) -> str:
        """Tell where it stands, in one line."""
        positions = ("kv", "scheduled", "sampled", "committed", "sent", "delivered", "limit", "blocks", "stay")
        return f"sequence {self.id} of {self.request.id} is {self.state.value}: " + ", ".join(
            f"{name} {getattr(self, name)}" for name in positions
        )

    def check(self) -> str | None:
        """Return which rule it breaks, if any."""
        wrong = self._wrong_length()
        if wrong is None and self.state is SequenceState.RUNNING and self.scheduled > self.blocks * BLOCK:
            wrong = "it has no room for what is dispatched"
        if wrong is None and self.state is not SequenceState.RUNNING and self.blocks:
            wrong = "it holds room and does not run"
        return None if wrong is None else f"{wrong}: {self.story()}"

    def _wrong_length(self) -> str | None:
        """Tell what is wrong with its tokens: how far they have come, and what stands beside them."""
        sampled = len(self.tokens)
        if self.state is not SequenceState.ENDED and not 0 <= self.kv <= self.scheduled <= sampled:
            return "kv <= scheduled <= sampled does not hold"
        if not self.delivered <= self.sent <= self.committed <= sampled:
            return "delivered <= sent <= committed <= sampled does not hold"
        if sampled > max(self.limit, self.num_prompt):
            return "it has grown past its limit"
        if len(self.logprobs) != self.num_generated or len(self.hops) > self.num_generated:
            return f"its tokens, logprobs ({len(self.logprobs)}) and hops ({len(self.hops)}) are uneven"
        return None

    def _move(self, to: SequenceState) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"it can't become {to.value}: {self.story()}")
        self.state = to

    def _allow(self, verb: str) -> None:
        """Refuse a verb in a state where it does not belong."""
        if self.state not in VERBS[verb]:
            raise IllegalMove(f"it can't {verb.replace('_', ' ')}: {self.story()}")

    # --- in and out of the stages ------------------------------------------------------------------------------------

    def enter(self, fork: tuple[int, int] | None) -> None:
        """Get room in the stages. ``fork``: whose first positions it begins with, and how many."""
        self._move(SequenceState.RUNNING)
        if fork is not None:
            self.fork_of, self.kv = fork
            self.scheduled = self.kv
            if self.started_at is None and not self.num_restored:
                self.num_cached = min(self.kv, self.num_prompt)

    def start(self, now: float) -> bool:
        """Stop being passed by later ones. Returns whether it runs for the first time."""
        self._allow("start")
        self.num_passed, self.passed_since = 0, None
        if self.started_at is not None:
            return False
        self.started_at = now
        if self.num_restored:  # a broker before this one has seen it run, and no stage holds anything of it
            self.num_recomputed += 1
        return True

    def take_back(self, position: int, now: float) -> None:
        """Run on from what workers still hold of it after the broker's own death."""
        self._move(SequenceState.RUNNING)
        self.kv = self.scheduled = position
        self.told, self.truncate = False, True
        if self.started_at is None:
            self.started_at = now

    def be_first_to_wait(self, now: float) -> None:
        """Find no room: from now on it counts for how long others pass it."""
        self._allow("be_first_to_wait")
        self.passed_since = now if self.passed_since is None else self.passed_since

    def be_passed(self) -> None:
        """Somebody who came later was let in."""
        self._allow("be_passed")
        self.num_passed += 1

    def fit(self) -> None:
        """Note that the plan could hold it."""
        self._allow("fit")
        self.unfit_s = 0.0

    def not_fit(self, passed_s: float) -> None:
        """Note that for so long more the plan could not hold it, even alone."""
        self._allow("not_fit")
        self.unfit_s += passed_s

    def wait_again(self) -> None:
        """Have it hold nothing in the stages any more. What of it is still in the pipe belongs to an earlier stay."""
        self._move(SequenceState.WAITING)
        self._cut_to(0)
        self.truncate = False
        self.stay += 1

    def end(self, reason: FinishReason, detail: str, now: float) -> None:
        self._move(SequenceState.ENDED)
        self.reason, self.detail, self.ended_at = reason, detail, now

    # --- through the stages ------------------------------------------------------------------------------------------

    def dispatch(self, count: int) -> int:
        """Send so many more tokens through the stages, which know it from now on. Returns the first one's position."""
        self._allow("dispatch")
        start = self.scheduled
        self.told, self.truncate = True, False
        self.scheduled = start + count
        return start

    def acknowledge(self, position: int) -> None:
        """Every stage has computed it so far."""
        self._allow("acknowledge")
        self.kv = min(max(self.kv, position), self.scheduled)

    def drop_kv(self) -> None:
        """Compute everything again with the next step: where keys and values are not to be kept."""
        self._allow("drop_kv")
        self.kv = self.scheduled = 0
        self.truncate = True

    def draw_again(self) -> None:
        """Compute the last position again with the next step, for a draw that was put off."""
        self._allow("draw_again")
        self.kv = self.scheduled = self.sampled - 1
        self.truncate = True

    def cut_to(self, position: int) -> None:
        """Count no longer what lies beyond ``position`` in the stages (a new epoch, or room given back)."""
        self._allow("cut_to")
        self._cut_to(position)

    def _cut_to(self, position: int) -> None:
        if self.scheduled > position:
            self.num_recomputed += 1
        self.kv = self.scheduled = position
        self.told = False
        self.truncate = True
        if self.fork_of is not None:  # it was never opened: nothing has been copied
            self.fork_of = None
            if not self.num_generated:  # with the first token the journal has noted it
                self.num_cached = 0
        self.rebuilds.clear()

    def compute_from(self, position: int) -> None:
        """Have what lies behind ``position`` computed again like a prompt."""
        self._allow("compute_from")
        self.num_recomputed += 1
        self.kv = self.scheduled = position

    def lag(self, runs: list[Rebuild]) -> None:
        """Wait for layers that changed hands to be brought level."""
        self._allow("lag")
        self.num_recomputed += 1
        self.rebuilds[:] = runs

    def level(self, run: Rebuild) -> None:
        """These layers have caught up."""
        self._allow("level")
        self.rebuilds.remove(run)

    def stop_rebuilding(self) -> None:
        self.rebuilds.clear()

    def be_present_at_death(self, times: int = 1) -> None:
        """Some worker died while it was in flight."""
        self.num_deaths += times

    def be_not_finite(self, worker: str) -> None:
        """Note a worker that sent hidden states of it that are no numbers."""
        self._allow("be_not_finite")
        self.not_finite.append(worker)

    # --- its tokens --------------------------------------------------------------------------------------------------

    def grow(self, token: int, logprobs: tuple[TokenLogprob, ...], hops: tuple[Hop, ...] | None, now: float) -> None:
        self._allow("grow")
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        if hops is not None:
            self.hops.append(hops)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def commit(self, position: int) -> None:
        """The journal has it so far: a client may see it."""
        self.committed = max(self.committed, min(position, self.sampled))

    def send(self, stop: int, now: float) -> None:
        """Tokens up to ``stop`` go to the client."""
        self.sent = stop
        num_sent = stop - self.num_prompt
        if num_sent > len(self.sent_at):
            self.sent_at.extend((now,) * (num_sent - len(self.sent_at)))

    def be_read(self, num_generated: int) -> None:
        """Note how many of its tokens its client has."""
        self.delivered = max(self.delivered, min(self.num_prompt + num_generated, self.sent))

    def read_from(self, next_index: int) -> None:
        """Note how much its reader says that it has; it may be less than the one before it had."""
        self.delivered = self.sent = min(self.num_prompt + next_index, self.committed)
        self.unsure = self.finish_sent = False

    def be_unsure(self) -> None:
        """Wait with sending until its reader has said how much it has."""
        self.unsure = True

    def tell_end(self) -> None:
        """Note that its client has been sent the end."""
        self._allow("tell_end")
        self.finish_sent = True

    def end_is_written(self) -> None:
        """The journal has its end, and all its tokens."""
        self._allow("end_is_written")
        self.end_written = True

    def expect_stop(self, num_generated: int) -> None:
        """Stop at so many tokens, some of which are still to be drawn again."""
        self._allow("expect_stop")
        self.stop_at = num_generated

    def bound(self, limit: int) -> None:
        """The model takes no more positions than that."""
        self._allow("bound")
        self.limit = min(self.limit, limit)

    def send_again(self) -> None:
        """Send once more what was not acknowledged, and the end."""
        self.sent, self.finish_sent = self.delivered, False

    def cut_answer(self, num_generated: int) -> None:
        """Keep only so many tokens, and what stands beside them: a stop string was found behind them."""
        self._allow("cut_answer")
        keep = self.num_prompt + num_generated
        del self.tokens[keep:], self.logprobs[num_generated:], self.hops[num_generated:], self.sent_at[num_generated:]
        self.committed = min(self.committed, keep)
        self.sent = min(self.sent, keep)
        self.delivered = min(self.delivered, keep)


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
    detached_at: float | None = None  # when its last reader left
    left_for_s: float = 0.0  # for how long after that it runs on without a reader
    stuck: bool = False  # its reader is there and does not read: what was sent last did not go out
    restored: bool = False  # it was in the journal only, for a while
    read_at: float | None = None  # when it was read from there because somebody asked for it

    @property
    def id(self) -> str:
        return self.submit.request_id

    def be_left(self, for_s: float, now: float) -> None:
        """Go on without a reader, for so long."""
        self.client, self.stuck = None, False
        self.detached_at, self.left_for_s = now, for_s

    def forgive(self, pause_s: float) -> None:
        """The broker stood still for so long: its deadline, and the grace of its client, end so much later."""
        if self.deadline_at is not None:
            self.deadline_at += pause_s
        if self.detached_at is not None:
            self.detached_at += pause_s

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
