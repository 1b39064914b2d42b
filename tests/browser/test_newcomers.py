"""What somebody meets who opens the page for the first time: examples, a recovery within a minute, and words where
something can't be."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, SOME_WORDS, Asked, Console
from tests.browser.swarms import Swarm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page, Route

    from tests.browser.guards import Guards

A_MINUTE_S = 60.0
TALK = "The cat is black and the dog is brown. "


def example(console: Console, name: str) -> None:
    """Of those that an empty conversation shows."""
    console.chat()
    console.region("Conversations").get_by_role("button", name="New conversation").click()
    console.region("Prompt").get_by_role("button", name=name, exact=True).click()


def answered(console: Console) -> str:
    """Generate, and wait for the end of just this answer: its text."""
    return ended(console, console.generate())


def ended(console: Console, asked: Asked) -> str:
    expect(console.region("Answer")).to_contain_text(f"seed {asked.body['seed']}")
    expect(console.region("Answer")).to_contain_text("complete", timeout=SLOW_MS)
    return console.answer().text_content() or ""


@pytest.fixture
def unhurt(guards: Guards, tmp_path: Path) -> Iterator[Swarm]:
    """A swarm of the test's own, where nothing had to heal yet. It outlives the page."""
    with Swarm(tmp_path) as swarm:
        guards.homes.append(swarm.url)
        yield swarm


def test_a_stranger_sees_a_recovery_within_a_minute(unhurt: Swarm, page: Page) -> None:
    """By what the page itself suggests: write a long story, kill a worker; the next button has the focus already. It
    goes on by itself, from one answer to the next, until Stop."""
    console = Console(page, unhurt.url)
    console.open()
    began = time.monotonic()
    recovery = console.region("Recovery")
    recovery.get_by_role("button", name="Write a long story").click()
    expect(recovery).to_contain_text("Now press “Kill this worker”")
    expect(console.page.get_by_role("button", name="Kill this worker").first).to_be_focused()
    expect(console.answer()).to_have_text(SOME_WORDS)
    victim = console.stages.first.get_attribute("data-worker") or ""
    console.kill(victim)
    expect(recovery.locator("li[data-phase]").last).to_be_in_viewport(timeout=SLOW_MS)  # beside the answer
    expect(recovery).to_contain_text(re.compile(rf"{victim} was lost.* went on"), timeout=SLOW_MS)
    assert time.monotonic() - began < A_MINUTE_S
    early = console.answer().text_content() or ""
    expect(console.answer()).not_to_have_text(early)
    console.button("Stop").click()
    expect(console.region("Answer")).to_contain_text("stopped")
    expect(console.button("Send")).to_be_enabled()


def test_what_repeats_is_asked_again(console: Console) -> None:
    """Until it is stopped; what was asked for is the same, and each answer another one."""
    console.choose("Raw")
    console.write("Once upon a time")
    console.set("Max tokens", "12")
    console.repeat(until_stop=True)
    bodies = [console.generate().body]
    for _ in range(2):
        with console.page.expect_request(lambda asked: asked.url.endswith("/v1/completions")) as asked:
            pass
        bodies.append(json.loads(asked.value.post_data or "{}"))
    console.repeat(until_stop=False)
    expect(console.region("Answer")).to_contain_text("complete", timeout=SLOW_MS)
    expect(console.button("Send")).to_be_enabled()
    assert len({body.pop("seed") for body in bodies}) == 3
    assert bodies[0] == bodies[1] == bodies[2]


def test_examples_do_what_they_say(console: Console) -> None:
    example(console, "A short story")
    assert SOME_WORDS.search(answered(console))
    example(console, "JSON")
    expect(console.button("Parameters · 2 set")).to_be_visible()
    animal = json.loads(answered(console))
    assert set(animal) == {"animal", "colour", "legs", "is_friendly"}
    example(console, "A question")
    asked = console.generate()
    assert "response_format" not in asked.body
    assert "black" in ended(console, asked)


def test_an_answer_may_be_told_not_to_end(console: Console) -> None:
    """By its length alone, and with which parameters that can't be had."""
    example(console, "A question")
    console.set("Max tokens", "90")
    console.drawer().get_by_text("More parameters").click()
    console.drawer().get_by_label("Continue to Max tokens").check()
    asked = console.generate()
    assert asked.body["ignore_eos"] is True
    ended(console, asked)
    expect(console.region("Answer")).to_contain_text("answer 90 tokens")
    console.set("JSON schema", "{}")
    expect(console.button("Send")).to_be_disabled()
    expect(console.region("Prompt")).to_contain_text("ends where its format ends")


def test_a_full_context_is_foretold_and_left(console: Console, guards: Guards) -> None:
    """The page says what is left, then that it is full; what is refused for it says why at once, and offers the way
    out, with the words that were not taken still in the box."""
    guards.expect("status of 400")
    room = console.region("Prompt").get_by_role("meter", name="Context")
    expect(room).to_have_attribute("aria-valuetext", re.compile(r"About 2.000 of 2.048 tokens left"))
    console.set("Max tokens", "20")
    for _ in range(3):
        console.write(TALK * 62)
        answered(console)
    expect(room).to_have_attribute("aria-valuetext", re.compile(r"(About )?1\d\d of .* the answer may be cut"))
    console.write(TALK * 62)
    told = re.compile("are too long for the model's .* begin a new conversation")
    expect(room).to_have_attribute("aria-valuetext", told)
    console.button("Send").click()
    prompt = console.region("Prompt")
    expect(prompt.get_by_role("status")).to_contain_text(re.compile(r"maximum context length is 2048 tokens"))
    expect(console.box).to_have_value(TALK * 62)
    prompt.get_by_role("button", name="Begin a new conversation").click()
    expect(console.region("Answer")).to_be_hidden()
    assert answered(console)


def test_an_error_stands_beside_the_button_until_the_next_prompt(console: Console, guards: Guards) -> None:
    """With the words that were not taken still in the box."""
    guards.expect("status of 400")
    status = console.region("Prompt").get_by_role("status")
    console.write("Hi")
    console.set("JSON schema", '{"type": "array", "uniqueItems": true}')
    console.button("Send").click()
    expect(status).to_contain_text("uniqueItems")
    expect(console.box).to_have_value("Hi")
    box, button = status.bounding_box(), console.button("Send").bounding_box()
    assert box
    assert button
    assert box["y"] < button["y"] + button["height"]
    assert button["y"] < box["y"] + box["height"]
    console.set("JSON schema", "")
    answered(console)
    expect(status).to_be_empty()


def test_a_timeline_says_that_it_is_fetched(console: Console) -> None:
    """While its times are on the way, it doesn't say that there are none."""

    def hold(_: Route) -> None:
        """No answer, for as long as the page is routed."""

    console.page.route("**/console/trace/*", hold)
    console.choose("Raw")
    console.write("Once upon a time")
    console.set("Max tokens", "12")
    asked = console.generate()
    ended(console, asked)
    timeline = console.timeline()
    expect(timeline).to_contain_text("Fetching the times")
    console.page.unroute("**/console/trace/*")  # it lets go of what is held, too
    expect(timeline).to_contain_text("The slowest after it", timeout=SLOW_MS)


def test_a_plan_by_hand_is_told_as_such(console: Console, swarm: Swarm) -> None:
    """After a reload, too, with what was laid down in the form; what can't be is not to be applied; and what was
    compared goes with what it was compared for."""
    stage = swarm.client.query("plan")["stages"][0]
    first, stop = stage["worker"], stage["layers"][1]
    last = stop - 2 if stop > 2 else stop  # other layers than it has
    said = f"Manual plan: {first} holds only layers 0–{last}"
    plan = console.tab("Plan")
    apply = plan.get_by_role("button", name="Apply")
    pin = plan.get_by_label(f"Only layers: {first}")
    try:
        pin.fill("900-901")
        plan.get_by_role("button", name="Try").click()
        expect(plan).to_contain_text("No plan is possible", timeout=SLOW_MS)
        expect(apply).to_be_disabled()
        pin.fill(f"0-{last}")
        expect(plan).not_to_contain_text("No plan is possible")
        expect(apply).to_be_enabled()
        plan.get_by_role("button", name="Try").click()
        expect(plan).to_contain_text("This would be made", timeout=SLOW_MS)
        apply.click()
        console.agree()
        expect(plan).not_to_contain_text("This would be made")
        expect(plan).to_contain_text(said, timeout=SLOW_MS)
        console.page.reload()
        console.until_live()
        expect(plan).to_contain_text(said, timeout=SLOW_MS)
        expect(pin).to_have_value(f"0–{last}")
        assert swarm.client.query("plan")["by_hand"] == {"pins": {first: [0, last + 1]}}
        plan.get_by_role("button", name="Clear").click()
        apply.click()
        console.agree()
        expect(plan).not_to_contain_text("Manual plan", timeout=SLOW_MS)
    finally:
        swarm.ask("/console/orders", {"verb": "plan", "suppose": {}})
