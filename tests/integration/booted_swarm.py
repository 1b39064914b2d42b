"""A swarm in a booted system: what is asked of it, and what is done to it while an answer is under way."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.admin.report_rows import Row, is_present
from tests.integration.booted import PROGRAMS, SOON_S, Booted
from tests.integration.reports import Reporter

UNITS = ("swarm-broker", "swarm-gateway", "swarm-worker@w0", "swarm-worker@w1")
ASKS = """
from swarm import Client
with Client(reconnect_timeout_s=60.0) as client:
    answer = client.generate("Once upon a time", max_tokens=1200, ignore_eos=True, temperature=1.0, seed=7, timeout=90)
    print(answer.text)
"""
SUBMITS = """
from swarm import Client
with Client() as client:
    print(client.submit("Once upon a time", max_tokens=1200, ignore_eos=True, temperature=1.0, seed=7))
"""
READS = """
import http.client, json, time, urllib.request
asked = {"model": "village", "prompt": "Once upon a time", "max_tokens": 1200, "ignore_eos": True, "temperature": 1.0}
body = json.dumps(asked | {"seed": 7, "stream": True, "keep_s": 60}).encode()
text, last, done, give_up_at = "", "", False, time.monotonic() + 90
while not done and time.monotonic() < give_up_at:
    try:
        headers = {"content-type": "application/json"} | ({"last-event-id": last} if last else {})
        request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=5) as answer:
            event = {}
            for line in answer:
                name, _, value = line.decode().rstrip().partition(": ")
                if name:
                    event[name] = value
                    continue
                done = done or event.get("data") == "[DONE]"
                if event.get("data", "").startswith("{"):
                    text += json.loads(event["data"])["choices"][0]["text"]
                last, event = event.get("id", last), {}
    except (OSError, http.client.HTTPException):
        time.sleep(0.2)
print(text)
"""  # reads on by the last event's id whenever it breaks off
MEMORY = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
NEWER = "0.999.0"


class BootedSwarm(Booted):
    """A booted system, and who tells what its broker reports."""

    def __init__(self, system: Booted, report: Reporter) -> None:
        super().__init__(system.root, system.leader)
        self.report = report

    def num_stages(self) -> int:
        """Of a swarm that serves; 0 if none does."""
        status = self.report("status")
        return int(status["num_stages"]) if status.get("state") == "serving" else 0

    def num_tokens(self) -> int:
        """So many were drawn in the broker's life."""
        return int(self.until(lambda: self.report("status"), "the broker answers")["tokens_total"])

    def num_lost(self) -> int:
        """So many workers were put out or vanished in the broker's life."""
        return int(self.until(lambda: self.report("stats"), "the broker answers")["pipeline"].get("workers_lost", 0))

    def workers(self) -> list[Row]:
        """A row for each, also of those that are gone."""
        rows: list[Row] = self.report("nodes").get("workers", [])
        return rows

    def has(self, worker: str) -> bool:
        """Is it here?"""
        return any(row["name"] == worker and is_present(row) for row in self.workers())

    def layers(self) -> dict[str, object]:
        """Of those that have some."""
        return {str(row["name"]): row["layers"] for row in self.workers() if row["layers"]}

    def pid_of(self, unit: str) -> int:
        return int(self.shown(unit, "MainPID"))


def generate(system: Booted, asks: str = ASKS) -> subprocess.Popen[str]:
    return system.start(str(PROGRAMS / "python"), "-c", asks)


@contextmanager
def under_way(system: BootedSwarm, expected: str, asks: str = ASKS) -> Iterator[None]:
    """A request is under way while something is done, and ends as if nothing had been. ``asks``: the program that
    makes it and prints its answer."""
    before = system.num_tokens()
    asker = generate(system, asks)
    try:
        system.until(lambda: system.num_tokens() > before + 10, "tokens come")
        yield
        said, complaint = asker.communicate(timeout=SOON_S)
    finally:
        asker.kill()
        asker.wait()
    assert asker.returncode == 0, complaint
    assert said == expected


@contextmanager
def limited(pid: int) -> Iterator[None]:
    """No more memory for this process, from now on."""
    group = MEMORY.parent / f"swarm-test-{pid}"
    group.mkdir()
    try:
        (group / MEMORY.name).write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        group.rmdir()


def install_newer(system: Booted) -> None:
    """The same, with the next version's number, where Python looks first."""
    place = "import pathlib, swarm.version; print(pathlib.Path(swarm.version.__file__).parent)"
    swarm = system.run(str(PROGRAMS / "python"), "-c", place).stdout.strip()
    path = next((system.root / PROGRAMS.parent.relative_to("/") / "lib").glob("python*/site-packages/checkout.pth"))
    done = system.run("sh", "-c", f"mkdir /opt/newer && cp -r {swarm} /opt/newer/swarm && chmod -R a+rX /opt/newer")
    assert done.returncode == 0, done.stderr
    done = system.run(
        "sh", "-c", f"sed -i 's/^__version__ = .*/__version__ = \"{NEWER}\"/' /opt/newer/swarm/version.py"
    )
    assert done.returncode == 0, done.stderr
    path.write_text("/opt/newer\n" + path.read_text())


def versions(system: Booted) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(system.swarmctl("version", "--json"))["processes"]
    return rows


def is_open(system: Booted, port: int) -> bool:
    """Is somebody let in who knocks there?"""
    return system.run("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}").returncode == 0


@contextmanager
def nobody_refused(system: Booted, *doors: tuple[str, int]) -> Iterator[None]:
    """Whoever knocks at one of these doors while something is done is let in or waits."""
    refused: list[str] = []
    over = threading.Event()
    knocks = "; ".join(f"exec 3<>/dev/tcp/{host}/{port}" for host, port in doors)

    def knock() -> None:
        while not over.wait(0.05):
            said = system.run("bash", "-c", knocks).stderr
            refused.extend([said] if said else [])

    knocker = threading.Thread(target=knock)
    knocker.start()
    try:
        yield
    finally:
        over.set()
        knocker.join()
    assert not refused
