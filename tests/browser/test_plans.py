"""Plans by hand and by button: what is tried, what is applied, and that it is so everywhere then."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, Console
from tests.browser.feed import first_view

if TYPE_CHECKING:
    from playwright.sync_api import Route

    from tests.browser.swarms import Swarm


def swarmctl(swarm: Swarm, *words: str) -> Any:
    """What the command says, as JSON."""
    command = [
        sys.executable,
        "-c",
        "from swarm.ctl.main import main; main()",
        *words,
        "--url",
        swarm.broker_url,
        "--json",
    ]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def steered(swarm: Swarm) -> Iterator[Swarm]:
    """Afterwards plans go by the settings alone, nobody is kept out, and nothing runs."""
    before = swarm.chain()
    yield swarm
    for row in swarm.client.query("requests")["requests"]:
        swarm.ask("/console/orders", {"verb": "cancel", "request": row["request_id"]})
    swarm.ask("/console/orders", {"verb": "plan", "suppose": {}})
    for worker in before:
        swarm.ask("/console/orders", {"verb": "uncordon", "worker": worker})
    swarm.ask("/console/orders", {"verb": "rebalance"})
    swarm.until_well()
    swarm.until(lambda: not first_view(swarm.url)["plan"].get("by_hand"), "pages show that nothing is by hand")


def test_a_plan_is_tried_then_applied_and_then_it_is_so(console: Console, steered: Swarm) -> None:
    """What was tried is what comes: in the page's stages and its plan, and for ``swarmctl plan``. An answer that is
    under way goes on. Cleared and applied, plans go by the settings again."""
    before = steered.client.query("plan")
    last = steered.chain()[-1]
    console.ask_for_much(num_tokens=1900)
    plan = console.tab("Plan")
    plan.get_by_label(f"Only layers: {last}").fill("0-1")
    plan.get_by_role("button", name="Try").click()
    tried = plan.get_by_role("row", name=re.compile("^Stages"))
    expect(tried).to_contain_text(f"{last} 0–1,", timeout=SLOW_MS)
    (_, then) = tried.get_by_role("cell").all_inner_texts()
    assert steered.client.query("plan")["epoch"] == before["epoch"]

    plan.get_by_role("button", name="Apply").click()
    console.agree()
    expect(console.news).to_contain_text("plan", timeout=SLOW_MS)
    console.chat()
    expect(console.stages.first).to_have_attribute("aria-label", f"Stage 1: {last}", timeout=SLOW_MS)
    now = swarmctl(steered, "plan")
    assert now["epoch"] > before["epoch"]
    assert "by_hand" in now
    assert ", ".join(f"{s['worker']} {s['layers'][0]}–{s['layers'][1] - 1}" for s in now["stages"]) == then
    console.tab("Plan")
    held = plan.get_by_role("table", name="Stages of the plan").get_by_role("row").filter(has_text=last)
    expect(held).to_contain_text("0–1", timeout=SLOW_MS)
    console.button("Stop").click()
    expect(console.region("Answer").get_by_role("status").first).to_have_text(
        "stopped", timeout=SLOW_MS
    )  # it was still under way

    console.tab("Plan")
    plan.get_by_role("button", name="Clear").click()
    plan.get_by_role("button", name="Apply").click()
    expect(console.dialog).to_contain_text("Plans follow the settings alone again")
    console.agree()
    steered.until(lambda: "by_hand" not in steered.client.query("plan"), "the settings alone decide")


def test_an_answer_for_a_form_that_was_changed_is_not_shown(console: Console) -> None:
    """A press is seen at once; what comes late is no plan for what stands there by then."""
    plan = console.tab("Plan")
    tries, applies = (plan.get_by_role("button", name=name) for name in ("Try", "Apply"))
    then = plan.get_by_role("row", name=re.compile("^Stages"))
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    console.page.route("**/console/plan", hold)
    with console.page.expect_request("**/console/plan"):
        tries.click()
    expect(plan).to_contain_text("Computing")
    expect(tries).to_be_disabled()
    expect(applies).to_be_disabled()
    plan.get_by_label("More workers").fill("1")
    expect(plan).to_contain_text("The form has changed since the request")
    held.pop().continue_()
    expect(tries).to_be_enabled(timeout=SLOW_MS)
    expect(then).to_have_count(0)
    console.page.unroute("**/console/plan")
    tries.click()
    expect(then).to_be_visible(timeout=SLOW_MS)


def tried(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Press Try: what the page asks for, and what it is told."""
    with console.page.expect_response("**/console/plan") as answered:
        console.region("Plan").get_by_role("button", name="Try").click()
    return answered.value.request.post_data_json, answered.value.json()


def check_shown(console: Console, told: dict[str, Any]) -> None:
    """All of it is in the page: whether anything would change, who would have what, and each sentence."""
    plan = console.region("Plan")
    expect(plan.get_by_role("heading", name=f"This {told['state']}", exact=True)).to_be_visible()
    shown = plan.locator(".supposed")
    _, then = shown.get_by_role("row", name=re.compile("^Stages")).get_by_role("cell").all_inner_texts()
    ranges = [(stage["worker"], *stage["layers"]) for stage in told["stages"]]
    assert then == ", ".join(f"{name} {a}–{b - 1}" if b - a > 1 else f"{name} {a}" for name, a, b in ranges)
    assert shown.get_by_role("listitem").all_inner_texts() == told["why"]


def test_one_more_is_supposed(console: Console, swarm: Swarm) -> None:
    """Like one that is named: the answer speaks of it. It can't be applied, and it is said what can."""
    plan = console.tab("Plan")
    epoch = swarm.client.query("plan")["epoch"]
    plan.get_by_label("More workers").fill("1")
    plan.get_by_label("Each like").select_option("w1")
    asked, told = tried(console)
    assert asked["one_more"] == {"count": 1, "like": "w1"}
    assert "w1+1" in " ".join([*told["why"], *(stage["worker"] for stage in told["stages"])])
    check_shown(console, told)
    expect(plan).to_contain_text("w1+1")
    plan.get_by_role("button", name="Apply").click()
    expect(plan).to_contain_text("drain or join them")
    assert swarm.client.query("plan")["epoch"] == epoch


def test_another_objective_is_tried(console: Console, swarm: Swarm) -> None:
    """The answer says for what it was reckoned."""
    plan = console.tab("Plan")
    before = swarm.client.query("plan")
    for objective in ("latency", "throughput"):
        plan.get_by_label("Objective").select_option(objective)
        asked, told = tried(console)
        assert asked["objective"] == objective
        check_shown(console, told)
        expect(plan.locator(".supposed")).to_contain_text(f"objective {objective}: for ")
    after = swarm.client.query("plan")
    assert (after["epoch"], after["objective"]) == (before["epoch"], before["objective"])


def test_the_plan_is_not_cut_at_the_right(console: Console, swarm: Swarm) -> None:
    """Beside What if, in a window of a laptop's width: also with measured steps."""
    swarm.answer("/v1/completions", {"model": "village", "prompt": "Once", "max_tokens": 40})
    stages = console.tab("Plan").get_by_role("group", name="Stages of the plan, scrolls")
    expect(stages).to_contain_text(re.compile(r"over \d+ steps"), timeout=SLOW_MS)
    assert console.page.viewport_size == {"width": 1280, "height": 900}
    assert stages.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 0


def test_rebalance_brings_back_who_was_drained(console: Console, steered: Swarm) -> None:
    """By its button, after a question: a plan is made from what is there now."""
    last = steered.chain()[-1]
    steered.ask("/console/orders", {"verb": "drain", "worker": last})
    expect(console.stage(last)).to_have_count(0, timeout=SLOW_MS)
    steered.ask("/console/orders", {"verb": "uncordon", "worker": last})
    workers = console.tab("Workers")
    workers.get_by_role("button", name="Rebalance").click()
    console.dialog.get_by_role("button", name="No").click()
    workers.get_by_role("button", name="Rebalance").click()
    console.agree()
    expect(console.news).to_contain_text("plan", timeout=SLOW_MS)
    expect(console.stage(last)).to_be_visible(timeout=SLOW_MS)


def test_who_keeps_which_layers_warm_is_told(console: Console, swarm: Swarm) -> None:
    """As ``swarmctl standby`` tells it: beside each worker, and in its stage."""
    rows = swarm.until(
        lambda: all((found := swarmctl(swarm, "standby"))["workers"]) and not found["not_kept"] and found["workers"],
        "all layers are kept warm by somebody",
    )
    console.tab("Workers")
    for row in rows:
        kept = ", ".join(f"{a}–{b - 1}" if b - a > 1 else f"{a}" for a, b in row["standby"])
        expect(console.worker(row["name"])).to_contain_text(kept or "none")
        if kept:
            expect(console.stage(row["name"])).to_contain_text(f"standby {kept}")
