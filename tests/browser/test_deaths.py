"""What dies in the middle of an answer, as the page tells it; and the answer, which is the same as ever."""

from __future__ import annotations

import itertools
import re
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, SOME_WORDS, Asked, Console, text_of

if TYPE_CHECKING:
    from tests.browser.guards import Guards
    from tests.browser.swarms import Swarm

PHASES = ["verdict", "plan", "load", "activate", "replay", "resume"]
# What a browser writes to the console when the server that a test killed isn't there.
GONE = r"ERR_CONNECTION_(REFUSED|RESET)|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_EMPTY_RESPONSE|ERR_NETWORK"
BUSY = r"status of 503"


def ends_as_ever(console: Console, swarm: Swarm, asked: Asked) -> None:
    """Check that the answer comes to its end, to the letter as without any harm."""
    whole = text_of(swarm.answer(asked.path, asked.body))
    expect(console.answer()).to_have_text(whole, timeout=SLOW_MS)
    assert console.answer().text_content() == whole


def test_a_worker_is_killed_from_the_page(console: Console, swarm: Swarm) -> None:
    """By its button, in the middle of an answer. The recovery is told phase by phase, then in a sentence; the text is
    the undisturbed one; and the worker comes back."""
    victim = swarm.chain()[1]
    before = swarm.processes()[victim].pid
    asked = console.ask_for_much(num_tokens=500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.kill(victim)
    recovery = console.region("Recovery")
    expect(recovery).to_contain_text(re.compile(rf"{victim} (died|was|is|has)"), timeout=SLOW_MS)
    phases = recovery.locator("li[data-phase]")
    expect(phases.first).to_be_visible()
    assert [phase.get_attribute("data-phase") for phase in phases.all()][:6] == PHASES
    expect(recovery.locator('li[data-phase="resume"][data-state="done"]').first).to_contain_text(
        re.compile(r"\d.* ?(ms|s)")
    )
    ends_as_ever(console, swarm, asked)
    expect(recovery).to_contain_text(re.compile(r"went on after|goes on|went on"))
    healed = console.region("Answer").get_by_role("group", name="Healed answer")
    expect(healed).to_contain_text(f"the loss of {victim}")
    expect(healed).to_contain_text("equal", timeout=SLOW_MS)
    digest = sha256((console.answer().text_content() or "").encode()).hexdigest()
    expect(healed.get_by_role("code")).to_have_text([digest[:12], digest[:12]])
    expect(console.stage(victim)).to_be_visible(timeout=SLOW_MS)
    assert swarm.processes()[victim].pid != before


def test_no_is_no(console: Console, swarm: Swarm) -> None:
    """Whoever says no to the question, or presses Escape, kills nobody."""
    victim = swarm.chain()[0]
    before = swarm.processes()[victim].pid
    button = console.stage(victim).get_by_role("button", name="Kill this worker")
    button.click()
    console.dialog.get_by_role("button", name="No").click()
    expect(console.dialog).to_have_count(0)
    button.click()
    console.page.keyboard.press("Escape")
    expect(console.dialog).to_have_count(0)
    assert swarm.processes()[victim].pid == before
    assert swarm.client.query("status")["state"] == "serving"


def test_the_broker_is_killed(console: Console, swarm: Swarm, guards: Guards) -> None:
    """The page says that it is away, and is live again once ``swarm up`` has started another; the answer goes on."""
    guards.expect(BUSY)
    asked = console.ask_for_much(num_tokens=500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    with swarm.left_dead("broker"):
        expect(console.connection).to_contain_text("broker away")
    console.until_live()
    ends_as_ever(console, swarm, asked)
    expect(console.stages).to_have_count(3)


def test_the_gateway_is_killed(console: Console, swarm: Swarm, guards: Guards) -> None:
    """The page says that it looks for it, and is live again with all that it knew; the answer goes on."""
    guards.expect(GONE, BUSY)
    asked = console.ask_for_much(num_tokens=500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    with swarm.left_dead("gateway"):
        expect(console.connection).to_contain_text("reconnecting")
        expect(console.stages).to_have_count(3)  # what was known stays, until it is known better
        expect(console.page.get_by_role("banner")).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d"))
        expect(console.stages.first.get_by_role("button", name="Kill this worker")).to_be_disabled()
        expect(console.tab("Workers").get_by_role("button", name="Drain").first).to_be_disabled()
    console.until_live()
    ends_as_ever(console, swarm, asked)


def test_why_it_cannot_connect_is_said(console: Console, guards: Guards) -> None:
    """In the gateway's words, until it can."""
    guards.expect("status of 503")
    words = "too many consoles are open"
    console.page.route("**/console/live", lambda route: route.fulfill(status=503, json={"error": {"message": words}}))
    console.page.reload()
    expect(console.page.get_by_role("banner")).to_contain_text(words)
    expect(console.tab("Workers")).to_contain_text(words)
    console.page.unroute("**/console/live")
    console.until_live()
    expect(console.page.get_by_role("banner")).not_to_contain_text(words)


def test_a_part_that_could_not_be_loaded_is_tried_again(console: Console, guards: Guards) -> None:
    """A gateway that goes while the page loads leaves no hole in it."""
    guards.expect("Failed to load resource")
    console.page.route(re.compile(r"/console/charts\.js$"), lambda route: route.abort())
    console.page.reload()
    expect(console.tab("Charts").get_by_role("heading", name="Charts")).to_be_visible(timeout=SLOW_MS)


# What the region says, as often as it says anything else.
LISTEN = """() => {
  const region = document.querySelector("[aria-label=Recovery]");
  const stateOf = ({ dataset, style, children }) =>
    [dataset.phase, dataset.state, style.getPropertyValue("--delay"), children[4].textContent];
  const say = () => {
    const phases = [...region.querySelectorAll("li[data-phase]")].map(stateOf);
    window.told.push({ at: performance.now(), words: region.innerText, phases });
  };
  window.told = [];
  new MutationObserver(say).observe(region, { subtree: true, childList: true, characterData: true, attributes: true });
}"""


def test_each_phase_is_told_as_it_happens(console: Console, swarm: Swarm) -> None:
    """Under way before it is over; phases run and are done in their order, with what was predicted beside; those that
    are told live wait for no animation; one sentence at the end. One phase takes seconds, so that the page shows it
    while it runs, on any machine."""
    victim = swarm.chain()[1]
    asked = console.ask_for_much(num_tokens=500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.page.evaluate(LISTEN)
    region = console.region("Recovery")
    with swarm.slowed():
        console.kill(victim)
        activates = region.locator('li[data-phase="activate"][data-state="runs"]')
        expect(activates).to_be_visible(timeout=SLOW_MS)
    expect(region).to_contain_text(re.compile(rf"{victim} was lost; .*1 answer went on after"), timeout=SLOW_MS)
    told = console.page.evaluate("window.told")
    live = [each for each in told if "in progress" in each["words"] and victim in each["words"]]
    ended = [each for each in told if "went on after" in each["words"]]
    assert live, "its end was told, and not its beginning"
    assert live[-1]["at"] < ended[-1]["at"]
    order = {"waits": 0, "runs": 1, "done": 2}
    states = [[order[state] for _, state, *_ in each["phases"]] for each in live]
    assert all(one == sorted(one, reverse=True) for one in states), "phases are told in their order"
    assert all(a <= b for former, later in itertools.pairwise(states) for a, b in zip(former, later, strict=True))
    assert states[0][-1] == 0, "the last phase had not begun when it was first told"
    assert {delay for each in live for _, _, delay, _ in each["phases"]} == {"0s"}
    assert any("of" in predicted for _, _, _, predicted in live[-1]["phases"])
    ends_as_ever(console, swarm, asked)
