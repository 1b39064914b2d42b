"""Mutants of swarm/ctl and swarm/govern."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="doctor-passes-the-lost-by",
        breaks="The diagnosis reports no problem when a worker is lost but others remain.",
        target="swarm.ctl.look.workers:of_workers",
        old="for name, row in last_lives.items():",
        new="for name, row in last_lives.items() if not here else ():",
        caught_by="tests/unit/ctl/test_ailments.py::test_a_worker_that_is_missing_or_held_back_is_told",
    ),
    Mutant(
        name="top-drains-unasked",
        breaks="`swarmctl top` takes every key as a confirmation.",
        target="swarm.ctl.top.keys:pressed",
        old='order = screen.asked if key == "y" else None',
        new="order = screen.asked",
        caught_by="tests/unit/ctl/test_top.py::test_what_ends_something_asks_first",
    ),
    Mutant(
        name="top-yes-for-the-next-one",
        breaks="A confirmation in `swarmctl top` applies to a worker that is no longer listed.",
        target="swarm.ctl.top.keys:still_there",
        old="return replace(screen, chosen=items[0] if items else None, asked=None)",
        new="return replace(screen, chosen=items[0] if items else None)",
        caught_by="tests/unit/ctl/test_top.py::test_who_goes_while_it_is_asked_about_is_not_replaced_by_the_next",
    ),
)
