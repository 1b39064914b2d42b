"""Whether a door can be reached."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from swarm.errors import WireError
from swarm.wire.transport import client_handshake
from swarm.wire.transport.client_handshake import check_reachable
from swarm.wire.transport.curve import CurveServer
from swarm.wire.transport.keys import AuthPolicy, KeyPair, new_pair
from swarm.wire.transport.server_handshake import PULL
from swarm.wire.transport.zmtp import ZmtpDecoder, encode_greeting


def test_a_door_on_this_machine_is_not_tried() -> None:
    assert check_reachable("tcp://127.0.0.1:9") == ""
    assert check_reachable(f"tcp://{'ab' * 32}@[::1]:9") == ""


def test_who_does_not_answer_is_named() -> None:
    """An address of documentation's own network: nobody's, so that no way or no answer is there."""
    assert "192.0.2.77:9" in check_reachable(f"tcp://{'ab' * 32}@192.0.2.77:9", 0.2)


def own_address() -> str:
    every = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    own = [e.address for e in every if e.family == socket.AF_INET and not e.address.startswith("127.")]
    if not own:
        pytest.skip("this machine has no address beside loopback")
    return own[0]


def test_what_answers_can_be_reached() -> None:
    """By this machine's own address where it has one beside loopback; a port without anybody says so."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert check_reachable(f"tcp://{own_address()}:{port}") == ""
    assert "refused" in check_reachable(f"tcp://{own_address()}:{port}")


@contextmanager
def answering(answers: Callable[[socket.socket], object]) -> Iterator[int]:
    """Somebody who listens on all addresses and does that with each that comes; the port."""
    with socket.create_server(("0.0.0.0", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connected = server.accept()[0]
                    with suppress(OSError):
                        answers(connected)
                    connected.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def as_a_door(pair: KeyPair) -> Callable[[socket.socket], None]:
    """As one with this key that hears nobody yet."""

    def answers(connected: socket.socket) -> None:
        inlet = ZmtpDecoder(1 << 20, CurveServer(PULL, AuthPolicy(pair, lambda key: False, reject_explicitly=False)))
        connected.sendall(encode_greeting(b"CURVE"))
        with suppress(WireError):
            while came := connected.recv(1024):
                inlet.feed(came)
                inlet.advance_handshake()
                connected.sendall(inlet.answer)
                inlet.answer = b""

    return answers


DOOR = new_pair()


@pytest.mark.parametrize(
    ("answers", "is_door"),
    [
        (as_a_door(DOOR), True),
        (as_a_door(new_pair()), False),
        (lambda connected: connected.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(64)), False),
        (lambda connected: None, False),
        (lambda connected: connected.sendall(encode_greeting(b"NULL")), False),
    ],
    ids=["the door", "another door", "something else", "hangs up", "a door without a lock"],
)
def test_who_listens_shows_that_it_is_the_door(answers: Callable[[socket.socket], object], is_door: bool) -> None:
    """A neighbour can be tried before it hears us: the plan that names us may be on its way to it."""
    with answering(answers) as port:
        problem = check_reachable(f"tcp://{DOOR.public}@{own_address()}:{port}", 0.4)
        assert problem == "" if is_door else "does not have the expected key" in problem


def test_a_door_that_is_busy_counts_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process computes, and the kernel takes connections meanwhile. A relay is no door."""
    monkeypatch.setattr(client_handshake, "ANSWER_S", 0.1)
    with socket.create_server(("0.0.0.0", 0)) as busy:
        port = busy.getsockname()[1]
        assert check_reachable(f"tcp://{DOOR.public}@{own_address()}:{port}", 0.4) == ""
    with answering(lambda connected: None) as port:
        assert check_reachable(f"tcp://{DOOR.public}@{own_address()}:{port}/{'ab' * 16}", 0.4) == ""


def test_a_door_that_hangs_up_at_first_is_asked_again() -> None:
    """It has no room for newcomers at that moment."""
    turns = iter([lambda connected: None, as_a_door(DOOR)])

    def answers(connected: socket.socket) -> None:
        next(turns)(connected)

    with answering(answers) as port:
        assert check_reachable(f"tcp://{DOOR.public}@{own_address()}:{port}", 3.5) == ""
