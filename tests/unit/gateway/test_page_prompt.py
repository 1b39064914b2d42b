"""The console's prompt box: its modules without a page, by Node's test runner, and the Python that is copied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parent / "page_prompt"
PAGE = Path(__file__).parents[3] / "swarm" / "gateway" / "console" / "page"
LEAST = (20, 19)  # since then modules need no package.json beside them
PATIENCE_S = 120


def _node() -> str:
    """Find Node, or skip by name."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    found = re.match(r"v(\d+)\.(\d+)", told)
    if found is None or tuple(map(int, found.groups())) < LEAST:
        pytest.skip(f"node is {told.strip()}; the page's modules are tested by {LEAST[0]}.{LEAST[1]} or later")
    return node


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.test.mjs")))
def test_modules_do_what_their_own_tests_say(name: str) -> None:
    """Each file of Node's tests passes."""
    command = [_node(), "--test", "--test-reporter=spec", str(TESTS / name)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_copied_python_asks_for_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that is copied runs, and asks OpenAI's client for what the page would send."""
    content = 'it\'s "quoted" \\ \n 😀 \u2028 مرحبا'
    said = {"messages": [{"role": "user", "content": content}]} if "chat" in path else {"prompt": content}
    schema = {"type": "object", "properties": {"ok": {"type": "boolean", "const": True}, "no": {"const": None}}}
    body = {"model": "village", **said, "max_tokens": 9, "n": 2, "top_k": 4, "stream": True}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    where = {"baseUrl": "http://127.0.0.1:8000/v1", "needsKey": True}
    code = f"""
        import {{ pythonOf }} from {json.dumps((PAGE / "snippets.js").as_uri())};
        console.log(pythonOf({json.dumps({"path": path, "body": body})}, {json.dumps(where)}));
    """
    command = [_node(), "--input-type=module", "-e", code]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert made.returncode == 0, made.stderr

    monkeypatch.setenv("SWARM_API_KEY", "from-env")
    asked = _run(made.stdout, monkeypatch)
    assert asked["client"] == {"base_url": "http://127.0.0.1:8000/v1", "api_key": "from-env"}
    more = asked["create"].pop("extra_body")
    assert {**asked["create"], **more} == body


def _run(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program whose ``openai`` notes what it is asked for."""
    asked: dict[str, Any] = {}

    def create(**given: Any) -> list[Any]:
        asked["create"] = given
        return []

    def client(**given: Any) -> Any:
        asked["client"] = given
        completions = SimpleNamespace(create=create)
        return SimpleNamespace(chat=SimpleNamespace(completions=completions), completions=completions)

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=client))
    exec(compile(program, "copied.py", "exec"), {})
    return asked
