#!/usr/bin/env python3
"""Crowds at every door of a swarm that serves meanwhile: does anybody inside notice?

Four hosts (network namespaces; needs root): ``a`` has the broker and a worker, ``b`` another worker, ``c`` a client
that asks all the time, by one connection and by a new one each time. From ``d`` come the crowds, a process for each of
the five doors at once (clients, control, beats and data of the broker, data of ``b``'s worker), so many connections at
each, from eight addresses, and all of one kind: silent, a handshake without an end, garbage, no mechanism, a HELLO in
form only, a whole handshake with an unknown key, a member's recorded conversation, a frame of a terabyte.

``--nice 19`` gives the crowd's processes what the swarm leaves: in earnest, they have processors of their own.

    tools/crowd.py --connections 10000
    tools/crowd.py --connections 1000 --kind silent --kind wrong-key --json

Exit code 1 if an answer was another one, none came, a worker was judged or the plan changed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swarm import Client
from swarm.auth.memberships import JoinedSwarm, find
from tests.faults.linux import call
from tests.integration.crowd import KINDS, Crowd, Door, recorded
from tests.integration.hosts import Host, network

PROMPT: Final = "Once upon a time"
MAX_TOKENS: Final = 24
BROKERS: Final = {"clients": 5700, "control": 5701, "beats": 5702, "data": 5703}
SPEAKS: Final = {"clients": "DEALER", "control": "DEALER"}
SOURCES: Final = tuple(f"10.77.0.{100 + number}" for number in range(8))
DATA_PORT: Final = 20000
START_S: Final = 90.0
PAUSE_S: Final = 3.0
IDLE_S: Final = 20.0


def main() -> int:
    options = _options()
    if options.visit is not None:
        _visit(options.visit)
        return 0
    if options.knock is not None:
        print(json.dumps(asdict(asyncio.run(_knock(json.loads(options.knock))))))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="swarm-crowd-"))
    with network(folder, "a", "b", "c", "d") as hosts:
        phases = _run(hosts, options)
    if options.json:
        print(json.dumps([asdict(phase) for phase in phases], indent=1))
    bad = [phase.kind for phase in phases if phase.wrong or phase.judged]
    print(f"the logs are in {folder}" + (f"; not as it should be: {', '.join(bad)}" if bad else ""), file=sys.stderr)
    return int(bool(bad))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000, help="at each door (default: %(default)s)")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="may be repeated (default: all)")
    parser.add_argument("--nice", type=int, default=0, help="of the crowd's processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--visit", help=argparse.SUPPRESS)  # what runs on c
    parser.add_argument("--knock", help=argparse.SUPPRESS)  # what runs on d
    return parser.parse_args()


# --- on c and d -------------------------------------------------------------------------------------------------------


def _visit(log: str) -> None:
    """Ask, by one connection that stays and by a new one, in turns, until somebody ends it."""
    with open(log, "a", buffering=1) as file, Client() as steady:
        for number in itertools.count():
            started, text = time.time(), ""
            try:
                if number % 2:
                    with Client() as fresh:
                        text = fresh.generate(PROMPT, max_tokens=MAX_TOKENS).text
                else:
                    text = steady.generate(PROMPT, max_tokens=MAX_TOKENS).text
            except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
                text = f"!{type(error).__name__}: {error}"
            kind = "new" if number % 2 else "steady"
            file.write(json.dumps({"at": started, "kind": kind, "s": time.time() - started, "text": text}) + "\n")


async def _knock(told: dict[str, Any]) -> Any:
    door = Door(**(told["door"] | {"recorded": b""}))
    if told["kind"] == "replayed":
        known = find(Path(told["state"]))
        assert known is not None
        door = replace(door, recorded=await recorded(door, known.pair))
    return await Crowd(door, told["kind"], SOURCES).knock(told["count"])


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """What was seen while one crowd was there. Times in milliseconds, memory in MiB."""

    kind: str
    seconds: float = 0.0
    doors: dict[str, Any] = field(default_factory=dict)
    steady: dict[str, float] = field(default_factory=dict)
    new: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    judged: str = ""
    memory: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # before, most, after
    descriptors: dict[str, int] = field(default_factory=dict)  # most
    cpu_s: dict[str, float] = field(default_factory=dict)
    log_lines: dict[str, int] = field(default_factory=dict)


def _run(hosts: dict[str, Host], options: argparse.Namespace) -> list[Phase]:
    a, b, c, d = hosts.values()
    for source in SOURCES:
        call("ip", "-n", d.namespace, "addr", "add", f"{source}/24", "dev", "eth0")
    a.start("up", "--workers", "1", "--listen", a.address, "--no-http", log=a.home / "up.log")
    _until(lambda: _ask(a, "status").get("state") == "serving")
    ports = {"SWARM_WORKER__DATA_PORTS": f"{DATA_PORT}-{DATA_PORT + 10}"}
    b.start("worker", "--join", _invitation(a, "worker"), "--name", "far", log=b.home / "worker.log", **ports)
    _until(lambda: len(_ask(a, "plan").get("stages") or []) == 2)
    for host in (c, d):
        assert host.run("generate", PROMPT, "--max-tokens", "4", "--join", _invitation(a, "client")).returncode == 0
    broker, worker = (find(Path(host.home / "state" / "swarm")) for host in (c, b))
    assert broker is not None
    assert worker is not None
    log = c.home / "visits"
    words = [sys.executable, __file__, "--visit", str(log)]
    visitor = subprocess.Popen(c.command(*words), env=c.environment())
    try:
        _until(lambda: log.exists() and len(log.read_text().splitlines()) > 5)
        expected = _visits(log)[0]["text"]
        watch, doors = Watch(a, b), _doors(a, b, broker, worker)
        phases = []
        for kind in ("nobody", *(options.kind or KINDS)):
            phase = Phase(kind)
            with watch.on(phase), _asked(phase, log, expected), _unjudged(phase, a, b):
                started = time.monotonic()
                if kind == "nobody":
                    time.sleep(IDLE_S)
                else:
                    phase.doors = _crowds(kind, d, doors, options.connections, options.nice)
                phase.seconds = round(time.monotonic() - started, 1)
            phases.append(phase)
            _tell(phases[-1], sys.stderr if options.json else sys.stdout)
    finally:
        visitor.kill()
        visitor.wait()
    return phases


def _doors(a: Host, b: Host, broker: JoinedSwarm, worker: JoinedSwarm) -> list[Door]:
    found = [Door(name, a.address, port, broker.broker, SPEAKS.get(name, "PUSH")) for name, port in BROKERS.items()]
    listening = b.command("ss", "-Hltn")
    (line,) = subprocess.run(listening, check=True, capture_output=True, text=True).stdout.splitlines()
    return [*found, Door("worker", b.address, int(line.split()[3].rpartition(":")[2]), worker.pair.public, "PUSH")]


@contextmanager
def _asked(phase: Phase, log: Path, expected: str) -> Iterator[None]:
    """What became of the requests meanwhile."""
    started = time.time()
    yield
    ended = time.time()
    time.sleep(PAUSE_S)
    visits = [visit for visit in _visits(log) if visit["at"] < ended and visit["at"] + visit["s"] > started]
    phase.wrong = sorted({visit["text"] for visit in visits if visit["text"] != expected})
    for name in ("steady", "new"):
        times = sorted(visit["s"] * 1e3 for visit in visits if visit["kind"] == name)
        if times:
            told = {"n": len(times), "median": statistics.median(times), "p90": times[int(len(times) * 0.9)]}
            setattr(phase, name, {key: round(value, 1) for key, value in (told | {"max": times[-1]}).items()})


@contextmanager
def _unjudged(phase: Phase, a: Host, b: Host) -> Iterator[None]:
    """What was said of workers, and in logs."""
    before, verdicts = _lines(a, b), _verdicts(a)
    yield
    phase.log_lines = dict(_lines(a, b) - before)
    if (now := _verdicts(a)) != verdicts:
        phase.judged = f"{verdicts} became {now}"


def _crowds(kind: str, d: Host, doors: list[Door], count: int, nice: int) -> dict[str, Any]:
    """One at each door, all at once."""
    running = {}
    for door in doors:
        state = str(d.home / "state" / "swarm")
        told = {"door": asdict(door) | {"recorded": ""}, "kind": kind, "count": count, "state": state}
        words = d.command("nice", "-n", str(nice), sys.executable, __file__, "--knock", json.dumps(told))
        running[door.name] = subprocess.Popen(words, env=d.environment(), stdout=subprocess.PIPE, text=True)
    return {name: json.loads(process.communicate()[0] or "{}") for name, process in running.items()}


class Watch:
    """Memory, descriptors and processor time of the broker and both workers."""

    def __init__(self, a: Host, b: Host) -> None:
        (up,), (far,) = a.started, b.started
        under = psutil.Process(up.pid).children(recursive=True)
        self._watched = {"far": psutil.Process(far.pid)}
        for process in under:
            words = process.cmdline()
            for name, word in (("broker", "broker"), ("w0", "worker")):
                if word in words:
                    self._watched.setdefault(name, process)  # it may have processes of its own
        assert len(self._watched) == 3, [process.cmdline() for process in under]
        self._is_over = threading.Event()

    @contextmanager
    def on(self, phase: Phase) -> Iterator[None]:
        self._begin()
        yield
        self._end(phase)

    def _begin(self) -> None:
        self._is_over.clear()
        self._before = {name: _mib(process) for name, process in self._watched.items()}
        self._cpu = {name: sum(process.cpu_times()[:2]) for name, process in self._watched.items()}
        self._most = dict(self._before)
        self._descriptors = dict.fromkeys(self._watched, 0)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            for name, process in self._watched.items():
                self._most[name] = max(self._most[name], _mib(process))
                self._descriptors[name] = max(self._descriptors[name], process.num_fds())

    def _end(self, phase: Phase) -> None:
        self._is_over.set()
        self._thread.join()
        for name, process in self._watched.items():
            phase.memory[name] = (self._before[name], self._most[name], _mib(process))
            phase.cpu_s[name] = round(sum(process.cpu_times()[:2]) - self._cpu[name], 1)
        phase.descriptors = dict(self._descriptors)


def _mib(process: psutil.Process) -> int:
    return int(process.memory_info().rss) >> 20


def _ask(host: Host, *words: str) -> Any:
    done = host.ctl(*words, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def _until(holds: Any) -> None:
    give_up_at = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise TimeoutError("the swarm does not get to where it should be")
        time.sleep(0.3)


def _invitation(a: Host, role: str) -> str:
    done = a.ctl("invite", "--role", role)
    return next(word for word in done.stdout.split() if word.startswith("swarm1:"))


def _visits(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def _verdicts(a: Host) -> str:
    """Who is well, by which plan, and what was recovered from."""
    nodes = _ask(a, "nodes")
    rows = nodes if isinstance(nodes, list) else nodes.get("nodes") or nodes.get("workers") or []
    shown = [(row.get("worker") or row.get("name"), row.get("verdict")) for row in rows]
    recoveries = _ask(a, "recoveries")
    return f"{shown}, epoch {_ask(a, 'plan').get('epoch')}, {len(recoveries)} recoveries"


def _lines(*hosts: Host) -> Counter[str]:
    """Counts lines of logs, by their event."""
    found: Counter[str] = Counter()
    for path in (path for host in hosts for path in host.home.rglob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            found[str(json.loads(line).get("event", "")) if line.startswith("{") else "text"] += 1
    return found


def _tell(phase: Phase, out: Any) -> None:
    print(f"== {phase.kind}: {phase.seconds} s", file=out)
    for name, told in phase.doors.items():
        print(f"   at {name:8} {told}", file=out)
    print(f"   steady {phase.steady}\n   new    {phase.new}", file=out)
    print(f"   MiB before, most, after {phase.memory}; descriptors at most {phase.descriptors}", file=out)
    print(f"   processor s {phase.cpu_s}; log lines {phase.log_lines}", file=out)
    print(f"   wrong: {phase.wrong or 'nothing'}; judged: {phase.judged or 'nobody'}", file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
