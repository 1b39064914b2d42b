"""Settings of all tests: markers, order, quarantine, and the fast tests as the default.

``pytest`` without arguments runs the fast tests of ``tests/unit`` on all cores. ``pytest PATH``, ``-k`` and ``-m`` run
what they select, and nothing else is deselected.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

from swarm.stage.shell.openmp import use_passive_waiting

use_passive_waiting()  # before torch: the cores are shared

# Without a GPU, Triton's kernels run in its interpreter. transformers imports Triton, which reads this only then.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

from tests import durations, quarantine, untested  # noqa: E402

HERE = Path(__file__).parent
FAST = "not slow and not schedules and not long"
FOLDER_MARKERS = {
    "browser": ("browser", "processes"),
    "faults": ("faults", "processes"),
    "integration": ("processes",),
    "model": ("model",),
    "mutants": ("mutants",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="Save how long each file took, by which later runs are ordered."
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads these options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the fast tests, in parallel, if the command selects none."""
    option = config.option
    selects = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.markexpr or option.keyword
    if selects:
        return
    option.markexpr = FAST
    is_worker = hasattr(config, "workerinput")  # of xdist, which repeats the command line in each of its workers
    runs_alone = is_worker or option.usepdb or option.collectonly
    if not runs_alone and getattr(option, "numprocesses", None) is None:
        option.numprocesses, option.dist, option.loadscopereorder = "auto", "loadfile", False


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quarantined = quarantine.read()
    for item in items:
        if item.path.is_relative_to(HERE):
            for name in FOLDER_MARKERS.get(item.path.relative_to(HERE).parts[0], ()):
                item.add_marker(name)
        for entry in quarantined:
            if entry.names(item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=False))
    if any(item.get_closest_marker("gpu") for item in items):
        _skip_without_gpu(items)
    longest_first = durations.read()
    items.sort(key=lambda item: -longest_first.get(item.nodeid.partition("::")[0], 0.0))


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    untested.note_long(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    untested.note_reports(terminalreporter.stats)
    if terminalreporter.config.getoption("record_durations", default=False):
        durations.record(terminalreporter.stats)


# What is kept for the next process, such as proofs of kernels, is kept for the other processes of this run only. State
# of this user, such as records of swarm up, is neither read nor changed.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="swarm-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
if "SWARM_CACHE" not in os.environ:
    os.environ["SWARM_CACHE"] = tempfile.mkdtemp(prefix="swarm-tests-")
    atexit.register(shutil.rmtree, os.environ["SWARM_CACHE"], ignore_errors=True)

# A run in the background of a script, or one that outlives its terminal, ignores these signals. Processes that tests
# start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Machines are shared and noisy: one slow example proves nothing.
settings.register_profile("shared", deadline=None)
# Only whether a mutant is caught matters, not its smallest example.
settings.register_profile("mutants", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("shared")
