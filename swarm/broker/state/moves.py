"""Changes of a whole plan: what each was predicted to gain and to cost, and what it achieved. For ``swarmctl plan``.

A gain is a ratio of speeds, for the same number of running sequences: predicted from the workers' measurements at join,
achieved from the steps with decodes only that were completed under both plans. Accepted guesses do not count: they
depend on the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.wire.messages import Json

MAX_PAST = 16  # changes that are kept
MIN_STEPS = 32  # under each plan, with the same number of sequences, from which on their rates are compared
NUM_FIRST = 4  # first steps under a plan, which are not counted: connections and memory are new
KEEP = 0.98  # per step: factor on the sums, so that about the last 50 steps count


@dataclass(frozen=True, slots=True)
class MovePrediction:
    """Predicted effect of a change of plan, in seconds. ``load_s``: until the next plan's workers have loaded their
    layers while the active plan serves. ``copy_s``: to copy keys and values meanwhile. ``pause_s``: without steps."""

    before_s: float | None  # a step with the active plan; None: it can't go on
    after_s: float  # a step with the next one
    load_s: float = 0.0
    copy_s: float = 0.0
    pause_s: float = 0.0

    @property
    def gain(self) -> float | None:
        """How many times as quick the next plan is; None if the active one can't go on."""
        return None if self.before_s is None else self.before_s / max(self.after_s, 1e-9)


@dataclass(slots=True)
class _Rate:
    """Sums over steps with one load."""

    rows: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0


class DecodeLoad(NamedTuple):
    """What steps have in common whose times are compared. ``size``: bit length of the number of proposed tokens."""

    num_running: int
    size: int = 0


@dataclass(slots=True)
class DecodeRates:
    """Decoding speed under the active plan by load, in rows per second."""

    _rates: dict[DecodeLoad, _Rate] = field(default_factory=dict)
    _num_first: int = 0

    def record(self, num_running: int, num_rows: int, num_proposed: int, busy_s: float) -> None:
        """Record a step without prompts. ``busy_s``: time that passed because of it."""
        if self._num_first < NUM_FIRST:
            self._num_first += 1
            return
        rate = self._rates.setdefault(DecodeLoad(num_running, num_proposed.bit_length()), _Rate())
        rate.rows, rate.seconds = KEEP * rate.rows + num_rows, KEEP * rate.seconds + max(0.0, busy_s)
        rate.num_steps += 1

    def clear(self) -> None:
        """Start measuring another plan."""
        self._rates, self._num_first = {}, 0

    def rows_per_s(self) -> dict[DecodeLoad, float]:
        """Return the rate for every load that was measured often enough."""
        return {
            load: rate.rows / rate.seconds
            for load, rate in self._rates.items()
            if rate.num_steps >= MIN_STEPS and rate.seconds > 0
        }

    def compare(self, before: Mapping[DecodeLoad, float]) -> tuple[int, float] | None:
        """Return the gain over these earlier rates with the number of sequences for which it was measured best; None if
        no load was measured under both plans."""
        rates = self.rows_per_s()
        common = [load for load in rates if before.get(load)]
        if not common:
            return None
        load = max(common, key=lambda each: self._rates[each].num_steps)
        return load.num_running, rates[load] / before[load]


@dataclass(slots=True)
class PlanMove:
    """One change of a whole plan. Times are seconds of the broker's clock; None until the change has come so far."""

    cause: str  # what led to it, as text
    predicted: MovePrediction
    wanted_at: float  # when its cause occurred: the newest worker joined, or the change was decided
    rates_before: Mapping[DecodeLoad, float]
    epoch: int = 0
    stopped_at: float | None = None
    served_at: float | None = None
    achieved: tuple[int, float] | None = None  # number of sequences and gain, as measured by the end of its plan

    @property
    def reached_s(self) -> float | None:
        """Time from the cause until the next plan served."""
        return None if self.served_at is None else self.served_at - self.wanted_at

    @property
    def pause_s(self) -> float | None:
        """Time for which nothing was dispatched."""
        return None if self.served_at is None or self.stopped_at is None else self.served_at - self.stopped_at


@dataclass(slots=True)
class PlanMoves:
    """The change in progress, the last ones, and the speed under the active plan."""

    current: PlanMove | None = None
    past: deque[PlanMove] = field(default_factory=lambda: deque(maxlen=MAX_PAST))
    rates: DecodeRates = field(default_factory=DecodeRates)
    is_active: bool = False  # the plan of the last change is the active one
    quiet_until: float = 0.0  # until then, a busy plan is not changed for speed alone
    lifted_until: float = 0.0  # changes until then are not followed by such a time

    def begin(self, cause: str, predicted: MovePrediction, wanted_at: float, epoch: int) -> None:
        """Start a change of plan."""
        self.current = PlanMove(cause, predicted, wanted_at, self.rates.rows_per_s(), epoch)

    def record_stopped(self, now: float) -> None:
        """Note that nothing is dispatched any more."""
        if self.current is not None:
            self.current.stopped_at = now

    def give_up(self) -> None:
        """Drop the change in progress."""
        self.current = None

    def lift_quiet(self, until: float) -> None:
        """Allow changes at any time until then, since the active plan has lost a worker."""
        self.quiet_until, self.lifted_until = 0.0, until

    def end_plan(self) -> None:
        """Note that the active plan ends: what its change has achieved is final."""
        if self.current is not None:
            self.current.rates_before = {**self.rates.rows_per_s(), **self.current.rates_before}
        if self.is_active:
            self.past[-1].achieved = self.achieved(self.past[-1])
        self.is_active = False
        self.rates.clear()

    def record_serving(self, now: float, quiet_s: float) -> None:
        """Note that a plan starts to serve. After a change, the next one for speed alone is ``quiet_s`` away."""
        move, self.current = self.current, None
        if move is None:
            return
        move.served_at, self.is_active = now, True
        self.quiet_until = now + quiet_s if now >= self.lifted_until else 0.0
        self.past.append(move)

    def achieved(self, move: PlanMove) -> tuple[int, float] | None:
        """Return the gain of a change so far, with the number of sequences for which it was measured."""
        is_last = self.is_active and bool(self.past) and move is self.past[-1]
        return self.rates.compare(move.rates_before) if is_last else move.achieved

    def shift_deadlines(self, pause_s: float) -> None:
        """Move the times by a pause of the broker, in which nothing was changed."""
        self.quiet_until += pause_s
        self.lifted_until += pause_s

    def as_json(self, now: float) -> list[Json]:
        """Return the changes, the latest last."""
        return [_move_json(move, self.achieved(move), now) for move in self.past]


def _move_json(move: PlanMove, achieved: tuple[int, float] | None, now: float) -> Json:
    predicted = move.predicted
    return {
        "epoch": move.epoch,
        "cause": move.cause,
        "age_s": None if move.served_at is None else round(max(0.0, now - move.served_at), 3),
        "predicted": {
            "gain": predicted.gain,
            "step_before_s": predicted.before_s,
            "step_after_s": predicted.after_s,
            "load_s": predicted.load_s,
            "copy_s": predicted.copy_s,
            "pause_s": predicted.pause_s,
        },
        "measured": {
            "gain": None if achieved is None else achieved[1],
            "sequences": None if achieved is None else achieved[0],
            "reached_s": move.reached_s,
            "pause_s": move.pause_s,
        },
    }
