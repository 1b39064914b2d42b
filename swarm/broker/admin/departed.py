"""Lookup of a worker by name, and the error text if it is no member: what happened to it, and what to do."""

from __future__ import annotations

from swarm.broker.state import State, Worker, WorkerState

MINUTES_FROM_S = 120.0  # from this value on, times are shown in minutes


def find_member(state: State, name: str) -> Worker | None:
    """Return the member with this name."""
    return next((w for w in state.workers.values() if w.name == name and not w.is_gone), None)


def absence_reason(state: State, name: str) -> str:
    """Return the reason why there is no member with this name."""
    former = [worker for worker in state.workers.values() if worker.name == name]
    if not former:
        here = ", ".join(sorted(w.name for w in state.workers.values() if not w.is_gone))
        return f"no worker {name!r}: the workers are {here or 'none'}"
    worker = former[-1]
    process = f"process {worker.hello.pid} on {worker.hello.host}"
    passed = _describe_duration(0.0 if worker.judgement is None else max(0.0, state.now - worker.judgement.since))
    if worker.state is WorkerState.LEFT:
        return f"{name} left {passed} ago: {worker.reason}; it can be restarted where it ran ({process})"
    return (
        f"{name} has been out for {passed}: {worker.reason}; it rejoins as soon as it answers, and another process of "
        f"its name can join; if it doesn't answer, end it ({process})"
    )


def _describe_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < MINUTES_FROM_S else f"{seconds / 60:.0f} minutes"
