"""A connection for one message: it leaves as soon as somebody is there, and is given up if nobody comes."""

from __future__ import annotations

import socket
import time

from swarm.stage.shell.connections import LINGER_S, RETRY_S, SEND_TIMEOUT_S, PeerConnector, RecheckConnection
from swarm.wire.messages import Edge
from swarm.wire.pull import PullChannel
from swarm.wire.transport.keys import new_pair, with_key

SOON_S = 10.0
LIMIT = 1 << 26


def test_a_large_message_arrives_though_the_connection_is_closed_at_once() -> None:
    """Sixteen megabytes are on their way when the socket is closed, and all of them come."""
    taker, edge = PullChannel("127.0.0.1", LIMIT), RecheckConnection(PeerConnector(new_pair(), "127.0.0.1"))
    message = [b"header", bytes(1 << 24)]
    edge.send(Edge("w1.1", taker.endpoint), message, 0.0)
    give_up_at = time.monotonic() + SOON_S
    while edge.is_full:
        assert time.monotonic() < give_up_at
        taker.wait(RETRY_S)
        edge.flush(0.0)
    assert taker.wait(LINGER_S + SOON_S)
    frames = taker.receive()
    assert frames is not None
    assert [len(frame) for frame in frames] == [6, 1 << 24]
    taker.close()
    edge.close()


def test_nothing_goes_to_who_is_out_for_good() -> None:
    """Its key is revoked while the message waits for it."""
    gone, other = new_pair(), new_pair()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        edge = RecheckConnection(PeerConnector(new_pair(), "127.0.0.1"))
        edge.send(Edge("w1.1", with_key(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", gone.public.encode())), [b"x"], 0.0)
        edge.disconnect_key(other.public)
        assert edge.is_full
        edge.disconnect_key(gone.public)
        assert not edge.is_full


def test_nobody_there_is_given_up() -> None:
    """After a while, by the clock that it is told; the next message gets a connection of its own."""
    with socket.socket() as deaf:  # it has the port, so nobody else can, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        gone = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        edge = RecheckConnection(PeerConnector(new_pair(), "127.0.0.1"))
        edge.send(Edge("w1.1", gone), [b"x"], 100.0)
        edge.flush(100.0 + SEND_TIMEOUT_S - 0.1)
        assert edge.is_full
        edge.flush(100.0 + SEND_TIMEOUT_S)
        assert not edge.is_full
        edge.send(Edge("w1.1", gone), [b"x"], 200.0)
        assert edge.is_full
        edge.close()
        assert not edge.is_full
