"""Mutants of swarm/systemd."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="doors-of-others-not-held",
        breaks="systemd holds only the loopback socket open, so other machines are refused during a restart.",
        target="swarm.systemd.install:listen_addresses",
        old='return tuple(f"{_bracket(address)}:{number}" for address in (host, *others) for number in ports)',
        new='return tuple(f"{_bracket(address)}:{number}" for address in (host,) for number in ports)',
        caught_by="tests/unit/systemd/test_units.py::test_doors_are_held_open_where_the_settings_have_them",
    ),
    Mutant(
        name="reload-takes-what-it-can-not",
        breaks="A reload applies settings that need a restart.",
        target="swarm.systemd.service_context:split_changes",
        old="return SettingsChange(immediate, tuple(name for name in changed if name not in immediate), settings)",
        new="return SettingsChange(immediate, tuple(name for name in changed if name not in immediate), new)",
        caught_by="tests/unit/systemd/test_unit.py::test_what_a_process_can_take_it_takes_at_once_and_is_told",
    ),
    Mutant(
        name="unit-leaves-a-core",
        breaks="A service that the watchdog kills writes a core dump.",
        target="swarm/systemd/units/swarm-broker.service",
        old="LimitCORE=0",
        new="",
        caught_by="tests/unit/systemd/test_units.py::test_each_service_has_a_user_of_its_own_and_writes_no_core",
    ),
    Mutant(
        name="unit-shuts-the-wrong-brokers-doors",
        breaks="A broker that was stopped normally closes its sockets, and one with bad settings does not.",
        target="swarm/systemd/units/swarm-broker.service",
        old="""
        ExecStopPost=+-/bin/sh -c 'case "$$EXIT_STATUS" in 2|78) systemctl stop --no-block swarm-broker.socket;; esac'
        """,
        new="""
    ExecStopPost=+-/bin/sh -c 'case "$$EXIT_STATUS" in 2|78) ;; *) systemctl stop --no-block swarm-broker.socket;; esac'
        """,
        caught_by="tests/unit/systemd/test_units.py::test_a_broker_shuts_its_doors_only_if_it_can_not_work",
    ),
    Mutant(
        name="unit-tries-bad-settings-again",
        breaks="systemd restarts a worker with invalid settings without end.",
        target="swarm/systemd/units/swarm-worker@.service",
        old="RestartPreventExitStatus=2 78",
        new="",
        caught_by="tests/unit/systemd/test_units.py::test_settings_that_can_not_work_are_not_tried_again",
    ),
)
