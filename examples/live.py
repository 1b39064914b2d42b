"""Fault tolerance: workers join one by one, one is killed during an answer, and all answers are the same.

    python examples/live.py

It always starts its own swarm, even if SWARM_URL is set, so that it cannot kill a worker of another swarm.
"""

import os
import signal
import time
from typing import Any

from _swarm import running_swarm

from swarm import Client
from swarm.client.admin import ReportName

PROMPT, NUM_TOKENS, NUM_WORKERS, MEMORY = "Once upon a time", 80, 3, 1 << 30
TIMEOUT_S = 120.0  # enough to start a process, import torch and load layers, on a busy machine


def report(client: Client, what: ReportName) -> Any:
    return client.query(what)


def wait_until_serving(client: Client, num_stages: int) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while (status := report(client, "status"))["state"] != "serving" or status["num_stages"] != num_stages:
        if time.monotonic() > give_up_at:
            raise SystemExit(f"no plan with {num_stages} stages: {status['waits_for'] or status['state']}")
        time.sleep(0.05)
    for stage in report(client, "plan")["stages"]:
        first, stop = stage["layers"]
        print(f"  {stage['worker']} has layers {first} to {stop - 1}")


with running_swarm(num_workers=0, always_own=True) as url, Client(url) as client:
    answers = []
    for number in range(1, NUM_WORKERS + 1):
        print(f"worker {number} of {NUM_WORKERS} joins")
        client.join(1, memory_limit=MEMORY)
        wait_until_serving(client, number)
        answers.append(client.generate(PROMPT, max_tokens=NUM_TOKENS).text)

    print(f"now one is killed in the middle of an answer\n\n{PROMPT}", end="")
    victim = report(client, "plan")["stages"][1]["worker"]
    pid = next(node["pid"] for node in report(client, "nodes")["workers"] if node["name"] == victim)
    text = ""
    for piece in client.stream(PROMPT, max_tokens=NUM_TOKENS):
        if piece.index == NUM_TOKENS // 2:
            os.kill(pid, signal.SIGKILL)
            print(f" [{victim} is dead]", end="")
        text += piece.text
        print(piece.text, end="", flush=True)
    answers.append(text)

    same = len(set(answers)) == 1
    print(
        f"\n\n{len(answers)} answers, with 1, 2 and 3 workers and with one that died: {'the same' if same else answers}"
    )
