"""Who joins the next step.

First come, first served, with continuous joining and leaving; small sequences may overtake one that has no room yet,
but not for long. A step takes the decodes that are due first (one row each), then fills its token budget with prefill
chunks in order of arrival. A sequence enters when the stages have room for the most positions that it can come to hold,
so a running sequence never runs out of room.

Several micro-batches are in flight at once (see ``depth``). Nothing here must know which: a sequence's tokens that no
step carries yet are its ``pending`` ones, and a decode has none while its step is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.broker.blocks import num_blocks
from swarm.broker.state import Flight, Sequence, SequenceState, State
from swarm.wire.messages import MAX_ROWS, Open, Row, SequencePosition, Step

Mode = Literal["batch", "overlapped", "auto"]

# Below this, cutting the decodes into micro-batches costs more (each pays for reading the weights) than it hides.
SPLIT_FROM = 16

# How often, and for how long, others may pass the first one that waits for room. After that it is kept free for it.
MAX_PASSED = 16
MAX_PASSED_S = 5.0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    mode: Mode = "auto"
    step_tokens: int = 512
    prefill_chunk: int = 256
    max_running: int = 256
    kv_cache: bool = True  # False: every token computes its whole sequence anew; only good for comparisons


def depth(mode: Mode, num_stages: int, *, shares_cores: bool = False) -> int:
    """How many steps may be in flight.

    Stages that share the cores of one machine gain nothing by computing at the same time: each step reads all weights,
    so two half-full ones cost nearly twice one full one, and a step that is alone may use every core.
    """
    if mode == "batch" or (mode == "auto" and shares_cores):
        return 1
    return max(1, num_stages)


def admit(state: State, settings: SchedulerSettings, now: float) -> None:
    """Let waiting sequences in while there is room. One that doesn't fit yet doesn't hold up smaller ones behind it,
    until they have passed it too often or for too long; then nobody does, so that there will be room."""
    if not state.waiting:
        return
    room = _Room.of(state, settings)
    kept: list[Sequence] = []
    first: Sequence | None = None  # the first that waits for room which others have now
    while state.waiting and room.places + len(state.prefix.retired) > 0 and not _may_not_be_passed(first, now):
        sequence = state.waiting.popleft()
        if not _enter(state, sequence, room):
            kept.append(sequence)
            if first is None and num_blocks(sequence.limit) <= state.book.kv_blocks:
                first = sequence
                first.passed_since = now if first.passed_since is None else first.passed_since
            continue
        if first is not None:
            first.num_passed += 1
        sequence.num_passed, sequence.passed_since = 0, None
        sequence.state = SequenceState.RUNNING
        sequence.started_at = now if sequence.started_at is None else sequence.started_at
        state.running.append(sequence)
    state.waiting.extendleft(reversed(kept))


def _may_not_be_passed(first: Sequence | None, now: float) -> bool:
    if first is None or first.passed_since is None:
        return False
    return first.num_passed >= MAX_PASSED or now - first.passed_since >= MAX_PASSED_S


@dataclass(slots=True)
class _Room:
    """What is free now, retired sequences counted as used."""

    blocks: int
    places: int

    def holds(self, blocks: int) -> bool:
        return self.blocks >= blocks and self.places >= 1

    @classmethod
    def of(cls, state: State, settings: SchedulerSettings) -> _Room:
        used = sum(num_blocks(s.limit) for s in state.running) + state.prefix.num_blocks
        most = min(settings.max_running, state.book.max_sequences - len(state.prefix.retired))
        return cls(state.book.kv_blocks - used, most - len(state.running))


def _enter(state: State, sequence: Sequence, room: _Room) -> bool:
    """Take room for a sequence, from retired ones if need be; begin with a prefix that somebody holds."""
    blocks = num_blocks(sequence.limit)
    if room.blocks + state.prefix.num_blocks < blocks:
        return False
    found = state.prefix.find(sequence.tokens)
    if found is not None:
        state.prefix.pin(found[0])
        _make_room(state, room, blocks)
        if not room.holds(blocks):  # only at the cost of what it would begin with
            state.prefix.unpin(found[0])
            found = None
    _make_room(state, room, blocks)
    if not room.holds(blocks):
        return False
    room.blocks -= blocks
    room.places -= 1
    if found is not None:
        sequence.fork_of, sequence.kv = found
        sequence.scheduled = sequence.kv
        state.count("prefix_hits")
        state.count("prefix_positions", sequence.kv)
    return True


def _make_room(state: State, room: _Room, blocks: int) -> None:
    """Let retired sequences go as far as needed."""
    before = state.prefix.num_blocks, len(state.prefix.retired)
    state.to_release.extend(state.prefix.evict(blocks - room.blocks, 1 - room.places))
    room.blocks += before[0] - state.prefix.num_blocks
    room.places += before[1] - len(state.prefix.retired)


def next_step(state: State, settings: SchedulerSettings, now: float) -> Step | None:
    """The step to dispatch now, with the state moved on as if it were sent; None if there is nothing to send."""
    plan = state.book.current
    if plan is None or not state.book.serving:
        return None
    most = depth(settings.mode, len(plan.stages), shares_cores=plan.shares_cores)
    if len(state.flights) >= most:
        return None
    admit(state, settings, now)
    chosen = _choose(state, settings, most)
    if not chosen and not state.to_release and not state.to_retire:
        return None
    return _build(state, chosen, plan.epoch, now)


def _choose(state: State, settings: SchedulerSettings, most_in_flight: int) -> list[tuple[Sequence, int]]:
    """(sequence, number of tokens) in the order of the step's rows."""
    budget = settings.step_tokens
    due = [s for s in state.running if s.is_decoding]
    chosen = [(s, 1) for s in due[: min(budget, MAX_ROWS, _decode_share(state, settings, most_in_flight))]]
    budget -= len(chosen)
    for sequence in state.running:
        if budget <= 0 or len(chosen) >= MAX_ROWS:
            break
        if sequence.pending > 0 and not sequence.is_decoding:
            count = min(sequence.pending, settings.prefill_chunk, budget)
            chosen.append((sequence, count))
            budget -= count
    return chosen


def _decode_share(state: State, settings: SchedulerSettings, most_in_flight: int) -> int:
    """Decodes in one micro-batch: an even share, or all of them where splitting doesn't pay."""
    num_running = len(state.running)
    if most_in_flight == 1 or (settings.mode == "auto" and num_running < SPLIT_FROM):
        return max(1, num_running)
    return -(-num_running // most_in_flight)


def _build(state: State, chosen: list[tuple[Sequence, int]], epoch: int, now: float) -> Step:
    rows: list[Row] = []
    tokens: list[int] = []
    opens: list[Open] = []
    truncates: list[SequencePosition] = []
    for sequence, count in chosen:
        if not sequence.told:
            opens.append(_open(sequence))
            sequence.told = True
            if sequence.fork_of is not None:
                state.prefix.unpin(sequence.fork_of)  # what may release it now comes behind this step
                sequence.fork_of = None
        if sequence.truncate:
            truncates.append(SequencePosition(sequence.id, sequence.kv))
            sequence.truncate = False
        start = sequence.scheduled
        sequence.scheduled = start + count
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
    state.next_step += 1
    state.to_release.clear()
    state.to_retire.clear()
    state.flights[step.step] = Flight(tuple((s, s.scheduled) for s, _ in chosen), now)
    _rotate(state, chosen)
    return step


def _open(sequence: Sequence) -> Open:
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


def _rotate(state: State, chosen: list[tuple[Sequence, int]]) -> None:
    """Decodes that were served go behind those that were not, so that a small share reaches everybody in turn."""
    if len(chosen) < len(state.running):
        served = {s.id for s, _ in chosen if s.scheduled == s.sampled}
        rest: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in state.running:
            (behind if sequence.id in served else rest).append(sequence)
        state.running[:] = rest + behind
