"""axe-core's findings on a page. It comes from npm, once for all tests, and nothing of it is in the repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

PACKAGE = "axe-core@4.14.1"  # another one may find other things
INSTALL_S = 120.0
GRAVE = ("serious", "critical")


class NoAxe(Exception):
    """It can't be had here; why."""


def source(folder: Path) -> str:
    """Raises NoAxe."""
    if shutil.which("npm") is None:
        raise NoAxe("npm is not installed, so there is no axe-core")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        raise NoAxe(f"npm did not install axe-core within {INSTALL_S:g} s") from None
    if made.returncode:
        raise NoAxe(f"npm can't install axe-core here: {made.stderr[-300:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


def grave_findings(page: Page, axe: str) -> list[str]:
    """What is serious or critical, in words, with the elements."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(f"() => {{ {axe} }}")
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    return [
        f"{rule['impact']}: {rule['id']}: {rule['help']}: {node['html'][:160]} ({node['failureSummary'][:300]})"
        for rule in found["violations"]
        if rule["impact"] in GRAVE
        for node in rule["nodes"][:3]
    ]
