"""For everybody: assistive technology, the keyboard alone, a phone, less motion."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.axe import NoAxe, grave_findings, source
from tests.browser.console import SLOW_MS, SOME_WORDS, Console, until_seen

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import OpenContext
    from tests.browser.swarms import Swarm

TABS = ["Chat", "Swarm", "Requests", "Plan", "Logs", "Connect"]
SHOWN = {"Chat": "Prompt", "Swarm": "Stages", "Connect": "Connect a client"}  # a part of each tab
PHONE = {"width": 360, "height": 780}
MOST_STOPS = 80  # that a person would press Tab on the way to anything here


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        return source(tmp_path_factory.mktemp("axe"))
    except NoAxe as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_grave(open_context: OpenContext, swarm: Swarm, axe: str, scheme: str) -> None:
    """With an answer and its timeline, in each tab, and before a question."""
    context = open_context(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 1280, "height": 900})
    console = Console(context.new_page(), swarm.url)
    console.open()
    console.write("Where is the cat?")
    console.set("Max tokens", "12")
    console.generate()
    expect(console.timeline()).to_contain_text(re.compile("slowest", re.IGNORECASE), timeout=SLOW_MS)
    for name in TABS:
        console.tab(name)
        assert grave_findings(console.page, axe) == [], name
    console.drawer()
    assert grave_findings(console.page, axe) == [], "the parameters"
    console.stage("w1").get_by_role("button", name="Kill this worker").click()
    expect(console.dialog).to_be_visible()
    assert grave_findings(console.page, axe) == [], "the question"


def press_until(page: Page, key: str, what: str, holds: str) -> None:
    """Press a key until the focused element is as wished (an expression with ``at``)."""
    for _ in range(MOST_STOPS):
        if page.evaluate(f"(() => {{ const at = document.activeElement; return Boolean({holds}); }})()"):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{MOST_STOPS} times {key}, and never at {what}")


def at_button(name: str) -> str:
    return f"at.matches('button') && (at.getAttribute('aria-label') ?? at.textContent).trim().startsWith('{name}')"


def test_the_keyboard_is_enough(console: Console, swarm: Swarm) -> None:
    """A prompt is written and sent, a worker is killed, and tabs are changed: by keys alone, with the focus seen."""
    page = console.page
    press_until(page, "Tab", "the prompt", "at.matches('textarea')")
    page.keyboard.type("Where is the cat?")
    press_until(page, "Tab", "Send", at_button("Send"))
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "the focus is to be seen"
    page.keyboard.press("Enter")
    expect(console.answer()).to_have_text(SOME_WORDS)

    victim = swarm.chain()[0]  # whose button comes first on the way
    before = swarm.processes()[victim].pid
    press_until(page, "Tab", "a button to kill", at_button("Kill this worker"))
    page.keyboard.press("Enter")
    expect(console.dialog).to_be_visible()
    press_until(page, "Tab", "Yes", at_button("Yes"))
    page.keyboard.press("Enter")
    expect(console.dialog).to_have_count(0)
    swarm.until(lambda: (now := swarm.processes().get(victim)) and now.pid != before, "another has its name")

    swarm.until_well()
    press_until(page, "Shift+Tab", "a tab", "at.getAttribute('role') === 'tab'")
    expect(page.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
    for key, name in {"ArrowRight": "Swarm", "End": TABS[-1], "Home": TABS[0]}.items():
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(console.region(SHOWN[name])).to_be_visible()


def test_a_plan_is_tried_by_keys_alone(console: Console, swarm: Swarm) -> None:
    """From field to field by Tab. Enter in a field tries it; on Apply it asks first, and Escape goes back there."""
    page, plan = console.page, console.region("Plan")
    epoch, last = swarm.client.query("plan")["epoch"], swarm.chain()[-1]
    press_until(page, "Tab", "a tab", "at.getAttribute('role') === 'tab'")
    for name in ("Swarm", "Requests", "Plan"):
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name=name)).to_be_focused()
    press_until(page, "Tab", "its layers", f"at.getAttribute('aria-label') === 'Only layers: {last}'")
    page.keyboard.type("0-1")
    page.keyboard.press("Enter")
    tried = plan.get_by_role("row", name=re.compile("^Stages"))
    expect(tried).to_contain_text(f"{last} 0–1,", timeout=SLOW_MS)
    press_until(page, "Tab", "Apply", at_button("Apply"))
    page.keyboard.press("Enter")
    expect(console.dialog).to_contain_text("Apply this?")
    page.keyboard.press("Escape")
    expect(console.dialog).to_have_count(0)
    expect(plan.get_by_role("button", name="Apply")).to_be_focused()
    assert swarm.client.query("plan")["epoch"] == epoch


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


def test_colours_are_chosen_by_keys_and_kept(open_context: OpenContext, swarm: Swarm) -> None:
    """Light, dark, and the system's again, in turn; a reload changes nothing of it."""
    context = open_context(color_scheme="light", reduced_motion="reduce")
    page = context.new_page()
    console = Console(page, swarm.url)
    console.open()
    colours = page.get_by_role("banner").get_by_role("button", name=re.compile("^Colours: "))
    expect(colours).to_have_accessible_name("Colours: Auto")
    light = background(page)
    press_until(page, "Tab", "the colours", at_button("Colours"))
    for key, chosen in (("Enter", "Light"), ("Space", "Dark")):
        page.keyboard.press(key)
        expect(colours).to_have_accessible_name(f"Colours: {chosen}")
        expect(colours).to_be_focused()
        assert (background(page) == light) is (chosen == "Light")
    dark = background(page)
    page.reload()
    console.until_live()
    expect(colours).to_have_accessible_name("Colours: Dark")
    assert background(page) == dark
    press_until(page, "Tab", "the colours", at_button("Colours"))
    page.keyboard.press("Enter")
    expect(colours).to_have_accessible_name("Colours: Auto")
    page.reload()
    console.until_live()
    expect(colours).to_have_accessible_name("Colours: Auto")
    assert background(page) == light


def test_a_phone_is_wide_enough(open_context: OpenContext, swarm: Swarm) -> None:
    """No part is wider than the screen, in any tab; what is touched is large enough."""
    context = open_context(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    console = Console(context.new_page(), swarm.url)
    console.open()
    console.write("Where is the cat? " * 20)
    console.set("Max tokens", "30")
    console.generate()
    expect(console.answer()).to_have_text(SOME_WORDS)
    for name in TABS:
        console.tab(name)
        wide = console.page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= PHONE["width"], f"{name}: {wide} pixels"
    small = console.page.evaluate(
        """[...document.querySelectorAll("button")].filter((button) => button.checkVisibility())
        .map((button) => [button.textContent.trim(), button.getBoundingClientRect()])
        .filter(([, box]) => box.height < 24 || box.width < 24).map(([name]) => name)"""
    )
    assert small == []


def test_on_a_phone_each_worker_is_a_card(open_context: OpenContext, swarm: Swarm) -> None:
    """Its state, its layers and how quick it is stand with its name, and all of its orders can be reached."""
    context = open_context(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    console = Console(context.new_page(), swarm.url)
    console.open()
    rows = console.tab("Workers").locator("tr[data-worker]")
    expect(rows).to_have_count(3)
    for row in rows.all():
        row.scroll_into_view_if_needed()
        for words in (re.compile(r"^w\d$"), re.compile("well|slow"), re.compile("tokens/s$")):
            expect(row.get_by_text(words).first).to_be_in_viewport()
        expect(row.locator("[data-name=Layers]")).to_be_in_viewport()
        for name in ("Drain", "Cordon", "Stop worker"):
            expect(row.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)


def _place_below(page: Page, top: float) -> dict[str, Any] | None:
    """Return what has the focus, unless it lies under the page's top. News may move it for a moment."""
    place: dict[str, Any] = page.evaluate(
        """(() => { const at = document.activeElement; return { top: at.getBoundingClientRect().top,
        isOfTop: at.closest('header, .skip') !== null, isStage: at.closest('.stage') !== null }; })()"""
    )
    return place if place["isStage"] or place["isOfTop"] or place["top"] >= top - 1 else None


def test_what_the_keys_go_back_to_is_not_under_the_top(console: Console) -> None:
    """The top of the page stays where it is: what gets the focus comes to lie below it."""
    page = console.page
    console.tab("Events").get_by_label("Filter events").focus()
    page.evaluate("document.scrollingElement.scrollTo(0, 1e6)")
    top = page.evaluate("document.querySelector('header').getBoundingClientRect().bottom")
    for _ in range(MOST_STOPS):
        page.keyboard.press("Shift+Tab")
        found = until_seen(page, lambda: _place_below(page, top), "what has the focus lies below the page's top")
        if found["isStage"]:
            return
    raise AssertionError(f"{MOST_STOPS} times Shift+Tab, and never at a stage")


MOVING = """document.getAnimations().filter((one) => one.playState === "running" &&
one.effect.getComputedTiming().duration > 20).map((one) => one.effect.target.className)"""


def moving(page: Page) -> Counter[str]:
    """What moves by itself, and how many of each."""
    return Counter(page.evaluate(MOVING))


def ask_while_steps_go(console: Console) -> None:
    """Returns when the page knows that steps go through the stages, and long before they end."""
    console.ask_for_much(num_tokens=1900)
    expect(console.page.get_by_role("banner")).to_contain_text(re.compile(r"[1-9]\d* tokens/s"))
    expect(console.region("Answer").get_by_role("status").first).to_have_text("streaming")


def test_steps_are_seen_moving_through_the_chain(console: Console, swarm: Swarm) -> None:
    """Along each link, those from and to the broker among them, and through each stage; until nothing runs."""
    num = len(swarm.chain())
    ask_while_steps_go(console)
    steps = {"link-pulse": num + 1, "stage-glow": num}
    until_seen(console.page, lambda: steps.items() <= moving(console.page).items(), f"{steps} move")
    console.button("Stop").click()
    until_seen(console.page, lambda: not steps.keys() & moving(console.page).keys(), "nothing moves any more")


def test_less_motion_is_less_motion(open_context: OpenContext, swarm: Swarm) -> None:
    """For who asks for it, nothing moves by itself, also while an answer comes."""
    context = open_context(reduced_motion="reduce")
    console = Console(context.new_page(), swarm.url)
    console.open()
    ask_while_steps_go(console)
    assert moving(console.page) == {}
    console.button("Stop").click()


def test_charts_are_told_in_words(console: Console) -> None:
    """Whoever can't see a drawing is told what it shows: the latest figure, a summary, and each point by the keys."""
    charts = console.tab("Charts")
    expect(charts.get_by_role("figure")).to_have_count(4)
    for figure in charts.get_by_role("figure").all():
        plot = figure.get_by_role("slider")
        assert re.search(r"\w{4}", plot.get_attribute("aria-label") or "")
        assert re.search(r"\w{4}", plot.get_attribute("aria-valuetext") or "")
    console.page.wait_for_timeout(2500)  # two more points
    plot = charts.get_by_role("slider").first
    plot.focus()
    console.page.keyboard.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"\d\d:\d\d:\d\d: "))
    assert charts.locator("canvas:not([aria-hidden=true])").count() == 0
