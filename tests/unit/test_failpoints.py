"""Failpoints: what the environment says is understood or refused, and off means off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swarm import failpoints
from swarm.errors import ConfigError


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm({})


def arm(spec: str, trace: str = "") -> None:
    failpoints.arm({failpoints.VARIABLE: spec, failpoints.TRACE_VARIABLE: trace})


def test_off_unless_the_environment_says_so() -> None:
    """Nothing is armed, so a place is one look at a name; and what is reached all the same does nothing."""
    failpoints.arm({})
    assert failpoints.armed is None
    failpoints.hit("step.sampled")


def test_it_happens_at_the_time_that_was_named() -> None:
    """@3: the third time and no other."""
    arm("step.computes=raise@3")
    failpoints.hit("step.computes")
    failpoints.hit("step.computes")
    with pytest.raises(RuntimeError, match=r"step\.computes"):
        failpoints.hit("step.computes")
    failpoints.hit("step.computes")


def test_with_a_plus_it_goes_on() -> None:
    """@2+: not the first time, and from then on each time."""
    arm("beat.due=raise@2+")
    failpoints.hit("beat.due")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            failpoints.hit("beat.due")


def test_nothing_counts_before_the_file_is_there(tmp_path: Path) -> None:
    """SWARM_FAILPOINTS_FROM: while its file is missing nothing happens, and @2 counts from its making on."""
    begun = tmp_path / "begun"
    failpoints.arm({failpoints.VARIABLE: "step.computes=raise@2", failpoints.FROM_VARIABLE: str(begun)})
    for _ in range(3):
        failpoints.hit("step.computes")
    begun.touch()
    failpoints.hit("step.computes")
    with pytest.raises(RuntimeError):
        failpoints.hit("step.computes")


def test_only_what_the_condition_names_counts() -> None:
    """token=7: batches without that token don't, nor do they count."""
    arm("step.computes[token=7]=memory")
    failpoints.hit("step.computes", token=[1, 2])
    with pytest.raises(MemoryError):
        failpoints.hit("step.computes", token=[1, 7])


def test_values_are_spoilt_in_a_copy() -> None:
    """NaN in what is passed on, and nothing in what the caller still has; other places' values stay."""
    arm("step.computed=nan@2")
    values = np.ones((2, 4), np.float32)
    assert failpoints.falsified_values("step.computed", values) is values
    spoilt = failpoints.falsified_values("step.computed", values)
    assert np.isnan(spoilt).sum() == 1
    assert np.all(values == 1)


def test_another_port_is_told() -> None:
    """The endpoint that others hear of, each time."""
    arm("advertise=port:-10000")
    for _ in range(2):
        assert failpoints.advertised_endpoint("advertise", "tcp://127.0.0.1:20001") == "tcp://127.0.0.1:10001"
    assert failpoints.advertised_endpoint("broker.advertise", "tcp://127.0.0.1:20001") == "tcp://127.0.0.1:20001"


def test_what_happened_is_written_down(tmp_path: Path) -> None:
    """One line each: place, action, which time it was."""
    arm("step.sent=stall:0@2, loop.turn=stall:0", str(tmp_path / "trace"))
    for place in ("step.sent", "loop.turn", "step.sent"):
        failpoints.hit(place)
    lines = [line.split()[1:4] for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines == [["loop.turn", "stall", "1"], ["step.sent", "stall", "2"]]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("nonsense", "write it as"),
        ("step.nowhere=kill", "no place"),
        ("step.sent=dance", "the actions there"),
        ("step.sent=nan", "the actions there"),
        ("advertise=kill", "the actions there"),
        ("step.sent=stall", "takes a number"),
        ("step.sent=kill:3", "takes no number"),
    ],
)
def test_what_cannot_be_understood_is_one_clear_error(spec: str, complaint: str) -> None:
    """The setting, the piece that is wrong, what would be right; nothing is armed."""
    with pytest.raises(ConfigError, match=complaint) as caught:
        arm(spec)
    assert str(caught.value).startswith(f"{failpoints.VARIABLE}: '{spec}'")
    assert failpoints.armed is None


@pytest.mark.slow
def test_a_process_with_a_wrong_one_does_not_start() -> None:
    """One line on stderr, and the exit code that tells a supervisor not to try again."""
    done = subprocess.run(
        [sys.executable, "-m", "swarm", "broker", "--port", "5990"],
        env=os.environ | {failpoints.VARIABLE: "step.nowhere=kill"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 78
    assert "there is no place 'step.nowhere'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
