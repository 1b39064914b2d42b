"""The console before a real ``swarm up``: what is told while workers and the broker die, orders, logs, and the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

from swarm.gateway.console.local_swarm import pids_by_name
from swarm.gateway.console.patch import apply_patch
from tests.integration.gateway import request
from tests.integration.lines import PATIENCE_S, Lines
from tests.integration.processes import free_ports, launch

Json = dict[str, Any]
LONG: Json = {
    "model": "village",
    "prompt": "Once",
    "max_tokens": 900,
    "ignore_eos": True,
    "speculation": "off",
    "seed": 3,
    "temperature": 0.8,
}


class Live:
    """One open page, read in a thread: ``view`` is the last snapshot with all patches, ``heard`` the last event's id
    with the view as it was then. A page that comes back goes on from what another one had ``heard``."""

    def __init__(self, port: int, heard: tuple[str, Json] = ("", {}), key: str = "") -> None:
        self.heard = heard
        last, self.view = heard
        self.events: list[tuple[str, str, Any]] = []
        self.is_over = False
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        headers = {"last-event-id": last} if last else {}
        self._connection.request("GET", "/console/live", headers=headers | ({"x-api-key": key} if key else {}))
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while line := self._answer.readline().decode():
                name, _, value = line.rstrip("\n").partition(": ")
                if name == "data":
                    self._take(fields["id"], fields["event"], json.loads(value))
                elif name:
                    fields[name] = value
        self.is_over = True

    def _take(self, identity: str, event: str, data: Any) -> None:
        self.events.append((identity, event, data))
        if event == "snapshot":
            self.view = data
        elif event == "delta":
            self.view = apply_patch(self.view, data)
        self.heard = identity, self.view

    def of(self, name: str) -> list[Any]:
        return [data for _, event, data in list(self.events) if event == name]

    @property
    def happened(self) -> list[str]:
        return [each["event"] for events in self.of("events") for each in events]

    def until(self, holds: Callable[[Json], object]) -> Json:
        give_up_at = time.monotonic() + PATIENCE_S
        while not (self.view and holds(self.view)):
            assert time.monotonic() < give_up_at, (self.view, self.events[-5:])
            time.sleep(0.02)
        return self.view

    def close(self) -> None:
        """Hang up, as a tab that is closed does."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)
        self._thread.join(PATIENCE_S)
        self._connection.close()


class Up:
    """A running ``swarm up``."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(4)
        self.http = self.port + 2
        arguments = ["up", "--port", str(self.port), "--http", str(self.http), "--state-dir", str(folder), "--json"]
        self.lines = Lines(arguments, folder, OMP_NUM_THREADS="1", SWARM_LOG__FORMAT="json")
        self.url = f"http://127.0.0.1:{self.http}"

    def children(self) -> dict[str, int]:
        """By name."""
        return pids_by_name({child.pid: child.cmdline() for child in psutil.Process(self.lines.process.pid).children()})

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, _, content = request(self.url + path, body)
        return status, json.loads(content)

    def until_it_serves(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while request(self.url + "/ready")[0] != 200:
            assert time.monotonic() < give_up_at
            time.sleep(0.1)

    def to_broker(self) -> int:
        """Connections of the gateway to the broker's door."""
        gateway = psutil.Process(self.children()["gateway"])
        return sum(bool(c.raddr) and c.raddr.port == self.port for c in gateway.net_connections())


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"))
    try:
        running.lines.wait_for("http")
        running.until_it_serves()
        yield running
        running.lines.process.send_signal(signal.SIGINT)
        assert running.lines.process.wait(PATIENCE_S) == 0
    finally:
        running.lines.close()


class Asking(threading.Thread):
    """Somebody who asks for a long answer."""

    def __init__(self, up: Up) -> None:
        super().__init__(daemon=True)
        self._up, self.answer = up, {}
        self.start()

    def run(self) -> None:
        self.answer = self._up.ask("/v1/completions", LONG)[1]

    def text(self) -> str:
        self.join(PATIENCE_S)
        return str(self.answer["choices"][0]["text"])


def test_a_death_is_told_while_it_is_healed(up: Up) -> None:
    """Killed from the page, in the middle of an answer: the view says what was lost and how long it took, the answer is
    the undisturbed one, and who reads on from before the death comes to the same view. The dead one's log is there."""
    undisturbed = Asking(up).text()
    live = Live(up.http)
    live.until(lambda view: len(view["workers"]) == 2 and view["plan"])
    asking = Asking(up)
    row = next(iter(live.until(lambda view: view["requests"])["requests"].values()))
    assert (row["tenant"], row["max_tokens"]) == ("http", 900)
    before = live.heard
    victim = before[1]["plan"]["stages"][-1]["worker"]
    pid = up.children()[victim]
    status, told = up.ask("/console/orders", {"verb": "kill", "worker": victim})
    assert (status, told["body"]) == (200, {"worker": victim, "pid": pid})
    recovery = live.until(lambda view: view["recoveries"])["recoveries"][0]
    assert recovery["workers"] == [victim]
    assert [phase["state"] for phase in recovery["phases"]] == ["done"] * 6
    assert f"{victim} was lost; " in recovery["sentence"]
    assert "1 answer went on after" in recovery["sentence"]
    assert asking.text() == undisturbed
    assert {"worker_lost", "recovery_begun", "recovery_ended", "serving"} <= set(live.happened)
    again = Live(up.http, before)
    again.until(lambda view: view["recoveries"] and view["recoveries"][0]["key"] == recovery["key"])
    assert again.of("snapshot") == []
    live.until(lambda view: len([w for w in view["workers"].values() if w["state"] == "member"]) == 2)
    _, logs = up.ask("/console/logs")
    assert {"broker", "gateway", "w0", "w1"} <= {each["name"] for each in logs["processes"]}
    assert all(each["alive"] for each in logs["processes"] if each["name"] in ("broker", "gateway", "w0", "w1"))
    lines = up.ask(f"/console/logs/{victim}")[1]["lines"]
    assert str(pid) in str(lines) or len(lines) > 1  # of the life before, too
    assert up.ask("/console/logs/gateway?search=console_order")[1]["lines"][-1]["fields"]["order"] == f"kill {victim}"
    live.close()
    again.close()


def test_a_stream_outlives_the_broker(up: Up) -> None:
    """While it is away that is told; then it goes on, and says that the broker was started again."""
    live = Live(up.http)
    started_at = live.until(lambda view: view["status"].get("state") == "serving")["status"]["started_at"]
    broker = up.children()["broker"]
    os.kill(broker, signal.SIGSTOP)
    live.until(lambda view: view.get("away_s") is not None)
    assert "broker_away" in live.happened
    os.kill(broker, signal.SIGKILL)
    live.until(
        lambda view: (
            view.get("away_s") is None
            and view["status"]["started_at"] > started_at
            and view["status"]["state"] == "serving"
        )
    )
    assert "broker_started" in live.happened
    assert len(live.of("snapshot")) == 1
    live.close()


def test_the_broker_is_asked_nothing_while_nobody_looks(up: Up) -> None:
    """Nor is anything connected for it."""
    up.until_it_serves()
    alone = up.to_broker()
    tabs = [Live(up.http), Live(up.http)]
    for tab in tabs:
        tab.until(lambda view: view["workers"])
    assert up.to_broker() == alone + 1  # for all who look
    for tab in tabs:
        tab.close()
    give_up_at = time.monotonic() + PATIENCE_S
    while up.to_broker() > alone:
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def test_orders_are_carried_out_and_seen(up: Up) -> None:
    up.until_it_serves()
    live = Live(up.http)
    live.until(lambda view: len([w for w in view["workers"].values() if w["state"] == "member"]) == 2)

    def steered(name: str) -> Callable[[Json], bool]:
        return lambda view: any(w["name"] == "w1" and w["steered"] == name for w in view["workers"].values())

    assert up.ask("/console/orders", {"verb": "cordon", "worker": "w1"})[0] == 200
    live.until(steered("cordoned"))
    assert up.ask("/console/orders", {"verb": "uncordon", "worker": "w1"})[0] == 200
    live.until(steered(""))
    asking = Asking(up)
    request_id = next(iter(live.until(lambda view: view["requests"])["requests"]))
    assert up.ask("/console/orders", {"verb": "cancel", "request": request_id})[0] == 200
    live.until(lambda view: request_id in view["ended"])
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert up.ask(f"/console/trace/{request_id}")[1]["request_id"] == request_id
    assert up.ask("/console/plan", {"without": ["w1"]})[1]["state"] == "would be made"
    assert up.ask("/console/plan", {"without": ["w0", "w1"]})[1]["state"] == "no plan"
    assert up.ask("/console/orders", {"verb": "drain", "worker": "w7"})[0] == 404
    live.close()


def test_another_gateway_kills_nobody_and_ends_at_once(up: Up, tmp_path: Path) -> None:
    """One that no ``swarm up`` started knows no logs, and no process is its to kill. A stream that never ends does not
    hold it up when it is told to end."""
    port = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "gateway.log"
    broker = f"tcp://127.0.0.1:{up.port}"
    process = launch(["gateway", "--url", broker, "--http", str(port)], dict(os.environ), log)
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                if request(url + "/health")[0] == 200:
                    break
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.1)
        me = json.loads(request(url + "/console/me")[2])
        assert (me["is_demo"], me["has_logs"], me["admin"]) == (False, False, True)
        status, _, content = request(url + "/console/orders", {"verb": "kill", "worker": "w0"})
        assert (status, json.loads(content)["error"]["code"]) == (403, "no_demo")
        assert request(url + "/console/logs")[0] == 404
        live = Live(port)
        live.until(lambda view: view["workers"])
        process.terminate()
        process.wait(PATIENCE_S)
        assert "gateway_let_go" not in log.read_text()  # nothing was left after its grace
        live.close()
        assert live.is_over
    finally:
        process.kill()
        process.wait()
