"""One browser and one swarm for all tests that find it well; a context of its own for each, watched by guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.chromium import launched, must_be_here, why_none
from tests.browser.console import Console
from tests.browser.guards import Guards
from tests.browser.swarms import Swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

OpenContext = Callable[..., "BrowserContext"]


@pytest.fixture(scope="package")
def swarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Without keys, for this machine alone. It reads prompts in small pieces, so that one is seen being read."""
    with Swarm(tmp_path_factory.mktemp("swarm"), SWARM_BROKER__PREFILL_CHUNK="8") as swarm:
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


@pytest.fixture
def console(page: Page, swarm: Swarm) -> Console:
    """The page of the shared swarm, open and live."""
    console = Console(page, swarm.url)
    console.open()
    return console
