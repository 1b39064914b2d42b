"""What is copied from the page, run as a person would run it."""

from __future__ import annotations

import json
import os
import subprocess

RUN_S = 60.0


def run(command: list[str], **environment: str) -> str:
    """What a command prints, which must end well. It knows of no proxy and no key but those that are given."""
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, env=own | environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def streamed(events: str) -> str:
    """The text in the events that curl has printed, to their end."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    choices = [choice for chunk in data[:-1] for choice in json.loads(chunk)["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)
