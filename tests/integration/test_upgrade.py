"""Builds of two versions beside each other, and the step from one to the other while a swarm serves.

``tests/old`` has wheels of the versions before, without their compiled kernels. Our library must not serve them: its
structures are others, and a process that calls it with those of another version crashes. An installed package has no
sources to compare a library with, so it takes whatever library lies in its folder for its own. Workers of both builds
therefore compute with torch's kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient, RequestFailed
from swarm.version import __version__
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.integration.test_up import StartUp, up  # noqa: F401 (a fixture)

# by version of the protocol
WHEELS = {1: "swarm-0.1.0.whl", 2: "swarm-0.2.0-protocol-2.whl", 3: "swarm-0.3.0-protocol-3.whl"}
BUILDS = {1: None, 2: "0.2.0", 3: "0.3.0"}  # as they report themselves
OLD = "WITH_THE_OLD_BUILD"
PROMPT = list(range(5, 25))

pytestmark = pytest.mark.usefixtures("own_cache")


# The version before this one; the older ones under --long.
@pytest.fixture(
    scope="module", params=[3, *(pytest.param(version, marks=pytest.mark.long) for version in WHEELS if version < 3)]
)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def old(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A former build, unpacked."""
    root = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(Path(__file__).parents[1] / "old" / WHEELS[version]) as wheel:
        wheel.extractall(root)
    return root


class Launcher:
    """Starts a process of this build, or with ``OLD`` in its environment, of the one before."""

    def __init__(self, old: Path, zygote: Zygote) -> None:
        self._old, self._zygote = old, zygote

    def __call__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> Any:
        if not environment.pop(OLD, ""):
            return self._zygote(arguments, environment, log)
        with log.open("ab") as file:
            command = [sys.executable, "-P", "-m", "swarm", *arguments]
            environment |= {"PYTHONPATH": str(self._old)}
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=self._old)


@pytest.fixture
def swarm(random_llama: Path, tmp_path: Path, old: Path, zygote: Zygote) -> Iterator[Processes]:
    options = {"SWARM_WORKER__KERNELS": "torch"}
    with Processes(random_llama, tmp_path, options=options, launch=Launcher(old, zygote)) as processes:
        yield processes


async def answer(client: AsyncClient) -> list[int]:
    return list((await client.generate(PROMPT, max_tokens=24)).tokens)


def generated(old: Path, url: str) -> list[int]:
    """The same, asked for by a client of the former build."""
    command = [sys.executable, "-P", "-m", "swarm", "generate", "--url", url, "--tokens", ",".join(map(str, PROMPT))]
    done = subprocess.run(
        [*command, "--max-tokens", "24", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(old)},
        cwd=old,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["tokens"])


async def builds(client: AsyncClient) -> dict[str, object]:
    report: Any = await client.query("nodes")
    return {row["name"]: row["build"] for row in report["workers"] if row["state"] == "member"}


async def test_workers_of_two_builds_serve_together(swarm: Processes, old: Path, version: int) -> None:
    """The same tokens as of one build, and to a client of the former build, too; who is which is told. The new worker
    can be told to come again, the old one is left alone, in words."""
    swarm.start_broker(min_workers=2)
    swarm.start_worker("w0")
    swarm.start_worker("w1", **{OLD: "1"})
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 2)
        tokens = await answer(client)
        assert await builds(client) == {"w0": __version__, "w1": BUILDS[version]}
        assert await asyncio.to_thread(generated, old, swarm.url) == tokens
        if version == 1:
            with pytest.raises(RequestFailed, match="w1 runs an older version, which can't be restarted remotely"):
                await client.stop_worker("w1", again=True)
        await client.stop_worker("w0", again=True)
        assert await asyncio.to_thread(swarm.workers.pop("w0").wait, 60) == 75
        await swarm.until_serving(client, 1)
        assert await answer(client) == tokens


async def test_all_workers_are_started_anew_under_load(up: StartUp) -> None:  # noqa: F811
    """One after the other, while answers run: each ends as without it, and all processes are others afterwards."""
    swarm = up("--workers", "3")
    await asyncio.to_thread(swarm.wait_for, "serving")
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        expected = (await client.generate(PROMPT, max_tokens=40, seed=7, temperature=1.0)).tokens
        before, done = await builds_and_processes(client), asyncio.Event()

        async def ask() -> int:
            num = 0
            while not done.is_set():
                assert (await client.generate(PROMPT, max_tokens=40, seed=7, temperature=1.0)).tokens == expected
                num += 1
            return num

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        arguments = ("--json", "upgrade", "--rolling", "--yes")
        rolled = await asyncio.to_thread(lambda: swarm.run(*arguments, program="ctl"))
        done.set()
        assert min(await asyncio.gather(*asking)) > 0
        assert rolled.returncode == 0, rolled.stderr
        lines = [json.loads(line) for line in rolled.stdout.splitlines()]
        assert [line["worker"] for line in lines] == ["w0", "w1", "w2"]
        after = await builds_and_processes(client)
        assert set(after) == set(before)
        assert not set(after.values()) & set(before.values())


async def builds_and_processes(client: AsyncClient) -> dict[str, object]:
    report: Any = await client.query("nodes")
    return {row["name"]: (row["build"], row["pid"]) for row in report["workers"] if row["state"] == "member"}


async def test_a_broker_of_the_former_build(swarm: Processes, version: int) -> None:
    """Workers and clients of this one serve there; what it doesn't know is not said to it."""
    swarm.start_broker(**{OLD: "1"})
    swarm.start_worker("w0")
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 1)
        tokens = await answer(client)
        assert len(tokens) == 24
        if version == 1:
            told = r"stop_worker\.again needs version 2 of the protocol, the peer supports 1"
            with pytest.raises(Exception, match=told):
                await client.stop_worker("w0", again=True)
        stream = client.stream(PROMPT, max_tokens=500, ignore_eos=True, request_id="left")
        await anext(stream)
        submits = await asyncio.wait_for(asyncio.gather(*(client.recall("left") for _ in range(4))), 20)
        assert {submit.request_id for submit in submits} == {"left"}
        if version < 3:
            told = rf"look_up needs version 3 of the protocol, the peer supports {version}"
            with pytest.raises(Exception, match=told):
                await client.look_up("left")
            with pytest.raises(Exception, match=r"submit\.keep_s needs version 3"):
                await client.generate(PROMPT, max_tokens=1, keep_s=5.0)
        await stream.aclose()
        assert await answer(client) == tokens
