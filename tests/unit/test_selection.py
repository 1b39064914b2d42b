"""Which tests run, in which order, and which of them decide."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import durations, quarantine, untested
from tests.conftest import FAST, FOLDER_MARKERS, pytest_cmdline_main

ROOT = Path(__file__).parents[2]
FLAKY = "import random\n\n\ndef test_a():\n    assert False\n\n\ndef test_b():\n    assert True\n"
SETTINGS = "[[quarantined]]\ntest = 'test_flaky.py'\ncause = 'a race'\nsince = 2026-11-26\n"
# A conftest that marks the tests of its folder as tests/conftest.py does, by a list of its own.
CONFTEST = """
from pathlib import Path
from tests import quarantine
from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_terminal_summary
quarantine.FILE = Path(__file__).with_name("quarantine.toml")
"""


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != untested.VARIABLE}  # it reports nothing
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, env=environment)


def test_every_quarantined_test_exists_and_has_a_cause() -> None:
    for entry in quarantine.read():
        path, _, name = entry.test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / path).read_text(), entry
        assert len(entry.cause) > 20, f"{entry.test}: name what makes it fail by chance"
        assert entry.since <= date.today()


@pytest.mark.parametrize(
    ("nodeid", "is_named"),
    [("a.py::test_x", True), ("a.py::test_x[1]", True), ("a.py::test_xy", False), ("b.py::test_x", False)],
)
def test_an_entry_names_a_test_with_all_its_parameters(nodeid: str, is_named: bool) -> None:
    entry = quarantine.Quarantined("a.py::test_x", "a race", date(2026, 11, 26))
    assert entry.names(nodeid) == is_named


def test_an_entry_names_one_of_several_parameters() -> None:
    entry = quarantine.Quarantined("a.py::test_x[1]", "a race", date(2026, 11, 26))
    assert entry.names("a.py::test_x[1]")
    assert not entry.names("a.py::test_x[2]")


@pytest.mark.slow
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_quarantined_test_runs_and_does_not_decide(tmp_path: Path, is_listed: bool) -> None:
    """Its failure is reported with the cause. The same failure of another test decides."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    listed = SETTINGS.replace("test_flaky.py", "test_flaky.py::test_a")
    (tmp_path / "quarantine.toml").write_text(listed if is_listed else "")
    done = run("-ra", "-c", "/dev/null", "--rootdir", str(tmp_path), "-o", f"pythonpath={ROOT}", ".", cwd=tmp_path)
    assert done.returncode == (0 if is_listed else 1), done.stdout + done.stderr
    assert ("XFAIL test_flaky.py::test_a - quarantined since 2026-11-26: a race" in done.stdout) == is_listed


def options_of(args_source: pytest.Config.ArgsSource, **options: object) -> SimpleNamespace:
    """Return the options of a run after the decision what it runs."""
    defaults = {"markexpr": "", "keyword": "", "usepdb": False, "collectonly": False, "numprocesses": None}
    config = SimpleNamespace(args_source=args_source, option=SimpleNamespace(**{**defaults, **options}))
    pytest_cmdline_main(config)  # type: ignore[arg-type]
    return config.option


def test_plain_pytest_runs_the_fast_tests_on_all_cores(pytestconfig: pytest.Config) -> None:
    options = options_of(pytest.Config.ArgsSource.TESTPATHS)
    assert (options.markexpr, options.numprocesses, options.dist) == (FAST, "auto", "loadfile")
    assert pytestconfig.getini("testpaths") == ["tests/unit"]


@pytest.mark.parametrize("option", ["usepdb", "collectonly"])
def test_a_debugger_needs_a_single_process(option: str) -> None:
    options = options_of(pytest.Config.ArgsSource.TESTPATHS, **{option: True})
    assert (options.markexpr, options.numprocesses) == (FAST, None)


def test_a_worker_of_a_parallel_run_starts_no_workers() -> None:
    """It has the same command line. Once each worker started two more."""
    options = SimpleNamespace(markexpr="", keyword="", usepdb=False, collectonly=False, numprocesses=None)
    config = SimpleNamespace(args_source=pytest.Config.ArgsSource.TESTPATHS, option=options, workerinput={})
    pytest_cmdline_main(config)  # type: ignore[arg-type]
    assert (options.markexpr, options.numprocesses) == (FAST, None)


@pytest.mark.parametrize("options", [{"markexpr": "faults"}, {"keyword": "many_accidents"}])
def test_a_selection_is_not_narrowed(options: dict[str, str]) -> None:
    chosen = options_of(pytest.Config.ArgsSource.TESTPATHS, **options)
    assert (chosen.markexpr, chosen.numprocesses) == (options.get("markexpr", ""), None)


@pytest.mark.slow
def test_a_path_runs_everything_in_it() -> None:
    named = run("--collect-only", "-q", "tests/unit/sim/test_sim.py").stdout
    assert "test_many_accidents[20800]" in named
    assert "deselected" not in named


def test_markers_of_folders_are_registered_and_their_folders_exist(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {name for names in FOLDER_MARKERS.values() for name in names} <= registered
    assert all((ROOT / "tests" / folder).is_dir() for folder in FOLDER_MARKERS)


def test_durations_of_a_run_replace_those_of_its_files(tmp_path: Path) -> None:
    """Files that take little are left out, and those of other runs stay."""
    file = tmp_path / "durations.json"
    file.write_text('{"tests/a.py": 5, "tests/b.py": 7}')
    reports = [SimpleNamespace(nodeid=f"tests/{name}.py::test", duration=seconds) for name, seconds in
               (("a", 3.0), ("a", 6.0), ("c", 0.1))]  # fmt: skip
    durations.record({"passed": reports[:1], "failed": reports[1:], "warnings": [SimpleNamespace()]}, file)
    assert durations.read(file) == {"tests/a.py": 9, "tests/b.py": 7}


def test_only_ci_runs_a_failed_test_again() -> None:
    """By default ``tools/check`` has no retry: a flaky test is quarantined by name."""
    assert '[ -n "${CHECK_AGAIN-}" ] || return "$code"' in (ROOT / "tools/check").read_text()
    assert "CHECK_AGAIN=1" in (ROOT / ".ci/run").read_text()
