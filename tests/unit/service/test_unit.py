"""Settings that are read again: what is in force at once, what wants a restart, what is wrong and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from swarm import log
from swarm.config import Settings
from swarm.errors import ConfigError
from swarm.service.unit import Unit, changes


@pytest.fixture(autouse=True)
def told_from_info_on() -> Iterator[None]:
    log.configure(Settings().log)
    yield
    structlog.reset_defaults()


def test_changes_are_named_by_their_keys() -> None:
    old = Settings().model_dump()
    new = Settings(log={"level": "debug"}, broker={"port": 5800}, model="x").model_dump()  # type: ignore[arg-type]
    assert sorted(changes(old, new)) == ["broker.port", "log.level", "model"]
    assert list(changes(old, old)) == []


def test_what_can_be_is_in_force_and_the_rest_is_told() -> None:
    new = Settings(log={"level": "warning"}, broker={"port": 5800})  # type: ignore[arg-type]
    unit = Unit(Settings(), lambda: new)
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


def test_what_is_wrong_changes_nothing() -> None:
    def load() -> Settings:
        raise ConfigError("nonsense is no setting")

    unit = Unit(Settings(), load)
    with capture_logs() as told:
        unit.reload()
    assert told[0]["event"] == "settings_refused"
    assert "nonsense" in told[0]["reason"]
    assert unit.settings == Settings()
