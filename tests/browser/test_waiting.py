"""A swarm that can't serve yet: the page says for what it waits, and what can be done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from swarm.demo import model_path
from tests.browser.console import SLOW_MS, Console
from tests.integration.gateway import Gateway
from tests.integration.processes import Processes

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.browser.guards import Guards


@dataclass(frozen=True)
class Lonely:
    """A broker that wants two workers and has none, with a gateway before it."""

    processes: Processes
    gateway: Gateway


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[Lonely]:
    with Processes(model_path(), tmp_path) as processes:
        processes.start_broker(2)
        gateway = Gateway(processes.url, tmp_path)
        try:
            gateway.start()
            yield Lonely(processes, gateway)
        finally:
            gateway.stop()


@pytest.fixture
def visit(lonely: Lonely, page: Page, guards: Guards) -> Console:
    guards.homes.append(lonely.gateway.url)
    guards.expect("status of 503")  # no model is served yet
    console = Console(page, lonely.gateway.url)
    console.open()
    return console


def test_it_is_said_who_is_missing_and_what_helps(visit: Console, lonely: Lonely) -> None:
    """In the stages' place and above the plan; as each one comes, and no more when it serves."""
    stages, banner = visit.region("Stages"), visit.page.get_by_role("banner")
    why = visit.region("Plan").get_by_role("note")
    expect(stages).to_contain_text("No worker is here")
    expect(stages).to_contain_text(re.compile(r"Waiting: 2 more of 2 workers\. Start one with swarm worker"))
    visit.tab("Plan")
    expect(why).to_contain_text("Waiting for 2 more of 2 workers.")
    expect(why.get_by_role("listitem")).to_contain_text("Join a worker, or start one elsewhere with swarm worker.")
    visit.chat()
    expect(banner).to_contain_text("waiting")

    lonely.processes.start_worker("w0")
    expect(stages).to_contain_text("Waiting: 1 more of 2 workers.", timeout=SLOW_MS)
    expect(stages).to_contain_text("The Plan tab shows remedies")
    visit.tab("Plan")
    expect(why).to_contain_text("Waiting for 1 more of 2 workers.")

    lonely.processes.start_worker("w1")
    expect(banner).to_contain_text("serving", timeout=SLOW_MS)
    expect(why).to_have_count(0)
    visit.chat()
    expect(visit.stages.first).to_be_visible()
    expect(stages).not_to_contain_text("Waiting")
