"""What one child of a process finds out, the others are told; who dies at it holds nobody up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.stage.native import shared_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no nursery on this system")


@pytest.fixture(autouse=True)
def nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "_memory", None)
    shared_cache.create_shared_cache()


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
    all_ask, not_yet = os.pipe()  # it ends when everybody has closed the other end

    def find() -> float:
        (tmp_path / str(os.getpid())).touch()
        assert os.read(all_ask, 1) == b""
        return 2.5

    def ask() -> None:
        os.close(not_yet)
        assert shared_cache.get_or_compute("how fast", float, find) == 2.5

    children = [child(ask) for _ in range(3)]
    os.close(not_yet)
    assert [ended(number) for number in children] == [0, 0, 0]
    os.close(all_ask)
    assert len(list(tmp_path.iterdir())) == 1
    assert shared_cache.get_or_compute("how fast", float, lambda: 0.0) == 2.5
    assert shared_cache.get_or_compute("how large", float, lambda: 7.0) == 7.0
    assert shared_cache.get_or_compute("how fast", float, lambda: 0.0) == 2.5


def test_who_dies_while_finding_out_holds_nobody_up() -> None:
    begun, say_so = os.pipe()

    def find_for_ever() -> bool:
        os.write(say_so, b".")
        signal.pause()
        return False

    number = child(lambda: shared_cache.get_or_compute("is it so", bool, find_for_ever))
    os.close(say_so)
    assert os.read(begun, 1) == b"."
    os.close(begun)
    os.kill(number, signal.SIGKILL)
    assert ended(number) == -signal.SIGKILL
    assert shared_cache.get_or_compute("is it so", bool, lambda: True)


def test_what_has_no_room_is_found_out_by_each() -> None:
    large = "x" * shared_cache._SIZE_BYTES
    assert shared_cache.get_or_compute("a", str, lambda: large) == large
    assert shared_cache.get_or_compute("a", str, lambda: "b") == "b"


def test_without_a_nursery_each_finds_out_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "_memory", None)
    assert [shared_cache.get_or_compute("a", int, lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
