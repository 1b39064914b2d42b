"""The console as a person finds it: by roles and accessible names, which are what the page promises."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


class Console:
    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url

    def open(self) -> None:
        """Returns when it is live."""
        from playwright.sync_api import expect

        self.page.goto(self.url + "/")
        expect(self.connection).to_contain_text("live")

    @property
    def connection(self) -> Locator:
        """Live, reconnecting, or the broker is away."""
        return self.page.locator("header").get_by_role("status")

    def region(self, name: str) -> Locator:
        return self.page.get_by_role("region", name=name, exact=True)

    def tab(self, name: str) -> Locator:
        """Choose a tab; what it shows."""
        self.page.get_by_role("tab", name=name).click()
        return self.region(name)

    @property
    def stages(self) -> Locator:
        return self.region("Stages").get_by_role("article")

    def stage(self, worker: str) -> Locator:
        return self.region("Stages").get_by_role("article", name=re.compile(rf"^Stage \d+: {worker}$"))

    def agree(self) -> None:
        """Say yes to what ends something."""
        self.page.get_by_role("dialog").get_by_role("button", name=re.compile(r"^Yes\b")).click()
