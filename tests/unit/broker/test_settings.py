"""Every setting of the broker reaches the code that decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm import config
from swarm.broker.core import CoreSettings
from swarm.broker.settings import Endpoints, make_core_settings, make_plan_rules, speculation_conflict
from swarm.wire.messages import NO_LINEAGE

# Another value than the default, of each kind that can't be made by a rule.
OTHER: dict[str, object] = {
    "broker.mode": "batch",
    "broker.dtype": "float32",
    "broker.prefill_chunk": 100,
    "broker.prefix_share": 0.5,
    "broker.prefix_policy": "frequent",
    "broker.speculation": "off",
    "broker.draft": "/models/small",
    "plan.objective": "latency",
    "plan.standby": "all",
    "plan.standby_kv": "all",
    "plan.pins": {"a": "0-3"},
    "plan.caps": {"a": 3},
    "plan.exclude": ["a"],
    "plan.min_memory": 1 << 30,
    "recovery.source": "tokens",
    "worker.max_sequences": 63,
    "worker.beat_interval_s": 0.2,
}
SOCKETS = {
    "broker.host",
    "broker.port",
    "broker.listen",
    "broker.advertise",
    "broker.discoverable",
    "broker.worker_networks",
    "broker.draft_threads",
}  # for the service itself
TOLD = {"worker.beat_interval_s", "worker.lease_s", "worker.max_sequences"}  # the broker tells each worker
KEYS = sorted(
    key
    for key in config.setting_names()
    if (key.startswith(("broker.", "plan.", "health.", "recovery.")) and key not in SOCKETS)
    or key in TOLD | {"log.profile_every"}
)


def decide_by(overrides: dict[str, object]) -> CoreSettings:
    return replace(
        make_core_settings(config.load(overrides=overrides), Endpoints("beat", "data"), NO_LINEAGE, None), run=""
    )


def another(value: Any) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 + 0.5


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_reaches_the_core(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """With another value, the core is told something else: no knob turns nothing."""
    monkeypatch.chdir(str(tmp_path))
    default = config.get(config.Settings().model_dump(), key)
    value = OTHER[key] if key in OTHER else another(default)
    assert decide_by({key: value}) != decide_by({})


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("plan.")])
def test_all_that_is_read_again_of_plans_counts(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A reload tells the core what it was told at the start, no more and no less."""
    monkeypatch.chdir(str(tmp_path))
    default = config.load()
    value = OTHER[key] if key in OTHER else another(config.get(default.model_dump(), key))
    changed = config.load(overrides={key: value})
    assert make_plan_rules(changed) != make_plan_rules(default)
    assert make_core_settings(changed, Endpoints("beat", "data"), NO_LINEAGE, None).plan.rules == make_plan_rules(
        changed
    )


@pytest.mark.parametrize(
    ("mode", "draft", "named"),
    [
        ("off", "/small", "broker.draft"),
        ("suffix", "/small", "broker.draft"),
        ("draft", None, "broker.speculation"),
        ("draft", "/small", ""),
        ("auto", "/small", ""),
        ("auto", None, ""),
        ("off", None, ""),
        ("suffix", None, ""),
    ],
)
def test_settings_of_speculation_that_have_no_effect_are_named(
    mode: str, draft: str | None, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    settings = config.load(overrides={"broker.speculation": mode, "broker.draft": draft})
    conflict = speculation_conflict(settings)
    assert conflict.startswith(named)
    assert bool(conflict) is bool(named)
