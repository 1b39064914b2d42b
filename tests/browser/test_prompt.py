"""A prompt, its answer, and who reads it."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, SOME_WORDS, Console, text_of, until_seen

if TYPE_CHECKING:
    from tests.browser.swarms import Swarm

EVIL = "</output><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def test_a_prompt_streams(console: Console, swarm: Swarm) -> None:
    """Bit by bit, to the very text that is answered in one piece; with its timeline, and the slowest hop named."""
    asked = console.ask_for_much()
    answer = console.answer()
    expect(answer).to_have_text(SOME_WORDS)
    early = answer.text_content() or ""
    expect(console.button("Stop")).to_be_enabled()
    whole = text_of(swarm.answer(asked.path, asked.body))
    expect(answer).to_have_text(whole, timeout=SLOW_MS)
    assert answer.text_content() == whole
    assert whole.startswith(early)
    assert len(early) < len(whole)
    expect(console.timeline()).to_contain_text(re.compile(r"The slowest after it, token \d+"))


def test_several_continuations(console: Console, swarm: Swarm) -> None:
    console.choose("Raw")
    console.write("Anna")
    console.set("Continuations", "3")
    console.set("Max tokens", "12")
    asked = console.generate()
    whole = swarm.answer(asked.path, asked.body)
    for number in range(3):
        expect(console.answer(number)).to_have_text(text_of(whole, number), timeout=SLOW_MS)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "pet": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}


def test_an_answer_keeps_to_a_json_schema(console: Console, swarm: Swarm) -> None:
    """What is no schema is said before anything is asked."""
    console.write("Who lives in the village?")
    console.set("JSON schema", '{"type": "object",')
    expect(console.region("Prompt")).to_contain_text("JSON schema: not valid JSON")
    expect(console.button("Send")).to_be_disabled()
    console.set("JSON schema", json.dumps(PERSON))
    asked = console.generate()
    console.until_answered()
    text = console.answer().text_content() or ""
    assert text == text_of(swarm.answer(asked.path, asked.body))
    person = json.loads(text)
    assert set(person) == {"name", "age", "pet"}
    assert isinstance(person["age"], int)
    assert person["pet"] in ("cat", "dog")


def test_a_problem_in_a_folded_field_unfolds_it(console: Console) -> None:
    """A long story sets Min tokens, too: with fewer Max tokens it is shown what else is to be changed."""
    console.button("A long story").click()
    drawer = console.drawer()
    least = drawer.get_by_label("Min tokens", exact=True)
    expect(least).to_be_hidden()
    console.set("Max tokens", "300")
    expect(least).to_be_visible()
    expect(least).to_have_accessible_description(re.compile("more than Max tokens"))
    expect(console.button("Send")).to_be_disabled()
    least.fill("300")
    expect(console.button("Send")).to_be_enabled()


THIN = "\u202f"  # between thousands
PROGRESS = re.compile(r"reading the prompt\W.*?(\d+) of (\d+) prompt tokens", re.DOTALL)
# What is said of its progress, where it is asked and in the list of requests.
LISTEN = """() => {
  window.told = [];
  for (const name of ["Answer", "Requests"]) {
    const region = document.querySelector(`[aria-label=${name}]`);
    const say = () => window.told.push([name, region.innerText]);
    new MutationObserver(say).observe(region, { subtree: true, childList: true, characterData: true });
  }
}"""


def test_a_long_prompt_is_seen_being_read(console: Console, swarm: Swarm) -> None:
    """How much of it is computed is told while that goes on, until the first token."""
    console.choose("Raw")
    prompt = "Where" + " is" * 1500
    _, counted = swarm.ask("/tokenize", {"prompt": prompt})
    console.write(prompt)
    console.set("Max tokens", "4")
    console.page.evaluate(LISTEN)

    def read(name: str) -> list[int]:
        """The numbers of tokens that were told to be computed."""
        texts = [text.replace(THIN, "") for where, text in console.page.evaluate("window.told") if where == name]
        told = [PROGRESS.search(text) for text in texts]
        return [int(found[1]) for found in told if found is not None and int(found[2]) == counted["count"]]

    def is_read(name: str) -> bool:
        return any(0 < each < counted["count"] for each in read(name))

    with swarm.slowed():
        console.generate()
        until_seen(console.page, lambda: is_read("Answer"), "the answer tells how much is computed")
        console.tab("Requests")
        until_seen(console.page, lambda: is_read("Requests"), "the list of requests tells it, too")
    console.until_answered()
    for name in ("Answer", "Requests"):
        assert read(name) == sorted(read(name))


def test_stop_ends_it_on_all_stages(console: Console, swarm: Swarm) -> None:
    console.ask_for_much(num_tokens=1500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.button("Stop").click()
    expect(console.button("Send")).to_be_enabled()
    swarm.until(swarm.is_idle, "nothing runs")
    expect(console.region("Answer")).to_contain_text("stopped")


def test_what_a_model_says_stays_text(console: Console) -> None:
    """A model is made to say a script: it is shown to the letter, and nothing of it becomes an element."""
    console.write("Say it.")
    console.set("JSON schema", json.dumps({"const": EVIL}))
    console.generate()
    expect(console.answer()).to_have_text(json.dumps(EVIL, ensure_ascii=False), timeout=SLOW_MS)
    assert console.answer().locator("*:not(span)").count() == 0
    assert console.page.locator("img, output script").count() == 0
    assert "taken" not in console.page.title()
    assert console.answer().get_attribute("dir") == "auto"


# Which way a text runs, by its style and by where its first and its last letter stand.
RUNS = """(element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const letters = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (let at = 0; at < node.length; at += 1) letters.push([node, at]);
  const left = ([node, at]) => {
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    return range.getBoundingClientRect().left;
  };
  return [getComputedStyle(element).direction, left(letters[0]) < left(letters.at(-1)) ? "ltr" : "rtl"];
}"""


@pytest.mark.parametrize(("words", "way"), [("مرحبا بالعالم", "rtl"), ("Hello world", "ltr")], ids=["rtl", "ltr"])
def test_words_run_their_own_way(console: Console, words: str, way: str) -> None:
    """From the right where letters do: in the answer, in the box while it is written, and in the conversation."""
    console.write(words)
    assert console.box.evaluate("(box) => getComputedStyle(box).direction") == way
    console.set("JSON schema", json.dumps({"const": words}))
    console.generate()
    console.until_answered()
    expect(console.answer()).to_have_text(json.dumps(words, ensure_ascii=False))
    assert console.answer().evaluate(RUNS) == [way, way]
    asked = console.region("Conversation").get_by_text(words, exact=True)
    assert asked.evaluate(RUNS) == [way, way]


def test_a_reload_in_the_middle_loses_nothing(console: Console, swarm: Swarm) -> None:
    """What was there is there again, and the answer goes on to the same text."""
    asked = console.ask_for_much(num_tokens=500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    early = console.answer().text_content() or ""
    console.page.reload()
    expect(console.answer()).to_have_text(SOME_WORDS)
    assert (console.answer().text_content() or "").startswith(early[:20])
    whole = text_of(swarm.answer(asked.path, asked.body))
    expect(console.answer()).to_have_text(whole, timeout=SLOW_MS)
    assert console.answer().text_content() == whole
    console.page.reload()  # one that has ended is there again, too
    expect(console.answer()).to_have_text(whole)


def test_two_tabs(console: Console, swarm: Swarm) -> None:
    """Each has its own answer, and both see what runs."""
    other = Console(console.page.context.new_page(), swarm.url)
    other.open()
    one, two = console.ask_for_much("Once upon a time", 1500), other.ask_for_much("Where is the cat?", 1500)
    for each in (console, other):
        expect(each.tab("Requests").get_by_role("button", name="Cancel")).to_have_count(2)
    for each, asked in ((console, one), (other, two)):
        whole = text_of(swarm.answer(asked.path, asked.body))
        expect(each.answer()).to_have_text(whole, timeout=SLOW_MS)


def test_a_request_of_somebody_else_is_cancelled(console: Console, swarm: Swarm) -> None:
    """From the list, after a question; who waits for it is told."""
    body = {"model": "village", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    codes: list[int] = []
    asker = threading.Thread(target=lambda: codes.append(swarm.ask("/v1/completions", body)[0]))
    asker.start()
    try:
        requests = console.tab("Requests")
        requests.get_by_role("button", name="Cancel").click()
        console.agree()
        expect(requests.get_by_role("button", name="Cancel")).to_have_count(0)
    finally:
        asker.join()
    assert codes == [499]
    assert swarm.is_idle()
