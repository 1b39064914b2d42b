"""Settings that are read again: what is in force at once, what wants a restart, what is wrong and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from swarm import log
from swarm.config import Settings
from swarm.errors import ConfigError
from swarm.systemd.service_context import ALWAYS_LIVE, ServiceContext, changed_names, split_changes


@pytest.fixture(autouse=True)
def told_from_info_on() -> Iterator[None]:
    log.configure(Settings().log)
    yield
    structlog.reset_defaults()


def test_changes_are_named_by_their_keys() -> None:
    old = Settings().model_dump()
    new = Settings(log={"level": "debug"}, broker={"port": 5800}, model="x").model_dump()  # type: ignore[arg-type]
    assert sorted(changed_names(old, new)) == ["broker.port", "log.level", "model"]
    assert list(changed_names(old, old)) == []


def test_what_can_be_is_in_force_and_the_rest_is_told() -> None:
    new = Settings(log={"level": "warning"}, broker={"port": 5800})  # type: ignore[arg-type]
    unit = ServiceContext(Settings(), lambda: new)
    with capture_logs() as told:
        unit.reload()
    assert told[-1] | {"module": ""} == {
        "event": "settings_reloaded",
        "changed": ["log.level"],
        "need_a_restart": ["broker.port"],
        "log_level": "info",
        "module": "",
    }
    assert unit.settings.log.level == "warning"
    assert unit.settings.broker.port == 5700  # as it runs


def test_what_a_process_can_take_it_takes_at_once_and_is_told() -> None:
    """The rest is as it was, and is named again at the next reload; a change that is taken back is one."""
    read = [
        Settings(plan={"caps": {"w0": 3}}, log={"profile_every": 5}),  # type: ignore[arg-type]
        Settings(),
    ]
    told: list[Settings] = []
    unit = ServiceContext(Settings(), lambda: read[0])
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        unit.enable_reload(loop, frozenset({"plan"}), told.append)
    lines: list[MutableMapping[str, Any]] = []
    for _ in range(3):
        with capture_logs() as said:
            unit.reload()
        lines += said
        if len(lines) == 2:
            del read[0]
    assert [(line["changed"], line["need_a_restart"]) for line in lines] == [
        (["plan.caps"], ["log.profile_every"]),
        ([], ["log.profile_every"]),
        (["plan.caps"], []),
    ]
    assert [settings.plan.caps for settings in told] == [{"w0": 3}, {}]
    assert {settings.log.profile_every for settings in told} == {0}


def test_what_only_a_broker_reads_concerns_nobody_else() -> None:
    news = split_changes(Settings(), Settings(plan={"margin": 0.5}), ALWAYS_LIVE)  # type: ignore[arg-type]
    assert (news.immediate, news.need_a_restart) == ((), ())
    assert news.settings == Settings()


def test_what_is_wrong_changes_nothing() -> None:
    def load() -> Settings:
        raise ConfigError("nonsense is no setting")

    unit = ServiceContext(Settings(), load)
    with capture_logs() as told:
        unit.reload()
    assert told[0]["event"] == "settings_refused"
    assert "nonsense" in told[0]["reason"]
    assert unit.settings == Settings()
