"""The guards that all tests here rely on notice what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.browser.guards import Guards

if TYPE_CHECKING:
    from playwright.sync_api import Browser

POLICY = "default-src 'none'; script-src 'self'; connect-src *; img-src data:"


class _Strict(BaseHTTPRequestHandler):
    """An empty page with a strict policy, whatever is asked; 404 for what is named missing."""

    def do_GET(self) -> None:
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("content-type", "text/html")
        self.send_header("content-security-policy", POLICY)
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>empty</title>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def home() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Strict) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


MISDEEDS = {
    "fetch('http://example.org/font.woff').catch(() => 0)": "outside: GET http://example.org/font.woff",
    "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:1/pixel'}))": "img-src refused",
    "document.body.setAttribute('style', 'color: red')": "style-src",
    "document.body.append(Object.assign(document.createElement('script'), {textContent: 'boom()'}))": "script-src",
    "setTimeout(() => { throw new Error('slipped') })": "thrown: Error: slipped",
    "console.error('slipped')": "console: error: slipped",
    "fetch('/missing').then((answer) => answer.text())": "404",
    "fetch('/?key=sk-secret').then((answer) => answer.text())": "a key in an address",
}


@pytest.mark.parametrize(("misdeed", "told"), MISDEEDS.items(), ids=range(len(MISDEEDS)))
def test_each_misdeed_is_noticed(chromium: Browser, home: str, misdeed: str, told: str) -> None:
    guards = Guards([home])
    guards.keep_secret("sk-secret")
    context = chromium.new_context()
    try:
        guards.watch(context)
        page = context.new_page()
        page.goto(home)
        guards.check()  # nothing yet
        page.evaluate(f"async () => {{ {misdeed}; }}")
        for _ in range(200):  # the browser tells it in its own time
            if any(told in trouble for trouble in guards.troubles):
                break
            page.wait_for_timeout(50)
    finally:
        context.close()
    with pytest.raises(AssertionError, match="did what it must not"):
        guards.check()
    assert any(told in trouble for trouble in guards.troubles), guards.troubles
    guards.expect(".")
    guards.check()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux has it installed")
@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_where_it_is_installed_a_missing_browser_fails(tmp_path: Path, ci: str, code: int) -> None:
    """Nobody looks at what continuous integration skips. Elsewhere it is a reason to skip."""
    one = f"{__file__}::test_each_misdeed_is_noticed[0]"
    environment = {**os.environ, "PATH": str(tmp_path), "CI": ci}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert "no Chromium is installed" in ran.stdout
    assert ran.returncode == code
