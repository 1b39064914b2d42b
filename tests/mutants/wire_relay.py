"""Mutants of swarm/wire/door/relay."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="waiting-without-a-bound",
        breaks="The number of peers that wait under one ticket is not limited.",
        target="swarm.wire.door.relay.rendezvous:Rendezvous._beyond",
        old="gives_way = list(waiting)[: max(0, len(waiting) - most)]",
        new="gives_way = list(waiting)[:0]",
        caught_by="tests/unit/wire/test_rendezvous.py::test_of_those_that_wait_the_oldest_give_way",
    ),
    Mutant(
        name="admitted-for-ever",
        breaks="A relay keeps two peers connected after their ticket is withdrawn.",
        target="swarm.wire.door.relay.rendezvous:Rendezvous.admit",
        old="cut.append(end)",
        new="",
        caught_by="tests/unit/wire/test_rendezvous.py::test_who_is_admitted_no_more_is_hung_up_on",
    ),
    Mutant(
        name="joined-under-any-ticket",
        breaks="A relay connects peers whose ticket is not allowed.",
        target="swarm.wire.door.relay.rendezvous:Rendezvous.comes",
        old="""
            if asked.ticket not in self._admitted:
                return [end]
        """,
        new="",
        caught_by="tests/unit/wire/test_rendezvous.py::test_nobody_is_joined_under_a_ticket_that_is_not_admitted",
    ),
    Mutant(
        name="the-oldest-receiver-is-joined",
        breaks="A relay connects a sender to the oldest receiver, which may be gone.",
        target="swarm.wire.door.relay.rendezvous:Rendezvous.joins",
        old="sender, receiver = next(iter(meeting.senders)), next(reversed(meeting.receivers))",
        new="sender, receiver = next(iter(meeting.senders)), next(iter(meeting.receivers))",
        caught_by="tests/unit/wire/test_rendezvous.py::test_the_longest_waiting_sender_meets_the_newest_receiver",
    ),
)
