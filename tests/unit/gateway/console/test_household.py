"""Who may be killed: a worker of this swarm, on this machine, that was started beside this gateway."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.gateway.console import local_swarm
from swarm.gateway.console.local_swarm import find_victim, pids_by_name
from swarm.gateway.errors import ApiError

NODES: dict[str, Any] = {
    "workers": [
        {"name": "w0", "incarnation": "w0-1", "host": "here", "pid": 11, "state": "out"},
        {"name": "w0", "incarnation": "w0-2", "host": "here", "pid": 12, "state": "member"},
        {"name": "w1", "incarnation": "w1-1", "host": "there", "pid": 13, "state": "member"},
        {"name": "w2", "incarnation": "w2-1", "host": "here", "pid": 14, "state": "member"},
        {"name": "w3", "incarnation": "w3-1", "host": "here", "pid": None, "state": "member"},
    ]
}
BESIDE = {"broker": 10, "w0": 12, "w1": 13, "w2": 99}


@pytest.mark.parametrize("worker", ["w0", "w0-2"])
def test_a_worker_of_ours_is_found_by_name_or_incarnation(worker: str) -> None:
    assert find_victim(worker, NODES, "here", BESIDE) == 12


@pytest.mark.parametrize(
    ("worker", "status"),
    [
        ("w0-1", 404),  # an earlier life
        ("w9", 404),
        ("broker", 404),
        ("w1", 409),  # on another machine, though a process of ours has its number
        ("w2", 409),  # the number that it told is none of ours
        ("w3", 409),
    ],
)
def test_no_other_process_is_ended(worker: str, status: int) -> None:
    with pytest.raises(ApiError) as told:
        find_victim(worker, NODES, "here", BESIDE)
    assert told.value.status == status


def test_processes_are_known_by_their_command_lines() -> None:
    commands = {
        1: ["python", "-P", "-m", "swarm", "--log-level", "info", "broker", "--port", "1"],
        2: ["python", "-m", "swarm", "gateway", "--demo"],
        3: ["swarm worker --url tcp://127.0.0.1:1 --name w0 --device cpu"],  # as it calls itself
        4: ["python", "-m", "swarm", "worker", "--name", "w1"],
        5: ["swarm nursery /models/x"],
        6: ["sleep", "9"],
        7: ["swarm worker --name"],
        8: [],
    }
    assert pids_by_name(commands) == {"broker": 1, "gateway": 2, "w0": 3, "w1": 4, "nursery": 5}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def nodes_with(pid: int) -> dict[str, Any]:
    return {
        "workers": [{"name": "w0", "incarnation": "w0-1", "host": socket.gethostname(), "pid": pid, "state": "member"}]
    }


def test_a_worker_is_killed(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_swarm, "sibling_commands", lambda: {child.pid: ["swarm worker --name w0"]})
    assert local_swarm.kill_worker("w0", nodes_with(child.pid)) == child.pid
    assert child.wait(20) == -9


def test_who_is_no_child_of_our_parent_lives_on(child: subprocess.Popen[bytes]) -> None:
    """It is a child of ours, not a sibling, whatever the broker was told."""
    with pytest.raises(ApiError) as told:
        local_swarm.kill_worker("w0", nodes_with(child.pid))
    assert told.value.code == "not_ours"
    assert child.poll() is None


def test_who_has_ended_already_is_said_so(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    child.kill()
    child.wait()
    monkeypatch.setattr(local_swarm, "sibling_commands", lambda: {child.pid: ["swarm worker --name w0"]})
    with pytest.raises(ApiError) as told:
        local_swarm.kill_worker("w0", nodes_with(child.pid))
    assert told.value.code == "gone"
