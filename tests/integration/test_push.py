"""The sending end of data edges, beside those that speak ZMTP elsewhere, and at the back door of this host."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import zmq

from swarm.errors import ConfigError
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.transport import unix_socket
from swarm.wire.transport.keys import AuthPolicy, address_and_key, new_pair, with_key

HOST = "127.0.0.1"
SOON_S = 10.0
LIMIT = 1 << 26
DOOR = new_pair()
ME = new_pair()


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where back doors are, for this test alone."""
    if not hasattr(socket, "SO_PEERCRED") or not Path("/proc/self/ns/net").exists():
        pytest.skip("a system that tells who is at the other end of a Unix socket, and in which network it lives")
    with tempfile.TemporaryDirectory() as short:  # pytest's own folders have longer names than a socket may have
        monkeypatch.setattr("tempfile.gettempdir", lambda: short)
        yield Path(short) / f"swarm-{os.geteuid()}"


def sent(push: PushChannel, pull: PullChannel, *frames: bytes) -> list[bytes]:
    """Send as soon as that is possible; what arrives."""
    give_up_at = monotonic() + SOON_S
    while not push.send(frames):
        assert monotonic() < give_up_at
        pull.wait(0.05)
    assert pull.wait(SOON_S)
    return [bytes(frame) for frame in pull.receive() or []]


@pytest.mark.parametrize("is_locked", [False, True], ids=["NULL", "CURVE"])
def test_it_speaks_with_libzmq(context: zmq.Context[zmq.Socket[bytes]], is_locked: bool) -> None:
    """A PULL that is not ours hears it: what it says is ZMTP, and not only what we take for it."""
    with context.socket(zmq.PULL) as theirs:
        theirs.set(zmq.RCVTIMEO, int(SOON_S * 1000))
        if is_locked:
            theirs.set(zmq.CURVE_SERVER, 1)
            theirs.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(DOOR.public))
            theirs.set(zmq.CURVE_SECRETKEY, bytes.fromhex(DOOR.secret))
        port = theirs.bind_to_random_port(f"tcp://{HOST}")
        push = PushChannel(with_key(f"tcp://{HOST}:{port}", DOOR.public.encode() if is_locked else b""), pair=ME)
        assert push.wait(SOON_S)
        for size in (0, 200, 100_000, 3_000_000):
            assert push.wait(SOON_S)
            assert push.send([b"header", bytes(size)])
            assert [len(frame) for frame in theirs.recv_multipart()] == [6, size]
        push.close()


@pytest.mark.parametrize("is_locked", [False, True], ids=["PLAIN", "CURVE"])
def test_all_of_many_messages_arrive_in_order(is_locked: bool) -> None:
    """More than the kernel takes at once: what is left of one goes before the next, whichever thread writes."""
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, lambda _: True) if is_locked else None)
    push = PushChannel(pull.endpoint, pair=ME)
    messages = [[b"%d" % number, bytes([number]) * (6_000_000 if number % 3 else 10)] for number in range(12)]

    def send_all() -> None:
        for frames in messages:
            while not push.send(frames):
                push.wait(SOON_S)

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    for frames in messages:
        assert pull.wait(SOON_S)
        assert [bytes(frame) for frame in pull.receive() or []] == frames
    sender.join(SOON_S)
    push.close()
    pull.close()


@pytest.mark.parametrize("is_locked", [False, True], ids=["PLAIN", "CURVE"])
def test_messages_sent_together_arrive_one_by_one_and_take_one_place(is_locked: bool) -> None:
    """Whether the kernel takes them at once or not; and none is accepted while the queue is full."""
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, lambda _: True) if is_locked else None)
    push = PushChannel(pull.endpoint, 2, pair=ME)
    batches = [
        [[b"%d %d" % (number, part), bytes([part]) * size] for part in range(5)]
        for number, size in enumerate((10, 3_000_000, 10, 3_000_000))
    ]
    assert sent(push, pull, b"connected") == [b"connected"]
    assert [push.send_all(batch) for batch in batches] == [True, True, True, False]
    for batch in batches:
        if batch is batches[3]:
            assert push.wait(SOON_S)
            assert push.send_all(batch)
        for frames in batch:
            assert pull.wait(SOON_S)
            assert [bytes(frame) for frame in pull.receive() or []] == frames
    push.close()
    pull.close()


def test_who_closes_while_nobody_is_there_waits_for_nobody() -> None:
    with socket.socket() as deaf:  # it has the port, and does not listen
        deaf.bind((HOST, 0))
        push = PushChannel(f"tcp://{HOST}:{deaf.getsockname()[1]}")
        assert not push.wait(0.05)
        began = monotonic()
        push.close(linger_s=60.0)
        push._thread.join(SOON_S)
        assert not push._thread.is_alive()
        assert monotonic() - began < SOON_S


def test_who_closes_a_connection_does_not_pause_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is for who wants to connect again; the thread and its descriptors are gone at once."""
    monkeypatch.setattr("swarm.wire.push.PAUSE_S", 10 * SOON_S)
    pull = PullChannel(HOST, LIMIT)
    push = PushChannel(pull.endpoint)
    assert sent(push, pull, b"step") == [b"step"]
    push.close()
    push._thread.join(SOON_S)
    assert not push._thread.is_alive()
    pull.close()


def test_closing_waits_for_no_thread_and_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On busy cores the background thread may be late; a stage that changes its neighbour does not wait for it, and the
    former neighbour gets nothing of what was accepted and not sent."""
    pull = PullChannel(HOST, LIMIT)
    push = PushChannel(pull.endpoint)
    assert sent(push, pull, b"step") == [b"step"]
    is_late, goes_on = threading.Event(), threading.Event()
    real = PushChannel._serve_once

    def late(self: PushChannel, sock: socket.socket) -> bool:
        is_late.set()
        assert goes_on.wait(SOON_S)
        return real(self, sock)

    monkeypatch.setattr(PushChannel, "_serve_once", late)
    while push.send([bytes(6_000_000)]):  # until the kernel takes no more, and the thread has the rest
        pass
    assert is_late.wait(SOON_S)
    push.close()
    assert push._thread.is_alive()
    goes_on.set()
    push._thread.join(SOON_S)
    assert not push._thread.is_alive()
    assert not pull.wait(0.2)  # a part of a message is none
    pull.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000"])
def test_what_is_no_endpoint_is_said(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no endpoint like"):
        PushChannel(endpoint)


# --- the back door ----------------------------------------------------------------------------------------------------


def family(push: PushChannel) -> socket.AddressFamily:
    assert push._socket is not None
    return socket.AddressFamily(push._socket.family)


@pytest.mark.parametrize("is_locked", [False, True], ids=["PLAIN", "CURVE"])
def test_who_runs_on_this_host_comes_by_the_back_door(own_folder: Path, is_locked: bool) -> None:
    """By itself, with what it was told of the door; nobody else may enter the directory, and no file stays."""
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, lambda _: True) if is_locked else None, unix_socket=True)
    push = PushChannel(pull.endpoint, pair=ME)
    for size in (10, 1_000_000):
        assert sent(push, pull, b"step", bytes(size)) == [b"step", bytes(size)]
    assert family(push) is socket.AF_UNIX
    assert stat.S_IMODE(own_folder.stat().st_mode) == 0o700
    push.close()
    pull.close()
    assert list(own_folder.iterdir()) == []


def test_without_a_back_door_the_door_itself_is_taken(own_folder: Path) -> None:
    """In another network or a container there is none to be found; and one that a killed process left leads nowhere.
    It is gone when the next one opens its own."""
    pull = PullChannel(HOST, LIMIT, unix_socket=True)
    (back,) = own_folder.iterdir()
    back.unlink()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(back))
    push = PushChannel(pull.endpoint)
    assert sent(push, pull, b"step") == [b"step"]
    assert family(push) is socket.AF_INET
    other = PullChannel(HOST, LIMIT, unix_socket=True)
    assert not back.exists()
    for each in (push, other, pull):
        each.close()


def test_another_door_behind_the_back_door_is_not_believed(own_folder: Path) -> None:
    """It does not know the word: the next attempt takes the door itself."""
    pull, other = PullChannel(HOST, LIMIT, unix_socket=True), PullChannel(HOST, LIMIT, unix_socket=True)
    key, port = address_and_key(pull.endpoint)[1], int(pull.endpoint.rpartition(":")[2])
    found, wrong = unix_socket.find_socket(key, port), unix_socket.find_socket(*_place(other))
    assert found is not None
    assert wrong is not None
    Path(wrong).rename(found)
    push = PushChannel(pull.endpoint)
    give_up_at = monotonic() + SOON_S
    while not push.send([b"step"]):
        assert monotonic() < give_up_at
        other.wait(0.02)
        pull.wait(0.02)
    assert pull.wait(SOON_S)
    assert family(push) is socket.AF_INET
    for each in (push, other, pull):
        each.close()


def _place(pull: PullChannel) -> tuple[bytes, int]:
    return address_and_key(pull.endpoint)[1], int(pull.endpoint.rpartition(":")[2])


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_may_enter_is_not_believed(own_folder: Path, mode: int) -> None:
    """Neither by who listens, who says why, nor by who knocks."""
    own_folder.mkdir()
    own_folder.chmod(mode)
    pull = PullChannel(HOST, LIMIT, unix_socket=True)
    assert "is not this user's alone" in pull.unix_socket_error
    assert list(own_folder.iterdir()) == []
    own_folder.chmod(0o700)
    other = PullChannel(HOST, LIMIT, unix_socket=True)
    assert unix_socket.find_socket(*_place(other)) is not None
    own_folder.chmod(mode)
    assert unix_socket.find_socket(*_place(other)) is None
    push = PushChannel(other.endpoint)
    assert sent(push, other, b"step") == [b"step"]
    assert family(push) is socket.AF_INET
    for each in (push, other, pull):
        each.close()


def test_a_name_that_is_too_long_for_the_kernel_is_said(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "x" * 100)
    pull = PullChannel(HOST, LIMIT, unix_socket=True)
    assert "would be longer than 107 bytes" in pull.unix_socket_error
    push = PushChannel(pull.endpoint)
    assert sent(push, pull, b"step") == [b"step"]
    push.close()
    pull.close()


def test_another_user_is_not_heard(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it came into the directory: the kernel says whose process it is."""
    pull = PullChannel(HOST, LIMIT, unix_socket=True)
    monkeypatch.setattr(unix_socket, "is_same_user", lambda _: False)
    monkeypatch.setattr("swarm.wire.transport.connection.is_same_user", lambda _: False)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(SOON_S)
        raw.connect(str(unix_socket.find_socket(*_place(pull))))
        assert not pull.wait(0.1)
        assert raw.recv(64) == b""
    pull.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="a system that tells nothing of its connections")
def test_the_way_is_told_as_the_kernel_has_seen_it() -> None:
    """Over tcp; nothing is known before somebody is there, nor after the end."""
    pull = PullChannel(HOST, LIMIT)
    push = PushChannel(pull.endpoint)
    sent(push, pull, b"x" * (1 << 20))
    seen = push.tcp_info()
    assert seen is not None
    assert 0 < seen.round_trip_s < SOON_S
    assert seen.bytes_per_s >= 0
    push.close()
    assert push.tcp_info() is None
    pull.close()


def test_of_a_back_door_there_is_no_way_to_tell(own_folder: Path) -> None:
    pull = PullChannel(HOST, LIMIT, unix_socket=True)
    push = PushChannel(pull.endpoint)
    sent(push, pull, b"step")
    assert push.tcp_info() is None
    for each in (push, pull):
        each.close()
