"""A swarm larger than any desk's, an hour of news, and a recovery told slowly: the stream is a test's own."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import Console
from tests.browser.feed import crowded, heap, hurry, tell

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Fed

NUM_WORKERS, NUM_REQUESTS = 100, 1000
MOST_NODES = 12_000  # a row a request with a dozen parts each would be more
LONGEST_FRAME_MS = 2_000  # a page that is stuck takes longer, on any machine
USUAL_FRAME_MS = 250  # beside other tests; alone it is some 20
MINUTES = 10  # of news, by their own clock
NUM_ANSWERS = 300


@pytest.fixture
def crowd(fed: Fed, view: dict[str, Any]) -> Console:
    return fed(crowded(view, NUM_WORKERS, NUM_REQUESTS), viewport={"width": 1280, "height": 900})


def test_a_crowd_stays_usable(crowd: Console) -> None:
    """Lists hold what is seen and little more, whatever is scrolled to; frames come while all of it changes."""
    page = crowd.page
    expect(crowd.region("Stages")).to_contain_text("w99")
    requests = crowd.tab("Requests")
    expect(requests.get_by_role("button", name="Cancel").first).to_be_visible()
    assert requests.get_by_role("button", name="Cancel").count() < 200
    assert heap(page)["Nodes"] < 3 * MOST_NODES  # detached ones that wait for the collector among them
    assert page.evaluate("document.querySelectorAll('*').length") < MOST_NODES
    frames = hurry(page, 300, 1)
    told = f"median {statistics.median(frames):.0f} ms, longest {max(frames):.0f} ms"
    assert max(frames) < LONGEST_FRAME_MS, told
    assert statistics.median(frames) < USUAL_FRAME_MS, told
    listed = requests.get_by_role("group", name="List of requests")
    listed.focus()
    page.keyboard.press("End")
    count = int(listed.get_by_role("table").get_attribute("aria-rowcount") or 0)
    assert count > NUM_REQUESTS
    last = listed.locator(f'tr[aria-rowindex="{count}"]')
    expect(last).to_be_in_viewport()
    page.keyboard.press("Home")
    expect(listed.get_by_role("button", name="Cancel").first).to_be_in_viewport()
    requests.get_by_label("Find requests").fill(f"{NUM_REQUESTS // 2:032x}")
    expect(listed.locator("tr[data-request]")).to_have_count(1)
    requests.get_by_label("Find requests").fill("")
    for name in ("Workers", "Requests", "Plan"):
        crowd.tab(name)
        assert page.evaluate("document.querySelectorAll('*').length") < MOST_NODES, name
    page.evaluate("document.scrollingElement.scrollTo(0, 1e6)")
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_no_word_is_broken_in_a_narrow_stage(fed: Fed, view: dict[str, Any]) -> None:
    """What a worker does stands beside its button, or above it: on whole lines, whatever its width."""
    for width in (1000, 1280):
        few = crowded(view, 4, 1)
        for row in few["workers"].values():
            row["evidence"] = "computing"
        console = fed(few, viewport={"width": width, "height": 900})
        console.tab("Swarm")
        evidence = console.stages.locator(".stage-evidence")
        expect(evidence).to_have_text(["computing"] * 4)
        for each in evidence.all():
            lines = each.evaluate(
                """(element) => { const range = document.createRange(); range.selectNodeContents(element);
                return range.getClientRects().length; }"""
            )
            assert lines == 1, width


def test_the_memory_is_flat(fed: Fed, view: dict[str, Any]) -> None:
    """Once ten minutes of news have filled all that is kept, as many again add nothing."""
    console = fed(view)
    hurry(console.page, MINUTES * 600, 20)
    before = heap(console.page)
    hurry(console.page, MINUTES * 600, 20)
    after = heap(console.page)
    assert after["JSHeapUsedSize"] < before["JSHeapUsedSize"] + (1 << 20), (before, after)
    assert after["Nodes"] < before["Nodes"] + 500, (before, after)
    assert after["JSEventListeners"] < before["JSEventListeners"] + 100, (before, after)


def test_answers_leave_nothing_behind(fed: Fed, view: dict[str, Any]) -> None:
    """After 300 short answers all is full that has a bound: 100 events in the list, 8 recoveries, 20 requests that
    ended. 150 more change the words of what is there. What is written by hand is another matter: a browser keeps for
    its own Undo what was typed into a field."""
    console = fed(view)
    page = console.page
    page.evaluate("window.feed.words = ['One', ' two', ' three']")
    console.choose("Raw")
    console.write("Count")
    console.tab("Requests")
    console.repeat(until_stop=True)
    console.button("Send").click()
    before = _held_after(page, NUM_ANSWERS)
    after = _held_after(page, NUM_ANSWERS + NUM_ANSWERS // 2)
    assert (before["events"], before["recoveries"]) == (100, 7), before  # the latest recovery has its place above them
    assert after["connected"] == before["connected"], (before, after)
    assert after["Nodes"] < before["Nodes"] + 60, (before, after)
    assert after["JSEventListeners"] <= before["JSEventListeners"] + 4, (before, after)
    assert after["JSHeapUsedSize"] < before["JSHeapUsedSize"] + (1 << 19), (before, after)


def _held_after(page: Page, num: int) -> dict[str, float]:
    """Let so many answers come, in all, and then hold the next one; what the page holds when all is drawn."""
    page.evaluate("(num) => { window.feed.until = num; window.feed.go?.(); }", num)
    page.wait_for_function("(num) => window.feed.answered === num", arg=num)
    page.wait_for_timeout(1500)  # the trace, and the next second's figures
    counted: dict[str, float] = page.evaluate(
        """() => { const all = (found) => document.querySelectorAll(found).length;
        let connected = 0;
        for (const walker = document.createTreeWalker(document); walker.nextNode(); ) connected += 1;
        return { connected, events: all(".happened li"), recoveries: all("#recovery .earlier li") }; }"""
    )
    return counted | heap(page)


def test_a_recovery_is_told_while_it_happens(fed: Fed, view: dict[str, Any]) -> None:
    """The stage goes dark, the phases tick off one by one with what was predicted beside, and one sentence stays."""
    console = fed(view)
    lost = view["plan"]["stages"][1]["worker"]
    incarnation = next(own for own, row in view["workers"].items() if row["name"] == lost)
    names = ["verdict", "plan", "load", "activate", "replay", "resume"]
    phases = [{"name": name, "took_s": None, "predicted_s": 0.19, "state": "waits"} for name in names]
    phases[0] = {**phases[0], "took_s": 0.036, "state": "done"}
    phases[1] = {**phases[1], "state": "runs"}
    recovery = {
        "began_at": view["at"],
        "cause": f"{lost} was lost",
        "evidence": f"{lost}: its connection closed",
        "workers": [lost],
        "lost": [[3, 6]],
        "choice": "a plan from scratch",
        "phases": phases,
    }
    tell(console.page, "delta", {"recovery": recovery, "workers": {incarnation: {"verdict": "dead"}}})
    region = console.region("Recovery")
    expect(region.locator('li[data-phase="verdict"]')).to_have_attribute("data-state", "done")
    expect(region.locator('li[data-phase="verdict"]')).to_contain_text("36")
    expect(region.locator('li[data-phase="plan"]')).to_have_attribute("data-state", "runs")
    expect(region.locator('li[data-phase="load"]')).to_have_attribute("data-state", "waits")
    expect(region.locator('li[data-phase="load"]')).to_contain_text("190")
    expect(region).to_contain_text(f"{lost}: its connection closed")
    expect(console.stage(lost)).to_have_attribute("data-state", "lost")
    done = [{**phase, "took_s": 0.02, "state": "done"} for phase in phases]
    sentence = f"{lost} died; w0 took layers 3–5; 2 answers went on after 212 ms."
    ended = {
        **recovery,
        "phases": done,
        "total_s": 0.212,
        "sequences": 2,
        "sentence": sentence,
    }
    tell(console.page, "delta", {"recovery": None, "recoveries": [ended]})
    expect(region).to_contain_text(sentence)
    expect(region.locator("li[data-phase][data-state='done']").first).to_be_visible()
