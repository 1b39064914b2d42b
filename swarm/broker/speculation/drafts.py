"""Proposals of the draft model, which runs in a process of its own (``swarm.draft``): what to ask for, what arrived.

Events of the process come in (``handle``), requests go out as actions. One request is under way at a time, for all
sequences whose next token is due. Sequences wait for their proposals until a deadline that follows from the measured
times of earlier requests, then go on without.

A sequence that the process drops for lack of memory is asked for again when another one has ended. Nothing that the
process sends can change an answer: the stages verify each token, and tokens that the model of the swarm does not have
are dropped here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from swarm.broker.actions import AskDraft, Outbox, StopDraft
from swarm.broker.events import DraftGone, DraftMessageReceived
from swarm.broker.speculation.draft_costs import MAX_DEPTH, DraftCosts, DraftPlan
from swarm.broker.speculation.proposer import ProposerName
from swarm.broker.state import Sequence, SequenceState, State
from swarm.wire.draft_messages import (
    CATCH_UP,
    MAX_ASKED,
    MAX_FRAME_BYTES,
    AskedSequence,
    AskProposals,
    CaughtUp,
    DraftedTokens,
    DraftLoaded,
    DraftOpening,
    DraftUnusable,
    Dropped,
    Proposals,
    class_of,
)
from swarm.wire.messages import Asset, Json, Manifest

# Longest wait for a proposal: in relation to the expected time of the request, and before any was measured.
WAIT_FACTOR = 3.0
MIN_WAIT_S = 0.004
FIRST_WAIT_S = 0.05
MAX_WAIT_S = 0.5
MAX_ASK_BYTES = MAX_FRAME_BYTES // 2  # of all sequences of a request; the first sequence may always be sent
# Where proposals do not pay, short ones are asked for after this number of steps: a probe.
PROBE_EVERY = 48
MAX_PROBE_EVERY = 768  # the interval doubles with each probe that does not pay
PROBE_DEPTH = 2
MIN_ACCEPTANCE = 0.2  # of a sequence's tokens, for more than probes
SEQUENCE_WEIGHT = 0.05  # weight of a token in the acceptance of its sequence
TOKENIZER = "tokenizer.json"

DraftEvent = DraftMessageReceived | DraftGone
DraftState = Literal["starting", "ready", "gone", "refused"]


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """A sequence as the draft process has it."""

    sequence: Sequence
    num_sent: int = 0  # tokens that were sent; 0: the process does not have the sequence
    is_behind: bool = False  # the process computes its tokens and will report that it has caught up
    is_refused: bool = False  # the process can't compute it
    acceptance: float = 1.0  # moving share of accepted tokens
    num_skipped: int = 0  # requests without it since the last one, because its tokens are hardly accepted
    start: int = 0  # position of the proposed tokens
    drafted: tuple[int, ...] = ()  # the last proposal
    confidence: tuple[float, ...] = ()  # log probabilities of its tokens
    next_index: int | None = None  # index in it of the first token that was proposed; None: none was


@dataclass(slots=True)
class _Wish:
    """A sequence for which the next request is to ask. ``until``: time until which it waits; None: it does not."""

    held: _DraftedSequence
    most: int  # maximum number of tokens; 0: it is dropped
    until: float | None

    def limit_unlikely(self) -> None:
        """Drop the wish if its sequence's tokens are hardly accepted, but for a short probe now and then."""
        held = self.held
        if held.acceptance >= MIN_ACCEPTANCE:
            return
        held.num_skipped += 1
        self.most = 0 if held.num_skipped < PROBE_EVERY else min(self.most, PROBE_DEPTH)
        if self.most:
            held.num_skipped = 0


@dataclass(slots=True)
class _Request:
    """The request under way."""

    number: int
    sent_at: float
    sequences: dict[int, int]  # sequence -> tokens that were sent of it
    least_kept: float
    until: float  # time until which sequences wait for it
    is_overdue: bool = False


@dataclass(slots=True)
class Drafts:
    """The draft model as the broker sees it (see the module). An ``AsyncProposer``."""

    state: State
    out: Outbox
    name: ProposerName = "draft"
    status: DraftState = "starting"
    problem: str = ""  # why there is no draft model, as text
    costs: DraftCosts = field(default_factory=DraftCosts)
    _loaded: DraftLoaded | None = None
    _checked: Manifest | None = None  # model of the swarm that the draft model was compared with
    _sequences: dict[int, _DraftedSequence] = field(default_factory=dict)
    _wishes: dict[int, _Wish] = field(default_factory=dict)
    _request: _Request | None = None
    _num_requests: int = 0
    _to_forget: list[int] = field(default_factory=list)
    # sequences for which the process had no memory, the first one first
    _crowded_out: dict[int, None] = field(default_factory=dict)
    _num_plain: int = 0  # steps since the last request for which proposals did not pay
    _probe_every: int = PROBE_EVERY  # such steps between two probes

    # --- the process -------------------------------------------------------------------------------------------------

    def handle(self, event: DraftEvent, now: float) -> list[int]:
        """Handle an event of the process; return the sequences that need not wait any more."""
        match event:
            case DraftGone(reason, is_final):
                return self.on_gone(reason, is_final=is_final)
            case DraftMessageReceived(Proposals() as answer):
                return self.on_proposals(answer, now)
            case DraftMessageReceived(CaughtUp(sequence)):
                self.on_caught_up(sequence)
            case DraftMessageReceived(Dropped(sequence)):
                self._on_dropped(sequence)
            case DraftMessageReceived(DraftLoaded() as loaded):
                self.on_loaded(loaded)
            case DraftMessageReceived(DraftUnusable()):
                pass  # the process ends with it
        return []

    def on_loaded(self, loaded: DraftLoaded) -> None:
        """Begin with an empty draft model."""
        self._clear()
        self.status, self.problem, self._loaded, self._checked = "ready", "", loaded, None
        self.costs = DraftCosts()
        self.state.count("draft_starts")
        self.out.note("draft_model_loaded", model=loaded.name, bytes=loaded.weight_bytes, seconds=loaded.load_s)

    def on_gone(self, reason: str, *, is_final: bool) -> list[int]:
        """Go on without the draft model. Return the sequences that need not wait any more."""
        if self.status != "refused":
            self.status, self.problem = ("refused" if is_final else "gone"), reason
            self.state.count("draft_losses")
        self._loaded = None
        return self._clear()

    def _clear(self) -> list[int]:
        waiting = [*self._wishes, *(self._request.sequences if self._request else ())]
        self._request = None
        self._sequences.clear()
        self._wishes.clear()
        self._to_forget.clear()
        self._crowded_out.clear()
        return waiting

    def on_proposals(self, answer: Proposals, now: float) -> list[int]:
        """Store proposals; return the sequences that need not wait any more."""
        request = self._request
        if request is None or answer.number != request.number:
            self.state.count("draft_errors")
            return []
        self._request = None
        if answer.passes:
            self.costs.record_request(answer.passes, answer.seconds, now - request.sent_at)
        self.state.count("draft_requests")
        self.state.count("draft_seconds", now - request.sent_at)
        for drafted in answer.drafted:
            self._store(drafted, request)
        for sequence in set(answer.behind) & request.sequences.keys() & self._sequences.keys():
            self._sequences[sequence].is_behind = True
        for sequence in set(answer.lost) & request.sequences.keys() & self._sequences.keys():
            self._sequences[sequence].num_sent = 0
        for sequence in set(answer.refused) & request.sequences.keys() & self._sequences.keys():
            self._sequences[sequence].is_refused = True
            self.state.count("draft_refusals")
        for sequence in answer.dropped:
            self._on_dropped(sequence)
        return list(request.sequences)

    def _store(self, drafted: DraftedTokens, request: _Request) -> None:
        held, model = self._sequences.get(drafted.sequence), self.state.manifest
        if drafted.sequence not in request.sequences or held is None or model is None:
            return  # the sequence has ended
        if drafted.start != request.sequences[drafted.sequence] or len(drafted.logprobs) != len(drafted.tokens):
            self.state.count("draft_errors")
            return
        num, acceptance, by_class = 0, 1.0, self.costs.acceptance
        for token, logprob in zip(drafted.tokens, drafted.logprobs, strict=True):
            acceptance *= by_class[class_of(logprob)]
            if token >= model.vocab_size or acceptance < request.least_kept:
                break
            num += 1
        held.start, held.drafted, held.confidence = drafted.start, drafted.tokens[:num], drafted.logprobs[:num]
        held.next_index = None

    def on_caught_up(self, sequence: int) -> None:
        """Note that a sequence can be proposed for."""
        if (held := self._sequences.get(sequence)) is not None:
            held.is_behind = False

    def _on_dropped(self, sequence: int) -> None:
        """Ask for a sequence no more until there is memory for it."""
        if (held := self._sequences.get(sequence)) is not None:
            held.num_sent, held.is_behind, held.drafted = 0, False, ()
            self._crowded_out[sequence] = None
            self.state.count("draft_drops")

    def check_overdue(self, now: float) -> None:
        """Note when sequences have stopped waiting for the request under way."""
        request = self._request
        if request is not None and not request.is_overdue and now >= request.until:
            request.is_overdue = True
            self.state.count("draft_overdue")

    # --- sequences ---------------------------------------------------------------------------------------------------

    def prepare(self, sequence: Sequence, most: int, now: float) -> float | None:
        """Wish for a proposal for a sequence. Return the time until which it waits; ``ask`` may end the wait at once.
        None if it does not wait."""
        self.check_overdue(now)
        request = self._request
        if most <= 0 or not self._is_usable() or (request is not None and request.is_overdue):
            return None
        if self.propose(sequence, most):  # what is left of a late answer
            return None
        held = self._sequences.get(sequence.id)
        if held is None:
            held = self._sequences[sequence.id] = _DraftedSequence(sequence, acceptance=self.costs.total.value)
        if held.is_behind or held.is_refused or len(self._wishes) >= MAX_ASKED or self._has_no_memory(sequence.id):
            return None
        if sequence.sampled - held.num_sent >= CATCH_UP:
            self._wishes[sequence.id] = _Wish(held, 1, None)
            return None  # until it has caught up
        wish = self._wishes[sequence.id] = _Wish(held, min(most, MAX_DEPTH), now + self._wait_s(now))
        return wish.until

    def _has_no_memory(self, sequence: int) -> bool:
        """Whether the process has no memory for a sequence. If it has dropped all, it has."""
        if sequence not in self._crowded_out or any(held.num_sent for held in self._sequences.values()):
            return sequence in self._crowded_out
        del self._crowded_out[sequence]
        return False

    def _wait_s(self, now: float) -> float:
        """Return how long to wait for a proposal at most, the rest of the request under way included."""
        expected_s = self.costs.expected_s(MAX_DEPTH)
        if not expected_s:
            return FIRST_WAIT_S
        rest_s = 0.0 if self._request is None else max(0.0, self._request.sent_at + expected_s - now)
        return min(MAX_WAIT_S, rest_s + WAIT_FACTOR * expected_s + MIN_WAIT_S)

    def ask(self, now: float) -> list[int]:
        """Send the next request, if sequences wish for proposals and none is under way. Return the sequences that need
        not wait, because a proposal is not worth its time."""
        if not self._wishes or self._request is not None:
            return []
        self._forget_ended()
        # Drop the wishes of sequences that have gone on without.
        wishes = {id: wish for id, wish in self._wishes.items() if wish.until is None or wish.until > now}
        plan = self._decide(list(wishes.values()))
        released = [id for id, wish in wishes.items() if wish.until is not None and not wish.most]
        self._wishes = {id: wish for id, wish in wishes.items() if wish.most}
        if self._wishes:
            self._send(plan, now)
        return released

    def _decide(self, wishes: list[_Wish]) -> DraftPlan:
        """Decide what to ask for: full proposals, short ones as a probe, or nothing. A wish for no tokens is
        dropped."""
        if not wishes:
            return DraftPlan(0.0)
        worthwhile = [wish for wish in wishes if wish.held.acceptance >= MIN_ACCEPTANCE]
        num_rows, step_s = max(len(wishes), len(self.state.running.due)), self.state.costs.expected_s
        acceptance = sum(wish.held.acceptance for wish in worthwhile) / max(1, len(worthwhile))
        plan = self.costs.plan(num_rows, len(worthwhile), acceptance, step_s) if worthwhile else DraftPlan(0.0)
        if plan.is_worthwhile:
            self._num_plain, self._probe_every = 0, PROBE_EVERY
            for wish in wishes:
                wish.limit_unlikely()
            return plan
        self._num_plain += 1
        # a probe takes a hundredth of the time at most
        cost = self.costs.expected_s(PROBE_DEPTH) / (step_s(num_rows) or 1.0)
        is_probe = self._num_plain >= max(self._probe_every, 100 * cost)
        if is_probe and any(wish.until is not None for wish in wishes):
            self._num_plain, self._probe_every = 0, min(MAX_PROBE_EVERY, 2 * self._probe_every)
        for wish in wishes:
            wish.most = min(wish.most, PROBE_DEPTH) if is_probe else 0
        return plan

    def _send(self, plan: DraftPlan, now: float) -> None:
        entries: list[AskedSequence] = []
        until, num_bytes = now, 0
        for number, wish in [*self._wishes.items()]:
            entry = _entry(wish)
            num_bytes += _max_bytes(entry)
            if entries and num_bytes > MAX_ASK_BYTES:
                break
            del self._wishes[number]
            wish.held.num_sent = wish.held.sequence.sampled
            until = max(until, wish.until or now)
            entries.append(entry)
        self._num_requests += 1
        sent = {entry.sequence: entry.start + len(entry.tokens) for entry in entries}
        self._request = _Request(self._num_requests, now, sent, plan.least_kept, until)
        forgotten = tuple(self._to_forget)
        self._to_forget.clear()
        message = AskProposals(self._num_requests, plan.least, self.costs.acceptance, tuple(entries), forgotten)
        self.out.append(AskDraft(message))

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return what is left of the last proposal after the tokens that the sequence has gained since."""
        held = self._sequences.get(sequence.id)
        if held is None or not held.drafted:
            return ()
        gained = sequence.tokens[held.start :]
        if len(gained) >= len(held.drafted) or tuple(gained) != held.drafted[: len(gained)]:
            return ()
        held.next_index = len(gained)
        return held.drafted[len(gained) : len(gained) + most]

    def record(self, sequence: int, num_proposed: int, num_accepted: int) -> None:
        """Record how many tokens of the proposal that ``propose`` returned last were accepted."""
        held = self._sequences.get(sequence)
        if held is None or held.next_index is None:
            return
        self.costs.record_tokens(held.confidence[held.next_index : held.next_index + num_proposed], num_accepted)
        for index in range(min(num_proposed, num_accepted + 1)):
            held.acceptance += SEQUENCE_WEIGHT * ((index < num_accepted) - held.acceptance)

    def forget(self, sequence: int) -> None:
        """Drop a sequence that has ended or left the stages; the process drops it with the next request."""
        self._wishes.pop(sequence, None)
        self._crowded_out.pop(sequence, None)
        held = self._sequences.pop(sequence, None)
        if held is not None and held.num_sent:
            self._to_forget.append(sequence)
            if self._crowded_out:  # its memory is enough for one of them, perhaps
                del self._crowded_out[next(iter(self._crowded_out))]

    def _forget_ended(self) -> None:
        for number, held in [*self._sequences.items()]:
            if held.sequence.state is not SequenceState.RUNNING:
                self.forget(number)

    # --- the two models ----------------------------------------------------------------------------------------------

    def _is_usable(self) -> bool:
        """Whether a draft model is loaded that suits the swarm's model. A wrong one is stopped, with one error."""
        loaded, model = self._loaded, self.state.manifest
        if self.status != "ready" or loaded is None or model is None:
            return False
        if self._checked is not model:
            self._checked = model
            if problem := refusal(loaded, model):
                self.status, self.problem = "refused", problem
                self.out.note("draft_model_refused", "error", reason=problem)
                self.out.append(StopDraft())
                self._clear()
                return False
        return True

    def report(self) -> Json:
        """Return figures for ``swarmctl stats``."""
        body: Json = {"state": self.status, "model": self._loaded.name if self._loaded else ""}
        if self.problem:
            body["problem"] = self.problem
        return body | {
            "ask_ms": round(self.costs.ask_s * 1e3, 3),
            "pass_ms": round(self.costs.pass_s * 1e3, 3),
            "acceptance": round(self.costs.total.value, 3),
            "sequences": len(self._sequences),
        }


def _entry(wish: _Wish) -> AskedSequence:
    held, sequence = wish.held, wish.held.sequence
    if held.num_sent > sequence.sampled:
        held.num_sent = 0  # it was cut
    opening = None
    if not held.num_sent:
        # the log probability of each token is drawn in any case; a grammar is long, and the stages enforce it
        params = structs.replace(sequence.request.submit.params, grammar=None, thinking=None, stop=(), logprobs=None)
        opening = DraftOpening(params, sequence.seed, sequence.num_prompt, max(1, sequence.limit))
    return AskedSequence(sequence.id, held.num_sent, tuple(sequence.tokens[held.num_sent :]), wish.most, opening)


def _max_bytes(entry: AskedSequence) -> int:
    """Return the largest size of an entry in a frame."""
    params = None if entry.opening is None else entry.opening.params
    return 512 + 5 * len(entry.tokens) + (0 if params is None else 14 * len(params.logit_bias))


def refusal(loaded: DraftLoaded, model: Manifest) -> str:
    """Return why the draft model can't propose for the swarm's model; empty if it can."""
    if model.state_stride:
        return f"{model.name} keeps states, which can't be rolled back from a wrong proposal: remove broker.draft"
    return vocabulary_difference(loaded, model)


def vocabulary_difference(loaded: DraftLoaded, model: Manifest) -> str:
    """Return why tokens of the draft model are not those of the swarm's model; empty if they are.

    Two models of a family may have the same tokenizer and padded vocabularies of different sizes. Without tokenizers,
    the sizes decide.
    """
    draft_file, swarm_file = _tokenizer(loaded.assets), _tokenizer(model.assets)
    if draft_file is None and swarm_file is None:
        if loaded.vocab_size == model.vocab_size:
            return ""
    elif draft_file is not None and swarm_file is not None:
        is_comparable = len(draft_file.digest) == len(swarm_file.digest)  # a hub's digests are of another kind
        if draft_file.digest == swarm_file.digest if is_comparable else draft_file.num_bytes == swarm_file.num_bytes:
            return ""
    return (
        f"the draft model {loaded.name} has another vocabulary ({loaded.vocab_size} tokens) than {model.name} "
        f"({model.vocab_size} tokens): choose one with the same {TOKENIZER}"
    )


def _tokenizer(assets: tuple[Asset, ...]) -> Asset | None:
    return next((asset for asset in assets if asset.name == TOKENIZER), None)
