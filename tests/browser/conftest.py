"""One browser and one swarm for all tests that find it well; a context of its own for each, watched by guards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.chromium import launched, must_be_here, why_none
from tests.browser.console import Console
from tests.browser.feed import View, feed, first_view
from tests.browser.guards import Guards
from tests.browser.swarms import Swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

OpenContext = Callable[..., "BrowserContext"]
Fed = Callable[..., Console]


@pytest.fixture(scope="package")
def swarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Without keys, for this machine alone. It reads prompts in small pieces, so that one is seen being read, and
    proposes no tokens, so that an answer that was given before takes as long as the first time."""
    slow = {"SWARM_BROKER__PREFILL_CHUNK": "8", "SWARM_BROKER__SPECULATION": "off"}
    with Swarm(tmp_path_factory.mktemp("swarm"), **slow) as swarm:
        yield swarm


@pytest.fixture
def swarm(swarms: Swarm, guards: Guards) -> Swarm:
    """Three workers, all of them well, and nothing runs."""
    swarms.until_well()
    guards.homes.append(swarms.url)
    return swarms


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    if (reason := why_none()) is not None:
        (pytest.fail if must_be_here() else pytest.skip)(reason)
    with launched() as browser:
        yield browser


@pytest.fixture(autouse=True)
def guards() -> Guards:
    return Guards()


@pytest.fixture
def open_context(chromium: Browser, guards: Guards) -> Iterator[OpenContext]:
    """Open a window of its own, as of another visitor. At the end, all are looked through for what no page may do."""
    opened: list[BrowserContext] = []

    def open_one(**options: Any) -> BrowserContext:
        context = chromium.new_context(**{"reduced_motion": "no-preference", **options})
        context.set_default_timeout(20_000)
        guards.watch(context)
        opened.append(context)
        return context

    yield open_one
    for context in opened:
        context.close()
    guards.check()


@pytest.fixture
def page(open_context: OpenContext) -> Page:
    return open_context(viewport={"width": 1280, "height": 900}).new_page()


@pytest.fixture(scope="module")
def view(swarms: Swarm) -> View:
    """Of the shared swarm, with a request under way."""
    swarms.until_well()
    body = {"model": "village", "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    asker = threading.Thread(target=swarms.ask, args=("/v1/completions", body))
    asker.start()
    try:
        return swarms.until(lambda: view if (view := first_view(swarms.url))["requests"] else None, "it has a request")
    finally:
        asker.join()


@pytest.fixture
def fed(open_context: OpenContext, swarm: Swarm) -> Fed:
    """Opens the page in a window of its own, where it hears of a view in place of the gateway's."""

    def opened(view: View, **options: Any) -> Console:
        context = open_context(**options)
        feed(context, view)
        console = Console(context.new_page(), swarm.url)
        console.open()
        return console

    return opened


@pytest.fixture
def console(page: Page, swarm: Swarm) -> Console:
    """The page of the shared swarm, open and live."""
    console = Console(page, swarm.url)
    console.open()
    return console
