"""A broker's reports, from a program that stays: one started for each question takes longer than what is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from subprocess import PIPE
from typing import Any

# Answers each line, the name of a report, with that report; with null if no broker does.
PROGRAM = """
import json, sys
from swarm import Client
from swarm.errors import ClientError
client = Client(reconnect_timeout_s=2.0)
for what in sys.stdin:
    try:
        report = client.query(what.strip())
    except ClientError:
        report = None
        client.close()
        client = Client(reconnect_timeout_s=2.0)
    print(json.dumps(report), flush=True)
client.close()
"""


class Reporter:
    """``python``: the words by which Python is started where the broker is asked."""

    def __init__(self, environment: dict[str, str], python: Sequence[str] = (sys.executable,)) -> None:
        self._process = subprocess.Popen([*python, "-c", PROGRAM], stdin=PIPE, stdout=PIPE, text=True, env=environment)

    def close(self) -> None:
        with self._process:
            self._process.kill()

    def __call__(self, what: str) -> Any:
        """What ``swarmctl --json`` would print of it; nothing, if no broker answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline()) or {}
