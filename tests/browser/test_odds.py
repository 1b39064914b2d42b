"""What people bring along: names without an end, little room, colours of their own, clocks that are set."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, SOME_WORDS, Console, until_seen
from tests.browser.feed import tell

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Fed, OpenContext
    from tests.browser.swarms import Swarm

ENDLESS = "W" * 120
BEYOND = """[...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1
&& !one.closest(".scroller, .unseen, .skip, [role=tablist], .code, .sums")).map((one) => one.outerHTML.slice(0, 90))"""
ZOOMED = {"width": 320, "height": 225}  # 1280 × 900 at 400 %


def named_without_end(view: dict[str, Any]) -> dict[str, Any]:
    endless = copy.deepcopy(view)
    endless["status"]["model"] = f"owner/{ENDLESS}"
    for row in endless["workers"].values():
        row |= {"name": row["name"] + ENDLESS[:60], "host": ENDLESS, "evidence": ENDLESS}
    for stage in endless["plan"]["stages"]:
        stage["worker"] += ENDLESS[:60]
    for row in endless["requests"].values():
        row["tenant"] = f"key:{ENDLESS}"
    healed = {"key": "1", "began_at": view["at"], "cause": ENDLESS, "sentence": ENDLESS, "evidence": ENDLESS}
    endless["recoveries"] = [healed | {"workers": [], "phases": []}] * 2
    return endless


@pytest.mark.parametrize("width", [390, 1280])
def test_no_name_makes_the_page_wider(fed: Fed, view: dict[str, Any], width: int) -> None:
    """Of a model, a worker, a host, a key, in an event and a recovery; what a worker may be ordered is in sight."""
    endless = named_without_end(view)
    console = fed(endless, viewport={"width": width, "height": 900})
    page = console.page
    running = endless["recoveries"][0] | {"key": "2", "workers": [ENDLESS], "lost": [[3, 6]], "choice": ENDLESS}
    tell(page, "delta", {"recovery": running})
    tell(page, "events", [{"time": view["at"], "event": "worker_lost", "text": ENDLESS}])
    expect(console.tab("Events")).to_contain_text(ENDLESS)
    expect(console.region("Recovery")).to_contain_text(ENDLESS)
    for name in ("Chat", "Requests", "Plan", "Workers"):
        console.tab(name)
        assert page.evaluate(BEYOND) == [], name
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), name
    stop = console.region("Workers").get_by_role("button", name="Stop worker").first
    stop.scroll_into_view_if_needed()
    expect(stop).to_be_in_viewport(ratio=1)
    stop.click()
    for name in ("No", "Yes"):
        expect(console.dialog.get_by_role("button", name=re.compile(f"^{name}"))).to_be_in_viewport(ratio=1)
    assert console.dialog.evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_what_stays_in_sight_leaves_room_when_zoomed_in(open_context: OpenContext, swarm: Swarm) -> None:
    """The top does not lie over what is read, and nothing has to be scrolled sideways."""
    page = open_context(viewport=ZOOMED).new_page()
    console = Console(page, swarm.url)
    console.open()
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    console.region("Prompt").get_by_role("meter", name="Context").scroll_into_view_if_needed()
    expect(page.get_by_role("banner")).not_to_be_in_viewport()


def test_colours_that_are_forced_hide_nothing(open_context: OpenContext, swarm: Swarm) -> None:
    """What a ground says elsewhere is told then, too: which tab is open, which layers a stage holds, the links, the
    phases of a recovery, where tokens end."""
    page = open_context(forced_colors="active").new_page()
    console = Console(page, swarm.url)
    console.open()
    borders = """(tab) => getComputedStyle(tab).borderBottomWidth"""
    tabs = page.get_by_role("tab")
    assert [tab.evaluate(borders) for tab in tabs.all()] == ["4px", *["0px"] * (tabs.count() - 1)]
    ground = "(one) => getComputedStyle(one).backgroundColor"
    canvas = page.evaluate(f"({ground})(document.querySelector('.card'))")
    for what in (".ruler .held", ".link-line"):
        assert page.locator(what).first.evaluate(ground) not in (canvas, "rgba(0, 0, 0, 0)"), what
    console.write("Where is the cat?")
    console.generate()
    console.until_answered()
    page.get_by_role("checkbox", name="Tokens", exact=True).check()
    token = console.answer().get_by_role("option").first
    assert token.evaluate("(one) => getComputedStyle(one).borderLeftStyle") == "solid"


WRITTEN = """
const { fillText } = CanvasRenderingContext2D.prototype;
window.written = new Map();
CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
  if (words !== "now" && !words.startsWith("−")) return fillText.call(this, words, x, y);
  const { width } = this.measureText(words);
  const left = x - { left: 0, right: width, center: width / 2 }[this.textAlign];
  const of = this.canvas.parentElement.ariaLabel;
  window.written.set(of, { ...window.written.get(of), [words]: [left, left + width] });
  return fillText.call(this, words, x, y);
};
"""


@pytest.mark.parametrize("width", [320, 390, 660, 1280])
def test_times_under_a_chart_do_not_run_into_each_other(open_context: OpenContext, swarm: Swarm, width: int) -> None:
    context = open_context(viewport={"width": width, "height": 900})
    context.add_init_script(WRITTEN)
    console = Console(context.new_page(), swarm.url)
    console.open()
    console.tab("Charts")
    lines = until_seen(console.page, lambda: console.page.evaluate("[...window.written.values()]"), "charts are drawn")
    for places in lines:
        assert len(places) > 1
        ends = sorted(places.values())
        assert all(one[1] + 4 < other[0] for one, other in pairwise(ends)), places


SET_CLOCK = """
const now = Date.now.bind(Date);
window.ahead = 0;
Date.now = () => now() + window.ahead;
"""


def points(page: Page) -> int:
    chart = page.get_by_role("region", name="Charts").get_by_role("slider").first
    return int(chart.get_attribute("aria-valuemax") or 0)


def test_a_clock_that_is_set_moves_no_moment_and_stops_no_chart(open_context: OpenContext, swarm: Swarm) -> None:
    """An hour ahead and two back, as after a laptop's sleep: ages are what they were, and the charts go on."""
    page = open_context().new_page()
    page.add_init_script(SET_CLOCK)
    console = Console(page, swarm.url)
    console.open()
    console.ask_for_story(8, "0")
    console.until_answered()
    console.tab("Charts")
    until_seen(page, lambda: points(page) > 2, "the charts have points")
    for ahead_s in (3600, -3600):
        page.evaluate("(ahead) => { window.ahead = ahead; }", 1000 * ahead_s)
        page.wait_for_timeout(3000)
        before = until_seen(page, lambda: num if (num := points(page)) > 2 else None, "the charts keep their points")
        until_seen(page, lambda num=before: points(page) > num, "the charts go on")
        age = console.tab("Requests").get_by_role("row").nth(1).get_by_role("cell").nth(4)
        expect(age).to_have_text(re.compile(r"^([1-9]\d*.s|[1-9] min.*) ago$"))
        console.tab("Charts")


def test_words_from_right_to_left_turn_nothing_around(fed: Fed, view: Any) -> None:
    """A token is quoted among figures: these stay behind it, in the order in which they are written."""
    console = fed(view)
    page = console.page
    page.evaluate("window.feed.words = ['שלום', ' עולם']")
    console.choose("Raw")
    console.write("Say it")
    console.button("Send").click()
    expect(console.answer()).to_have_text("שלום עולם")
    readout = console.timeline().locator(".readout")
    expect(readout).to_contain_text("שלום", timeout=SLOW_MS)
    word, figure = readout.evaluate(
        """(one) => { const [node] = one.childNodes, words = node.data; return ["שלום", "12.0"].map((found) => {
        const range = document.createRange(), at = words.indexOf(found);
        range.setStart(node, at); range.setEnd(node, at + found.length);
        return range.getBoundingClientRect().left; }); }"""
    )
    assert word < figure


def test_a_page_that_is_gone_back_to_goes_on(console: Console, swarm: Swarm) -> None:
    """Elsewhere and back by the browser's button: the answer, its tab and the connection are there."""
    page = console.page
    console.ask_for_much(num_tokens=600)
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.tab("Plan")
    page.goto("about:blank")
    page.go_back()
    console.until_live()
    expect(page.get_by_role("tab", name="Plan")).to_have_attribute("aria-selected", "true")
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.until_answered()
