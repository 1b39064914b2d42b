"""The page is sealed, as a browser takes it: no script but its own runs in it, and nobody's frame shows it."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import Console, until_seen

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

    from tests.browser.guards import Guards
    from tests.browser.swarms import Swarm


class Stranger(ThreadingHTTPServer):
    """Another origin, which shows ``html`` whatever it is asked, and has a script."""

    html = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Stranger)
        is_script = self.path.endswith(".js")
        self.send_response(200)
        self.send_header("content-type", "text/javascript" if is_script else "text/html")
        self.end_headers()
        self.wfile.write(b"window.taken = 'from elsewhere'" if is_script else self.server.html.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger(guards: Guards) -> Iterator[Stranger]:
    with Stranger() as server:
        guards.homes.append(server.url)
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_no_script_but_its_own_runs(page: Page, swarm: Swarm, stranger: Stranger, guards: Guards) -> None:
    """Planted into what the gateway sends, headers as they are: an inline script, a handler, a script from elsewhere.
    The page does without, and lives."""
    guards.expect("(?i)content security policy.*script-src")
    planted = {
        "script-src-elem refused inline": "<script>window.taken = 'inline'</script>",
        "script-src-attr refused inline": "<img src='data:,' alt='' onerror=\"window.taken = 'handler'\">",
        f"script-src-elem refused {stranger.url}/taken.js": f"<script src='{stranger.url}/taken.js'></script>",
    }

    def plant(route: Route) -> None:
        sent = route.fetch()
        route.fulfill(response=sent, body=sent.text().replace("</body>", "".join(planted.values()) + "</body>"))

    page.route(swarm.url + "/", plant)
    console = Console(page, swarm.url)
    console.open()
    expect(console.stages).to_have_count(3)
    assert page.evaluate("document.scripts.length") == 4, "its own two, and what was planted"
    for refused in planted:
        until_seen(page, lambda refused=refused: any(refused in told for told in guards.troubles), refused)
    assert page.evaluate("window.taken ?? null") is None


def test_nobodys_frame_shows_it(page: Page, swarm: Swarm, stranger: Stranger, guards: Guards) -> None:
    """What may be framed is, beside it."""
    guards.expect("frame-ancestors")
    framed = {"open": swarm.url + "/health", "sealed": swarm.url + "/"}
    frames = "".join(f"<iframe name={name} src='{url}'></iframe>" for name, url in framed.items())
    stranger.html = f"<!doctype html><link rel=icon href='data:,'><title>Another page</title>{frames}"
    page.goto(stranger.url)
    expect(page.frame_locator("[name=open]").locator("body")).to_contain_text("ok")
    until_seen(page, lambda: any("frame-ancestors" in told for told in guards.troubles), "the frame is refused")
    sealed = page.frame("sealed")
    assert sealed is not None
    assert not sealed.url.startswith(swarm.url)
    assert "Swarm" not in sealed.content()
    expect(page.frame_locator("[name=sealed]").get_by_role("region")).to_have_count(0)
