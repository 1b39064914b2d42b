"""What is said to systemd: READY once, a status that changed, signs of life as often as they are needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.systemd.manager import ProgressDetector, ServiceManager
from swarm.testing import ManualClock


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(str(tmp_path / "notify"))
    made.setblocking(False)
    yield made
    made.close()


def said(heard: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(heard.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture
def made() -> Iterator[list[ServiceManager]]:
    found: list[ServiceManager] = []
    yield found
    for each in found:
        each.close()


def manager(
    made: list[ServiceManager], heard: socket.socket, clock: ManualClock, watchdog_us: str = ""
) -> ServiceManager:
    environment = {"NOTIFY_SOCKET": heard.getsockname()} | ({"WATCHDOG_USEC": watchdog_us} if watchdog_us else {})
    made.append(ServiceManager.from_environment(environment, clock))
    assert not environment  # children are not this process
    return made[-1]


def test_ready_is_said_once_and_a_status_when_it_changes(made: list[ServiceManager], heard: socket.socket) -> None:
    own = manager(made, heard, ManualClock())
    own.send_status("loading")
    own.send_ready("serving\non two stages")
    own.send_ready("serving on two stages")
    own.send_status("serving on two stages")
    own.send_stopping("leaving")
    assert said(heard) == ["STATUS=loading", "READY=1\nSTATUS=serving on two stages", "STOPPING=1\nSTATUS=leaving"]


def test_reading_settings_again_ends_with_ready(made: list[ServiceManager], heard: socket.socket) -> None:
    clock = ManualClock()
    own = manager(made, heard, clock)
    own.send_ready()
    clock.advance(2.5)
    own.send_reloading()
    own.send_ready()
    _, reloading, ready = said(heard)
    assert reloading == f"RELOADING=1\nMONOTONIC_USEC={int(clock.now() * 1e6)}"
    assert ready == "READY=1"


def test_signs_of_life_are_four_within_the_watchdog_s_patience(
    made: list[ServiceManager], heard: socket.socket
) -> None:
    clock = ManualClock()
    own = manager(made, heard, clock, watchdog_us="4000000")
    for _ in range(80):
        own.send_alive()
        clock.advance(0.05)
    assert said(heard) == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": "nonsense"}, {"NOTIFY_SOCKET": "/nobody/listens", "WATCHDOG_USEC": "x"}],
)
def test_without_a_manager_nothing_is_said_and_nothing_fails(environment: dict[str, str]) -> None:
    own = ServiceManager.from_environment(dict(environment))
    own.send_ready("serving")
    own.send_alive()
    own.send_reloading()
    own.send_stopping()
    own.close()


def test_the_watchdog_of_another_process_is_not_ours(heard: socket.socket) -> None:
    clock = ManualClock()
    environment = {
        "NOTIFY_SOCKET": heard.getsockname(),
        "WATCHDOG_USEC": "4000000",
        "WATCHDOG_PID": str(os.getpid() + 1),
    }
    own = ServiceManager.from_environment(environment, clock)
    own.send_alive()
    own.close()
    assert said(heard) == []


def test_progress_is_what_changed_since_the_last_look() -> None:
    progress = ProgressDetector()
    assert progress.update(1.0, 5)
    assert not progress.update(1.0, 5)
    assert progress.update(1.0, 6)
    assert progress.update(2.0, 6)
