"""Mutants of swarm/cli and swarm/config."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="nursery-births-unread-at-its-end",
        breaks="Messages that the fork server sent before its end are not read, so that its workers are started twice.",
        target="swarm.cli.up.forkserver.client:ForkServer.stop",
        old="self._read_messages()",
        new="",
        caught_by="tests/integration/test_supervisor.py::test_who_is_born_when_a_nursery_is_ended_is_known",
    ),
    Mutant(
        name="nursery-worker-runs-unnamed",
        breaks="A forked worker runs before its process number is reported.",
        target="swarm.cli.up.forkserver.process:_wait_for_release",
        old="""
            is_released = os.read(hears, 1)
            os.close(hears)
            if not is_released or os.getppid() != supervisor:
        """,
        new="""
            os.close(hears)
            if supervisor == 0:
        """,
        caught_by="tests/integration/test_supervisor.py::test_a_nursery_that_dies_before_it_names_a_worker_takes_it_along",
    ),
    Mutant(
        name="nursery-with-threads-forks",
        breaks="The fork server forks although it has threads.",
        target="swarm.cli.up.forkserver.process:serve",
        old='if len(os.listdir("/proc/self/task")) != 1:',
        new='if len(os.listdir("/proc/self/task")) < 1:',
        caught_by="tests/integration/test_supervisor.py::test_without_a_nursery_workers_start_by_themselves",
    ),
    Mutant(
        name="lock-children-use-an-invitation",
        breaks="Workers that `swarm up` starts inherit an invitation and join another swarm.",
        target="swarm.cli.up.processes:child_environment",
        old="return {name: value for name, value in os.environ.items() if name != INVITATION_VARIABLE}",
        new="return {name: value for name, value in os.environ.items()}",
        caught_by="tests/unit/cli/test_joining.py::test_children_of_swarm_up_join_nothing",
    ),
    Mutant(
        name="nursery-unknown-orphans-reaped",
        breaks="`swarm up` reaps a worker before it has its process number, so that its exit is lost.",
        target="swarm.cli.up.runner:Runner._check_children",
        old="if self._adopts_orphans and not (self._forkserver is not None and self._forkserver.has_pending_forks):",
        new="if self._adopts_orphans:",
        caught_by="tests/integration/test_supervisor.py::test_a_worker_that_dies_before_its_number_is_known_is_started_again",
    ),
    Mutant(
        name="config-show-tells-passwords",
        breaks="`swarm config show` prints passwords that are part of addresses.",
        target="swarm.config.display:hide_credentials",
        old='return _CREDENTIALS.sub("://…@", value)',
        new="return value",
        caught_by="tests/unit/cli/test_commands.py::test_config_show",
    ),
    Mutant(
        name="down-signals-a-stranger",
        breaks="`swarm down` signals a process that was given the number of an ended `swarm up`.",
        target="swarm.cli.up.runs:stop_run",
        old="if not run.is_alive:",
        new="if False:",
        caught_by="tests/unit/cli/test_runs.py::test_another_process_with_the_number_is_not_signalled",
    ),
    Mutant(
        name="detached-before-its-gateway",
        breaks="`swarm up --detach` returns before the gateway answers.",
        target="swarm.cli.up.runs:RunRecorder.__init__",
        old='self._awaited = {"serving", "http"} if has_http else {"serving"}',
        new='self._awaited = {"serving"}',
        caught_by="tests/unit/cli/test_runs.py::test_it_is_ready_once_it_serves_and_its_gateway_answers",
    ),
)
