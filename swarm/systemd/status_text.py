"""Status of a process in one line, for ``systemctl status``, in the terms of ``swarmctl status``."""

from __future__ import annotations

from collections.abc import Mapping


def broker_status(status: Mapping[str, object]) -> str:
    """Return the broker's status line, from the report of ``swarmctl status``."""
    if status["state"] != "serving":
        return f"{status['state']}: {status['waits_for'] or 'making a plan'}"
    stages = status["num_stages"]
    parts = [f"serving {status['model']} on {stages} {'stage' if stages == 1 else 'stages'}"]
    parts.append(f"{status['num_running']} running, {status['num_queued']} queued")
    return "; ".join([*parts, *([str(problem)] if (problem := status["journal_problem"]) else [])])


def worker_status(*, is_welcome: bool, broker: str, epoch: int | None, layers: str, condition: str) -> str:
    """Return a worker's status line. ``layers``: its layers as text; empty: none. ``epoch``: of the plan in force."""
    if not is_welcome:
        return f"connecting to the broker at {broker}"
    if not layers:
        return f"member without layers; {condition}"
    return f"{layers} of epoch {epoch}; {condition}"


def gateway_status(url: str) -> str:
    return f"serving {url}"
