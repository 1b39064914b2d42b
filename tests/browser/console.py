"""The console as a person finds it: by roles and accessible names, which are what the page promises."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

SOME_WORDS = re.compile(r"\w+\W+\w+\W+\w+")  # an answer that has begun
# The tab of each part that has not its tab's name.
TABS = {"Workers": "Swarm", "Charts": "Swarm", "Events": "Swarm", "Timeline": "Requests"}
TABS |= {"Keys": "Connect", "Connect a client": "Connect"}
SLOW_MS = 60_000  # for what takes an answer's whole time, on a busy machine


@dataclass(frozen=True)
class Asked:
    """What the page asked the gateway for, by itself."""

    path: str
    body: dict[str, Any]


class Console:
    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url

    def open(self) -> None:
        """Returns when it is live."""
        self.page.goto(self.url + "/")
        self.until_live()

    def until_live(self) -> None:
        from playwright.sync_api import expect

        expect(self.connection).to_contain_text("live", timeout=SLOW_MS)

    @property
    def connection(self) -> Locator:
        """Live, reconnecting, or the broker is away."""
        return self.page.locator("header").get_by_role("status")

    def region(self, name: str) -> Locator:
        return self.page.get_by_role("region", name=name, exact=True)

    @property
    def news(self) -> Locator:
        """What is said in passing."""
        return self.page.locator("#news")

    def tab(self, name: str) -> Locator:
        """Choose the tab with this part of the page; the part."""
        self.page.get_by_role("tab", name=TABS.get(name, name), exact=True).click()
        return self.region(name)

    def chat(self) -> None:
        """Choose the tab with the conversation, if another one is open."""
        tab = self.page.get_by_role("tab", name="Chat")
        if tab.get_attribute("aria-selected") != "true":
            tab.click()

    @property
    def stages(self) -> Locator:
        return self.region("Stages").get_by_role("article")

    def stage(self, worker: str) -> Locator:
        return self.region("Stages").get_by_role("article", name=re.compile(rf"^Stage \d+: {worker}$"))

    def worker(self, name: str) -> Locator:
        """Its row in the open tab: by how it begins, since others' evidence may name it, too; and not the row of one
        that is gone, which can be ordered nothing."""
        rows = self.region("Workers").get_by_role("row", name=re.compile(rf"^{name}\b"))
        return rows.filter(has=self.page.get_by_role("button", name="Stop worker"))

    def kill(self, worker: str) -> None:
        self.stage(worker).get_by_role("button", name="Kill this worker").click()
        self.agree()

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    def agree(self) -> None:
        """Say yes to what ends something."""
        self.dialog.get_by_role("button", name=re.compile(r"^Yes\b")).click()

    # --- prompt and answer

    def drawer(self) -> Locator:
        """Open the parameters."""
        self.chat()
        drawer = self.region("Prompt").get_by_role("group", name="Parameters")
        if not drawer.is_visible():
            self.region("Prompt").get_by_role("button", name="Parameters").click()
        return drawer

    def choose(self, mode: str) -> None:
        """Chat or raw."""
        self.drawer().get_by_role("radio", name=mode).check()

    def write(self, prompt: str) -> None:
        self.chat()
        self.box.fill(prompt)

    @property
    def box(self) -> Locator:
        return self.region("Prompt").get_by_role("textbox", name="Prompt", exact=True)

    def set(self, label: str, value: str) -> None:
        """One of the parameters."""
        field = self.drawer().get_by_label(label, exact=True)
        if not field.is_visible():
            self.drawer().get_by_text("More parameters").click()
        field.fill(value)

    def repeat(self, *, until_stop: bool) -> None:
        self.drawer().get_by_label("repeat until Stop").set_checked(until_stop)

    def button(self, name: str) -> Locator:
        """Of the prompt box."""
        self.chat()
        return self.region("Prompt").get_by_role("button", name=name, exact=True)

    def generate(self) -> Asked:
        """Returns when the page has asked."""
        return self.asks_by(self.button("Send"))

    def asks_by(self, button: Locator) -> Asked:
        """Returns when what is shown is of the new answer."""
        from playwright.sync_api import expect

        former = self.page.locator("output[data-former]")
        self.page.evaluate("document.querySelectorAll('output').forEach((one) => (one.dataset.former = ''))")
        with self.page.expect_request(lambda asked: asked.method == "POST" and "/v1/" in asked.url) as asked:
            button.click()
        body = asked.value.post_data
        assert body is not None
        expect(former).to_have_count(0)
        return Asked(asked.value.url.removeprefix(self.url), json.loads(body))

    def ask_for_story(self, num_tokens: int, temperature: str) -> Asked:
        self.choose("Raw")
        self.write("Once upon a time")
        self.set("Temperature", temperature)
        self.set("Max tokens", str(num_tokens))
        return self.generate()

    def ask_for_much(self, prompt: str = "Once upon a time", num_tokens: int = 300) -> Asked:
        """Ask for an answer that takes seconds, the same each time: it may not end before so many tokens."""
        self.write(prompt)
        self.set("Temperature", "0")
        self.set("Max tokens", str(num_tokens))
        self.set("JSON schema", json.dumps({"type": "string", "minLength": 10_000}))
        return self.generate()

    def copied(self, name: str) -> str:
        """Press a button that copies; what is in the clipboard then. The page's context must be allowed to use it."""
        if name.startswith("Copy as"):
            self.drawer()
        self.page.get_by_role("button", name=name, exact=True).click()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def until_answered(self) -> None:
        from playwright.sync_api import expect

        self.chat()
        expect(self.region("Answer").get_by_role("status").first).to_have_text("complete", timeout=SLOW_MS)

    def timeline(self) -> Locator:
        return self.tab("Timeline")

    def answer(self, number: int = 0) -> Locator:
        self.chat()
        return self.region("Answer").locator(f'output[data-answer="{number}"]')


def until_seen(page: Page, holds: Callable[[], Any], what: str) -> Any:
    """Look again and again, while the page goes on. For what no locator can wait for."""
    give_up_at = time.monotonic() + SLOW_MS / 1e3
    while not (found := holds()):
        assert time.monotonic() < give_up_at, f"not within {SLOW_MS / 1e3:.0f} s: {what}"
        page.wait_for_timeout(50)
    return found


def text_of(answer: dict[str, Any], number: int = 0) -> str:
    """A choice's text, of either API."""
    choice = answer["choices"][number]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
