"""Who joins the next step, and what counts once it has come back.

Continuous joining and leaving. Who enters the stages is decided by class, share and deadline (``queue``), how much room
it gets by ``room``; small sequences may overtake one that has no room yet, but not for long.

A step takes the decodes that are due, the longest unserved first, one row each; then chunks of prompts by class,
deadline and arrival. The two are governed apart:

* *Decodes* are spread evenly over the micro-batches in flight (see ``depth``).
* *Prompts* get what the decodes leave of the step's budget, and always a little, so that neither starves the other.
  What is pending is shared out over the micro-batches. While answers are running, prompts are held back as free room
  gets short, so that those who run come to their end before more join; and they get no more than keeps a step's
  measured time below ``step_target_s``.

While layers that changed hands are rebuilt, steps rest between each other, so that replays get most of the time.

Nothing here must know which micro-batch is which: a sequence's tokens that no step carries yet are its ``pending``
ones, and a decode has none while its step is under way. A step costs time in proportion to its rows, whatever waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.broker.planner.recover import rest_s
from swarm.broker.state import Flight, Sequence, SequenceState, State
from swarm.broker.state.costs import CHUNK
from swarm.broker.steps.apart import who_may_go
from swarm.broker.steps.room import Room
from swarm.wire.messages import MAX_HEADER_BYTES, MAX_ROWS, Open, Row, SequencePosition, Step, num_blocks

Mode = Literal["batch", "overlapped", "auto"]

# Below this, cutting the decodes into micro-batches costs more (each pays for reading the weights) than it hides.
SPLIT_FROM = 16

# How often, and for how long, others may pass the first one that waits for room. After that it is kept free for it.
MAX_PASSED = 16
MAX_PASSED_S = 5.0

LOOK_AHEAD = 16  # how many that have no room are passed over in looking for one that has
PROMPT_SHARE = 64  # prompts are not cut smaller to share them out over the micro-batches: each pays for the weights
MOST_TELLING_BYTES = MAX_HEADER_BYTES // 2  # of a step's header; the rest of it is far shorter
KV_SHORT = 0.05  # below this part of free room, prompts get the least there is


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    mode: Mode = "auto"
    step_tokens: int = 512
    prefill_chunk: int = 256
    max_running: int = 256
    kv_cache: bool = True  # False: every token computes its whole sequence anew; only good for comparisons
    step_target_s: float = 0.0  # 0: a step has all of ``step_tokens``, however long it takes
    kv_headroom: int = 64  # positions beyond its prompt for which a sequence gets room when it enters
    max_passed: int = MAX_PASSED
    max_passed_s: float = MAX_PASSED_S


def depth(mode: Mode, num_stages: int, *, shares_cores: bool = False) -> int:
    """How many steps may be in flight.

    Stages that share the cores of one machine gain nothing by computing at the same time: each step reads all weights,
    so two half-full ones cost nearly twice one full one, and a step that is alone may use every core.
    """
    if mode == "batch" or (mode == "auto" and shares_cores):
        return 1
    return max(1, num_stages)


# --- entering ---------------------------------------------------------------------------------------------------------


def admit(state: State, settings: SchedulerSettings, now: float) -> None:
    """Let waiting sequences in while there is room. One that doesn't fit yet doesn't hold up smaller ones behind it,
    until they have passed it too often or for too long; then nobody does, so that there will be room."""
    waiting = state.waiting
    if not waiting:
        return
    room = Room(state, settings.kv_headroom, settings.max_running)
    passed: list[Sequence] = []  # those that have no room now, the first of them first
    while len(passed) < LOOK_AHEAD and _has_place(state, room) and not _may_not_be_passed(passed, settings, now):
        sequence = waiting.pop()
        if sequence is None:
            break
        if num_blocks(sequence.limit) > state.book.kv_blocks:
            waiting.set_aside(sequence)
            continue
        sequence.fit()
        if _is_hopeless(state, sequence, now):
            state.give_up(sequence)
        elif room.enter(sequence):
            _entered(state, sequence, passed, now)
        else:
            if not passed:
                sequence.be_first_to_wait(now)
            passed.append(sequence)
    for sequence in passed:
        waiting.add(sequence)


def _has_place(state: State, room: Room) -> bool:
    """One may be free for whoever is next, at once or by others' going."""
    if room.places + state.prefix.num_evictable > 0:
        return True
    highest, lowest = state.waiting.highest, state.running.lowest
    return highest is not None and lowest is not None and highest > lowest


def _may_not_be_passed(passed: list[Sequence], settings: SchedulerSettings, now: float) -> bool:
    if not passed or (since := passed[0].passed_since) is None:
        return False
    return passed[0].num_passed >= settings.max_passed or now - since >= settings.max_passed_s


def _is_hopeless(state: State, sequence: Sequence, now: float) -> bool:
    """Even with the quickest steps of late, alone and at once, it would be too late."""
    deadline, params = sequence.request.deadline_at, sequence.request.submit.params
    if deadline is None:
        return False
    may_end_early = not params.ignore_eos or params.stop or params.stop_token_ids
    least = params.min_tokens if may_end_early else params.max_tokens
    return now + max(1, least - sequence.num_generated) * state.costs.least_step_s > deadline


def _entered(state: State, sequence: Sequence, passed: list[Sequence], now: float) -> None:
    if passed:
        passed[0].be_passed()
    if sequence.start(now):
        state.waiting.charge(sequence.request.tenant, sequence.sampled - sequence.kv)


# --- the step ---------------------------------------------------------------------------------------------------------


def next_step(state: State, settings: SchedulerSettings, now: float) -> Step | None:
    """The step to dispatch now, with the state moved on as if it were sent; None if there is nothing to send."""
    plan = state.book.current
    if plan is None or not state.book.serving:
        return None
    most = depth(settings.mode, len(plan.stages), shares_cores=plan.shares_cores)
    state.decided.depth, state.decided.mode = most, "batch" if most == 1 else "overlapped"
    if len(state.flights) >= most or not _has_work(state) or _lets_replays_pass(state, now):
        return None
    admit(state, settings, now)
    chosen = _choose(state, settings, most)
    if not chosen and not state.to_release and not state.to_retire:
        return None
    return _build(state, chosen, plan.epoch, now)


def _has_work(state: State) -> bool:
    """Somebody waits, or has tokens that no step carries, or is to be let go of: asked after every event."""
    running = state.running
    pending = running.due or running.num_prefilling
    return bool(pending or state.waiting or state.to_release or state.to_retire)


def _lets_replays_pass(state: State, now: float) -> bool:
    """While layers are rebuilt, stages belong to replays most of the time. A step goes before the next chunk in every
    stage: those whose layers are level would have their tokens at the cost of all who still wait, and of their own,
    since a step of few costs as much as one of all."""
    costs = state.costs
    return not state.rebuilding.is_idle and now - costs.done_at < rest_s(costs.usual_step_s)


def _choose(state: State, settings: SchedulerSettings, most_in_flight: int) -> list[tuple[Sequence, int]]:
    """(sequence, number of tokens) in the order of the step's rows."""
    room = Room(state, settings.kv_headroom, settings.max_running)
    kept = _kept_for_prompts(state, settings)
    most = min(settings.step_tokens - kept, MAX_ROWS, _decode_share(state, settings, most_in_flight))
    chosen: list[tuple[Sequence, int]] = []
    told = 0  # bytes by which stages are told of sequences that they don't know
    apart = who_may_go(state) if state.evidence.suspects else None
    for sequence in list(state.running.due.values()) if apart is None else apart.due:
        if len(chosen) >= most:
            break
        if not _can_be_told(sequence, told):
            continue
        if sequence.state is SequenceState.RUNNING and room.grow(sequence, sequence.sampled):
            chosen.append((sequence, 1))
            told += _telling_bytes(sequence)
    left = _prompt_tokens(state, settings, len(chosen), kept, most_in_flight)
    prefilling = () if not left else state.running.prefilling if apart is None else apart.prefilling
    for sequence in prefilling:
        if left <= 0 or len(chosen) >= MAX_ROWS:
            break
        if not _can_be_told(sequence, told):
            continue
        count = min(sequence.pending, settings.prefill_chunk, left)
        if sequence.state is SequenceState.RUNNING and room.grow(sequence, sequence.scheduled + count):
            chosen.append((sequence, count))
            left -= count
            told += _telling_bytes(sequence)
    # Whoever was chosen first and had to give way to a later one with more claim is in the queue again.
    return [(sequence, count) for sequence, count in chosen if sequence.state is SequenceState.RUNNING]


def _can_be_told(sequence: Sequence, told: int) -> bool:
    """The step's header has room for it. Grammars are long, and each of a request's sequences brings its own copy. One
    that is longer than all comes alone."""
    more = _telling_bytes(sequence)
    return not more or not told or told + more <= MOST_TELLING_BYTES


def _telling_bytes(sequence: Sequence) -> int:
    """How much longer a step's header is at most because stages are told of this sequence."""
    if sequence.told:
        return 0
    grammar = sequence.request.submit.params.grammar
    return 5 * len(sequence.tokens) + (0 if grammar is None else 4 * len(grammar.text))


def _decode_share(state: State, settings: SchedulerSettings, most_in_flight: int) -> int:
    """Decodes in one micro-batch: an even share, or all of them where splitting doesn't pay."""
    num_decoding = len(state.running) - state.running.num_prefilling
    if most_in_flight == 1 or (settings.mode == "auto" and num_decoding < SPLIT_FROM):
        return max(1, num_decoding)
    return max(1, -(-num_decoding // most_in_flight))


def _kept_for_prompts(state: State, settings: SchedulerSettings) -> int:
    """Tokens of the step that decodes must leave to prompts: up to a chunk, a quarter of the step at most. Where a step
    has only one or two tokens, they take turns."""
    running = state.running
    if not running.num_pending or not running.due:
        running.prompts_are_next = False
        return 0
    quarter = settings.step_tokens // 4
    if quarter:
        return min(running.num_pending, CHUNK, quarter)
    running.prompts_are_next = not running.prompts_are_next
    return 0 if running.prompts_are_next else 1


def _prompt_tokens(state: State, settings: SchedulerSettings, num_decodes: int, kept: int, most_in_flight: int) -> int:
    """How many tokens of prompts join this many decodes."""
    pending, decided = state.running.num_pending, state.decided
    decided.budget, decided.prefill, decided.throttle = settings.step_tokens, 0, "none"
    if not pending:
        return 0
    least = max(kept, min(CHUNK, settings.step_tokens - num_decodes))
    most = settings.step_tokens - num_decodes
    limits = {"none": min(pending, most), "pending": max(least, PROMPT_SHARE, -(-pending // most_in_flight))}
    if len(state.running) > state.running.num_prefilling:  # answers are running, in this micro-batch or another
        decided.budget = state.costs.budget(settings.step_target_s, settings.step_tokens)
        limits["time"] = max(least, decided.budget - num_decodes)
        limits["kv"] = max(least, int(most * _kv_ease(state)))
    tokens = min(limits.values())
    decided.prefill, decided.throttle = tokens, next(name for name, limit in limits.items() if limit == tokens)
    return tokens


def _kv_ease(state: State) -> float:
    """1 as long as all room is free, falling to 0 where it is short."""
    total = state.book.kv_blocks
    free = total - state.running.blocks - state.prefix.num_blocks + state.prefix.evictable_blocks
    return max(0.0, (free / total - KV_SHORT) / (1 - KV_SHORT)) if total else 0.0


def _build(state: State, chosen: list[tuple[Sequence, int]], epoch: int, now: float) -> Step:
    rows: list[Row] = []
    tokens: list[int] = []
    opens: list[Open] = []
    truncates: list[SequencePosition] = []
    for sequence, count in chosen:
        if not sequence.told:
            opens.append(opening(sequence))
            state.unfork(sequence)  # what may release its model now comes behind this step
        if sequence.truncate:
            truncates.append(SequencePosition(sequence.id, sequence.kv))
        start = sequence.dispatch(count)
        rows.append(Row(sequence.id, start, count, sequence.scheduled == sequence.sampled))
        tokens.extend(sequence.tokens[start : sequence.scheduled])
    step = Step(
        epoch=epoch,
        step=state.next_step,
        rows=tuple(rows),
        tokens=tuple(tokens),
        retire=tuple(state.to_retire),
        release=tuple(state.to_release),
        open=tuple(opens),
        truncate=tuple(truncates),
        alone=not state.flights,
    )
    state.dispatched(len(tokens), tuple((s, s.scheduled) for s, _ in chosen), now)
    return step


def opening(sequence: Sequence) -> Open:
    """Make what stages must know of a sequence before its first row."""
    return Open(
        sequence.id,
        sequence.request.submit.params,
        sequence.seed,
        sequence.num_prompt,
        sequence.limit,
        tuple(sequence.tokens),
        sequence.fork_of,
        sequence.kv if sequence.fork_of is not None else 0,
    )


# --- the step comes back ----------------------------------------------------------------------------------------------

# What a sequence was when the step was sent counts: one that has given its room back since (``stay``) begins anew, and
# what comes of it now is of its former self.


def acknowledge(state: State, reached: tuple[SequencePosition, ...], flight: Flight, *, keeps_kv: bool) -> None:
    """Every stage has done these rows: their keys and values are everywhere."""
    for sequence_id, position in ((k.sequence, k.position) for k in reached):
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.stay != flight.stays.get(sequence_id):
            continue  # it has given its room back since
        if sequence.state is SequenceState.RUNNING:
            sequence.acknowledge(position)
            state.prefix.acknowledge(sequence_id, sequence.tokens, sequence.kv)
            if not keeps_kv and sequence.kv == sequence.scheduled == sequence.sampled:
                sequence.drop_kv()
                state.running.refresh(sequence)


def put_off(state: State, late: tuple[int, ...], flight: Flight) -> None:
    """Have those drawn for again that the last stage could not draw for yet."""
    for sequence_id in late:
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.stay != flight.stays.get(sequence_id):
            continue  # it has given its room back since
        if sequence.state is SequenceState.RUNNING and sequence.kv == sequence.scheduled == sequence.sampled:
            sequence.draw_again()
            state.running.refresh(sequence)
            state.count("draws_put_off")
