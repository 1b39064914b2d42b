"""Settings as a running process tells them: what it reads, where each value comes from, and no password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from swarm import log
from swarm.config import Settings, load, origins
from swarm.config.display import FROM_PROCESS, Process, describe_settings
from swarm.stage.shell.control import settings_message
from swarm.systemd.service_context import ServiceContext
from swarm.wire.messages import MAX_TEXT


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    log.configure(Settings().log)
    yield
    structlog.reset_defaults()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "swarm.toml"
    path.write_text("[plan]\nmargin = 0.2\n[[upstream]]\nurl = 'https://me:secret@other/v1'\n")
    return path


def unit_of(file: Path) -> ServiceContext:
    unit = ServiceContext(load(file), lambda: load(file), origins=lambda: origins(file))
    unit._live = unit._live | {"plan"}
    return unit


def told(unit: ServiceContext, process: Process, settings: Settings | None = None) -> dict[str, tuple[object, str]]:
    return {each.name: (each.value, each.origin) for each in unit.describe_settings(process, settings)}


def test_each_process_tells_what_it_reads(file: Path) -> None:
    unit = unit_of(file)
    assert told(unit, "broker")["plan.margin"] == (0.2, f"the file {file}")
    assert "gateway.port" not in told(unit, "broker")
    assert "upstream" in told(unit, "gateway")
    assert "plan.margin" not in told(unit, "worker")
    assert told(unit, "worker")["worker.bits"] == ("auto", "the defaults")


def test_no_password_is_told(file: Path) -> None:
    assert "secret" not in str(told(unit_of(file), "gateway"))
    assert "https://…@other/v1" in str(told(unit_of(file), "gateway"))


def test_what_the_process_found_out_itself_is_told_so(file: Path) -> None:
    unit = unit_of(file)
    own = unit.settings.model_copy(update={"worker": unit.settings.worker.model_copy(update={"name": "machine-7"})})
    assert told(unit, "worker", own)["worker.name"] == ("machine-7", FROM_PROCESS)


def test_after_a_reload_what_is_in_force_is_told(file: Path) -> None:
    """With its origin; what needs a restart is as it runs."""
    unit = unit_of(file)
    file.write_text("[plan]\nmargin = 0.3\ncaps = { w0 = 3 }\n[broker]\nport = 5800\n")
    unit.reload()
    found = told(unit, "broker")
    assert found["plan.margin"] == (0.3, f"the file {file}")
    assert found["plan.caps"] == ({"w0": 3}, f"the file {file}")
    assert found["broker.port"] == (5700, "the defaults")


def test_a_value_that_is_too_long_for_a_message_is_left_out(file: Path) -> None:
    """A worker whose Hello is rejected because of its settings would be useless."""
    settings = Settings(model="m" * 2 * MAX_TEXT)
    (told,) = [each for each in settings_message(describe_settings(settings, {}, "worker")) if each.name == "model"]
    assert told.value == '"…"'
