"""A swarm as people start one: ``swarm up`` with workers and a gateway, whose processes a test may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from swarm import Client
from swarm.admin.report_rows import is_present
from swarm.errors import ClientError
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from tests.integration.gateway import request, status
from tests.integration.processes import KEEPER, PATIENT, free_ports

NUM_WORKERS = 3
READY_S = 120.0
MODEL = "village"
# Faults of the workers while a test wishes them: what is over in a moment is seen under way on any machine.
SLOW = "tell.activated=stall:3@1+,step.prefill=stall:0.05@1+"


class Swarm:
    """Serves from the start of a ``with`` to its end; ``folder`` has its state and its logs."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        port = free_ports(3)
        self.url = f"http://127.0.0.1:{port + 2}"
        self.broker_url = f"tcp://127.0.0.1:{port}"
        self.logs = folder / "state" / "logs"
        self._arguments = ["--port", str(port), "--http", str(port + 2), "--state-dir", str(folder / "state"), "--json"]
        self._slow = folder / "slow"
        faults = {VARIABLE: SLOW, FROM_VARIABLE: str(self._slow)}
        self._environment = {**PATIENT, **os.environ, "OMP_NUM_THREADS": "1", **faults, **environment}
        self._up: subprocess.Popen[bytes] | None = None
        self.client = Client(self.broker_url, connect_timeout_s=READY_S)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "swarm", "up", "--workers", str(NUM_WORKERS), *self._arguments]
        with (self._folder / "up.log").open("wb") as log:
            self._up = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        try:
            self.until_well()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self._up is not None:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(30)
            finally:
                self._up.kill()
                self._up.wait()

    def until_well(self) -> None:
        """Wait until the gateway answers, all workers serve and are well, and nothing runs."""
        self.until(lambda: status(self.url + "/ready") == 200, "the gateway is ready")
        self.until(self._is_well, f"{NUM_WORKERS} workers serve and are well, and nothing runs")

    def _is_well(self) -> bool:
        report = self.client.query("status")
        if (report["state"], report["num_stages"]) != ("serving", NUM_WORKERS) or not self.is_idle(report):
            return False
        workers = [worker for worker in self.client.query("nodes")["workers"] if is_present(worker)]
        # One may still be called slow, since other work had the cores: it is looked at again only when it has some.
        return len(workers) == NUM_WORKERS and all(worker["verdict"] in ("well", "slow") for worker in workers)

    def is_idle(self, report: dict[str, Any] | None = None) -> bool:
        """Does nothing run or wait? Answers that are kept for their readers don't count."""
        report = report or self.client.query("status")
        return not report["num_running"] and not report["num_queued"]

    def until(self, holds: Callable[[], Any], what: str, within_s: float = READY_S) -> Any:
        """Ask again and again; fail with the last lines of all logs."""
        give_up_at = time.monotonic() + within_s
        while time.monotonic() < give_up_at:
            try:
                if found := holds():
                    return found
            except ClientError:
                pass  # nobody is there yet, or any more
            time.sleep(0.1)
        reports = [self.client.query("status"), self.client.query("nodes")] if self._is_there() else ["no broker"]
        texts = f"{reports}\n" + "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self._all_logs())
        raise AssertionError(f"not within {within_s:.0f} s: {what}\n{texts}")

    def _is_there(self) -> bool:
        try:
            return bool(self.client.query("status"))
        except ClientError:
            return False

    def _all_logs(self) -> list[Path]:
        return [self._folder / "up.log", *sorted(self.logs.glob("*.log"))]

    def said(self) -> str:
        """What all its processes have written to their logs."""
        return "\n".join(log.read_text() for log in self._all_logs())

    def processes(self) -> dict[str, psutil.Process]:
        """By name: ``broker``, ``gateway``, ``w0``, …"""
        assert self._up is not None
        found = {}
        for process in psutil.Process(self._up.pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline()).split()
                is_keeper = process.name() == KEEPER
            except psutil.Error:
                continue
            if "--name" in words and not is_keeper:
                found[words[words.index("--name") + 1]] = process
            elif not is_keeper:
                found.update({name: process for name in ("broker", "gateway") if name in words})
        return found

    def kill(self, name: str) -> None:
        """As by the kernel: no last words."""
        self.processes()[name].kill()

    @contextmanager
    def left_dead(self, name: str) -> Iterator[None]:
        """Kill one, and keep ``swarm up`` from starting it again for as long as the ``with`` lasts."""
        assert self._up is not None
        os.kill(self._up.pid, signal.SIGSTOP)
        try:
            self.kill(name)
            yield
        finally:
            os.kill(self._up.pid, signal.SIGCONT)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Have each change of plan take seconds, and each chunk of a prompt a moment."""
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink()

    def chain(self) -> list[str]:
        """The workers that serve, in the order of their layers."""
        return [stage["worker"] for stage in self.client.query("plan")["stages"]]

    def ask(self, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """The status of an answer, and what it says."""
        headers = [("authorization", f"Bearer {key}")] if key else []
        code, _, said = request(self.url + path, body, headers)
        return code, json.loads(said)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the gateway answers to the same question, asked in one piece and left in peace."""
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "keep_s")}
        code, said = self.ask(path, whole)
        assert code == 200, said
        answer: dict[str, Any] = said
        return answer
