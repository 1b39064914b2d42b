"""The chat: what an answer looks like, its alternatives, and the conversations that the browser keeps."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, SOME_WORDS, Console, until_seen

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator, Route

    from tests.browser.conftest import OpenContext
    from tests.browser.guards import Guards
    from tests.browser.swarms import Swarm

MARKDOWN = """# Cats

Some **bold** words, `code`, [a link](https://example.org/a) and [a trap](javascript:alert(1)).

- one
- two

```python
print("<b>")
```

| a | b |
|---|--:|
| 1 | 2 |

<img src="https://example.org/x.png"> ![a cat](https://example.org/cat.png)"""


def say(route: Route) -> None:
    """Answer in the model's place, with a thought and Markdown."""
    deltas = [{"reasoning": "Let me think."}, {"content": MARKDOWN[:40]}, {"content": MARKDOWN[40:]}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    data = [*map(json.dumps, chunks), "[DONE]"]
    body = "".join(f"id: {'ab' * 16}:{at}.0\ndata: {one}\n\n" for at, one in enumerate(data))
    route.fulfill(status=200, content_type="text/event-stream", headers={"x-request-id": "ab" * 16}, body=body)


def turns(console: Console) -> Locator:
    return console.region("Conversation").get_by_role("listitem").and_(console.page.locator("[data-role]"))


def kept(console: Console) -> Locator:
    return console.region("Conversations").get_by_role("listitem")


def ask(console: Console, words: str) -> str:
    console.write(words)
    console.generate()
    console.until_answered()
    return console.answer().text_content() or ""


def test_markdown_is_drawn_and_nothing_of_it_acts(console: Console, guards: Guards) -> None:
    """Headings, code with its own button, tables; links lead out by themselves, images are not loaded, HTML is text."""
    guards.expect("status of 404")  # no trace of what no swarm has answered
    console.page.route("**/v1/chat/completions", say)
    for _ in range(2):  # the last answer, and one that is a turn of the conversation
        ask(console, "Tell me about cats")
    for place in (console.answer(), turns(console).nth(1)):
        expect(place.locator("strong")).to_have_text("bold")
        expect(place.locator("ul > li")).to_have_text(["one", "two"])
        expect(place.locator("pre")).to_have_text('print("<b>")')
        expect(place.get_by_role("button", name="Copy this code")).to_be_visible()
        expect(place.get_by_role("cell").last).to_have_text("2")
        expect(place).to_contain_text('<img src="https://example.org/x.png">')
        links = place.get_by_role("link")
        expect(links).to_have_text(["a link", "https://example.org/x.png", "a cat"])
        for link in links.all():
            assert "noopener" in (link.get_attribute("rel") or "")
        assert place.locator("img, script, b").count() == 0
    thought = console.region("Answer").locator("details")
    expect(thought.get_by_text("Let me think.")).to_be_hidden()
    thought.get_by_text("Reasoning").click()
    expect(thought.get_by_text("Let me think.")).to_be_visible()


def test_an_answer_has_alternatives(console: Console) -> None:
    """By Retry and by Edit; each is shown again by its arrows, and a branch is a conversation of its own."""
    first = ask(console, "What colour is the cat?")
    answer = console.region("Answer")
    console.asks_by(answer.get_by_role("button", name="Retry"))
    console.until_answered()
    expect(answer).to_contain_text("2 of 2")
    answer.get_by_role("button", name="Former alternative").click()
    expect(answer).to_be_hidden()
    expect(turns(console).last.locator(".words")).to_have_text(first)
    turns(console).first.hover()
    turns(console).first.get_by_role("button", name="Edit").click()
    expect(console.box).to_have_value("What colour is the cat?")
    ask(console, "Where is the dog?")
    expect(turns(console).first).to_contain_text("2 of 2")
    answer.get_by_role("button", name="Branch").click()
    expect(turns(console)).to_have_count(2)
    expect(kept(console)).to_have_count(2)


def test_conversations_are_kept_found_renamed_exported_and_imported(console: Console, tmp_path: Path) -> None:
    """In the browser, over a reload and in another tab."""
    page, list_ = console.page, console.region("Conversations")
    ask(console, "Who is Anna?")
    list_.get_by_role("button", name="New conversation").click()
    ask(console, "Where is the cat?")
    page.reload()
    expect(kept(console)).to_have_count(2)
    expect(turns(console).first).to_contain_text("Where is the cat?")

    list_.get_by_label("Search conversations").fill("anna")
    expect(kept(console)).to_have_count(1)
    list_.get_by_role("button", name=re.compile("^Who is Anna")).click()
    expect(turns(console).first).to_contain_text("Who is Anna?")
    kept(console).first.locator("summary").click()
    list_.get_by_role("button", name="Rename").click()
    console.dialog.get_by_label("Name").fill("About Anna")
    console.dialog.get_by_role("button", name="Rename").click()
    expect(kept(console).first).to_contain_text("About Anna")

    list_.get_by_label("Search conversations").fill("")
    with page.expect_download() as download:
        list_.get_by_role("button", name="Export all").click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    for _ in range(2):
        kept(console).first.locator("summary").click()
        kept(console).first.get_by_role("button", name="Delete").click()
        console.agree()
        expect(console.dialog).to_have_count(0)
    expect(kept(console)).to_have_count(0)
    list_.locator("input[type=file]").set_input_files(file)
    expect(kept(console)).to_have_count(2)
    (tmp_path / "bad.json").write_text('{"format": "else"}')
    list_.locator("input[type=file]").set_input_files(tmp_path / "bad.json")
    expect(console.news).to_contain_text("This file has no conversations")


def test_keys_lead_where_they_say(console: Console) -> None:
    page = console.page
    console.tab("Plan")
    page.get_by_role("tab", name="Plan").focus()
    page.keyboard.press("?")
    expect(console.dialog).to_contain_text("Find a conversation")
    page.keyboard.press("Escape")
    expect(console.dialog).to_have_count(0)
    page.keyboard.press("/")
    expect(console.box).to_be_focused()
    page.keyboard.type("a?/")
    expect(console.box).to_have_value("a?/")
    page.keyboard.press("Control+k")
    expect(console.region("Conversations").get_by_label("Search conversations")).to_be_focused()
    drawer = console.drawer()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()


def test_the_text_of_a_file_goes_into_the_prompt(console: Console, tmp_path: Path) -> None:
    (tmp_path / "cats.md").write_text("# Cats\n")
    (tmp_path / "bad.bin").write_bytes(b"\xff\x00")
    add = console.region("Prompt").locator("input[type=file]")
    add.set_input_files(tmp_path / "cats.md")
    expect(console.box).to_have_value("cats.md:\n```\n# Cats\n```")
    add.set_input_files(tmp_path / "bad.bin")
    expect(console.region("Prompt").get_by_role("status")).to_contain_text("bad.bin is not a text")


def test_a_long_paste_scrolls_in_its_box_and_is_counted_exactly(console: Console, swarm: Swarm) -> None:
    paste = "The cat is black.\n" * 120
    console.write(paste)
    box = console.box.bounding_box()
    assert box
    assert box["height"] < 400
    assert console.box.evaluate("(box) => box.scrollHeight > box.clientHeight")
    expect(console.button("Send")).to_be_in_viewport(ratio=1)
    _, counted = swarm.ask("/tokenize", {"messages": [{"role": "user", "content": paste}]})
    left = f"{2048 - counted['count']:,}".replace(",", ".?")
    meter = console.region("Prompt").get_by_role("meter", name="Context")
    expect(meter).to_have_attribute("aria-valuetext", re.compile(rf"^{left} of 2.048 tokens left"))


def test_on_a_phone_the_chat_comes_first(open_context: OpenContext, swarm: Swarm) -> None:
    """The stages are a line above it, which unfolds."""
    context = open_context(viewport={"width": 360, "height": 780}, has_touch=True, is_mobile=True)
    console = Console(context.new_page(), swarm.url)
    console.open()
    expect(console.box).to_be_in_viewport(ratio=1)
    expect(console.region("Stages")).to_be_hidden()
    line = console.region("Swarm at a glance")
    expect(line).to_contain_text("3 stages")
    line.get_by_role("button", name="Stages").click()
    expect(console.stages).to_have_count(3)
    expect(console.box).to_be_in_viewport(ratio=1)


def test_nothing_is_stated_before_the_first_snapshot(console: Console) -> None:
    """Nor does anything move when it comes."""
    page = console.page

    def hold(_: Route) -> None:
        """No answer, for as long as the page is routed."""

    page.route("**/console/live", hold)
    page.reload()
    expect(console.box).to_be_visible()
    page.wait_for_timeout(500)
    before = console.box.bounding_box()
    shown = page.locator("body").inner_text()
    assert not re.search(r"No worker|No recoveries|No data|waits for", shown), shown
    for name in ("Swarm", "Requests", "Plan"):
        console.tab(name)
        shown = page.locator("main").inner_text()
        assert not re.search(r"No worker|No requests|No events|No recoveries|No data", shown), (name, shown)
    console.chat()
    page.unroute("**/console/live")  # it lets go of what is held, too
    console.until_live()
    expect(console.stages).to_have_count(3)
    assert console.box.bounding_box() == before


def test_no_lack_of_models_is_stated_before_the_gateway_has_answered(console: Console) -> None:
    """The swarm is live and its stages are shown; what it serves is not yet known."""
    page = console.page
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))  # noqa: PLW0108
    page.reload()
    console.until_live()
    expect(console.stages).to_have_count(3, timeout=SLOW_MS)
    until_seen(page, lambda: held, "the page asks for models")
    beside_send = console.region("Prompt").locator(".prompt-actions").get_by_role("status")
    page.wait_for_timeout(300)
    expect(beside_send).to_be_empty()
    expect(console.button("Send")).to_be_disabled()
    page.route("**/v1/models", lambda route: route.continue_())
    for route in held:
        route.continue_()
    expect(console.button("Send")).to_be_enabled(timeout=SLOW_MS)


# Sums up how far the parts of a page have moved by themselves, as browsers measure it: 0.1 is called good.
SHIFTS = """window.shifted = 0; new PerformanceObserver((list) => list.getEntries().forEach((one) =>
(window.shifted += one.value))).observe({ type: "layout-shift", buffered: true })"""


@pytest.mark.parametrize("size", [(1280, 900), (360, 780)], ids=["desktop", "phone"])
def test_nothing_moves_while_the_page_loads(open_context: OpenContext, swarm: Swarm, size: tuple[int, int]) -> None:
    """Each part has its place before it is there."""
    context = open_context(viewport={"width": size[0], "height": size[1]})
    context.add_init_script(SHIFTS)
    console = Console(context.new_page(), swarm.url)
    console.open()
    expect(console.button("Send")).to_be_enabled()
    console.page.wait_for_timeout(500)
    assert console.page.evaluate("window.shifted") < 0.02


def test_the_api_is_described_without_the_internet(console: Console) -> None:
    """The guards see that no other host is asked."""
    page = console.page
    page.goto(console.url + "/docs")
    operation = page.locator("details").filter(has_text="/v1/chat/completions").first
    operation.locator("summary").click()
    expect(operation).to_contain_text(re.compile("messages.*required", re.DOTALL), timeout=SLOW_MS)


def test_esc_in_the_prompt_stops_the_answer(console: Console, swarm: Swarm) -> None:
    console.ask_for_much(num_tokens=1500)
    expect(console.answer()).to_have_text(SOME_WORDS)
    console.box.focus()
    console.page.keyboard.press("Escape")
    expect(console.region("Answer")).to_contain_text("stopped")
    swarm.until(swarm.is_idle, "nothing runs")
