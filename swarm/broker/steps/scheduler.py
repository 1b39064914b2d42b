"""Scheduler: which sequences join the next step, and what counts when it completes (continuous batching).

Admission follows class, share and deadline (``state.queue``); ``kv_capacity`` decides how many blocks a sequence gets.
Small sequences may overtake one that lacks blocks, but not for long.

A step takes the decodes that are due, the longest unserved first, one row each; then chunks of prompts by class,
deadline and arrival. The two are limited separately:

* *Decodes* are spread evenly over the micro-batches in flight (see ``max_steps_in_flight``).
* *Prompts* get what the decodes leave of the step's budget, and always a little, so that neither starves the other.
  Pending prompt tokens are shared out over the micro-batches. While answers are running, prompts are held back as free
  blocks become short, so that running sequences finish before more join; and they get no more tokens than keep the
  measured time of a step below ``step_target_s``.

* *Images* are computed in parts, besides the tokens of steps (``images``).

Suspects, the sequences of a step that raised, are computed alone, alternating with steps of all others. The next
failure then shows whether one of the sequences or the worker is to blame (``members.blame``).

While layers that changed hands are rebuilt, steps pause in favour of replays (``planner.pauses``).

Sequences that wait for their proposals join no step. With one step in flight, a step waits for them unless more others
could join it. If it never did, two groups would take steps in turns for good, each half as full, while the draft model
computes on the stages' cores; so the smaller group joins the larger one.

The scheduler does not track micro-batches: tokens that no step carries yet are a sequence's ``pending`` ones, and a
decode has none while its step is in flight. The cost of a step is proportional to its rows, however many sequences
wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from swarm.broker.planner.pauses import MAX_PAUSE_S, resumes_at_once, step_pause_s
from swarm.broker.speculation.speculation import Speculation
from swarm.broker.state import InFlightProposal, InFlightStep, Sequence, SequenceState, State
from swarm.broker.state.costs import CHUNK
from swarm.broker.steps.images import ImageChoice, awaits_images, choose_parts, lacking_images, num_seen, take_dropped
from swarm.broker.steps.kv_capacity import KvAllocator, shareable_positions
from swarm.broker.steps.proposals import choose_proposals, refused_positions
from swarm.broker.steps.restoring import begin_restore
from swarm.wire.messages import (
    BLOCK,
    MAX_ROWS,
    ImagePixels,
    Open,
    ProposedTail,
    Row,
    SequencePosition,
    Step,
    num_blocks,
)
from swarm.wire.shared_positions import Departures

Mode = Literal["batch", "overlapped", "auto"]

# With fewer decodes, splitting into micro-batches costs more (each reads all weights) than it hides.
MIN_DECODES_TO_SPLIT = 16

# How often, and for how many seconds, others may overtake the first sequence that waits for blocks. After that, free
# blocks are kept for it.
MAX_OVERTAKES = 16
MAX_OVERTAKEN_S = 5.0

LOOK_AHEAD = 16  # sequences without enough blocks that are skipped in search of one that fits
MAX_DEFERRED = 256  # sequences that wait for another one's prompt and are skipped
# tokens; prompts are not split into smaller parts over the micro-batches, since each part reads all weights
MIN_PROMPT_SHARE = 64
# maximum size of ``Open`` records in a step's header; the rest of the header is far shorter
MAX_OPEN_BYTES = 4 << 20
MAX_VECTOR_BYTES = 4 << 20  # maximum size of the vectors that a step returns, likewise
# prompt tokens of a step with log probabilities: the last stage holds logits for each, as for each decode
MAX_SCORED = 128
NO_SPECULATION = Speculation(mode="off")
MIN_TARGET_S = 1e-6  # time of prompt tokens if a step's target leaves none
KV_SHORT = 0.05  # free fraction of KV blocks below which prompts get the minimum


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of steps and of admission."""

    mode: Mode = "auto"
    step_tokens: int = 512  # maximum tokens of a step
    prefill_chunk: int = 256  # maximum prompt tokens of one sequence in a step
    max_running: int = 256
    kv_cache: bool = True  # False: every token computes its whole sequence again; only useful for comparisons
    step_target_s: float = 0.0  # 0: a step may have ``step_tokens``, however long it takes
    kv_headroom: int = 64  # positions beyond its prompt for which a sequence gets blocks at admission
    max_passed: int = MAX_OVERTAKES
    max_passed_s: float = MAX_OVERTAKEN_S


def max_steps_in_flight(mode: Mode, num_stages: int, *, shares_cores: bool = False) -> int:
    """Return the maximum number of steps in flight.

    Stages that share the cores of one machine gain nothing by computing at the same time: each step reads all weights,
    so two half-full steps cost nearly twice as much as one full step, and a step that runs alone can use every core.
    """
    if mode == "batch" or (mode == "auto" and shares_cores):
        return 1
    return max(1, num_stages)


# --- admission --------------------------------------------------------------------------------------------------------


def admit(state: State, settings: SchedulerSettings, now: float, max_tokens_per_step: float = 1.0) -> None:
    """Admit waiting sequences while there is capacity. A sequence that doesn't fit yet doesn't block smaller ones
    behind it, until they have overtaken it too often or for too long; from then on free blocks are kept for it."""
    waiting = state.waiting
    if not waiting:
        return
    allocator = KvAllocator(state, settings.kv_headroom, settings.max_running)
    overtaken: list[Sequence] = []  # sequences that lack blocks now, the first one first
    deferred: list[Sequence] = []  # sequences that are about to start from another one's prompt
    while (
        len(overtaken) < LOOK_AHEAD
        and len(deferred) < MAX_DEFERRED
        and _may_have_slot(state, allocator)
        and not _is_overtaking_exhausted(overtaken, settings, now)
    ):
        sequence = waiting.pop()
        if sequence is None:
            break
        if num_blocks(sequence.limit) > state.plans.kv_blocks or state.outdated_worker(sequence.request.submit.params):
            waiting.set_aside(sequence)
            continue
        sequence.mark_fitting()
        if _is_deadline_unreachable(state, sequence, max_tokens_per_step, now):
            state.give_up_deadline(sequence)
        elif _is_prompt_underway(state, sequence):
            deferred.append(sequence)
        elif allocator.admit(sequence):
            _record_admission(state, sequence, overtaken, now)
            begin_restore(state, sequence, now)
        else:
            if not overtaken:
                sequence.start_counting_overtakes(now)
            overtaken.append(sequence)
    for sequence in (*overtaken, *deferred):
        waiting.add(sequence)


def _is_prompt_underway(state: State, sequence: Sequence) -> bool:
    """Whether another sequence of the request is computing a prompt that this one can share as soon as it is done."""
    position = shareable_positions(sequence, state.shared.unit)
    if not position:
        return False
    running = [other.id for other in sequence.request.sequences if other.state is SequenceState.RUNNING]
    return bool(running) and all(state.prefix.index.num_blocks(other) * BLOCK < position for other in running)


def _may_have_slot(state: State, allocator: KvAllocator) -> bool:
    """Whether a slot may be available for the next sequence, immediately or by preempting others."""
    if allocator.free_slots + state.prefix.num_evictable > 0:
        return True
    highest, lowest = state.waiting.highest_class, state.running.lowest_class
    return highest is not None and lowest is not None and highest > lowest


def _is_overtaking_exhausted(overtaken: list[Sequence], settings: SchedulerSettings, now: float) -> bool:
    if not overtaken or (since := overtaken[0].overtaken_since) is None:
        return False
    return overtaken[0].num_overtaken >= settings.max_passed or now - since >= settings.max_passed_s


def _is_deadline_unreachable(state: State, sequence: Sequence, max_tokens_per_step: float, now: float) -> bool:
    """Whether it would miss its deadline even alone, now, and with the quickest recent steps."""
    deadline, params = sequence.request.deadline_at, sequence.request.submit.params
    if deadline is None:
        return False
    may_end_early = not params.ignore_eos or params.stop or params.stop_token_ids  # tokens it must generate at least
    least = 0 if params.vector is not None else params.min_tokens if may_end_early else params.max_tokens
    num_steps = max(1, math.ceil((least - sequence.num_generated) / max_tokens_per_step))
    return now + num_steps * state.costs.min_step_s > deadline


def _record_admission(state: State, sequence: Sequence, overtaken: list[Sequence], now: float) -> None:
    if overtaken:
        overtaken[0].count_overtake()
    state.restores.record_admission(sequence)
    if sequence.start(now):
        state.waiting.charge(sequence.request.tenant, sequence.sampled - sequence.kv)


# --- the step ---------------------------------------------------------------------------------------------------------


def next_step(
    state: State, settings: SchedulerSettings, now: float, speculation: Speculation = NO_SPECULATION
) -> Step | None:
    """Return the step to dispatch now, and record it in the state as sent; None if there is nothing to send."""
    plan = state.plans.current
    if plan is None or not state.plans.is_serving:
        return None
    most = max_steps_in_flight(settings.mode, len(plan.stages), shares_cores=plan.shares_cores)
    state.decision.depth, state.decision.mode = most, "batch" if most == 1 else "overlapped"
    if len(state.in_flight) >= most or not _has_work(state) or _must_yield_to_replays(state, now):
        return None
    if most == 1 and _waits_for_proposals(state, speculation, now):
        return None
    admit(state, settings, now, speculation.max_tokens_per_step)
    chosen, images = _choose(state, settings, most, speculation)
    if not chosen and not images.parts and state.evidence.suspects:  # then the others may have work
        chosen, images = _choose(state, settings, most, speculation)
    unopened = _choose_unopened(state, chosen)
    if not chosen and not unopened and not images.parts and not state.to_release and not state.to_retire:
        return None
    may_propose = settings.kv_cache and speculation.is_active
    proposals: dict[int, InFlightProposal] = {}
    if may_propose:
        budget = state.costs.budget(settings.step_target_s, settings.step_tokens, least=0)
        proposals = choose_proposals(state, speculation, chosen, budget, overlaps=most > 1)
    return _build(state, chosen, unopened, proposals, images=images, now=now)


def _has_work(state: State) -> bool:
    """Whether a sequence waits, has tokens that no step carries, or must be released. Called after every event."""
    running = state.running
    pending = running.due or running.num_prefilling
    is_image_awaited = any(sequence.images for sequence in state.rebuilding.queue)
    waiting = state.waiting or state.restores.unopened or is_image_awaited
    return bool(pending or waiting or state.to_release or state.to_retire)


def _waits_for_proposals(state: State, speculation: Speculation, now: float) -> bool:
    """Whether a step waits: at least as many sequences wait for their proposals as others that run could join it."""
    num_waiting, running = speculation.num_waiting(now), state.running
    return 0 < num_waiting >= len(running.due) - num_waiting + running.num_prefilling


def _must_yield_to_replays(state: State, now: float) -> bool:
    """Whether to pause so that the stages can work on replays: a step is served before the next replay chunk in every
    stage.

    While no replay makes progress, steps leave half of the time to them.
    """
    rebuilding, costs = state.rebuilding, state.costs
    if rebuilding.is_idle or _await_images_only(state):
        return False
    step_s, num_waiting = costs.usual_step_s, rebuilding.num_waiting
    is_blocked = now - rebuilding.ordered_at > MAX_PAUSE_S
    wait_s = 0.0 if is_blocked else rebuilding.expected_wait_s(now)
    pause_s = step_pause_s(step_s, len(state.running) - num_waiting, num_waiting, wait_s)
    if rebuilding.completed_before == state.next_step:
        delay_s = min(pause_s, rebuilding.expected_rest_s(now) / num_waiting)
        if resumes_at_once(rebuilding.num_resuming, delay_s, step_s, num_waiting):
            return False
    return now - costs.last_done_at < pause_s


def _await_images_only(state: State) -> bool:
    """Whether all replays wait for images, which are computed in steps."""
    rebuilding = state.rebuilding
    return not rebuilding.in_progress and all(awaits_images(state, sequence) for sequence in rebuilding.queue)


class _EligibleSequences(NamedTuple):
    """Sequences that the next step may contain: decodes and prompts, and those with images for their replays."""

    due: list[Sequence]
    prefilling: list[Sequence]
    rebuilt: Collection[Sequence] = ()
    postponed: Collection[Sequence] = ()  # suspects whose turn comes after that of another one

    def only(self, ids: Collection[int], postponed: Collection[Sequence]) -> _EligibleSequences:
        """Return these of the sequences."""
        due, prefilling, rebuilt = ([s for s in each if s.id in ids] for each in self[:3])
        return _EligibleSequences(due, prefilling, rebuilt, postponed)


def _choose_eligible(state: State) -> _EligibleSequences:
    """Return one suspect, or all sequences that are not suspects, alternately.

    A suspect's step is the only one in flight. Otherwise its failure would discard the steps of others, which could
    show that the workers are sound, again and again.
    """
    evidence, nothing = state.evidence, _EligibleSequences([], [])
    everything = _EligibleSequences(list(state.running.due.values()), state.running.prefilling)
    if not evidence.suspects:
        return everything
    flights = state.in_flight.values()
    in_flight = [id_ for flight in flights for id_ in (*(s.id for s, _ in flight.sequences), *flight.seen)]
    if any(id_ in evidence.suspects for id_ in in_flight):
        return nothing
    everything = everything._replace(rebuilt=lacking_images(state))
    candidates = [*everything.due, *everything.prefilling, *everything.rebuilt]
    suspects = [s for s in candidates if s.id in evidence.suspects]
    if not suspects:
        return everything
    others = {s.id for s in candidates} - evidence.suspects
    first = min(suspects, key=lambda s: evidence.last_failure_at(s.id))
    postponed = [s for s in suspects if s is not first]
    if others and not evidence.suspects_are_next:
        evidence.suspects_are_next = True
        return everything.only(others, postponed)
    if in_flight:
        return nothing
    evidence.suspects_are_next = False
    return everything.only({first.id}, postponed)


def _choose(
    state: State, settings: SchedulerSettings, most_in_flight: int, speculation: Speculation
) -> tuple[list[tuple[Sequence, int]], ImageChoice]:
    """Return (sequence, number of tokens) in the order of the step's rows, and the parts of images."""
    allocator = KvAllocator(state, settings.kv_headroom, settings.max_running)
    reserved = _reserve_for_prompts(state, settings)
    most = min(settings.step_tokens - reserved, MAX_ROWS, _decode_share(state, settings, most_in_flight))
    chosen: list[tuple[Sequence, int]] = []
    open_bytes = 0  # header bytes needed to open sequences in the stages
    eligible = _choose_eligible(state)
    for sequence in eligible.due:
        if len(chosen) >= most:
            break
        if not _fits_into_header(sequence, open_bytes) or speculation.is_waiting(sequence, state.now):
            continue
        if sequence.state is SequenceState.RUNNING and allocator.grow(sequence, sequence.sampled):
            chosen.append((sequence, 1))
            open_bytes += _open_bytes(sequence)
    seeing = (*eligible.prefilling, *eligible.rebuilt) if state.evidence.suspects else None
    images = choose_parts(state, settings.step_target_s, len(chosen), seeing, eligible.postponed)
    left = _prompt_tokens(state, settings, len(chosen), reserved, most_in_flight, num_patches=images.num_patches)
    vector_bytes = 0  # of the vectors that the step returns
    scored = 0  # prompt tokens whose log probabilities the step returns
    for sequence in eligible.prefilling:
        if left <= 0 or len(chosen) >= MAX_ROWS:
            break
        if not _fits_into_header(sequence, open_bytes):
            continue
        count = min(sequence.pending, settings.prefill_chunk, left)
        if sequence.lacks_prompt_logprobs:
            count = min(count, MAX_SCORED - scored)
        count = num_seen(state, sequence, count)
        if not count:
            continue
        returned = _returned_bytes(state, sequence, count)
        if vector_bytes and vector_bytes + returned > MAX_VECTOR_BYTES:
            continue
        if sequence.state is SequenceState.RUNNING and allocator.grow(sequence, sequence.scheduled + count):
            chosen.append((sequence, count))
            left -= count
            vector_bytes += returned
            scored += count if sequence.lacks_prompt_logprobs else 0
            open_bytes += _open_bytes(sequence)
    # A sequence chosen early may have been preempted since by a later one of higher rank.
    return [(sequence, count) for sequence, count in chosen if sequence.state is SequenceState.RUNNING], images


def _fits_into_header(sequence: Sequence, open_bytes: int) -> bool:
    """Whether the step's header has space to open the sequence. Grammars are long, and each sequence of a request
    carries its own copy. A sequence whose record exceeds the limit alone gets a step of its own."""
    more = _open_bytes(sequence)
    return not more or not open_bytes or open_bytes + more <= MAX_OPEN_BYTES


def _returned_bytes(state: State, sequence: Sequence, count: int) -> int:
    """Return the size of the vector that a step with this many of the sequence's tokens returns; usually 0."""
    kind = sequence.request.submit.params.vector
    is_end = kind is not None and count == sequence.pending
    return state.manifest.vector_bytes(kind) if is_end and kind and state.manifest is not None else 0


def _open_bytes(sequence: Sequence) -> int:
    """Return the maximum size of the ``Open`` record that the sequence needs; 0 if it is open in the stages."""
    return 0 if sequence.is_open_in_stages else max_record_bytes(sequence)


def max_record_bytes(sequence: Sequence) -> int:
    """Return the maximum size of the sequence's ``Open`` record."""
    params = sequence.request.submit.params
    grammar = 0 if params.grammar is None else 4 * len(params.grammar.text)
    thinking = () if params.thinking is None else (*params.thinking.ends, params.thinking.closing)
    return 5 * len(sequence.tokens) + grammar + 5 * sum(map(len, thinking))


def _decode_share(state: State, settings: SchedulerSettings, most_in_flight: int) -> int:
    """Return the number of decodes in one micro-batch: an even share, or all where splitting doesn't pay."""
    num_decoding = len(state.running) - state.running.num_prefilling
    if most_in_flight == 1 or (settings.mode == "auto" and num_decoding < MIN_DECODES_TO_SPLIT):
        return max(1, num_decoding)
    return max(1, -(-num_decoding // most_in_flight))


def _reserve_for_prompts(state: State, settings: SchedulerSettings) -> int:
    """Return the tokens that decodes must leave to prompts: up to a chunk, at most a quarter of the step. In steps of
    only a few tokens, decodes and prompts take turns."""
    running = state.running
    if not running.num_pending or not running.due:
        running.prompts_are_next = False
        return 0
    quarter = settings.step_tokens // 4
    if quarter:
        return min(running.num_pending, CHUNK, quarter)
    running.prompts_are_next = not running.prompts_are_next
    return 0 if running.prompts_are_next else 1


def _prompt_tokens(
    state: State, settings: SchedulerSettings, num_decodes: int, reserved: int, most_in_flight: int, *, num_patches: int
) -> int:
    """Return the number of prompt tokens in the next step, which also contains ``num_decodes`` decode tokens, and parts
    of images with ``num_patches``.

    Records the step budget and the limit that applied in ``state.decision``.
    """
    pending, decision = state.running.num_pending, state.decision
    decision.step_budget, decision.prompt_tokens, decision.throttle = settings.step_tokens, 0, "none"
    if not pending:
        return 0
    least = max(reserved, min(CHUNK, settings.step_tokens - num_decodes))
    most = settings.step_tokens - num_decodes
    limits = {"none": min(pending, most), "pending": max(least, MIN_PROMPT_SHARE, -(-pending // most_in_flight))}
    if len(state.running) > state.running.num_prefilling:  # answers are running, in this micro-batch or another
        target_s = settings.step_target_s
        if target_s:  # 0 means that there is no target
            target_s = max(MIN_TARGET_S, target_s - num_patches * state.images.patch_s)
        decision.step_budget = state.costs.budget(target_s, settings.step_tokens)
        limits["time"] = max(least, decision.step_budget - num_decodes)
        limits["kv"] = max(least, int(most * _free_kv_ratio(state)))
    tokens = min(limits.values())
    decision.prompt_tokens, decision.throttle = tokens, next(name for name, limit in limits.items() if limit == tokens)
    return tokens


def _free_kv_ratio(state: State) -> float:
    """Return how much of the KV cache is free, as a factor for the prompt tokens: 1 when all blocks are free, 0 when
    they are short."""
    total = state.plans.kv_blocks
    free = total - state.reserved_blocks + state.prefix.evictable_blocks(Departures(state.shared))
    return max(0.0, (free / total - KV_SHORT) / (1 - KV_SHORT)) if total else 0.0


def _choose_unopened(state: State, chosen: list[tuple[Sequence, int]]) -> list[Sequence]:
    """Return the sequences to be opened without a row, so that the stages can read them from disk."""
    open_bytes = sum(_open_bytes(sequence) for sequence, _ in chosen)
    opened: list[Sequence] = []
    for sequence in state.restores.unopened if state.restores.in_progress else ():
        if len(chosen) + len(opened) < MAX_ROWS and _fits_into_header(sequence, open_bytes):
            open_bytes += _open_bytes(sequence)
            opened.append(sequence)
    return opened


def _build(
    state: State,
    chosen: list[tuple[Sequence, int]],
    unopened: list[Sequence],
    proposals: dict[int, InFlightProposal],
    *,
    images: ImageChoice,
    now: float,
) -> Step:
    assert state.plans.current is not None
    rows: list[Row] = []
    tokens: list[int] = []
    opens: list[Open] = []
    truncates = refused_positions(state, (sequence for sequence, _ in chosen)) if state.to_truncate else []
    unshared: list[int] = []
    pixels = dict(images.pixels)
    for sequence, count in (*((sequence, 0) for sequence in unopened), *chosen):
        if not sequence.is_open_in_stages:
            opens.append(build_open(sequence))
            if state.shared.unit and sequence.fork_of is not None and not state.shared.stop(sequence.id):
                unshared.append(sequence.id)
            state.release_fork(sequence)  # a release of the copied sequence can only follow this step now
        if sequence.truncate:
            truncates.append(SequencePosition(sequence.id, sequence.kv))
        proposed = proposals[sequence.id].tokens if sequence.id in proposals else ()
        start = sequence.dispatch(count, proposed)
        if not count:
            state.restores.record_opening(sequence, state.next_step)
            continue
        rows.append(Row(sequence.id, start, count + len(proposed), sequence.scheduled == sequence.sampled))
        tokens.extend(sequence.tokens[start : sequence.scheduled])
        tokens.extend(proposed)
        pixels |= sequence.pixels(start, sequence.scheduled)
    step = Step(
        epoch=state.plans.current.epoch,
        step=state.next_step,
        rows=tuple(rows),
        tokens=tuple(tokens),
        retire=tuple(state.to_retire),
        release=tuple(state.to_release),
        open=tuple(opens),
        truncate=tuple(truncates),
        alone=not state.in_flight,
        unshared=tuple(unshared) or UNSET,
        proposed=tuple(ProposedTail(s, len(proposal.tokens)) for s, proposal in proposals.items()) or UNSET,
        pixels=image_pixels(pixels),
        image_parts=(*take_dropped(state), *images.parts) or UNSET,
    )
    ends = tuple((s, s.scheduled) for s, _ in chosen)
    state.record_dispatch(len(tokens), ends, now, proposals, seen=images.sequences, num_patches=images.num_patches)
    return step


def image_pixels(pixels: Mapping[str, bytes]) -> tuple[ImagePixels, ...] | UnsetType:
    """Return a step's field with the pixels of its images, given by digest."""
    return tuple(ImagePixels(*each) for each in pixels.items()) or UNSET


def build_open(sequence: Sequence) -> Open:
    """Return the ``Open`` record that stages need before the sequence's first row."""
    params = sequence.request.submit.params
    if sequence.has_scored_prompt:
        params = replace(params, prompt_logprobs=None)
    return Open(
        sequence.id,
        params,
        sequence.seed,
        sequence.num_prompt,
        sequence.limit,
        tuple(sequence.tokens),
        sequence.fork_of,
        sequence.kv if sequence.fork_of is not None else 0,
    )


# --- completed steps --------------------------------------------------------------------------------------------------

# The residency at the time of dispatch counts: a sequence preempted since (``residency`` has changed) starts over, and
# results of the earlier residency are ignored.


def acknowledge(state: State, reached: tuple[SequencePosition, ...], flight: InFlightStep, *, keeps_kv: bool) -> None:
    """Record that every stage has computed these rows."""
    for sequence_id, position in ((k.sequence, k.position) for k in reached):
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.residency != flight.residencies.get(sequence_id):
            continue  # preempted since
        if sequence.state is SequenceState.RUNNING:
            sequence.acknowledge(position)
            state.prefix.acknowledge(sequence_id, sequence.tokens, sequence.kv, sequence.adapter, sequence.images)
            if not keeps_kv and sequence.kv == sequence.scheduled == sequence.sampled:
                sequence.drop_kv()
                state.running.refresh(sequence)


def redraw_late(state: State, late: tuple[int, ...], flight: InFlightStep) -> None:
    """Schedule another draw for sequences for which the last stage could not draw yet."""
    for sequence_id in late:
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.residency != flight.residencies.get(sequence_id):
            continue  # preempted since
        if sequence.state is SequenceState.RUNNING and sequence.kv == sequence.scheduled == sequence.sampled:
            state.redraw_last(sequence)
            state.count("draws_put_off")
