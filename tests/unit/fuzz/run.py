"""Fuzz one target for some time, in a process of its own, and tell what came of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import swarm
from tests.unit.fuzz.seeds import seeds
from tests.unit.fuzz.targets import TARGETS

WHY_NOT: Final = (
    None
    if importlib.util.find_spec("atheris")
    else "atheris is not here: it is for Linux on x86-64, and in the extra dev"
)
_PACKAGE: Final = Path(swarm.__file__).parent
_FUZZED: Final = (_PACKAGE / "wire", _PACKAGE / "auth")
_START_S: Final = 200.0  # of a process, and to end it; a busy machine takes its time


@dataclass
class Outcome:
    """``places``: in the code, as libFuzzer counts those that were reached. ``findings``: each with its input."""

    target: str
    executions: int = 0
    seconds: float = 0.0
    places: int = 0
    corpus: int = 0
    peak_mib: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)


def fuzz(
    name: str, seconds: float, findings: Path, *, seed: int = 0, corpus: Path | None = None, more: Sequence[str] = ()
) -> Outcome:
    """``seed`` 0: another one each time. ``corpus``: where inputs that reached something new are kept for later.
    ``more``: options of libFuzzer."""
    findings.mkdir(parents=True, exist_ok=True)
    with _folder(corpus) as folder:
        for number, each in enumerate(seeds(name)):
            (folder / f"seed-{number:03}").write_bytes(each)
        result = folder.parent / f"{folder.name}.json"
        ended = _child([name, str(folder), str(findings), str(result), *more], seconds, seed)
        outcome = _read(name, ended, result, findings)
        outcome.corpus = sum(1 for _ in folder.iterdir())
        result.unlink(missing_ok=True)
    return outcome


@contextlib.contextmanager
def _folder(corpus: Path | None) -> Iterator[Path]:
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        yield corpus
        return
    with tempfile.TemporaryDirectory(prefix="swarm-fuzz-") as made:
        folder = Path(made) / "corpus"
        folder.mkdir()
        yield folder


def _child(words: list[str], seconds: float, seed: int) -> subprocess.CompletedProcess[str]:
    options = [f"-max_total_time={max(1, round(seconds))}", "-verbosity=1", *([f"-seed={seed}"] if seed else [])]
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.fuzz.guided", *words, *options],
        cwd=_PACKAGE.parent,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + _START_S,
    )


def _read(name: str, ended: subprocess.CompletedProcess[str], result: Path, findings: Path) -> Outcome:
    told: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    done = re.findall(r"Done (\d+) runs in (\d+) second", ended.stderr)
    executions, seconds = map(int, done[-1]) if done else (told.get("executions", 0), told.get("seconds", 0))
    places = re.findall(r"cov: (\d+)", ended.stderr)
    outcome = Outcome(name, executions, seconds, int(places[-1]) if places else 0, 0, told.get("peak_kib", 0) >> 10)
    outcome.findings = told.get("findings", [])
    if ended.returncode:  # of libFuzzer: an input that takes 20 s, or gigabytes, or ends the process
        files = sorted(findings.glob(f"{name}-ended-*"), key=lambda path: path.stat().st_mtime)
        file = files[-1] if files else None
        outcome.findings.append(
            {
                "kind": f"ended with {ended.returncode}",
                "file": str(file or ""),
                "hex": file.read_bytes().hex() if file else "",
                "story": ended.stderr[-3000:],
            }
        )
    return outcome


def lines_covered(name: str, corpus: Path) -> dict[str, set[int]]:
    """The lines of each file that the inputs of a corpus reach."""
    reached: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        lines = reached.get(frame.f_code.co_filename)
        if lines is None:
            if not _is_fuzzed(frame.f_code.co_filename):
                return None
            lines = reached.setdefault(frame.f_code.co_filename, set())
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    for path in sorted(corpus.iterdir()):
        data = path.read_bytes()
        sys.settrace(trace)
        try:
            TARGETS[name].run(data)
        except Exception:  # noqa: BLE001 (counted as a finding where it was found)
            continue
        finally:
            sys.settrace(None)
    return {file: lines & all_lines(file) for file, lines in reached.items()}


def _is_fuzzed(file: str) -> bool:
    return any(folder in Path(file).parents for folder in _FUZZED)


def all_lines(file: str) -> set[int]:
    """Those that run when something in it is called."""
    found: set[int] = set()
    waiting = [each for each in compile(Path(file).read_text(), file, "exec").co_consts if isinstance(each, CodeType)]
    while waiting:
        code = waiting.pop()
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        waiting += inner
        if code.co_flags & 0x2:  # of a function, not of a class
            found |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
    return found
