"""What no page may do, in any test: ask another host, break the content security policy, complain on the console, or
show a key in an address."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Request, WebError

# Told by the page's own event, since not every violation is written to the console.
TELL_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (violation) => {
  const { effectiveDirective, blockedURI, sourceFile, lineNumber } = violation;
  window.tellViolation(`${effectiveDirective} refused ${blockedURI} (${sourceFile}:${lineNumber})`);
});
"""
OWN_SCHEMES = ("data:", "blob:", "about:")


class Guards:
    """Watch contexts of a browser. ``homes``: the origins that may be asked. A test says what it brings about itself
    by :meth:`expect`, and which words are secrets by :meth:`keep_secret`."""

    def __init__(self, homes: Sequence[str] = ()) -> None:
        self.homes = list(homes)
        self.troubles: list[str] = []
        self._expected: list[re.Pattern[str]] = []
        self._secrets: list[str] = []

    def expect(self, *patterns: str) -> None:
        """These errors on the console are the test's own doing, such as a server's that it killed."""
        self._expected += [re.compile(pattern) for pattern in patterns]

    def keep_secret(self, secret: str) -> None:
        self._secrets.append(secret)

    def watch(self, context: BrowserContext) -> None:
        context.expose_binding("tellViolation", lambda source, text: self._note(f"content security policy: {text}"))
        context.add_init_script(TELL_VIOLATIONS)
        context.on("request", self._asked)
        context.on("console", self._said)
        context.on("weberror", self._threw)

    def check(self) -> None:
        """Raises AssertionError if anything was done that must not be."""
        left = [trouble for trouble in self.troubles if not any(known.search(trouble) for known in self._expected)]
        assert not left, "the page did what it must not:\n" + "\n".join(left)

    def _asked(self, request: Request) -> None:
        if not any(request.url == home or request.url.startswith(home + "/") for home in self.homes) and (
            not request.url.startswith(OWN_SCHEMES)
        ):
            self._note(f"outside: {request.method} {request.url}")
        if any(secret in request.url for secret in self._secrets):
            self._note(f"a key in an address: {request.url}")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self._note(f"console: {message.type}: {message.text} ({message.location.get('url', '')})")

    def _threw(self, error: WebError) -> None:
        self._note(f"thrown: {error.error.stack or error.error.message}")

    def _note(self, trouble: str) -> None:
        self.troubles.append(trouble)
