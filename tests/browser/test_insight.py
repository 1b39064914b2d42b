"""What stands behind an answer: each token's chance and what else could have stood there, and two traces compared."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import Console, text_of

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.swarms import Swarm

MS = {"µs": 1e-3, "ms": 1.0, "s": 1e3}


def ask_briefly(console: Console, num_tokens: int) -> None:
    console.ask_for_story(num_tokens, temperature="0.8")
    console.until_answered()


def shares(panel: Locator) -> list[float]:
    """The percentages that are listed, the likeliest first."""
    return [
        float(found) for found in re.findall(r"([\d.]+)\s?%", " ".join(panel.get_by_role("listitem").all_inner_texts()))
    ]


def test_each_token_tells_what_else_could_have_stood_there(console: Console, swarm: Swarm) -> None:
    """Asked for afterwards, with the same text. The chances are those of the API; keys go from token to token."""
    ask_briefly(console, 16)
    plain = console.answer().text_content()
    region = console.region("Answer")
    region.get_by_label("Confidence").check()
    asked = console.asks_by(region.get_by_role("button", name="Ask again with confidence"))
    console.until_answered()
    assert console.answer().text_content() == plain
    told = swarm.answer(asked.path, asked.body)
    assert text_of(told) == plain
    logprobs = told["choices"][0]["logprobs"]
    tokens = region.get_by_role("option")
    expect(tokens).to_have_count(len(logprobs["tokens"]))
    panel = region.get_by_role("group", name="Alternatives")
    tokens.nth(3).click()
    _check_panel(panel, logprobs, 3)
    console.page.keyboard.press("ArrowRight")
    expect(tokens.nth(4)).to_have_attribute("aria-selected", "true")
    _check_panel(panel, logprobs, 4)


def _check_panel(panel: Locator, logprobs: dict[str, Any], at: int) -> None:
    expect(panel).to_contain_text(f"Token {at + 1}:")
    found = {**logprobs["top_logprobs"][at], logprobs["tokens"][at]: logprobs["token_logprobs"][at]}
    expected = sorted((100 * math.exp(each) for each in found.values()), reverse=True)
    assert shares(panel)[: len(expected)] == pytest.approx(expected, abs=1)
    taken = panel.get_by_role("listitem").filter(has_text="taken")
    expect(taken).to_have_count(1)
    expect(taken).to_contain_text(logprobs["tokens"][at].strip())


def test_two_traces_are_laid_side_by_side(console: Console, swarm: Swarm) -> None:
    """In words, drawn at one scale, and as a table with the times that the traces tell."""
    asked, ids = [], []
    for num_tokens in (8, 24):
        ask_briefly(console, num_tokens)
        (found,) = re.findall(r"request ([0-9a-f]{8})", console.region("Answer").inner_text())
        asked.append(found)
    timeline = console.region("Timeline")
    timeline.get_by_text("Compare two traces").click()
    for label, own in zip(("First trace", "Second trace"), asked, strict=True):
        option = timeline.get_by_label(label).locator("option").filter(has_text=own)
        expect(option).to_have_count(1)
        ids.append(option.get_attribute("value") or "")
        timeline.get_by_label(label).select_option(ids[-1])
    timeline.get_by_role("button", name="Compare", exact=True).click()
    table = timeline.get_by_role("table", name="Times a token of both traces")
    row = table.get_by_role("row", name=re.compile("^each token"))
    expect(row).to_be_visible()
    first, second, difference = (_milliseconds(words) for words in row.get_by_role("cell").all_inner_texts())
    assert second - first == pytest.approx(difference, abs=0.02 * max(first, second))
    assert [first, second] == pytest.approx([_per_token_ms(swarm, own) for own in ids], rel=0.01)
    expect(timeline).to_contain_text(re.compile(r"Both took the same time|times as long as"))
    scales = [_scale(timeline, own) for own in asked]
    assert scales[0] == scales[1]


def _milliseconds(words: str) -> float:
    sign, figure, unit = re.fullmatch(r"([+−]?)([\d.]+)\s(µs|ms|s)", words.strip()).groups()  # type: ignore[union-attr]
    return (-1 if sign == "−" else 1) * float(figure) * MS[unit]


def _per_token_ms(swarm: Swarm, request_id: str) -> float:
    code, trace = swarm.ask(f"/console/trace/{request_id}")
    assert code == 200, trace
    (sequence,) = trace["sequences"]
    return 1e3 * float(sequence["sums"]["total_s"]) / float(sequence["num_traced"])


def _scale(timeline: Locator, own: str) -> str:
    label = timeline.get_by_role("img", name=f"Tokens of {own}").get_attribute("aria-label") or ""
    return label.partition(", ")[2]
