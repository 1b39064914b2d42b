"""Duration of each phase of each recovery, next to its prediction: for ``swarmctl recoveries``.

A recovery begins when the active plan becomes void: a worker was lost, the data path broke, or the broker was restarted
while requests were running. It ends when every sequence that ran before has had a step under the new plan. Sequences
that start over like prompts are counted but not waited for. A loss in the middle belongs to the same recovery.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.series import LONG_S, Histogram
from swarm.wire.messages import Json, LayerRange

MAX_PAST = 64
# entries at each end: the first losses are the cause, the last ones are what the recovery waits for now
NUM_EACH_END = 8

PARTS = ("detect_s", "plan_s", "load_s", "activate_s", "replay_s", "resume_s", "total_s")

T = TypeVar("T")


@dataclass(slots=True)
class FirstAndLast(Generic[T]):
    """The first and the last items of a list that may grow without end (a worker may die at every start), and the
    number between them."""

    first: list[T] = field(default_factory=list)
    last: deque[T] = field(default_factory=lambda: deque(maxlen=NUM_EACH_END))
    num_between: int = 0

    def add(self, item: T) -> None:
        if len(self.first) < NUM_EACH_END:
            self.first.append(item)
            return
        self.num_between += len(self.last) == NUM_EACH_END
        self.last.append(item)

    @property
    def num(self) -> int:
        return len(self.first) + self.num_between + len(self.last)

    @property
    def items(self) -> list[T]:
        return [*self.first, *self.last]

    def describe(self) -> list[str]:
        """Return the kept items as text, with the number of omitted ones between them."""
        between = [f"{self.num_between} more"] if self.num_between else []
        return [*map(str, self.first), *between, *map(str, self.last)]


@dataclass(frozen=True, slots=True)
class PredictedRecovery:
    """Predicted durations of a recovery. ``is_warm``: no layers must be loaded."""

    load_s: float
    replay_s: float
    is_warm: bool


@dataclass(slots=True)
class Recovery:
    """Record of one recovery for reports.

    Times (``…_at``) are seconds of the broker's clock; None until the recovery reaches the phase.
    """

    detected_at: float
    causes: FirstAndLast[str] = field(default_factory=FirstAndLast)
    workers: FirstAndLast[str] = field(default_factory=FirstAndLast)
    evidence: FirstAndLast[str] = field(default_factory=FirstAndLast)
    lost_layers: FirstAndLast[LayerRange] = field(default_factory=FirstAndLast)  # layers of the lost workers
    last_seen_at: float | None = None  # time of the lost worker's last heartbeat or message
    epoch: int = 0
    choice: str = ""  # which worker takes which layers, as text
    predicted: PredictedRecovery | None = None
    planned_at: float | None = None
    prepared_at: float | None = None
    activated_at: float | None = None
    replayed_at: float | None = None
    resumed_first_at: float | None = None
    resumed_all_at: float | None = None
    num_sequences: int = 0
    num_restarted: int = 0  # of these, sequences without keys and values on any worker
    layer_positions: int = 0  # work of the replays: layers times positions
    least_layer_positions: int = 0  # the part of that work that no other plan could have avoided
    copied_layer_positions: int = 0  # work that copies of keys and values have saved
    restored_layer_positions: int = 0  # work that reading keys and values from disk has saved
    has_replays: bool = False  # whether the replays under way are counted here; those of a planned move are not

    def as_json(self) -> Json:
        prediction = self.predicted
        predicted: Json = dict.fromkeys(("load_s", "replay_s", "total_s"))
        if prediction is not None:
            total_s = prediction.load_s + prediction.replay_s
            predicted = {"load_s": prediction.load_s, "replay_s": prediction.replay_s, "total_s": total_s}
        return {
            "epoch": self.epoch,
            "cause": "; then ".join(self.causes.describe()),
            "evidence": "; ".join(self.evidence.describe()),
            "losses": self.workers.num,
            "workers": self.workers.items,
            "lost": [[layers.first, layers.stop] for layers in self.lost_layers.items],
            "choice": self.choice,
            "warm": prediction is not None and prediction.is_warm,
            "sequences": self.num_sequences,
            "layer_positions": self.layer_positions,
            "least_layer_positions": self.least_layer_positions,
            "copied_layer_positions": self.copied_layer_positions,
            "restored_layer_positions": self.restored_layer_positions,
            "heard_at": self.last_seen_at,
            "detected_at": self.detected_at,
            "planned_at": self.planned_at,
            "prepared_at": self.prepared_at,
            "activated_at": self.activated_at,
            "replayed_at": self.replayed_at,
            "resumed_first_at": self.resumed_first_at,
            "resumed_all_at": self.resumed_all_at,
            "predicted": predicted,
            "measured": self.durations(),
        }

    def durations(self) -> Json:
        """Return the duration of each phase in seconds. ``detect_s`` counts from the last message of the lost worker,
        so the true time is shorter."""
        return {
            "detect_s": _duration(self.last_seen_at, self.detected_at),
            "plan_s": _duration(self.detected_at, self.planned_at),
            "load_s": _duration(self.planned_at, self.prepared_at),
            "activate_s": _duration(self.prepared_at, self.activated_at),
            "replay_s": _duration(self.activated_at, self.replayed_at),
            "resume_s": _duration(self.replayed_at, self.resumed_all_at),
            "total_s": _duration(self.detected_at, self.resumed_all_at),
        }


def _duration(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(slots=True)
class RecoveryHistory:
    """Recent recoveries, the current one, and a histogram of the duration of each part over all of them."""

    current: Recovery | None = None
    past: deque[Recovery] = field(default_factory=lambda: deque(maxlen=MAX_PAST))
    num: int = 0
    parts: dict[str, Histogram] = field(default_factory=lambda: {part: Histogram(LONG_S) for part in PARTS})
    # sequences that start over: their recovery, the range that counts as computed again, and the number of layers
    _restarted: dict[int, tuple[Recovery, int, int, int]] = field(default_factory=dict)

    def begin(self, cause: str, now: float) -> Recovery:
        """Start a recovery, or add a cause to the current one."""
        if self.current is None:
            self.current = Recovery(now)
            self._restarted.clear()
        self.current.causes.add(cause)
        return self.current

    def record_loss(
        self, worker: str, evidence: str, layers: LayerRange | None, last_seen_at: float | None, now: float
    ) -> None:
        recovery = self.begin(f"{worker} was lost", now)
        recovery.workers.add(worker)
        recovery.evidence.add(f"{worker}: {evidence}")
        recovery.last_seen_at = (
            recovery.last_seen_at if last_seen_at is None or recovery.last_seen_at is not None else last_seen_at
        )
        if layers is not None:
            recovery.lost_layers.add(layers)

    def record_plan(self, epoch: int, choice: str, predicted: PredictedRecovery | None, now: float) -> None:
        if self.current is None:
            return
        self.current.epoch, self.current.choice, self.current.planned_at = epoch, choice, now
        self.current.predicted = predicted
        self.current.prepared_at = self.current.activated_at = self.current.replayed_at = None
        self.current.resumed_first_at = None

    def record_prepared(self, now: float) -> None:
        if self.current is not None:
            self.current.prepared_at = now

    def record_activated(self, num_sequences: int, now: float) -> Recovery | None:
        """Note that the new plan serves. If no sequence ran, the recovery ends and is returned."""
        if self.current is None:
            return None
        self.current.activated_at = now
        self.current.num_sequences = self.current.num_restarted + num_sequences
        return None if num_sequences else self._end(now)

    def add_replay_work(self, layer_positions: int, least: int) -> None:
        """Add to the positions that replays have computed, and to the least number that any plan would have had to
        compute."""
        if self.current is not None:
            self.current.layer_positions += layer_positions
            self.current.least_layer_positions += least

    def begin_replays(self, layer_positions: int, least: int) -> None:
        """Add the work of the replays that begin now."""
        self.add_replay_work(layer_positions, least)
        if self.current is not None:
            self.current.has_replays = True

    def drop_replays(self, layer_positions: int, least: int) -> None:
        """Subtract the work of replays that a further loss has ended before their positions were computed."""
        if self.current is not None and self.current.has_replays:
            self.current.has_replays = False
            self.current.layer_positions -= layer_positions
            self.current.least_layer_positions = min(
                self.current.least_layer_positions - least, self.current.layer_positions
            )

    def add_copied(self, layer_positions: int) -> None:
        """Add to the positions, times layers, that stages took over from copies instead of computing them again."""
        if self.current is not None:
            self.current.copied_layer_positions += layer_positions

    def add_lost(self, sequence: int, position: int, num_layers: int) -> None:
        """Count a sequence that starts over because no worker holds anything of it, and the work of computing it up to
        ``position`` again."""
        if self.current is not None:
            self.current.num_restarted += 1
            self.add_recomputed(sequence, 0, position, num_layers, least=position * num_layers)

    def add_recomputed(self, sequence: int, start: int, stop: int, num_layers: int, *, least: int) -> None:
        """Count positions that all layers are expected to compute again. ``record_restored`` corrects the count."""
        if self.current is not None and start < stop:
            self.add_replay_work((stop - start) * num_layers, least)
            self._restarted[sequence] = self.current, start, stop, num_layers

    def record_restored(self, sequence: int, start: int, stop: int) -> None:
        """Note that a sequence has started again: it shares the positions before ``start`` with another one, stages
        have read those before ``stop`` from disk, and the others are computed."""
        recovery, expected, end, num_layers = self._restarted.pop(sequence, (None, 0, 0, 0))
        if recovery is not None:
            start = min(start, end)
            saved = max(0, min(stop, end) - start) * num_layers
            recovery.restored_layer_positions += saved
            recovery.layer_positions += (expected - start) * num_layers - saved
            recovery.least_layer_positions = min(recovery.least_layer_positions, recovery.layer_positions)

    def record_step(self, *, num_tokens: int, rebuilding: bool, now: float) -> Recovery | None:
        """Note a step completed under the new plan. Return the recovery if that ends it. A step without rows, which
        only opens or releases sequences, resumes none."""
        recovery = self.current
        if recovery is None or recovery.activated_at is None or not num_tokens:
            return None
        if recovery.resumed_first_at is None:
            recovery.resumed_first_at = now
        return None if rebuilding else self._end(now)

    def record_replayed(self, now: float) -> None:
        """Note that all layers are rebuilt."""
        if self.current is not None and self.current.activated_at is not None and self.current.replayed_at is None:
            self.current.replayed_at = now

    def end_without_sequences(self, now: float) -> Recovery | None:
        """End the recovery if all sequences that it waited for have ended; return it."""
        if self.current is None or self.current.activated_at is None:
            return None
        return self._end(now)

    def _end(self, now: float) -> Recovery:
        recovery = self.current
        assert recovery is not None
        if recovery.replayed_at is None:
            recovery.replayed_at = recovery.activated_at
        recovery.resumed_first_at = now if recovery.resumed_first_at is None else recovery.resumed_first_at
        recovery.resumed_all_at = now
        self.past.append(recovery)
        self.current = None
        self._count(recovery)
        return recovery

    def _count(self, recovery: Recovery) -> None:
        self.num += 1
        for part, seconds in recovery.durations().items():
            if isinstance(seconds, float):
                self.parts[part].add(seconds)

    def figures(self, now: float) -> Json:
        """Return totals over all recoveries. ``under_way_s``: seconds since the current one began."""
        under_way_s = 0.0 if self.current is None else max(0.0, now - self.current.detected_at)
        return {"ended": self.num, "under_way": int(self.current is not None), "under_way_s": under_way_s}

    def report(self, now: float) -> Json:
        """Return the recent recoveries, the latest last. ``age_s``: seconds since each began."""
        under_way = [] if self.current is None else [self.current]
        return {
            "recoveries": [
                recovery.as_json() | {"age_s": round(max(0.0, now - recovery.detected_at), 3)}
                for recovery in (*self.past, *under_way)
            ]
        }
