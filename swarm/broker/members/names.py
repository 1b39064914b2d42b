"""Whose name a worker may have, beside what the roll says (``broker.locks``): nobody from elsewhere is called as a
worker of the broker's own machine, which shows no key, and would be told to end as a process that was started anew."""

from __future__ import annotations

from swarm.broker.state import State, WorkerState


def why_not_called(name: str, owner: str, state: State) -> str | None:
    """Say why this member's worker may not have this name; None if it may. ``owner``: see ``WorkerSaid``."""
    if not owner or not _is_anothers(name, owner, state):
        return None
    return f"the name {name} is that of a worker on the broker's own machine: call this one {owner}-SOMETHING (--name)"


def _is_anothers(name: str, owner: str, state: State) -> bool:
    """Is there a worker of this name that is not this member's, or was there one that may come back?"""
    found = [worker for worker in state.workers.values() if worker.name == name]
    return any(worker.belongs_to != owner and worker.state is not WorkerState.LEFT for worker in found)
