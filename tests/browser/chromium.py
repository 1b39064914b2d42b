"""Debian's Chromium, as the tests and the README's pictures start it: none is downloaded, and none calls home."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Nothing but what the test opens, and no name is looked up: a page that asks for another host gets no further.
FLAGS = (
    "--no-sandbox",  # root may have none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # containers have little of it
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--enable-precise-memory-info",
    "--js-flags=--expose-gc",
)


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def why_none() -> str | None:
    """Why no browser can be driven here; None if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install '.[dev]')"
    if program() is None:
        return "no Chromium is installed (Debian: apt-get install chromium)"
    return None


def must_be_here() -> bool:
    """Is it a fault if there is none? ``.ci/run`` installs one where it may: as root, on Linux."""
    return bool(os.environ.get("CI")) and sys.platform == "linux" and os.geteuid() == 0


@contextmanager
def launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
