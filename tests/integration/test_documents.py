"""What the documents have their reader type or copy, run as it stands, where it only asks: commands, curl, Python."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from swarm import AsyncClient, Client
from swarm.cli.main import run as run_swarm
from swarm.ctl.main import run as run_swarmctl
from tests.documents import Command, blocks, typed
from tests.integration.gateway import Served
from tests.unit.test_documents import AS_IT_STANDS, RUN, TOLD

pytestmark = pytest.mark.usefixtures("own_cache")
# What is not only a question, what has no end, and who is not there.
LEFT_OUT = {"--apply", "--follow", "--watch", "--join", "w2"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


def asking() -> list[Command]:
    found = [command for _, command in TOLD if RUN.get(command.name) == AS_IT_STANDS]
    whole = [command for command in found if not command.is_short or command.name != "swarm generate"]
    return [command for command in dict.fromkeys(whole) if not set(command.words) & LEFT_OUT]


@pytest.fixture
def place(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the files that are named, and a swarm that is found; an ended request's number is returned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_URL", served.swarm.url)
    (tmp_path / "person.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "sql.gbnf").write_text('root ::= " name"')
    (tmp_path / "swarm.toml").write_text("[broker]\nport = 5800\n")
    with Client(served.swarm.url) as client:
        return client.submit("Once", max_tokens=2)


def words_of(command: Command, request: str, gateway: str) -> list[str]:
    put_in = {
        "URL": gateway,
        "http://127.0.0.1:8000": gateway,
        "REQUEST": request,
        "ID": request,
        "N": "0",
        "WORKER": "w0",
        "/etc/swarm/swarm.toml": "swarm.toml",
        "FILE": "swarm.toml",
    }
    return [put_in.get(word, word) for word in command.words]


@pytest.mark.parametrize("command", [pytest.param(each, id=" ".join(each.words)[:70]) for each in asking()])
def test_what_only_asks_is_run_as_it_stands(
    command: Command, place: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = words_of(command, place, served.url)
    code = {"swarm": run_swarm, "swarmctl": run_swarmctl}[program](words)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert shown.out


def test_curl_is_answered(served: Served) -> None:
    (line,) = [line for line in typed("README.md") if line.startswith("curl ")]
    words = line.replace("localhost:8000", served.url.removeprefix("http://"))
    done = subprocess.run(["bash", "-c", words + " -sf"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("page", "paragraph"),
    [
        pytest.param(page, paragraph, id=f"{page}-{index}")
        for page in ("README.md", "docs/how-to/batching.md", "docs/how-to/grammars.md")
        for body in blocks(page, "python")
        for index, paragraph in enumerate([body] if "import" in body else body.split("\n\n"))
    ],
)
def test_python_does_what_it_shows(
    page: str, paragraph: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a page leaves out the client, it is the one that the paragraph is written for."""
    monkeypatch.setenv("SWARM_URL", served.swarm.url)
    text = paragraph.replace("tcp://127.0.0.1:5700", served.swarm.url).replace("http://127.0.0.1:8000", served.url)
    names = {"json": json, "asyncio": asyncio, "schema": SCHEMA, "prompts": ["Once upon a time", "One day"]}
    code = compile(text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "import" in text:
        exec(code, names)
    elif code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(_awaited(code, names, served.swarm.url))
    else:
        with Client(served.swarm.url) as client:
            exec(code, names | {"client": client})


async def _awaited(code: CodeType, names: dict[str, Any], url: str) -> None:
    async with AsyncClient(url) as client:
        await eval(code, names | {"client": client})
