"""Workers that come and go, and what the page knows of them: plans, why there is none, charts, logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, Console

if TYPE_CHECKING:
    from tests.browser.swarms import Swarm


@pytest.fixture
def roomy(swarm: Swarm) -> Iterator[Swarm]:
    """Who joined in a test leaves at its end."""
    before = set(swarm.processes())
    yield swarm
    for name in set(swarm.processes()) - before:
        swarm.ask("/console/orders", {"verb": "stop", "worker": name})
    swarm.until(lambda: set(swarm.processes()) == before, "the joined have left")


def test_a_worker_joins_and_drains(console: Console, roomy: Swarm) -> None:
    """It is there within the page's own time, takes a part, and gives it away again when it is drained; then it is
    stopped and gone."""
    workers = console.tab("Workers")
    console.page.get_by_role("button", name="Join a worker").first.click()
    if console.dialog.count():
        console.agree()
    row = workers.get_by_role("row").filter(has_text="w3")
    expect(row).to_be_visible(timeout=SLOW_MS)
    expect(console.stage("w3")).to_be_visible(timeout=SLOW_MS)
    row.get_by_role("button", name="Drain").click()
    console.agree()
    expect(console.stage("w3")).to_have_count(0, timeout=SLOW_MS)
    expect(row).to_contain_text(re.compile("drain", re.IGNORECASE))
    row.get_by_role("button", name="Stop worker").click()
    console.agree()
    expect(row).to_have_count(0, timeout=SLOW_MS)
    assert "w3" not in roomy.processes()


def test_a_worker_is_cordoned_and_back(console: Console, swarm: Swarm) -> None:
    workers = console.tab("Workers")
    row = workers.get_by_role("row").filter(has_text="w1")
    row.get_by_role("button", name="Cordon").click()
    if console.dialog.count():
        console.agree()
    expect(row.get_by_role("button", name="Uncordon")).to_be_visible()
    steered = {worker["name"]: worker["steered"] for worker in swarm.client.query("nodes")["workers"]}
    assert "cordon" in steered["w1"]
    row.get_by_role("button", name="Uncordon").click()
    expect(row.get_by_role("button", name="Cordon", exact=True)).to_be_visible()


def test_a_plan_is_tried_and_changes_nothing(console: Console, swarm: Swarm) -> None:
    """Without one of them the others have its layers; without all of them there is none, and it is said why."""
    plan = console.tab("Plan")
    expect(plan).to_contain_text("w1 holds layers")
    epoch = swarm.client.query("plan")["epoch"]
    for worker in ("w0", "w1"):
        plan.get_by_label(worker, exact=True).check()
    plan.get_by_role("button", name="Try").click()
    expect(plan).to_contain_text("w2 holds layers 0–7")
    plan.get_by_label("w2", exact=True).check()
    plan.get_by_role("button", name="Try").click()
    expect(plan).to_contain_text(re.compile("no worker|no plan|nobody", re.IGNORECASE))
    assert swarm.client.query("plan")["epoch"] == epoch


def test_a_dead_workers_last_lines_are_found(console: Console, swarm: Swarm) -> None:
    """By a word in them, also after it has died and another has its name."""
    dead = swarm.processes()["w2"].pid
    swarm.kill("w2")
    swarm.until_well()
    logs = console.tab("Logs")
    logs.get_by_role("combobox").first.select_option(label=re.compile("w2"))  # type: ignore[call-overload]
    logs.get_by_role("searchbox").fill("worker_started")
    expect(logs.get_by_text("worker_started").first).to_be_visible()
    assert logs.get_by_text("worker_started").count() >= 2, f"the first one's, process {dead}, and its successor's"


def test_events_are_told(console: Console, swarm: Swarm) -> None:
    swarm.kill("w1")
    events = console.region("Events")
    expect(events).to_contain_text("w1: its connection closed", timeout=SLOW_MS)
    expect(events).to_contain_text("w1 is here", timeout=SLOW_MS)
