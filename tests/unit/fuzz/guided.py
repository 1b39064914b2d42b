"""One target fuzzed in a process of its own, guided by coverage: libFuzzer by way of atheris.

    python -m tests.unit.fuzz.guided TARGET CORPUS FINDINGS RESULT [options of libFuzzer]

Mutations, the corpus and the guidance are libFuzzer's. What a target raises does not end it: each kind of finding
(what, and where it was raised) is kept once, as a file with the input. RESULT is written again and again.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import atheris

with atheris.instrument_imports(
    include=["swarm.wire", "swarm.auth", "tests.unit.fuzz.planted"], enable_loader_override=False
):
    from tests.unit.fuzz.planted import planted
    from tests.unit.fuzz.seeds import with_other_fields
    from tests.unit.fuzz.targets import TARGETS, Target, got_to

LONGEST_S: Final = 0.5  # of processor time, for one input of some kilobytes
MOST_GROWTH_KIB: Final = 64 << 10  # of the process, by one input
_LONGEST_INPUT: Final = 1 << 14
_FULL_AFTER: Final = 50  # findings of one target
_NUM_MARKS: Final = 1024


def marks() -> list[Callable[[], None]]:
    """Functions that do nothing, each a place in the code: calling one tells libFuzzer that something new was met."""
    made: dict[str, Any] = {}
    exec("\n".join(f"def mark_{number}(): pass" for number in range(_NUM_MARKS)), made)
    return [atheris.instrument_func(made[f"mark_{number}"]) for number in range(_NUM_MARKS)]


class Judge:
    """Runs a target and keeps what was found."""

    def __init__(self, target: Target, findings: Path, result: Path) -> None:
        self._target, self._findings, self._result = target, findings, result
        self._found: dict[str, dict[str, str]] = {}
        self._count = 0
        self._started = self._told = time.monotonic()
        self._peak = _peak_kib()

    def __call__(self, data: bytes) -> None:
        self._count += 1
        before = time.process_time()
        try:
            self._target.run(data)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
            self._keep(data, f"{type(error).__name__} at {_place(error)}", traceback.format_exc())
        if (took_s := time.process_time() - before) > LONGEST_S and self._is_slow(data):
            self._keep(data, "slow", f"{took_s:.2f} s of processor time")
        if (peak := _peak_kib()) > self._peak:
            if peak - self._peak > MOST_GROWTH_KIB and self._count > 1:
                self._keep(data, "memory", f"the process grew by {peak - self._peak} KiB")
            self._peak = peak
        if not self._count & 0xFFF and time.monotonic() - self._told > 5.0:
            self.tell()

    def _is_slow(self, data: bytes) -> bool:
        """Again, and again: it may have been the machine."""
        for _ in range(2):
            before = time.process_time()
            try:
                self._target.run(data)
            except Exception:  # noqa: BLE001 (found already)
                return True
            if time.process_time() - before <= LONGEST_S:
                return False
        return True

    def _keep(self, data: bytes, kind: str, story: str) -> None:
        if kind in self._found or len(self._found) >= _FULL_AFTER:
            return
        path = self._findings / f"{self._target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        self._found[kind] = {"kind": kind, "file": str(path), "hex": data.hex(), "story": story}
        self.tell()

    def tell(self) -> None:
        self._told = time.monotonic()
        told: dict[str, Any] = {
            "target": self._target.name,
            "executions": self._count,
            "seconds": round(self._told - self._started, 1),
            "peak_kib": self._peak,
            "findings": list(self._found.values()),
        }
        self._result.write_text(json.dumps(told))


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _place(error: Exception) -> str:
    """Where it was raised, as far as it was in the product or its targets."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if ("swarm/" in frame.filename or "tests/" in frame.filename)
    ] or [None]
    last = own[-1] or traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _mutated(data: bytes, longest: int, seed: int) -> bytes:
    """Half of the time a field of a header, else bytes."""
    chance = random.Random(seed)
    if chance.random() < 0.5 and len(changed := with_other_fields(data, chance)) <= longest:
        return changed
    return bytes(atheris.Mutate(data, longest))


def main() -> None:
    name, corpus, findings, result = sys.argv[1:5]
    target = TARGETS.get(name) or Target("planted", planted)
    judge = Judge(target, Path(findings), Path(result))
    judge.tell()
    arguments = [sys.argv[0], f"-max_len={_LONGEST_INPUT}", "-timeout=20", "-rss_limit_mb=3000", "-verbosity=0"]
    arguments += [f"-artifact_prefix={findings}/{name}-ended-", *sys.argv[5:], corpus]
    if target.has_parser_in_c:
        all_marks = marks()
        got_to.append(lambda place: all_marks[zlib.crc32(place.encode()) % _NUM_MARKS]())
    atheris.Setup(arguments, judge, **({"custom_mutator": _mutated} if target.has_header else {}))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
