"""Listening sockets when there are no descriptors: whom a gate sends away, and for how long at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swarm.wire import gate
from swarm.wire.gate import GATES, SPARE, Gate, Gates

pytestmark = pytest.mark.skipif(not GATES, reason="only Linux can close a gate")

CROWD = 20


def listening(host: str = "127.0.0.1", family: int = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)  # blocking, as libzmq's are
    made.bind((host, 0))
    made.listen(100)
    return made


@pytest.fixture
def doors() -> Iterator[list[socket.socket]]:
    made = [listening() for _ in range(4)]
    yield made
    for each in made:
        each.close()


def knock(door: socket.socket, host: str = "127.0.0.1") -> socket.socket:
    peer = socket.socket(door.family)
    peer.setblocking(False)
    peer.connect_ex((host, door.getsockname()[1]))
    return peer


def is_sent_away(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def is_connected(peer: socket.socket) -> bool:
    try:
        peer.getpeername()
    except OSError:
        return False
    return True


def waiting(doors: list[socket.socket]) -> int:
    return sum(gate._waiting(door.fileno()) for door in doors)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come true")


async def test_all_doors_close_when_one_fails(doors: list[socket.socket]) -> None:
    """Whoever had knocked, at any of them, is sent away; whoever knocks then gets no answer until they open, all."""
    gates = Gates()
    several = [Gate(gates) for _ in doors]
    for each, door in zip(several, doors, strict=True):
        each.listens(door.fileno())
    crowd = [knock(door) for door in doors for _ in range(CROWD)]
    await until(lambda: waiting(doors) == len(crowd))
    assert several[0].refused(errno.ECONNABORTED) is False
    assert waiting(doors) == len(crowd)
    assert several[0].refused(errno.EMFILE)
    assert not several[0].refused(errno.EMFILE)
    assert several[1].refused(errno.EMFILE), "each door tells once"
    await until(lambda: waiting(doors) == 0)
    assert all(map(is_sent_away, crowd))
    late = [knock(door) for door in doors]
    await asyncio.sleep(0.1)
    assert not any(map(is_connected, late))
    several[1].open()
    for door in doors:
        crowd.append(knock(door))
    await until(lambda: waiting(doors) >= len(doors))
    for peer in (*crowd, *late):
        peer.close()
    for each in several:
        each.close()


async def test_a_spell_is_short_and_the_loop_has_its_turn_between(
    doors: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: who sends them away stops after a moment and goes on later, until none is left."""
    gates, now, stretches = Gates(), [0.0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    turn_away = gate._turn_away

    def slowly(listener: int) -> bool:
        now[0] += gate.SPELL_S / 3
        stretches[-1] += 1
        return turn_away(listener)

    monkeypatch.setattr(gate, "_turn_away", slowly)
    gates.add(doors[0].fileno())
    crowd = [knock(doors[0]) for _ in range(CROWD)]
    assert gates.shut()
    assert stretches[-1] <= 4
    deadline = time.perf_counter() + 20
    while waiting(doors[:1]) and time.perf_counter() < deadline:
        before = stretches[-1]
        now[0] += 1.0
        gates._rest()
        gates._send_away()
        assert stretches[-1] - before <= 4
    assert waiting(doors[:1]) == 0
    gates.remove(doors[0].fileno())
    for peer in crowd:
        peer.close()


async def test_without_descriptors_it_is_tried_less_and_less_often(
    doors: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else has taken those that were spare: the loop is not kept busy with it."""
    monkeypatch.setattr(gate, "_turn_away", lambda listener: False)
    gates = Gates()
    gates.add(doors[0].fileno())
    peer = knock(doors[0])
    assert gates.shut()
    pauses = []
    for _ in range(10):
        gates._rest()
        gates._send_away()
        pauses.append(gates._again_s)
    assert pauses == sorted(pauses)
    assert pauses[-1] == gate.MOST_AGAIN_S
    gates.remove(doors[0].fileno())
    assert gates._timer is None
    peer.close()


async def test_it_is_tried_soon_again_while_those_let_in_are_hung_up_on(
    doors: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq may be quicker and let somebody in with each descriptor that was spare. Hanging up on them is progress: a
    long pause would leave it accepting in vain, with a processor to itself, for as long as others wait."""
    monkeypatch.setattr(gate, "_turn_away", lambda listener: False)
    door = doors[0]
    gates = Gates()
    gates.add(door.fileno())
    crowd = [knock(door) for _ in range(CROWD)]
    await until(lambda: waiting(doors) == len(crowd))
    let_in, _ = door.accept()  # in libzmq's stead
    gates._spare.append(let_in.detach())
    monkeypatch.setattr(gates, "_give_spare", lambda: None)
    assert gates.shut()
    for _ in range(10):
        assert gates._again_s == gate.AGAIN_S
        gates._rest()
        gates._send_away()
    monkeypatch.undo()
    gates.remove(door.fileno())
    for peer in crowd:
        peer.close()


def test_nobody_waits_for_one_who_was_sent_away(doors: list[socket.socket]) -> None:
    """libzmq is told that somebody knocks, and lets them in a moment later, when they may be gone: its thread serves
    all connections, so it must not wait there for the next one."""
    gates = Gates()
    gates.add(doors[0].fileno())
    assert not os.get_blocking(doors[0].fileno())
    gates.remove(doors[0].fileno())


def test_what_is_kept_spare_is_given_back(doors: list[socket.socket]) -> None:
    """By the last gate that closes; all gates share it."""
    before = len(os.listdir("/proc/self/fd"))
    gates = Gates()
    for door in doors:
        gates.add(door.fileno())
    assert len(os.listdir("/proc/self/fd")) == before + SPARE
    for door in doors:
        gates.remove(door.fileno())
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_sockets_are_not_hung_up_on(doors: list[socket.socket], tmp_path: Path) -> None:
    """A number that was spare may be anything by now: a local socket, whose address is no pair, a connection that came
    in elsewhere, a file."""
    door, other = doors[:2]
    left, right = socket.socketpair()
    named = socket.socket(socket.AF_UNIX)
    named.bind(str(tmp_path / "s"))
    with left, right, named, knock(other) as stranger, (tmp_path / "file").open("w") as file:
        stranger.setblocking(True)
        came_in, _ = other.accept()
        with came_in:
            for each in (left, named, came_in, file):
                assert gate._hang_up(each.fileno(), door.fileno()) is False
            assert gate._hang_up(came_in.fileno(), other.fileno()) is True
            assert stranger.recv(1) == b""
        left.send(b"x")
        assert right.recv(1) == b"x"


@pytest.mark.parametrize(("listens", "family"), [("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_who_came_in_at_any_address_is_hung_up_on(listens: str, family: int) -> None:
    """A door that listens at all addresses has none that its connections have; the other family's have four parts."""
    try:
        door = listening(listens, family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with door, closing(knock(door, "127.0.0.1" if family == socket.AF_INET else "::1")) as peer:
        peer.setblocking(True)
        came_in, _ = door.accept()
        with came_in:
            assert gate._hang_up(came_in.fileno(), door.fileno()) is True
            assert peer.recv(1) == b""
