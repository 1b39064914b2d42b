"""OpenAI's own JavaScript client against a gateway with a real swarm behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.integration.gateway import MODEL, Served

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

SCRIPT = Path(__file__).with_name("openai_client.mjs")
INSTALL_S = 120.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client in it, and the script beside."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), "openai@6"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install the client within {INSTALL_S:g} s")
    if made.returncode:
        pytest.skip(f"npm can't install the client here: {made.stderr[-300:]}")
    shutil.copy(SCRIPT, folder / SCRIPT.name)
    return folder


@pytest.fixture(scope="module")
def found(node: Path, served: Served) -> dict[str, Any]:
    """What the script found."""
    command = ["node", str(node / SCRIPT.name), served.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


async def test_the_javascript_client_gets_the_same_answers(found: dict[str, Any], served: Served) -> None:
    """As the Python client of the swarm itself: whole, streamed, by its helper, as texts with n and logprobs."""
    question = [{"role": "user", "content": "Who lives in the village?"}]
    async with AsyncClient(served.swarm.url) as client:
        expected = await client.chat(question, max_tokens=12)
        long = await client.chat(question, max_tokens=100)
        prose = await client.generate("Anna", max_tokens=8, n=2)
    assert found["models"] == [MODEL]
    assert found["whole"] == found["streamed"] == expected.text
    assert found["usage"]["total_tokens"] == expected.usage.num_total
    assert found["helper"] == long.text
    assert found["helperUsage"]["completion_tokens"] == long.usage.num_tokens
    assert found["texts"] == [choice.text for choice in prose.choices]
    assert "".join(found["tokens"]) == prose.text


async def test_the_javascript_client_reads_tools_and_errors(found: dict[str, Any]) -> None:
    """No calls where none may be made; an error is one of its own kind, with the field and the request's id."""
    assert found["offered"]
    assert found["calls"] is None
    assert found["error"] == [True, 400, "temperature", True]


async def test_what_the_javascript_client_aborts_is_cancelled(found: dict[str, Any], served: Served) -> None:
    assert 5 <= found["aborted"] < 200  # it hands over what it had read by then
    assert found["abort"] is True
    async with AsyncClient(served.swarm.url) as client:
        await served.until_empty(client)
