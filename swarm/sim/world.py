"""Virtual time, random numbers, and the story of what happened."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

STORY_LINES = 400  # lines of the story that are kept for a failure report


@dataclass(frozen=True, slots=True)
class Durations:
    """Range of a duration in seconds: (least, most)."""

    control: tuple[float, float] = (0.0001, 0.003)
    data: tuple[float, float] = (0.0001, 0.002)
    journal: tuple[float, float] = (0.0001, 0.01)
    compute: tuple[float, float] = (0.001, 0.01)
    load: tuple[float, float] = (0.02, 0.3)
    kv: tuple[float, float] = (0.0001, 0.005)  # for a part of keys and values on its way


class World:
    """Queue of scheduled callbacks, source of random numbers, and record of the run's events ("story"). Everything
    happens in the order of the virtual clock."""

    def __init__(self, seed: int, pace: Durations) -> None:
        self.random = Random(seed)
        # separate, so that the rest of a story doesn't depend on listeners
        self.listener_random = Random(f"doors {seed}")
        self.kv_random = Random(f"kv {seed}")  # the same for copies of keys and values
        self.speculation_random = Random(f"guesses {seed}")  # the same for proposals
        self.draft_random = Random(f"draft {seed}")  # the same for the draft model's process
        self.pace = pace
        self.now = 0.0
        self.num_events = 0
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY_LINES)
        # heap of (time, number, callback); the number keeps the order of equal times
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def schedule(self, delay: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` in ``delay`` seconds of virtual time."""
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, callback))

    def step(self) -> bool:
        """Run the next callback; return False if there is none."""
        if not self._due:
            return False
        self.now, _, callback = heapq.heappop(self._due)
        self.num_events += 1
        callback()
        return True

    def play_until(self, moment: float, max_events: int) -> bool:
        """Run all callbacks due by ``moment``, up to ``max_events`` events in total; return False if none is left."""
        due = self._due
        while due and due[0][0] <= moment and self.num_events < max_events:
            self.now, _, callback = heapq.heappop(due)
            self.num_events += 1
            callback()
        return bool(due)

    def draw(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)

    def tell(self, actor: str, item: object) -> None:
        """Add a line to the story. It is formatted only on demand: nearly every story ends well."""
        self._story.append((self.now, actor, item))

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of the story."""
        return tuple(f"{now:9.4f}  {actor:<10}  {item}" for now, actor, item in self._story)
