"""Mapping of the user's settings to those of the deciding code: every option is connected here, and nowhere else."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from swarm.broker.core import CoreSettings
from swarm.broker.members.health import HealthLimits
from swarm.broker.members.recheck import RecheckSettings
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.rebuild import RebuildSettings
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.speculation.proposer import Proposer
from swarm.broker.speculation.suffix import SuffixProposer
from swarm.broker.state.prefix import PrefixRules
from swarm.broker.steps.scheduler import SchedulerSettings
from swarm.config import Settings
from swarm.version import __version__
from swarm.wire.messages import LayerRange, Lineage


class Endpoints(NamedTuple):
    """Addresses that are announced to workers. ``relay``: empty if there is none."""

    heartbeats: str
    data: str
    relay: str = ""


def make_core_settings(settings: Settings, endpoints: Endpoints, lineage: Lineage, key: str | None) -> CoreSettings:
    """Return the deciding code's settings, with the endpoints and the lineage of this process."""
    broker, health = settings.broker, settings.health
    return CoreSettings(
        heartbeat_endpoint=endpoints.heartbeats,
        data_endpoint=endpoints.data,
        key=key,
        dtype="" if broker.dtype == "auto" else broker.dtype,
        relay=endpoints.relay,
        lineage=lineage,
        version=__version__,
        beat_interval_s=settings.worker.beat_interval_s,
        lease_s=settings.worker.lease_s,
        prefix=PrefixRules(
            is_enabled=broker.prefix_cache and broker.kv_cache,
            share=broker.prefix_share,
            policy=broker.prefix_policy,
            max_tokens=broker.prefix_tokens,
        ),
        trace_steps=broker.trace_steps,
        profile_every=settings.log.profile_every,
        check_rules=broker.check_rules,
        run=f"{secrets.token_hex(2)}-",
        speculation=broker.speculation,
        has_draft=has_draft(settings),
        requests=RequestSettings(
            broker.max_queue,
            broker.client_grace_s,
            broker.retain_s,
            has_journal=settings.state_dir is not None,
            too_large_patience_s=broker.too_large_patience_s,
        ),
        scheduler=SchedulerSettings(
            mode=broker.mode,
            step_tokens=broker.step_tokens,
            prefill_chunk=broker.prefill_chunk,
            max_running=broker.max_running,
            kv_cache=broker.kv_cache,
            step_target_s=broker.step_target_s,
            kv_headroom=broker.kv_headroom,
            max_passed=broker.max_passed,
            max_passed_s=broker.max_passed_s,
        ),
        plan=ReconfigurationSettings(
            rules=make_plan_rules(settings),
            min_workers=broker.min_workers,
            settle_s=broker.settle_s,
            prepare_timeout_s=broker.prepare_timeout_s,
            activate_timeout_s=broker.activate_timeout_s,
            max_sequences=settings.worker.max_sequences,
            rebuild=RebuildSettings(settings.recovery.chunk, from_tokens=settings.recovery.source == "tokens"),
        ),
        health=HealthLimits(
            beat_timeout_s=health.beat_timeout_s,
            beat_least_s=health.beat_least_s,
            hang_factor=health.hang_factor,
            hang_min_s=health.hang_min_s,
            asleep_s=health.asleep_s,
        ),
        recheck=RecheckSettings(settings.recovery.recheck_every_s),
    )


def has_draft(settings: Settings) -> bool:
    """Whether a draft model is configured, and may propose."""
    return settings.broker.draft is not None and settings.broker.speculation in ("auto", "draft")


def speculation_conflict(settings: Settings) -> str:
    """Return which settings of speculation contradict each other, and the remedy; empty if none do."""
    mode, draft = settings.broker.speculation, settings.broker.draft
    if draft is not None and not has_draft(settings):
        return (
            f'broker.draft = "{draft}" has no effect with broker.speculation = "{mode}": set that to "auto" or '
            '"draft", or remove broker.draft'
        )
    if mode == "draft" and draft is None:
        return (
            'broker.speculation = "draft" guesses nothing without a draft model: set broker.draft, or set '
            'broker.speculation to "auto"'
        )
    return ""


def make_proposers(settings: Settings) -> list[Proposer]:
    """Return the proposers that compute in the broker's own process. The grammar's is always there."""
    return [SuffixProposer()] if settings.broker.speculation in ("auto", "suffix") else []


def make_plan_rules(settings: Settings) -> PlanRules:
    """Return the rules for plans in the user's settings."""
    plan, broker = settings.plan, settings.broker
    pins: dict[str, LayerRange] = {}
    for name, text in plan.pins.items():
        first, _, last = text.partition("-")
        pins[name] = LayerRange(int(first), int(last or first) + 1)
    return PlanRules(
        mode=broker.mode,
        objective=plan.objective,
        load=PlannedLoad(plan.rows, plan.context, plan.prompt),
        kv_positions=plan.kv_positions,
        quiet_s=plan.quiet_s,
        margin=plan.margin,
        step_positions=broker.step_tokens,
        max_running=broker.max_running,
        max_sequences=settings.worker.max_sequences,
        min_memory_bytes=int(plan.min_memory),
        min_layers_per_s=plan.min_layers_per_s,
        pins=pins,
        caps=dict(plan.caps),
        exclude=frozenset(plan.exclude),
        standby=plan.standby,
        standby_kv=plan.standby_kv,
        cooldown_s=plan.cooldown_s,
    )
