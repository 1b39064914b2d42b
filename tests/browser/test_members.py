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
    stopped and gone, and its log is still there."""
    console.tab("Workers")
    console.page.get_by_role("button", name="Join a worker").first.click()
    console.agree()
    row = console.worker("w3")
    expect(row).to_be_visible(timeout=SLOW_MS)
    expect(console.stage("w3")).to_be_visible(timeout=SLOW_MS)
    row.get_by_role("button", name="Drain").click()
    console.agree()
    expect(console.stage("w3")).to_have_count(0, timeout=SLOW_MS)
    expect(row).to_contain_text("drained")
    expect(row.get_by_role("button", name="Drain")).to_have_count(0)  # it is; what can be done is to take it back
    row.get_by_role("button", name="Stop worker").click()
    console.agree()
    expect(row.get_by_role("button")).to_have_count(0, timeout=SLOW_MS)  # nothing can be ordered of who has left
    roomy.until(lambda: "w3" not in roomy.processes(), "its process has ended")
    logs = console.tab("Logs")
    expect(logs.get_by_label("Process")).to_contain_text(re.compile("w3 · .* · ended"))
    logs.get_by_label("Process").select_option("w3")
    logs.get_by_label("Search").fill("worker_started")
    expect(logs.get_by_role("listitem").first).to_contain_text("w3")


def test_a_worker_is_cordoned_and_back(console: Console, swarm: Swarm) -> None:
    console.tab("Workers")
    row = console.worker("w1")
    row.get_by_role("button", name="Cordon").click()
    console.agree()
    expect(row.get_by_role("button", name="Uncordon")).to_be_visible()
    steered = {worker["name"]: worker["steered"] for worker in swarm.client.query("nodes")["workers"]}
    assert "cordon" in steered["w1"]
    row.get_by_role("button", name="Uncordon").click()
    console.agree()
    expect(row.get_by_role("button", name="Cordon", exact=True)).to_be_visible()


def test_a_plan_is_tried_and_changes_nothing(console: Console, swarm: Swarm) -> None:
    """Without one of them the others have its layers; without all of them there is none, and it is said why."""
    plan = console.tab("Plan")
    expect(plan).to_contain_text("w1 holds layers")
    epoch = swarm.client.query("plan")["epoch"]
    for worker in ("w0", "w1"):
        plan.get_by_label(f"Assume it is gone: {worker}").check()
    plan.get_by_role("button", name="Try").click()
    expect(plan.get_by_role("cell", name="w2 0–7", exact=True)).to_be_visible()
    plan.get_by_label("Assume it is gone: w2").check()
    plan.get_by_role("button", name="Try").click()
    expect(plan).to_contain_text("No plan is possible")
    expect(plan).to_contain_text(re.compile("waiting for .*worker", re.IGNORECASE))
    assert swarm.client.query("plan")["epoch"] == epoch


def test_the_lines_of_the_dead_are_found(console: Console, swarm: Swarm) -> None:
    """By a word in them, after another has taken the name."""
    logs = console.tab("Logs")
    logs.get_by_label("Process").select_option("w2")
    logs.get_by_label("Search").fill("worker_started")
    starts = logs.get_by_role("listitem").filter(has_text="worker_started")
    expect(starts.first).to_be_visible()
    before = starts.count()
    was = swarm.processes()["w2"]
    swarm.kill("w2")
    swarm.until(lambda: swarm.processes().get("w2", was) != was, "there is another w2")
    swarm.until_well()
    logs.get_by_role("button", name="Read again").click()
    expect(starts).to_have_count(before + 1)
    logs.get_by_label("Search").fill("no such word")
    expect(logs).to_contain_text("No matching lines")


def test_events_are_told(console: Console, swarm: Swarm) -> None:
    swarm.kill("w1")
    events = console.tab("Events")
    expect(events).to_contain_text("w1: its connection closed", timeout=SLOW_MS)
    expect(events).to_contain_text("w1 is here", timeout=SLOW_MS)
