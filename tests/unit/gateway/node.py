"""Node, by which the page's modules are tested without a page."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

LEAST = (20, 19)  # since then modules need no package.json beside them
PATIENCE_S = 120


def node() -> str:
    """Find it, or skip by name."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    version = re.match(r"v(\d+)\.(\d+)", told)
    if version is None or tuple(map(int, version.groups())) < LEAST:
        pytest.skip(f"node is {told.strip()}; the page's modules are tested by {LEAST[0]}.{LEAST[1]} or later")
    return found
