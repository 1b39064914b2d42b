"""What one child of a process finds out, the others are told; who dies at it holds nobody up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.stage.native import siblings

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no nursery on this system")


@pytest.fixture(autouse=True)
def nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_board", None)
    siblings.share_with_children()


def child(does: Callable[[], object]) -> int:
    number = os.fork()
    if number == 0:
        code = 1
        try:
            does()
            code = 0
        finally:
            os._exit(code)  # whatever it was, this process must not go on as pytest
    return number


def ended(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def test_it_is_found_out_once(tmp_path: Path) -> None:
    """Though all of them ask at the same time; something else is found out again."""

    def find() -> float:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(0.05)
        return 2.5

    def ask() -> None:
        assert siblings.once("how fast", float, find) == 2.5

    assert [ended(number) for number in [child(ask) for _ in range(3)]] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 1
    assert siblings.once("how fast", float, lambda: 0.0) == 2.5
    assert siblings.once("how large", float, lambda: 7.0) == 7.0
    assert siblings.once("how fast", float, lambda: 0.0) == 2.5


def test_who_dies_while_finding_out_holds_nobody_up(tmp_path: Path) -> None:
    def find_for_ever() -> bool:
        (tmp_path / "begun").touch()
        time.sleep(60.0)
        return False

    number = child(lambda: siblings.once("is it so", bool, find_for_ever))
    while not (tmp_path / "begun").exists():
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    assert ended(number) == -signal.SIGKILL
    assert siblings.once("is it so", bool, lambda: True)


def test_what_has_no_room_is_found_out_by_each() -> None:
    large = "x" * siblings._BYTES
    assert siblings.once("a", str, lambda: large) == large
    assert siblings.once("a", str, lambda: "b") == "b"


def test_without_a_nursery_each_finds_out_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_board", None)
    assert [siblings.once("a", int, lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
