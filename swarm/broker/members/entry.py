"""Who may become a member: those of this build, with a device that can be planned with, the swarm's model and enough to
offer."""

from __future__ import annotations

from swarm.broker.drafts.rules import DEVICES, PlanRules, is_supported
from swarm.broker.recovery.restart import Restart
from swarm.broker.state import State, WorkerState
from swarm.wire.messages import PROTOCOL_VERSION, Hello
from swarm.wire.schema import schema


def why_not(hello: Hello, owner: str, state: State, restart: Restart, rules: PlanRules) -> str | None:
    """Say why this worker is not let in; None if it is. ``owner``: see ``WorkerSaid``."""
    if owner and _is_anothers(hello.name, owner, state):
        return (
            f"the name {hello.name} is that of a worker on the broker's own machine: call this one "
            f"{owner}-SOMETHING (--name)"
        )
    if PROTOCOL_VERSION not in hello.wire_versions:
        return f"this broker speaks protocol {PROTOCOL_VERSION}, the worker {hello.wire_versions}: install one version"
    if hello.schema != schema():
        return "the worker's messages are those of another build than the broker's: install one version on both"
    if not is_supported(hello.device):
        return f"device {hello.device!r} is none of {', '.join(DEVICES)}"
    # After a restart another model may come, if it is one of the known workers that brings it; but a stranger does not
    # take the swarm away from those that are waited for.
    is_expected = hello.name in restart.awaited or restart.waits_for(state.now) is None
    if state.manifest is not None and not (restart.model_is_remembered and is_expected):
        difference = state.manifest.difference(hello.manifest)
        if difference is not None:
            return f"this swarm serves another model: {difference}"
    return rules.why_not(hello)


def _is_anothers(name: str, owner: str, state: State) -> bool:
    """Is there a worker of this name that is not this member's, or was there one that may come back? It would be told
    to end, as a process that was started anew."""
    found = [worker for worker in state.workers.values() if worker.name == name]
    return any(worker.belongs_to != owner and worker.state is not WorkerState.LEFT for worker in found)
