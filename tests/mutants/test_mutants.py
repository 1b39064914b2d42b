"""Tests are worth what they catch. Each patch here breaks one rule, as a slip would; the simulation or a unit test must
notice it, and must not notice anything without it.

A patch begins with what is broken and who must catch it::

    # What is broken.
    # caught by: sim crash,freeze            schedules with faults of these kinds only, from seed 0 on
    # caught by: sim crash from 40           the same from a later seed on
    # caught by: sim                         all kinds
    # caught by: tests/unit/stage/test_core.py
    # caught by: tests/unit/stage/test_core.py::test_one_step_at_a_time       quicker, where one test is meant

A patch that does not apply any more must be made anew against the code as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAY = str(HERE / "play.py")
PATCHES = sorted(HERE.glob("*.patch"))
NUM_SCHEDULES = 120
LIMIT_S = 200  # for one; it takes a tenth of that on a machine that does nothing else
NOTICED = (1, 3)  # exit codes: a test failed; a schedule noticed
HEADER = re.compile(r"# caught by: (?:sim(?: ([a-z_,]+))??(?: from (\d+))?|(tests/\S+))$")
# Some plugins take longer to load than such a test takes.
WITHOUT = [part for name in ("cacheprovider", "schemathesis", "xdist", "anyio") for part in ("-p", f"no:{name}")]
LEFT_OUT = shutil.ignore_patterns("village", "*.so", "*.c", "*.h")


def _load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"mutants_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


applier = _load("applier")


@dataclass(frozen=True)
class Catcher:
    """Who must notice: schedules, or unit tests: files, or single ones."""

    kinds: str = ""
    first: int = 0
    tests: str = ""

    @classmethod
    def of(cls, patch: str) -> Catcher:
        found = next((match for line in patch.splitlines() if (match := HEADER.match(line))), None)
        assert found is not None, "the patch does not say who must catch it"
        return cls(found[1] or "", int(found[2] or 0), found[3] or "")

    def command(self, root: Path) -> list[str]:
        if self.tests:
            return ["-m", "pytest", "-x", "-q", "--assert=plain", *WITHOUT, *self.tests.split()]
        return [PLAY, str(root), str(self.first), str(NUM_SCHEDULES), self.kinds]


@dataclass(frozen=True)
class Done:
    code: int
    output: str


class Zygote:
    """The process that all who look are forked from (``zygote.py``)."""

    def __init__(self) -> None:
        of = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        hashes = os.environ | {"PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen([sys.executable, str(HERE / "zygote.py")], env=hashes, **of)  # type: ignore[call-overload]

    def look(self, root: Path, command: list[str], output: Path) -> Done:
        order = {"root": str(root), "command": command, "output": str(output), "limit_s": LIMIT_S}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Done(int(self._process.stdout.readline()), output.read_text())

    def end(self) -> None:
        with self._process:
            self._process.stdin.close()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.end()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, which are broken by one patch after the other."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "swarm", root / "swarm", ignore=LEFT_OUT)
    (root / "swarm/demo/village").symlink_to(ROOT / "swarm/demo/village")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("mutants"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for read_by_tests in ("docs", "config"):
        (root / read_by_tests).symlink_to(ROOT / read_by_tests)
    return root


@contextmanager
def broken(copy: Path, patch: str) -> Iterator[None]:
    """Within, the copy has the patch. Files come back with their times, by which Python knows what is compiled of
    them; who looks leaves nothing compiled behind."""
    try:
        applier.apply(patch, copy)
        yield
    finally:
        for name in applier.names(patch):
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, copy / name)


def test_there_are_enough() -> None:
    """Of every part that decides about recovery something is broken."""
    assert len(PATCHES) >= 120


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_is_caught(path: Path, copy: Path, tmp_path: Path, zygote: Zygote) -> None:
    """It is noticed, as a broken rule or a failed test, not as a crash of whoever looks."""
    patch = path.read_text()
    catcher = Catcher.of(patch)
    with broken(copy, patch):
        done = zygote.look(copy, catcher.command(copy), tmp_path / "said.txt")
    assert done.code in NOTICED, f"nobody noticed that: {patch}\n{done.output}"
    if catcher.tests:
        assert "FAILED " in done.output, done.output
        return
    noticed = re.search(r"^seed (\d+): ", done.output, re.MULTILINE)
    assert noticed is not None, done.output
    # The same schedule without the patch: it is the patch that was noticed.
    held = zygote.look(ROOT, [PLAY, str(ROOT), noticed[1], "1", catcher.kinds], tmp_path / "held.txt")
    assert held.code == 0, held.output


def unit_tests() -> dict[str, set[str]]:
    """All that must notice something, by their folders. A file stands for what is in it."""
    named = {Catcher.of(path.read_text()).tests for path in PATCHES} - {""}
    folders: dict[str, set[str]] = {}
    for each in named:
        file = each.split("::")[0]
        folders.setdefault(str(Path(file).parent), set()).add(file if file in named else each)
    return folders


@pytest.mark.parametrize("folder", sorted(unit_tests()))
def test_without_a_patch_unit_tests_pass(folder: str, copy: Path, tmp_path: Path, zygote: Zygote) -> None:
    """The same copy, unbroken, passes: it is the patch that they notice."""
    catcher = Catcher(tests=" ".join(sorted(unit_tests()[folder])))
    done = zygote.look(copy, catcher.command(copy), tmp_path / "said.txt")
    assert done.code == 0, done.output


def test_without_a_patch_schedules_hold(copy: Path, tmp_path: Path, zygote: Zygote) -> None:
    """The same copy, unbroken, notices nothing."""
    done = zygote.look(copy, Catcher().command(copy), tmp_path / "said.txt")
    assert done.code == 0, done.output


def test_a_patch_finds_its_lines_where_they_have_moved(tmp_path: Path) -> None:
    """Offsets don't matter, lines do."""
    (tmp_path / "a.py").write_text("new\n\nx = 1\ny = 2\nz = 3\n")
    applier.apply("# x\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n x = 1\n-y = 2\n+y = 4\n z = 3\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "new\n\nx = 1\ny = 4\nz = 3\n"


def test_a_patch_that_does_not_fit_says_so(tmp_path: Path) -> None:
    """With what to do about it, and without having changed anything."""
    (tmp_path / "a.py").write_text("x = 1\ny = 3\n")
    with pytest.raises(applier.DoesNotApply, match="regenerate"):
        applier.apply("--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n x = 1\n-y = 2\n+y = 4\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\n"
