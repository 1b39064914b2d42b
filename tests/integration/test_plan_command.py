"""The plan of real workers: from what they measured, predicted beside measured, by hand, and as it would be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.ctl.main import run
from swarm.demo import model_path
from swarm.wire.messages import PlanWhatIf
from tests.faults.zygote import Zygote
from tests.integration.processes import IS_OVERLAPPED, Processes

pytestmark = pytest.mark.timeout(180)


async def test_predicted_beside_measured_and_suppositions(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pins are kept; what was predicted stands beside what is measured while it runs; `swarmctl plan --dry-run` tells
    what would be, and changes nothing; only supposing needs --dry-run."""
    options = {"SWARM_PLAN__PINS": '{"w0": "0-1"}', "SWARM_PLAN__OBJECTIVE": "throughput"}
    options |= {"SWARM_BROKER__SPECULATION": "off"}  # a step for each token
    with Processes(Path(model_path()), tmp_path, options=options, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            done = await client.generate([5, 6, 7], max_tokens=20, ignore_eos=True)
            assert len(done.tokens) == 20
            plan = await client.query("plan")
            supposed = await client.suppose_plan(PlanWhatIf(without=("w1",)))
            nothing = await client.suppose_plan(PlanWhatIf(without=("w0", "w1")))
        assert [(s["worker"], s["layers"]) for s in plan["stages"]] == [("w0", [0, 2]), ("w1", [2, 8])]
        for stage in plan["stages"]:
            assert stage["seen_steps"] >= 20
            assert stage["predicted_s"] > 0
            assert stage["expected_s"] > 0
            assert stage["seen_s"] > 0
        assert plan["measured"]["step_s"] > plan["measured"]["outside_s"] > 0
        assert plan["forecast"]["tokens_per_second"] > 0
        assert plan["forecast"]["takes_turns"] is not IS_OVERLAPPED
        assert supposed["waits_for"].startswith("other pins or caps")  # w0 alone may not take more than two layers
        assert nothing["waits_for"] == "a worker besides w0, w1, which must not be used"

        capsys.readouterr()
        assert run(["--url", swarm.url, "--json", "plan", "--dry-run", "--with", "1", "--like", "w1"]) == 0
        body = json.loads(capsys.readouterr().out)
        assert "w1+1" in {stage["worker"] for stage in body["stages"]} | {
            each["worker"] for each in body["forecast"]["left_out"]
        }
        assert run(["--url", swarm.url, "plan"]) == 0
        assert "expected" in capsys.readouterr().out
        assert run(["--url", swarm.url, "plan", "--without", "w1"]) != 0
        assert "add --dry-run" in capsys.readouterr().err
        assert run(["--url", swarm.url, "plan", "--dry-run", "--without", "w7"]) != 0
        assert "no worker 'w7'" in capsys.readouterr().err


async def test_a_worker_that_has_too_little_is_told_why(zygote: Zygote, tmp_path: Path) -> None:
    """It ends, and its log has the reason."""
    with Processes(Path(model_path()), tmp_path, options={"SWARM_PLAN__MIN_MEMORY": "64GiB"}, launch=zygote) as swarm:
        swarm.start_broker()
        swarm.start_worker("w0")
        assert swarm.workers["w0"].wait(60) != 0
        assert "this swarm takes workers from 65536 MiB on" in swarm.log("w0")


async def test_an_operator_steers_while_it_serves(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan by hand is made, a worker drained and freed again, while a request runs: it ends with all its tokens."""

    def said(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run(["--url", swarm.url, "--json", *words]) == 0
        body = json.loads(capsys.readouterr().out)
        assert isinstance(body, dict)
        return body

    def layers() -> dict[str, list[int]]:
        return {stage["worker"]: stage["layers"] for stage in said("plan")["stages"]}

    async def until(wanted: dict[str, list[int]]) -> None:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(layers) != wanted:  # noqa: ASYNC110 (the plan is another process's)
                await asyncio.sleep(0.05)

    with Processes(Path(model_path()), tmp_path, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            undisturbed = await client.generate([5, 6, 7], max_tokens=600, ignore_eos=True)
            running = asyncio.create_task(client.generate([5, 6, 7], max_tokens=600, ignore_eos=True))
            pin = ["plan", "--pin", "w0=0-2", "--objective", "throughput"]
            assert (await asyncio.to_thread(said, *pin))["stages"][0]["layers"] == [0, 3]
            assert (await asyncio.to_thread(said, *pin, "--apply"))["state"] in {"is made now", "stays as it is"}
            await until({"w0": [0, 3], "w1": [3, 8]})
            await asyncio.to_thread(said, "plan", "--apply")
            assert (await asyncio.to_thread(said, "drain", "w1", "--yes"))["state"] == "drained"
            await until({"w0": [0, 8]})
            kept = await asyncio.to_thread(said, "standby")
            assert sorted(row["name"] for row in kept["workers"]) == ["w0", "w1"]
            assert (await asyncio.to_thread(said, "uncordon", "w1"))["state"] == "free"
            assert (await asyncio.to_thread(said, "cordon", "w0"))["state"] == "cordoned"
            assert (await asyncio.to_thread(said, "rebalance"))["stages"]
            assert (await running).tokens == undisturbed.tokens
        assert run(["--url", swarm.url, "drain", "w7"]) == 1
        assert "no worker 'w7': the workers are w0, w1" in capsys.readouterr().err
        assert run(["--url", swarm.url, "plan", "--pin", "w0"]) == 2
        assert "--pin takes WORKER=FIRST-LAST, like w1=0-10, not 'w0'" in capsys.readouterr().err
