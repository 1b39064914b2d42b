"""Check that tests notice broken rules. The tables beside this file list mutants, one table per package: each breaks
one rule, as a slip would. Simulated schedules or a named test must notice it, and must notice nothing without it.

``pytest tests/mutants -k every_mutant`` takes seconds and shows which mutants a change of the code has broken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import xxhash

from tests import untested
from tests.mutants.mutant import Catcher, DoesNotApply, Edit, Mutant, mutate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAY = str(HERE / "play.py")
NOT_TABLES = ("mutant", "forkserver", "play", "test_mutants")
MIN_MUTANTS = 150
NUM_SCHEDULES = 120
NUM_UNCHANGED = 12
SAMPLE = 5
LIMIT_S = 200  # for one run; on an idle machine it takes less than a tenth of that
NOTICED = (1, 3)  # exit codes: a test failed; a schedule broke a rule
# Some plugins take longer to load than such a test takes.
WITHOUT = [part for name in ("cacheprovider", "schemathesis", "xdist", "anyio") for part in ("-p", f"no:{name}")]
PYTEST = ["-m", "pytest", "-x", "-q", "--assert=plain", "--hypothesis-profile=mutants", *WITHOUT]
LEFT_OUT = shutil.ignore_patterns("village", "*.so", "*.c", "*.h")
SLOWEST = ("tests/integration", "tests/model", "sim")  # they start first, so that all processes end together


def read_tables() -> list[Mutant]:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_TABLES)
    mutants = [mutant for name in names for mutant in import_module(f"tests.mutants.{name}").MUTANTS]
    return sorted(mutants, key=lambda mutant: not mutant.caught_by.startswith(SLOWEST))


MUTANTS = read_tables()


def is_sampled(mutant: Mutant) -> bool:
    """Tell whether the normal check runs this mutant: one of ``SAMPLE``, chosen by its text and that of the files it
    changes, so that a change of a file draws others of its mutants. ``--long`` runs all."""
    texts = [mutant.name, *((ROOT / path).read_text() for path in mutant.paths if (ROOT / path).is_file())]
    return xxhash.xxh3_64_intdigest("\0".join(texts).encode()) % SAMPLE == 0


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str


class ForkServer:
    """The process that all runs are forked from (``forkserver.py``)."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        environment.pop(untested.VARIABLE, None)  # what the copy, which has no kernels, skips is no gap of this run
        self._process = subprocess.Popen([sys.executable, str(HERE / "forkserver.py")], env=environment, **pipes)  # type: ignore[call-overload]

    def run(self, root: Path, catcher: Catcher, output: Path) -> Outcome:
        """Run tests or schedules with the package and tests under ``root``."""
        folder = root.parent / "run"  # of this server's runs: several remove each other's from pytest's own
        command = [*PYTEST, f"--basetemp={folder}", *catcher.tests.split()]
        if not catcher.tests:
            command = [
                PLAY,
                str(root),
                str(catcher.first),
                str(catcher.count or NUM_SCHEDULES),
                catcher.kinds,
                catcher.extras,
            ]
        order = {"root": str(root), "command": command, "output": str(output), "limit_s": LIMIT_S}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Outcome(int(self._process.stdout.readline()), output.read_text())

    def stop(self) -> None:
        with self._process:
            self._process.stdin.close()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests, in which one mutant after the other is applied."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "swarm", root / "swarm", ignore=LEFT_OUT)
    (root / "swarm/demo/village").symlink_to(ROOT / "swarm/demo/village")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("mutants"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for read_by_tests in ("docs", "config", "examples"):
        (root / read_by_tests).symlink_to(ROOT / read_by_tests)
    return root


@contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Apply a mutant to the copy, and restore the files afterwards. They keep their times, by which Python finds their
    bytecode; a run writes no bytecode itself."""
    changed = mutate(mutant, copy)
    try:
        for path, text in changed.items():
            (copy / path).write_text(text)
        yield
    finally:
        for path in changed:
            shutil.copy2(ROOT / path, copy / path)


# The tables.


def test_there_are_enough() -> None:
    """Names are unique, and the normal check runs about as many as it should."""
    assert len(MUTANTS) >= MIN_MUTANTS
    assert len(MUTANTS) < 2 * SAMPLE * sum(map(is_sampled, MUTANTS))
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_every_mutant_applies() -> None:
    """Its target exists and contains the old text exactly once, the new text compiles, and something changes."""
    problems = []
    for mutant in MUTANTS:
        try:
            changed = mutate(mutant, ROOT)
        except DoesNotApply as error:
            problems.append(f"{mutant.name}: {error}")
        else:
            problems += [
                f"{mutant.name}: {path} is as before" for path in changed if changed[path] == (ROOT / path).read_text()
            ]
    assert not problems, "\n".join(problems)


def test_every_mutant_names_tests_that_exist() -> None:
    """``caught_by`` names files and functions of this checkout."""
    missing = []
    for mutant in MUTANTS:
        for test in mutant.catcher.tests.split():
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
            name = re.escape(function.partition("[")[0].rpartition("::")[2])
            if not re.search(rf"def {name}\b" if name else ".", text):
                missing.append(f"{mutant.name}: {test}")
    assert not missing, "\n".join(missing)


# Without a mutant. These take longest, so they start first.


def catching_tests() -> dict[str, set[str]]:
    """Map each folder to its tests that catch mutants. A whole file replaces single tests of it."""
    named = {test for mutant in MUTANTS for test in mutant.catcher.tests.split()}
    folders: dict[str, set[str]] = {}
    for test in named:
        file, function = test.split("::")[0], test.partition("[")[0]
        widest = next(name for name in (file, function, test) if name in named or name == test)
        folders.setdefault(str(Path(file).parent), set()).add(widest)
    return folders


@pytest.mark.parametrize("folder", sorted(catching_tests()))
def test_without_a_mutant_tests_pass(folder: str, copy: Path, tmp_path: Path, server: ForkServer) -> None:
    """The tests that catch mutants pass on the unchanged copy."""
    outcome = server.run(copy, Catcher(tests=" ".join(sorted(catching_tests()[folder]))), tmp_path / "output.txt")
    assert outcome.code == 0, outcome.output


def test_without_a_mutant_schedules_hold(copy: Path, tmp_path: Path, server: ForkServer) -> None:
    """The first schedules break no rule on the unchanged copy. Seeds that notice a mutant are checked with it."""
    outcome = server.run(copy, Catcher(count=NUM_UNCHANGED), tmp_path / "output.txt")
    assert outcome.code == 0, outcome.output


def test_what_the_copy_skips_is_not_noted(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has no kernels in C. The other runs of the check have them, and test them."""
    notes = tmp_path / "untested"
    notes.touch()
    monkeypatch.setenv(untested.VARIABLE, str(notes))
    skipped = copy / "tests/test_skipped.py"
    skipped.write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('no kernels')\n")
    server = ForkServer()
    try:
        outcome = server.run(copy, Catcher(tests="tests/test_skipped.py"), tmp_path / "output.txt")
    finally:
        server.stop()
        skipped.unlink()
    assert "1 skipped" in outcome.output
    assert notes.read_text() == ""


# The mutants.


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[] if is_sampled(mutant) else [pytest.mark.long])
        for mutant in MUTANTS
    ],
)
def test_a_mutant_is_caught(mutant: Mutant, copy: Path, tmp_path: Path, server: ForkServer) -> None:
    """A failed test or a broken rule of the simulation catches it, not a crash of the run."""
    catcher = mutant.catcher
    with applied(mutant, copy):
        outcome = server.run(copy, catcher, tmp_path / "output.txt")
    assert outcome.code in NOTICED, f"not caught: {mutant}\n{outcome.output}"
    if catcher.tests:
        assert "FAILED " in outcome.output, outcome.output
        return
    noticed = re.search(r"^seed (\d+): ", outcome.output, re.MULTILINE)
    assert noticed is not None, outcome.output
    # The same schedule holds without the mutant: the mutant is what was noticed.
    same = replace(catcher, first=int(noticed[1]), count=1)
    held = server.run(ROOT, same, tmp_path / "held.txt")
    assert held.code == 0, held.output


# How a mutant is applied.

SOURCE = """\
class Counter:
    @property
    def total(self):
        return self.value

    def add(self, number):
        if number > 0:
            self.value += number
            self.value += number


def total():
    return 0
"""


def mutant_of(target: str, old: str, new: str, *also: Edit) -> Mutant:
    return Mutant(name="m", breaks="", target=target, old=old, new=new, caught_by="sim", also=also)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/counter.py").write_text(SOURCE)
    return tmp_path


def test_old_lines_are_replaced_within_their_target_at_its_indentation(root: Path) -> None:
    """Other code may have moved or may contain the same lines."""
    old = """
        if number > 0:
            self.value += number
    """
    changed = mutate(mutant_of("package.counter:Counter.add", old, "if number > 1:\n    pass"), root)
    expected = SOURCE.replace("if number > 0:\n            self.value += number", "if number > 1:\n            pass", 1)
    assert changed == {"package/counter.py": expected}


def test_several_edits_refer_to_the_original_text(root: Path) -> None:
    """Removed lines of one edit do not move those of another."""
    also = Edit("package.counter:total", "return 0", "return 1")
    mutant = mutant_of("package.counter:Counter.total", "@property", "", also)
    expected = SOURCE.replace("    @property\n", "").replace("return 0", "return 1")
    assert mutate(mutant, root) == {"package/counter.py": expected}


def test_a_file_that_is_not_python_is_named_by_its_path(root: Path) -> None:
    (root / "a.service").write_text("[Service]\nLimitCORE=0\n")
    assert mutate(mutant_of("a.service", "LimitCORE=0", ""), root) == {"a.service": "[Service]\n"}


@pytest.mark.parametrize(
    ("target", "old", "new", "error"),
    [
        ("package.gone:", "x", "y", "gone.py does not exist"),
        ("package.counter:Counter.gone", "x", "y", "Counter.gone does not exist"),
        ("package.counter:Counter.add", "return 0", "return 1", "0 times instead of once"),
        ("package.counter:Counter.add", "self.value += number", "pass", "2 times instead of once"),
        ("package.counter:total", "return", "pass", "0 times instead of once"),
        ("package.counter:total", "", "pass", "0 times instead of once"),
        ("package.counter:total", "return 0", "", "does not compile"),
    ],
)
def test_a_mutant_that_does_not_apply_is_rejected(root: Path, target: str, old: str, new: str, error: str) -> None:
    """The error names the cause and the remedy."""
    with pytest.raises(DoesNotApply, match=error):
        mutate(mutant_of(target, old, new), root)


@pytest.mark.parametrize("caught_by", ["", "sim crash,freeze from", "simulation", "swarm/broker/core.py"])
def test_a_mutant_without_a_catcher_is_rejected(caught_by: str) -> None:
    mutant = Mutant(name="m", breaks="", target="a:", old="b", new="c", caught_by=caught_by)
    with pytest.raises(ValueError, match="names neither schedules nor tests"):
        _ = mutant.catcher
