"""Hosts: who can start workers, and who asked for some."""

from __future__ import annotations

from swarm.broker.actions import Action, Outbox, SendToClient
from swarm.broker.events import ClientUnreachable
from swarm.broker.members.hosts import MAX_TICKETS, HostManager
from swarm.broker.state import HostRegistry
from swarm.wire.messages import HostDone, HostHello, Join, Report, StartWorkers
from tests.unit.broker.bench import Bench

ASKER = b"asker"


def hosts() -> tuple[HostManager, list[Action]]:
    out = Outbox()
    return HostManager(HostRegistry(), out), out


def taken(out: list[Action]) -> list[Action]:
    found = out[:]
    out.clear()
    return found


def test_join_goes_to_the_host_and_its_answer_to_the_asker() -> None:
    """One ticket, one order, one answer."""
    some, out = hosts()
    some.on_hello(b"host", HostHello(host="here", pid=1))
    some.join(ASKER, Join(count=2, memory_limit=5, device="cuda:1"))
    assert taken(out) == [SendToClient(b"host", StartWorkers(ticket=1, count=2, memory_limit=5, device="cuda:1"))]
    some.on_done(HostDone(ticket=1, started=("w3", "w4")))
    assert taken(out) == [SendToClient(ASKER, Report(what="join", ok=True, body={"started": ["w3", "w4"]}))]
    # The same answer again is nobody's.
    some.on_done(HostDone(ticket=1, started=("w3", "w4")))
    assert taken(out) == []


def test_a_failure_is_passed_on() -> None:
    """What the host could not do is told in its words, with what it could."""
    some, out = hosts()
    some.on_hello(b"host", HostHello(host="here", pid=1))
    some.join(ASKER, Join(count=2))
    taken(out)
    some.on_done(HostDone(ticket=1, started=("w3",), error="no memory for more"))
    body = {"started": ["w3"], "error": "no memory for more"}
    assert taken(out) == [SendToClient(ASKER, Report(what="join", ok=False, body=body))]


def test_without_a_host_the_answer_says_what_to_do(serving: Bench) -> None:
    """Nobody can start workers: the asker is told how to start one by hand."""
    (action,) = serving.say(Join(count=1, memory_limit=1 << 30, device="cuda"), ASKER)
    assert isinstance(action, SendToClient)
    assert isinstance(action.message, Report)
    assert not action.message.ok
    command = "run `swarm worker --device cuda --memory-limit 1073741824`"
    assert command in str(action.message.body["error"])


def test_a_host_that_is_gone_is_not_asked(serving: Bench) -> None:
    """Through the core: its connection is lost, so there is no host any more."""
    serving.say(HostHello(host="here", pid=1), b"host")
    serving.feed(ClientUnreachable(b"host"))
    (action,) = serving.say(Join(count=1), ASKER)
    assert isinstance(action, SendToClient)
    assert action.client == ASKER


def test_a_host_that_dies_while_it_is_asked_leaves_nobody_waiting() -> None:
    """Whoever waits for its answer is told that none will come; a late answer is nobody's."""
    some, out = hosts()
    some.on_hello(b"host", HostHello(host="here", pid=7))
    some.join(ASKER, Join(count=1))
    taken(out)
    some.on_client_gone(b"somebody")
    assert taken(out) == []
    some.on_client_gone(b"host")
    error = "the `swarm up` on here (pid 7) went away before it answered: ask again"
    assert taken(out) == [SendToClient(ASKER, Report(what="join", ok=False, body={"error": error}))]
    some.on_done(HostDone(ticket=1, started=("w3",)))
    assert taken(out) == []


def test_a_host_on_a_new_connection_may_still_answer() -> None:
    """The old connection's end is not the process's: the ticket goes with the process."""
    some, out = hosts()
    some.on_hello(b"old", HostHello(host="here", pid=1))
    some.join(ASKER, Join(count=1))
    some.on_hello(b"new", HostHello(host="here", pid=1))
    taken(out)
    some.on_client_gone(b"old")
    assert taken(out) == []
    some.on_done(HostDone(ticket=1, started=("w3",)))
    assert taken(out) == [SendToClient(ASKER, Report(what="join", ok=True, body={"started": ["w3"]}))]


def test_a_host_that_reconnects_takes_its_own_place() -> None:
    """The same process on a new connection is one host, reached there; the newest host is asked."""
    some, out = hosts()
    some.on_hello(b"old", HostHello(host="here", pid=1))
    some.on_hello(b"new", HostHello(host="here", pid=1))
    some.on_client_gone(b"new")
    some.join(ASKER, Join(count=1))
    (action,) = taken(out)
    assert isinstance(action, SendToClient)
    assert action.client == ASKER  # there is no old one left


def test_tickets_are_bounded() -> None:
    """A host that never answers does not make the broker remember everybody who ever asked."""
    some, out = hosts()
    some.on_hello(b"host", HostHello(host="here", pid=1))
    for number in range(MAX_TICKETS + 1):
        some.join(b"%d" % number, Join(count=1))
    refused = [a for a in taken(out) if isinstance(a, SendToClient) and isinstance(a.message, Report)]
    assert [(a.client, a.message.ok) for a in refused] == [(b"0", False)]  # the oldest is told before it is forgotten
    some.on_done(HostDone(ticket=1, started=()))
    assert taken(out) == []
    some.on_done(HostDone(ticket=2, started=()))
    assert [a.client for a in taken(out) if isinstance(a, SendToClient)] == [b"1"]
