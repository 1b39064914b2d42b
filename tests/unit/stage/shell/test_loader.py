"""Background work keeps to its share of the time while steps are computed, and goes on at full speed otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from swarm.stage.shell.loader import (
    BACKGROUND_SHARE,
    IDLE_AFTER_S,
    MAX_REST_S,
    MAX_TOTAL_REST_S,
    StepActivity,
    Throttle,
)


@dataclass
class Scene:
    """A clock that moves when somebody works or waits, and a compute thread that shows progress while it is busy."""

    at: float = 100.0
    computed: int = 0
    is_busy: bool = True
    others_busy: float = 0.0  # cores
    others_s: float = 0.0
    token_every_s: float = 0.0
    stops_at: float = float("inf")
    waits: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.at

    def num_computed(self) -> int:
        return self.computed

    def pass_s(self, seconds: float) -> None:
        before = self.at
        self.at += seconds
        self.others_s += self.others_busy * seconds
        if self.is_busy and (not self.token_every_s or before // self.token_every_s != self.at // self.token_every_s):
            self.computed += 1

    def others_busy_s(self) -> float:
        return self.others_s

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.pass_s(seconds)
        return self.at >= self.stops_at


def throttle_of(scene: Scene, most_rest_s: float = inf) -> Throttle:
    return Throttle(scene, StepActivity(scene.num_computed, scene.others_busy_s), scene.wait, most_rest_s)  # type: ignore[arg-type]


def test_beside_steps_work_takes_its_share_of_the_time() -> None:
    scene = Scene()
    throttle, began = throttle_of(scene), scene.at
    for piece_s in (0.1, 0.02, 0.2):
        scene.pass_s(piece_s)
        throttle.rest()
    assert abs(throttle.worked_s - 0.32) < 1e-9
    assert abs(throttle.worked_s / (scene.at - began) - BACKGROUND_SHARE) < 1e-6
    assert max(scene.waits) <= 0.1  # it looks around often


def test_an_idle_worker_works_without_rest() -> None:
    """Whatever was computed before the work began, such as a warm-up, is no step beside it."""
    scene = Scene(computed=70, is_busy=False)
    throttle = throttle_of(scene)
    for _ in range(5):
        scene.pass_s(0.1)
        throttle.rest()
    assert not scene.waits
    assert throttle.rested_s == 0.0


def test_a_rest_ends_once_steps_have_ended() -> None:
    scene = Scene()
    throttle = throttle_of(scene)
    scene.pass_s(0.25)
    scene.is_busy = False
    began = scene.at
    throttle.rest()
    assert IDLE_AFTER_S <= scene.at - began < IDLE_AFTER_S + 0.2


def test_a_gap_between_two_tokens_is_no_idleness() -> None:
    """One token a second: in between, other stages compute."""
    scene = Scene(token_every_s=1.0)
    throttle = throttle_of(scene)
    scene.pass_s(0.25)
    scene.computed += 1
    began = scene.at
    throttle.rest()
    assert abs(scene.at - began - 4.75) < 1e-6


def test_whoever_is_to_stop_rests_no_longer() -> None:
    scene = Scene(stops_at=100.3)
    throttle = throttle_of(scene)
    scene.pass_s(0.2)
    throttle.rest()
    assert scene.at < 100.5


def test_the_time_of_the_work_has_no_rests_in_it() -> None:
    """It forecasts how long a load takes that somebody waits for."""
    scene = Scene()
    throttle = throttle_of(scene)
    for _ in range(3):
        scene.pass_s(0.5)
        throttle.rest()
    scene.pass_s(0.25)
    throttle.finish()
    assert abs(throttle.worked_s - 1.75) < 1e-9


def test_other_processes_of_the_machine_are_not_slowed_down_either() -> None:
    """A worker that joins computes no steps yet, but those of others run on the same cores."""
    scene = Scene(is_busy=False, others_busy=1.2)
    throttle, began = throttle_of(scene), scene.at
    scene.pass_s(0.2)
    throttle.rest()
    assert abs(scene.at - began - 0.2 / BACKGROUND_SHARE) < 1e-6
    scene.others_busy = 0.1
    scene.pass_s(0.2)
    began = scene.at
    throttle.rest()
    assert scene.at == began


def test_a_slow_piece_does_not_hide_that_work_goes_on() -> None:
    scene = Scene()
    throttle, began = throttle_of(scene), scene.at
    scene.pass_s(3.0)
    throttle.rest()
    assert abs(scene.at - began - 3.0 - MAX_REST_S) < 1e-6


def test_a_plan_is_loaded_gently_for_a_while_only() -> None:
    scene = Scene()
    throttle = throttle_of(scene, MAX_TOTAL_REST_S)
    for _ in range(100):
        scene.pass_s(0.2)
        throttle.rest()
    assert abs(throttle.rested_s - MAX_TOTAL_REST_S) < 1e-6
