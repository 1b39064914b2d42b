"""A model's own Python: no call of transformers may run it. Without transformers, which is slow to import; what happens
to such a folder is tried in ``tests/integration/test_model_code.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarm

SOURCES = Path(swarm.__file__).parent
BUILDERS = {"from_pretrained", "from_config"}


def builders() -> Iterator[tuple[str, ast.Call]]:
    """Every call by which transformers builds something of what a folder says."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BUILDERS:
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", node


@pytest.mark.slow
def test_transformers_is_told_never_to_run_a_model_s_code() -> None:
    """Where it is not told so, it asks at the terminal, and runs the code for a "y"."""
    found = list(builders())
    assert len(found) >= 3
    for place, call in found:
        told = {keyword.arg: keyword.value for keyword in call.keywords}.get("trust_remote_code")
        assert isinstance(told, ast.Constant), place
        assert told.value is False, place
