"""The page of figures is generated from its data, and every figure says how it was measured."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from typing import Any

import pytest

from tests.documents import ROOT

_SPEC = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
assert _SPEC is not None
assert _SPEC.loader is not None
figures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(figures)

PAGE = ROOT / "docs" / "reference" / "figures.md"
DATA = tomllib.loads(figures.SOURCE.read_text())


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == figures.render(DATA), "python tools/figures.py > docs/reference/figures.md"


@pytest.mark.parametrize("figure", DATA["figure"], ids=lambda figure: figure["title"])
def test_a_figure_says_how_it_was_measured(figure: dict[str, Any]) -> None:
    assert figure["section"] in DATA["sections"]
    assert all(figure[key] for key in ("title", "what", "command", "processor", "rows"))
    assert re.match(r"20\d\d-\d\d-\d\d", figure["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", figure["commit"])


def test_titles_are_unique() -> None:
    """Other pages link to them."""
    titles = [figure["title"] for figure in DATA["figure"]]
    assert len(titles) == len(set(titles))


def test_a_row_with_a_missing_cell_is_rejected() -> None:
    figure = {**DATA["figure"][0], "rows": "one | cell"}
    with pytest.raises(ValueError, match="cells"):
        figures.render({**DATA, "figure": [figure]})
