"""For all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

from swarm.stage.shell.waiting import wait_passively

wait_passively()  # before torch: the cores are shared

import pytest  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

from tests.untested import note_skipped  # noqa: E402

# Files that take longest. They come first, so that the processes of a run end at about the same time.
LONGEST = ("integration/test_systemd.py", "integration/test_hosts.py", "faults/test_weather.py", "unit/sim/test_sim.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    note_skipped(terminalreporter.stats.get("skipped", []))


# What is kept for the next process, such as proofs of kernels, is kept for the other processes of this run only.
if "SWARM_CACHE" not in os.environ:
    os.environ["SWARM_CACHE"] = tempfile.mkdtemp(prefix="swarm-tests-")
    atexit.register(shutil.rmtree, os.environ["SWARM_CACHE"], ignore_errors=True)

# Who starts tests in the background of a script, or so that they outlive a terminal, starts them deaf to these signals;
# and so would be every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Machines are shared and noisy: an example that takes long once says nothing.
settings.register_profile("shared", deadline=None)
# Only whether a mutant is caught matters, not its smallest example.
settings.register_profile("mutants", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("shared")
