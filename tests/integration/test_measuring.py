"""A real swarm measured: profile, traces, hops, statistics, and causes from the broker's log to a worker's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm import AsyncClient
from swarm.broker.reports.trace import PARTS
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

PROMPT = [3, 5, 8, 13, 21]


def run_swarm(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SWARM_URL"}
    return subprocess.run(
        [sys.executable, "-m", "swarm", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )


def lines_of(swarm: Processes, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in swarm.log(name).splitlines() if line.startswith("{")]


def test_traces_hops_and_statistics(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """Of real processes: each token's parts add up to its time, which a client's clock confirms; hops come with the
    tokens; figures of stages and pipeline agree; log lines can be followed by their causes."""
    options = {"SWARM_LOG__PROFILE_EVERY": "5", "SWARM_LOG__LEVEL": "debug"}
    with Processes(random_llama, tmp_path, options=options, launch=zygote) as swarm:
        swarm.start(2)
        asyncio.run(_measure(swarm))
    _check_logs(swarm)


async def _measure(swarm: Processes) -> None:
    async with AsyncClient(swarm.url, connect_timeout_s=30.0) as client:
        await swarm.until_serving(client, 2)
        await client.generate(PROMPT, max_tokens=4, ignore_eos=True)  # so that the next one meets a swarm at work
        began = time.monotonic()
        traced = {"hops": True, "request_id": "traced", "speculation": "off"}  # a guessed token has no time of its own
        done = await client.generate(PROMPT, max_tokens=12, ignore_eos=True, **traced)
        took_s = time.monotonic() - began
        trace = await client.trace("trac")
        _check_trace(trace, done.timing.total_s, took_s)
        (sequence,) = trace["sequences"]  # type: ignore[misc]
        _check_hops(done.hops, sequence)
        stats = await swarm.until(
            client, "stats", lambda s: all(v.get("calls") == s["pipeline"]["calls"] for v in s["stages"].values())
        )
        _check_stats(stats)


def _check_trace(trace: dict[str, Any], total_s: float, took_s: float) -> None:
    (sequence,) = trace["sequences"]
    tokens = sequence["tokens"]
    assert (trace["request_id"], trace["state"]) == ("traced", "ended")
    assert [token["index"] for token in tokens] == list(range(12))
    for token in tokens:
        assert sum(token[part] for part in PARTS) == pytest.approx(token["total_s"], abs=1e-5)
        assert token["compute_s"] > 0
        assert token["wire_s"] > 0
        assert 0 <= token["unaccounted_s"] < token["total_s"]
    # Without what was between a token's answer and its sending, during which the next one was under way already, the
    # tokens' times follow each other without a gap.
    in_a_row = sequence["sums"]["total_s"] - sequence["sums"]["broker_s"]
    assert in_a_row == pytest.approx(total_s, abs=1e-4)
    assert in_a_row <= took_s


def _check_hops(hops: Any, sequence: dict[str, Any]) -> None:
    """Check the figures as they came with the tokens."""
    assert len(hops) == 12
    for per_token, traced in zip(hops, sequence["tokens"], strict=True):
        assert [(h.worker, [h.layers.first, h.layers.stop]) for h in per_token] == [
            (stage["worker"], stage["layers"]) for stage in traced["stages"]
        ]
        assert sum(h.compute_s for h in per_token) == pytest.approx(traced["compute_s"], abs=1e-5)
        assert all(h.held_s >= h.compute_s for h in per_token)


def _check_stats(stats: dict[str, Any]) -> None:
    pipeline = stats["pipeline"]
    times = pipeline["microseconds"]
    assert pipeline["sizes"]["rows"]["most"] == 1
    assert times["total"]["total"] > times["bridge"]["total"] > 0
    for name, stage in stats["stages"].items():
        assert stage["microseconds"]["compute"]["total"] == pytest.approx(times["stages"][name]["total"], rel=1e-3)
        assert stage["microseconds"]["total"]["average"] >= stage["microseconds"]["compute"]["average"] > 0
        assert stage["microseconds"]["bridge_in"]["last"] > 0
        assert stage["sizes"]["bytes_out"]["last"] > 0
        assert 0 < stage["device_memory_bytes"] < stage["device_memory_total_bytes"]
    heads = [stage["microseconds"]["head"]["total"] for stage in stats["stages"].values()]
    copies = [stage["microseconds"]["copy"]["total"] for stage in stats["stages"].values()]
    assert sum(head > 0 for head in heads) == 1  # the last stage
    assert sum(copy > 0 for copy in copies) == 1  # all others


def _check_logs(swarm: Processes) -> None:
    broker = lines_of(swarm, "broker")
    (ended,) = (line for line in broker if line["event"] == "request_ended" and line["request"] == "traced")
    assert (ended["event"], ended["tokens"], ended["reasons"]) == ("request_ended", 12, ["length"])
    assert ended["first_token_s"] <= ended["total_s"]
    assert ended["cause"]
    causes = {line["cause"].partition("-")[0] for line in broker if "cause" in line}
    assert len(causes) == 1  # one broker's life
    for name in ("w0", "w1"):
        lines = lines_of(swarm, name)
        (activated,) = (line for line in lines if line["event"] == "plan_activated")
        assert activated["epoch"] == 1
        assert activated["cause"].partition("-")[0] in causes
        profile = next(line for line in lines if line["event"] == "profile")
        assert profile["calls"] == 5
        assert profile["compute_us"] > 0
    assert [line["calls"] for line in broker if line["event"] == "profile"][:2] == [5, 10]
    _follow_a_request(swarm, {line["cause"]: line for line in broker if line["event"] == "event"})


def _follow_a_request(swarm: Processes, events: dict[str, dict[str, Any]]) -> None:
    """Its acceptance is an event at the broker; each worker's steps name the event that they follow from, and the
    event that the answer to them is names it too."""
    assert any(e["kind"] == "AcceptanceWritten" and e["request"] == "traced" for e in events.values())
    answers = {e["step"]: e for e in events.values() if e["kind"] == "StepFinished"}
    for name in ("w0", "w1"):
        steps = [line for line in lines_of(swarm, name) if line["event"] == "step_computes"]
        assert len(steps) >= 4 + 12
        for step in steps:
            assert (step["epoch"], step["rows"]) == (1, 1)
            assert step["cause"] in events
            assert answers[step["step"]]["caused_by"] == step["cause"]


def test_profile_of_a_swarm_of_its_own(random_llama: Path) -> None:
    """It starts one, measures all phases, prints JSON and nothing else on stdout, and leaves no process behind."""
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    done = run_swarm("profile", "--model", str(random_llama), "--workers", "2", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["tokens"] for row in result["output_scaling"]] == [5, 10, 20, 50]
    assert [row["name"] for row in result["prompts"]] == ["short", "medium", "long"]
    assert result["sustained"]["runs"] == 10
    assert [row["size"] for row in result["batches"]] == [1, 4]
    assert result["warm_up"]["first_ever"] is True
    for figures in (result["latency"]["ttft_s"], result["latency"]["per_token_s"]):
        assert 0 < figures["p50"] <= figures["p95"] <= figures["p99"]
    assert result["caches"]["rope"]["rate"] > 0.9
    assert result["caches"]["prefix"]["hits"] >= 1
    assert 0 < result["overhead"]["communication"] < 1
    assert sum(result["overhead"]["share"].values()) == pytest.approx(1.0, abs=0.01)
    assert len(result["stages"]) == 2
    left = {process.pid for process in psutil.Process().children(recursive=True)}
    assert left <= mine


def test_profile_of_a_running_swarm(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """For people: tables with all phases; the swarm runs on."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        done = run_swarm("profile", "--url", swarm.url, "--quick")
        assert done.returncode == 0, done.stderr
        assert swarm.broker is not None
        assert swarm.broker.poll() is None
    for title in (
        "warm-up",
        "output lengths",
        "prompt lengths",
        "sustained",
        "batches",
        "latency",
        "caches",
        "where a token's time goes",
        "communication",
    ):
        assert title in done.stdout
    assert "the swarm ran already" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_stops_the_swarm_too(random_llama: Path) -> None:
    """Ctrl-C in the middle: exit code 130, and nobody is left."""
    environment = {key: value for key, value in os.environ.items() if key != "SWARM_URL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm", "profile", "--model", str(random_llama), "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("output scaling"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--url", "tcp://127.0.0.1:20001", "--model", "x"), "give one of them"),
        (("--url", "tcp://127.0.0.1:20001", "--threads", "2"), "--threads is for a swarm that is started here"),
        (("--url", "tcp://127.0.0.1:20001"), "no broker answers at tcp://127.0.0.1:20001"),
        (("--model", "/does/not/exist"), "/does/not/exist"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], text: str) -> None:
    """On stderr, and nothing is started."""
    done = run_swarm("profile", *arguments, timeout_s=30)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
