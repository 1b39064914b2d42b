"""The console's prompt box: the Python that is copied, run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.gateway.node import PATIENCE_S, node

PAGE = Path(__file__).parents[3] / "swarm" / "gateway" / "console" / "page"


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
    command = [node(), "--input-type=module", "-e", code]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert made.returncode == 0, made.stderr

    monkeypatch.setenv("SWARM_API_KEY", "from-env")
    asked = _run(made.stdout, monkeypatch)
    assert asked["client"] == {"base_url": "http://127.0.0.1:8000/v1", "api_key": "from-env"}
    more = asked["create"].pop("extra_body")
    assert {**asked["create"], **more} == body


def _run(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program whose ``to_openai`` notes what it is asked for."""
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
