"""``swarm up`` with two models: a swarm for each, behind one gateway. A death in one disturbs the other in nothing."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.demo import model_path
from tests.integration.lines import PATIENCE_S, Lines
from tests.integration.processes import free_ports
from tests.integration.test_gateway_up import ask

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

GREEDY: dict[str, Any] = {"prompt": "Anna was", "max_tokens": 8, "temperature": 0}


def states(url: str) -> dict[str, str]:
    """The state of each listed model's swarm; none while no model is known."""
    status, content = ask(url + "/v1/models")
    if status == 503:
        return {}
    assert status == 200
    return {row["id"]: row["swarm"]["state"] for row in json.loads(content)["data"]}


def until_serving(url: str, *names: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while [states(url).get(name) for name in names] != ["serving"] * len(names):
        assert time.monotonic() < until, states(url)
        time.sleep(0.1)


def complete(url: str, model: str, **fields: Any) -> dict[str, Any]:
    status, content = ask(url + "/v1/completions", {"model": model, **GREEDY, **fields})
    assert status == 200, content
    answer: dict[str, Any] = json.loads(content)
    return answer


def complete_in_time(url: str, model: str) -> dict[str, Any]:
    """An answer of a swarm that is down at first, which is no other error than that."""
    until = time.monotonic() + PATIENCE_S
    while (answer := ask(url + "/v1/completions", {"model": model, **GREEDY}))[0] != 200:
        assert (answer[0], time.monotonic() < until) == (503, True), answer
        time.sleep(0.1)
    body: dict[str, Any] = json.loads(answer[1])
    return body


def test_two_models_at_one_address(tmp_path: Path) -> None:
    hamlet = tmp_path / "hamlet"
    shutil.copytree(model_path(), hamlet)
    port = free_ports(6)
    models = ["--model", str(model_path()), "--model", str(hamlet)]
    ports = ["--port", str(port), "--http", str(port + 4)]
    state = ["--workers", "1", "--state-dir", str(tmp_path / "state")]
    up = Lines(["up", *models, *ports, *state, "--json"], tmp_path, OMP_NUM_THREADS="1")
    try:
        url = up.wait_for("http")["url"]
        until_serving(url, "village", "hamlet")
        for name in ("village", "hamlet"):
            assert complete(url, name)["model"] == name
        status, content = ask(url + "/v1/completions", {"model": "gpt", **GREEDY})
        assert (status, b"the models here are village, hamlet" in content) == (404, True)
        # the memory is divided; both have half the weights
        (other,) = [child for child in psutil.Process(up.process.pid).children() if "up" in child.cmdline()]
        assert int(other.cmdline()[other.cmdline().index("--memory-limit") + 1]) > 0

        # all of the other swarm dies at once, and this one answers on; then that one is back, with its journal
        other.send_signal(signal.SIGKILL)
        assert len(complete(url, "village", max_tokens=64, ignore_eos=True)["choices"][0]["text"]) > 0
        up.wait_for("note", "swarm-hamlet was ended by SIGKILL; restarting it")
        assert complete_in_time(url, "hamlet")["choices"] == complete(url, "village")["choices"]
        until_serving(url, "village", "hamlet")  # the list is refreshed in intervals
        assert states(url).keys() == {"village", "hamlet"}

        children = psutil.Process(up.process.pid).children(recursive=True)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    finally:
        up.close()
