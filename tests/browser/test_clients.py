"""What is copied from the page works as it was copied: commands, programs, and settings of other programs."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from tests.browser.commands import run, streamed
from tests.browser.console import Console, text_of

if TYPE_CHECKING:
    from tests.browser.conftest import OpenContext
    from tests.browser.swarms import Swarm

# In the place of a program that reads the settings from its environment: it asks the address that they name.
STAND_IN = """#!/bin/sh
curl -fsS -H "Authorization: Bearer ${OPENAI_API_KEY:-$ANTHROPIC_AUTH_TOKEN}" \\
  "${OPENAI_API_BASE_URL:-$ANTHROPIC_BASE_URL/v1}/models" -w '\\n' > "$STAND_IN_FOUND" && env >> "$STAND_IN_FOUND"
"""


@pytest.fixture
def copying(open_context: OpenContext, swarm: Swarm) -> Console:
    """A page that may write to the clipboard, and lets us read it."""
    context = open_context(permissions=["clipboard-read", "clipboard-write"])
    console = Console(context.new_page(), swarm.url)
    console.open()
    return console


def fill_in(console: Console, mode: str) -> None:
    """A prompt with all that a shell and a language could take amiss."""
    console.choose(mode)
    console.write("It's \"Anna's\" `dog`,\n$HOME \\ and 100 % 🐸:")
    for label, value in {"Max tokens": "12", "Temperature": "0.8", "Top k": "7", "Stop": "frog\\n\nthe end"}.items():
        console.set(label, value)


@pytest.mark.parametrize("mode", ["Chat", "Raw"])
def test_what_is_copied_of_a_prompt_gives_the_answer_of_the_page(copying: Console, swarm: Swarm, mode: str) -> None:
    """For a shell and for Python, with the parameters, to the letter."""
    fill_in(copying, mode)
    shell, python = copying.copied("Copy as curl"), copying.copied("Copy as Python")
    asked = copying.generate()
    whole = text_of(swarm.answer(asked.path, asked.body))
    copying.until_answered()
    assert copying.answer().text_content() == (whole.rstrip() if mode == "Chat" else whole)  # Markdown ends without it
    assert streamed(run(["sh", "-c", shell])) == whole
    assert run([sys.executable, "-c", python]) == whole


def test_several_continuations_are_copied_too(copying: Console, swarm: Swarm) -> None:
    fill_in(copying, "Raw")
    copying.set("Continuations", "2")
    python = copying.copied("Copy as Python")
    asked = copying.generate()
    answer = swarm.answer(asked.path, asked.body)
    assert run([sys.executable, "-c", python]) == "\n\n".join(text_of(answer, number) for number in range(2)) + "\n"


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment whose ``claude`` and ``open-webui`` are stand-ins."""
    for name in ("claude", "open-webui"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STAND_IN_FOUND": str(tmp_path / "found")}


def test_settings_for_clients_work_as_they_are_copied(
    copying: Console, swarm: Swarm, stand_ins: dict[str, str]
) -> None:
    """Commands and programs get an answer; settings name an address that answers, and the model that is served."""
    copying.tab("Connect a client")
    settings = {name: copying.copied(f"Copy the settings for {name}") for name in ("Python", "curl", "Codex")}
    assert run([sys.executable, "-c", settings["Python"]])
    assert streamed(run(["sh", "-c", settings["curl"]]))
    _check_codex(swarm, tomllib.loads(settings["Codex"]))
    for name in ("Claude Code", "Open WebUI"):
        run(["sh", "-c", copying.copied(f"Copy the settings for {name}")], **stand_ins)
        models, _, environment = Path(stand_ins["STAND_IN_FOUND"]).read_text().partition("\n")
        assert "village" in [model["id"] for model in json.loads(models)["data"]]
        if name == "Claude Code":
            assert "ANTHROPIC_MODEL=village" in environment


def _check_codex(swarm: Swarm, config: dict[str, Any]) -> None:
    """What it names answers where Codex asks."""
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    path = provider["base_url"].removeprefix(swarm.url) + "/responses"
    code, answer = swarm.ask(path, {"model": config["model"], "input": "Who is Anna?", "max_output_tokens": 8})
    assert (code, answer["model"]) == (200, "village")
    assert config["model_context_window"] == 2048
