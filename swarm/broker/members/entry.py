"""Who may become a member: those of this build, with a device that can be planned with, the swarm's model and enough to
offer."""

from __future__ import annotations

from swarm.broker.drafts.rules import DEVICES, PlanRules, is_supported
from swarm.broker.recovery.restart import Restart
from swarm.broker.state import State
from swarm.wire.messages import PROTOCOL_VERSION, Hello
from swarm.wire.schema import schema


def why_not(hello: Hello, state: State, restart: Restart, rules: PlanRules) -> str | None:
    """Say why this worker is not let in; None if it is."""
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
