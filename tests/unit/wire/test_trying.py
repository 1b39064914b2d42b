"""Whether a door can be reached."""

from __future__ import annotations

import socket

import psutil
import pytest

from swarm.wire.door.trying import why_unreachable


def test_a_door_on_this_machine_is_not_tried() -> None:
    assert why_unreachable("tcp://127.0.0.1:9") == ""
    assert why_unreachable(f"tcp://{'ab' * 32}@[::1]:9") == ""


def test_who_does_not_answer_is_named() -> None:
    """An address of documentation's own network: nobody's, so that no way or no answer is there."""
    assert "192.0.2.77:9" in why_unreachable(f"tcp://{'ab' * 32}@192.0.2.77:9", 0.2)


def test_what_answers_can_be_reached() -> None:
    """By this machine's own address where it has one beside loopback; a port without anybody says so."""
    every = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    own = [e.address for e in every if e.family == socket.AF_INET and not e.address.startswith("127.")]
    if not own:
        pytest.skip("this machine has no address beside loopback")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert why_unreachable(f"tcp://{own[0]}:{port}") == ""
    assert "refused" in why_unreachable(f"tcp://{own[0]}:{port}")
