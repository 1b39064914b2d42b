"""Break single expressions of the deciding modules at random, and see whether tests notice: cosmic-ray's operators, and
one of ours, which leaves out a statement that calls something.

    pip install cosmic-ray coverage            # into the environment of the checkout; the product needs neither
    python tools/mutate.py map OUT             # which test runs which line: once
    python tools/mutate.py run OUT --count 1000 --seed 12 [--workers 2]    # goes on where it was
    python tools/mutate.py show OUT            # the share killed, and the survivors as diffs

A mutation is tried with the unit tests that run its line, quickest first, up to LIMIT_S of them, then with schedules.
All is imported once; a child of its own then exchanges the code of one function. What is decided while a module is
imported (defaults, constants) takes a fresh interpreter. Every CONTROL-th try breaks nothing and must hold.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib.machinery
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import ROOT, drawn, exchange, modules, mutated, prepare

sys.path.insert(0, str(ROOT))
MAX_EXAMPLES = 20  # of tests that draw their own
LIMIT_S = 3.0  # of unit tests, as long as they took for the map
NUM_SCHEDULES = 4
CPU_S, WALL_S = 20, 600  # whoever takes longer hangs: noticed
CONTROL = 40
TESTS = ["tests/unit/stage", "tests/unit/client", "tests/unit/test_params.py", "tests/unit/broker", "tests/unit/wire"]
PLAYED = ("swarm/broker/", "swarm/stage/", "swarm/client/session", "swarm/client/active_requests")  # what schedules run


# Tests.


class Runner:
    """A plugin of pytest: collects once, then does what it is told instead of running all."""

    def __init__(self, work: Any) -> None:
        self.work, self.failed = work, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from hypothesis import settings  # noqa: PLC0415

        few = settings(deadline=None, max_examples=MAX_EXAMPLES, derandomize=True, database=None)
        for item in items:
            if hasattr(item.function, "_hypothesis_internal_use_settings") or hasattr(item.function, "hypothesis"):
                item.function._hypothesis_internal_use_settings = few

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: Any) -> bool:
        self.work(self, {item.nodeid: item for item in session.items})
        return True

    def test(self, items: list[Any]) -> str:
        """Run tests; return the first that fails, or ""."""
        self.failed = ""
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        return self.failed


def collect(work: Any, tests: list[str]) -> None:
    import pytest  # noqa: PLC0415

    quiet = ["-q", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-o", "timeout=0"]
    pytest.main([*quiet, *tests], plugins=[Runner(work)])


def draw_map(out: Path) -> None:
    """Map which test runs which lines, and how long it takes; those that fail are left out. Each file of
    tests has a process of its own, and what is there already is kept."""
    place, paths = out / "map.json", modules()
    known = json.loads(place.read_text()) if place.exists() else {"done": [], "times": {}, "lines": {}}

    def work(runner: Runner, items: dict[str, Any]) -> None:
        files: dict[str, list[str]] = defaultdict(list)
        for name in items:
            files[name.split("::")[0]].append(name)
        for file, names in files.items():
            if file not in known["done"]:
                said = _said_by_a_child(lambda names=names: _map_of(runner, [items[n] for n in names], paths, out))
                if said == "done":
                    part = json.loads((out / "part.json").read_text())
                    known["times"].update(part["times"])
                    for path, lines in part["lines"].items():
                        for line, by in lines.items():
                            known["lines"].setdefault(path, {}).setdefault(line, []).extend(by)
                known["done"].append(file)
                place.write_text(json.dumps(known))

    collect(work, TESTS[:-1])


def _map_of(runner: Runner, items: list[Any], paths: list[str], out: Path) -> str:
    import coverage  # noqa: PLC0415

    watched, times = coverage.Coverage(data_file=None, include=[str(ROOT / path) for path in paths]), {}
    watched.start()
    for item in items:
        watched.switch_context(item.nodeid)
        began = sum(os.times()[:4])
        if not runner.test([item]):
            times[item.nodeid] = sum(os.times()[:4]) - began
    watched.stop()
    data, lines = watched.get_data(), {}  # type: Any, dict[str, dict[int, list[str]]]
    for path in paths:
        found = data.contexts_by_lineno(str(ROOT / path))
        lines[path] = {line: [name for name in names if name in times] for line, names in found.items()}
    (out / "part.json").write_text(json.dumps({"times": times, "lines": lines}))
    return "done"


def chosen(known: dict[str, Any], mutation: dict[str, Any], others: list[str]) -> list[str]:
    """Choose the tests that run this line, quickest first; if none does, those that run most of the module; for the
    wire's modules ``others`` too, which are in no map: they take long."""
    lines, times = known["lines"].get(mutation["path"], {}), known["times"]
    first = mutation["way"][2]
    names = {name for line in {mutation["line"], first} for name in lines.get(str(line), ())}
    if names:
        order = sorted(names, key=lambda name: times[name])
    else:
        often: dict[str, int] = defaultdict(int)
        for there in lines.values():
            for name in there:
                often[name] += 1
        order = sorted(often, key=lambda name: -often[name])
    if not order:  # values only: those who may use them
        folder = f"tests/unit/{mutation['path'].split('/')[1]}/"
        order = sorted((name for name in times if name.startswith(folder)), key=lambda name: times[name])
    picked, spent = [], 0.0
    for name in order:
        spent += times[name]
        if spent > LIMIT_S:
            break
        picked.append(name)
    return picked + (others if mutation["path"].startswith("swarm/wire/") else [])


# Runs.


def try_out(runner: Runner, items: list[Any], path: str) -> str:
    """Find who notices: a test, a schedule, or nobody."""
    if noticed := runner.test(items):
        return noticed
    if path.startswith(PLAYED):
        from swarm.sim import run  # noqa: PLC0415

        for outcome in run.run_many(0, NUM_SCHEDULES, images=path.endswith("/images.py")):
            if outcome.failure is not None:
                return f"schedule {outcome.seed}: {str(outcome.failure)[:200]}"
    return ""


def in_a_child(mutation: dict[str, Any] | None, runner: Runner, items: list[Any]) -> str:
    """Try it in a child and tell what came of it; "fresh" if it can't be done to modules that are imported."""

    def tried() -> str:
        path = mutation["path"] if mutation else PLAYED[0]
        fits = mutation is None or exchange(path, mutated(mutation))
        return try_out(runner, items, path) if fits else "fresh"

    return _said_by_a_child(tried)


def _said_by_a_child(work: Callable[[], str]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bound()
            said = work()
        except BaseException as error:  # noqa: BLE001  # whatever a broken program does
            said = f"{type(error).__name__}: {error}"
        os.write(writing, ("!" + said).encode()[:4000])
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + WALL_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    said = os.read(reading, 4000).decode(errors="replace")
    os.close(reading)
    return said[1:] if said else "it hung or died"


def bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def in_a_fresh_one(mutation: dict[str, Any], names: list[str]) -> str:
    """Try it in an interpreter that has imported nothing."""
    command = [sys.executable, __file__, "fresh", "."]
    told = json.dumps([mutation, names])
    try:
        done = subprocess.run(
            command, input=told, capture_output=True, text=True, timeout=WALL_S, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return "it hung"
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return said[-1].removeprefix("SAID ") if said else f"it died: {done.stdout[-300:]}{done.stderr[-300:]}"


def fresh() -> None:
    bound()
    mutation, names = json.loads(sys.stdin.read())
    full, source, plain = str(ROOT / mutation["path"]), mutated(mutation), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(source, full, "exec") if self.path == full else plain(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]

    def work(runner: Runner, items: dict[str, Any]) -> None:
        print(
            "\nSAID " + try_out(runner, [items[name] for name in names if name in items], mutation["path"]), flush=True
        )
        os._exit(0)

    collect(work, sorted({name.split("::")[0] for name in names}))


def run_all(out: Path, given: argparse.Namespace) -> None:
    """Append a line for each to results-PART.jsonl; what stands there is not tried again."""
    known = json.loads((out / "map.json").read_text())
    done = {
        json.loads(line)["number"] for path in out.glob("results-*.jsonl") for line in path.read_text().splitlines()
    }
    mutations = drawn(out, given.count, given.seed)

    def work(runner: Runner, items: dict[str, Any]) -> None:
        import swarm.sim.run  # noqa: F401, PLC0415

        gc.freeze()
        part = next((part for part in range(1, given.workers) if os.fork() == 0), 0)
        results = out / f"results-{part}.jsonl"
        for number, mutation in enumerate(mutations):
            if number % given.workers != part or number in done or not mutation["path"].startswith(tuple(given.only)):
                continue
            if number // given.workers % CONTROL == 0:
                some = sorted(known["times"], key=lambda name: known["times"][name])[number % 7 :: 7][:100]
                said = in_a_child(None, runner, [items[name] for name in some if name in items])
                _note(results, {"number": -1 - number, "control": True, "by": said})
            names = chosen(known, mutation, [name for name in items if name.startswith(TESTS[-1])])
            began = time.monotonic()
            prepare(mutation["path"])
            said = in_a_child(mutation, runner, [items[name] for name in names if name in items])
            if said == "fresh":
                said = in_a_fresh_one(mutation, names)
            took = round(time.monotonic() - began, 2)
            _note(results, {"number": number, **mutation, "by": said, "tests": len(names), "took": took})

    collect(work, TESTS)


def _note(path: Path, result: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def show(out: Path) -> None:
    results = [json.loads(line) for path in out.glob("results-*.jsonl") for line in path.read_text().splitlines()]
    controls = [result for result in results if result.get("control")]
    tried = sorted((r for r in results if not r.get("control")), key=lambda r: (r["path"], r["line"]))
    survived = [result for result in tried if not result["by"]]
    for result in survived:
        old = (ROOT / result["path"]).read_text().splitlines()
        new = mutated(result).splitlines()
        print(f"== {result['number']} {result['path']}:{result['line']} {result['way'][0]}, {result['tests']} tests")
        print("\n".join(list(difflib.unified_diff(old, new, n=2, lineterm=""))[3:]))
    killed, failed = len(tried) - len(survived), [control["by"] for control in controls if control["by"]]
    print(f"{len(tried)} tried, {killed} killed ({100 * killed / max(1, len(tried)):.1f} %), {len(survived)} survived")
    print(f"{len(controls)} tries that broke nothing; noticed all the same: {failed or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run", "show", "fresh"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=["swarm"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "map":
        draw_map(given.out)
    elif given.what == "run":
        run_all(given.out, given)
    elif given.what == "show":
        show(given.out)
    else:
        fresh()


if __name__ == "__main__":
    main()
