"""Who is behind a connection, when descriptors are used again and news arrives in another order than it happened."""

from __future__ import annotations

from swarm.wire.sockets import Connections


def test_a_closed_connection_names_its_peer() -> None:
    """The peer that spoke over a connection is lost with it; one that never spoke has no name to lose."""
    connections = Connections()
    connections.accepted(7)
    connections.accepted(8)
    assert connections.used(7, b"a") is None
    assert connections.has(b"a")
    assert connections.closed(8) is None
    assert connections.closed(7) == b"a"
    assert not connections.has(b"a")
    assert connections.closed(7) is None


def test_a_peer_that_came_back_is_not_lost_with_its_old_connection() -> None:
    """The old connection's end may become known after the new one's first message."""
    connections = Connections()
    connections.accepted(7)
    connections.used(7, b"a")
    connections.accepted(8)
    assert connections.used(8, b"a") is None
    assert connections.closed(7) is None
    assert connections.has(b"a")
    assert connections.closed(8) == b"a"


def test_a_descriptor_that_is_used_again_belongs_to_the_new_peer() -> None:
    """7 closed and opened again: who spoke over it before is lost, who speaks now is not."""
    connections = Connections()
    connections.accepted(7)
    connections.used(7, b"a")
    # The message of b was taken before the monitor was read; both events precede it.
    assert connections.closed(7) == b"a"
    connections.accepted(7)
    assert connections.used(7, b"b") is None
    assert connections.closed(7) == b"b"


def test_last_words_after_the_end() -> None:
    """A message that is read after its connection's end brings nobody to life."""
    connections = Connections()
    connections.accepted(7)
    assert connections.closed(7) is None
    assert connections.used(7, b"a") == b"a"
    assert not connections.has(b"a")


def test_last_words_over_a_descriptor_that_is_used_again() -> None:
    """They are taken for the new connection's, until its real peer speaks: then the dead one is lost again."""
    connections = Connections()
    connections.accepted(7)
    connections.closed(7)
    connections.accepted(7)
    assert connections.used(7, b"dead") is None
    assert connections.used(7, b"b") == b"dead"
    assert connections.closed(7) == b"b"


def test_last_words_of_a_peer_that_is_back_already() -> None:
    """They don't make it look lost."""
    connections = Connections()
    connections.accepted(7)
    connections.accepted(8)
    connections.used(8, b"a")
    connections.closed(7)
    assert connections.used(7, b"a") is None
    assert connections.closed(8) == b"a"
