"""A gateway with keys: who is let in, what each may see and do, and that no key shows anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.commands import run
from tests.browser.console import SOME_WORDS, Console
from tests.integration.gateway import Gateway, request
from tests.integration.processes import launch

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.guards import Guards
    from tests.browser.swarms import Swarm

WRONG = "sk-swarm-wrong-0123456789abcdef0123456789abcdef"
REFUSED = r"status of 401"


@dataclass(frozen=True)
class Keyed:
    """A second gateway of the shared swarm, that wants keys."""

    gateway: Gateway
    admin: str
    alice: str  # no admin

    @property
    def url(self) -> str:
        return self.gateway.url


def add_key(file: Path, name: str, *more: str) -> str:
    command = [sys.executable, "-c", "from swarm.ctl.main import main; main()", "keys", "add", name, *more]
    added = subprocess.run([*command, "--keys-file", str(file), "--json"], capture_output=True, text=True, check=True)
    (key,) = re.findall(r'"key": "([^"]+)"', added.stdout)
    return str(key)


@pytest.fixture(scope="module")
def keyed(swarms: Swarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "own" / "keys.json"
    admin, alice = add_key(keys, "boss", "--admin"), add_key(keys, "alice", "--tokens-per-day", "100000")

    def start(arguments: Sequence[str], environment: dict[str, str], log: Path) -> Any:
        return launch(arguments, {**environment, "SWARM_GATEWAY__KEYS_FILE": str(keys)}, log)

    gateway = Gateway(swarms.broker_url, folder, start=start)
    gateway.start()
    try:
        yield Keyed(gateway, admin, alice)
    finally:
        gateway.stop()


@pytest.fixture
def visit(page: Page, swarm: Swarm, keyed: Keyed, guards: Guards) -> Iterator[Console]:
    """The page, before any key. Whatever a test does, no key is in an address, and none in a log: of the gateway, the
    broker, or a worker."""
    guards.homes.append(keyed.url)
    guards.expect(REFUSED)
    keys = (keyed.admin, keyed.alice, WRONG)
    for key in keys:
        guards.keep_secret(key)
    page.goto(keyed.url + "/")
    yield Console(page, keyed.url)
    said = {"its gateway": keyed.gateway.log.read_text(), "the swarm": swarm.said()}
    assert all(said.values()), "there are no logs to look through"
    assert [who for who, words in said.items() if any(key in words for key in keys)] == []


def show(console: Console, key: str) -> None:
    console.dialog.get_by_label("Key", exact=True).fill(key)
    console.page.keyboard.press("Enter")


def test_a_wrong_key_is_refused_and_a_right_one_let_in(visit: Console, keyed: Keyed) -> None:
    """The dialog comes by itself, says why a key was refused, and goes for a right one, which the tab keeps."""
    expect(visit.dialog).to_contain_text("This gateway needs a key")
    expect(visit.stages).to_have_count(0)
    show(visit, WRONG)
    expect(visit.dialog.get_by_role("alert")).to_contain_text(re.compile("key", re.IGNORECASE))
    show(visit, keyed.admin)
    expect(visit.dialog).to_have_count(0)
    visit.until_live()
    expect(visit.stages).to_have_count(3)
    visit.page.reload()
    visit.until_live()
    expect(visit.dialog).to_have_count(0)
    assert visit.page.evaluate("JSON.stringify(localStorage)").count("sk-") == 0
    assert visit.page.context.cookies() == []


def test_who_has_closed_the_dialog_can_still_give_a_key(visit: Console, keyed: Keyed) -> None:
    """It is said what is missing, and where it can be given."""
    expect(visit.connection).to_contain_text("needs a key")
    visit.page.wait_for_load_state("networkidle")  # what is refused later opens the dialog anew
    visit.page.keyboard.press("Escape")
    expect(visit.dialog).to_have_count(0)
    for name in ("Stages", "Prompt"):
        expect(visit.region(name)).to_contain_text("needs a key: press “Key” above")
    visit.page.get_by_role("banner").get_by_role("button", name="Key", exact=True).click()
    show(visit, keyed.admin)
    visit.until_live()
    expect(visit.stages).to_have_count(3)


def test_another_tab_has_to_ask_again(visit: Console, keyed: Keyed) -> None:
    """A key is the tab's own."""
    show(visit, keyed.admin)
    visit.until_live()
    other = Console(visit.page.context.new_page(), keyed.url)
    other.page.goto(keyed.url + "/")
    expect(other.dialog).to_contain_text("This gateway needs a key")


def test_who_is_no_admin_sees_its_own_and_why_it_may_do_no_more(visit: Console, keyed: Keyed) -> None:
    """Of others' requests it learns their number; what needs an admin's key is refused, with that reason."""
    show(visit, keyed.alice)
    visit.until_live()
    body = {"model": "village", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            request(keyed.url + "/v1/completions", body, [("authorization", f"Bearer {keyed.admin}")])

    theirs = threading.Thread(target=keep_asking)
    theirs.start()
    try:
        visit.ask_for_much(num_tokens=1500)  # more than can be looked at before it ends
        expect(visit.answer()).to_have_text(SOME_WORDS)
        requests = visit.tab("Requests")
        expect(requests.get_by_role("button", name="Cancel")).to_have_count(1)
        expect(requests).to_contain_text(re.compile(r"1 (more|other)"))
        visit.button("Stop").click()
    finally:
        over.set()
        theirs.join()
    workers = visit.tab("Workers")
    for name in ("Drain", "Cordon", "Stop worker", "Join a worker", "Rebalance"):
        expect(workers.get_by_role("button", name=name, exact=True).first).to_be_disabled()
    expect(workers).to_contain_text("need an admin's key")
    plan = visit.tab("Plan")
    for name in ("Try", "Apply"):
        expect(plan.get_by_role("button", name=name, exact=True)).to_be_disabled()
    for name in ("Logs", "Keys"):
        expect(visit.tab(name)).to_contain_text(re.compile("admin", re.IGNORECASE))
    assert visit.page.get_by_role("button", name="Kill this worker").count() == 0, "this gateway is no demo's"


def test_what_is_copied_takes_the_key_from_a_variable(visit: Console, keyed: Keyed) -> None:
    """It is not among what is copied, and all works with it."""
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(visit, keyed.alice)
    visit.until_live()
    visit.choose("Raw")
    visit.write("Anna")
    visit.set("Max tokens", "8")
    shell, python = visit.copied("Copy as curl"), visit.copied("Copy as Python")
    visit.tab("Connect a client")
    greeting = visit.copied("Copy the settings for Python")
    for command in (["sh", "-c", shell], [sys.executable, "-c", python], [sys.executable, "-c", greeting]):
        assert keyed.alice not in command[-1]
        assert run(command, SWARM_API_KEY=keyed.alice)


def test_an_admin_sees_quotas_and_no_secrets(visit: Console, keyed: Keyed) -> None:
    show(visit, keyed.admin)
    visit.until_live()
    keys = visit.tab("Keys")
    expect(keys.get_by_role("row").filter(has_text="alice")).to_contain_text(
        re.compile(r"100[,. \u202f\u00a0]?000|100 ?k")
    )
    expect(keys.get_by_role("row").filter(has_text="boss")).to_contain_text(re.compile("admin", re.IGNORECASE))
    shown = visit.page.content()
    assert not any(key in shown for key in (keyed.admin, keyed.alice))
