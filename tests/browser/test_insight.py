"""What stands behind an answer: each token's chance, what else could have stood there, and where the time went."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.browser.console import SLOW_MS, Console, text_of, until_seen

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
    taken = panel.get_by_role("listitem").filter(has_text="chosen")
    expect(taken).to_have_count(1)
    expect(taken).to_contain_text(logprobs["tokens"][at].strip())


# The timeline's parts: as its table calls them, as a trace does, and as its sentences do.
ROWS = {"queue": "queue_s", "wire": "wire_s", "waiting": "wait_s", "compute": "compute_s", "sampling": "sample_s"}
ROWS |= {"broker": "broker_s", "unaccounted": "unaccounted_s"}
DOINGS = {"queue": "queueing", "wire": "on the wire", "waiting": "waiting", "compute": "computing"}
DOINGS |= {"sampling": "sampling", "broker": "in the broker", "unaccounted": "unaccounted for"}
LEAST_MS = 0.05  # less is lost where a trace rounds each token's part to a microsecond
HOP = re.compile(r"(waiting|computing|sampling) in (w\d) \(layers? [\d–]+\) ([\d.]+\s(?:µs|ms|s))")
WORTH_TELLING = 0.02  # of a token's time: what is less may be told as "all else"


def test_the_timeline_tells_each_part_as_the_trace_does(console: Console, swarm: Swarm) -> None:
    """The sums by part, the largest named; and one token hop by hop."""
    with console.page.expect_request("**/console/trace/*") as traced:
        ask_briefly(console, 24)
    timeline = console.timeline()
    table = timeline.get_by_role("table", name="Where the time of all tokens went")
    expect(table.get_by_role("row", name=re.compile("^total"))).to_contain_text("24 tokens", timeout=SLOW_MS)
    sequence = _trace(swarm, traced.value.url.rpartition("/")[2])
    sums = {row: 1e3 * sequence["sums"][part] for row, part in ROWS.items()}
    assert all(sums[row] > LEAST_MS for row in ("wire", "compute", "sampling")), "there is something to compare"
    told = pytest.approx(sums, rel=0.01, abs=LEAST_MS)
    until_seen(console.page, lambda: _parts_shown(table) == told, f"the table says {sums}")
    largest = DOINGS[max(sums, key=lambda row: sums[row])]
    expect(timeline).to_contain_text(f"Over all tokens the largest part was {largest}: ")
    _check_hops(timeline.get_by_role("slider", name="Token"), console, sequence["tokens"][0])


def _parts_shown(table: Locator) -> dict[str, float]:
    """Each part's milliseconds. What has no row took nothing."""
    rows = table.locator("tbody tr").all()
    found = {row.get_by_role("rowheader").inner_text().strip(): row.get_by_role("cell").first for row in rows}
    return {name: _milliseconds(found[name].inner_text()) if name in found else 0.0 for name in ROWS}


def _check_hops(slider: Locator, console: Console, token: dict[str, Any]) -> None:
    """What is said of the first token: its own times, in each worker."""
    slider.focus()
    console.page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^Token 1\b"))
    words = slider.get_attribute("aria-valuetext") or ""
    shown = {(doing, worker): _milliseconds(time) for doing, worker, time in HOP.findall(words)}
    fields = {"waiting": "wait_s", "computing": "compute_s", "sampling": "sample_s"}
    told = {(doing, each["worker"]): 1e3 * each[part] for each in token["stages"] for doing, part in fields.items()}
    worth = {hop for hop, length in told.items() if length >= WORTH_TELLING * 1e3 * token["total_s"]}
    assert worth, "no part of the first token's time is worth telling"
    assert worth <= shown.keys(), words
    for hop, length in shown.items():
        assert length == pytest.approx(told[hop], rel=0.01, abs=0.01), (hop, words)


def test_a_trace_is_asked_for_no_longer_than_it_runs(console: Console, swarm: Swarm) -> None:
    """Of somebody else's request, too, whose end the page only hears of."""
    asked: list[str] = []
    console.page.on("request", lambda one: "/console/trace/" in one.url and asked.append(one.url))
    body = {"model": "village", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as somebody:
        theirs = somebody.submit(swarm.ask, "/v1/completions", body)
        requests = console.tab("Requests")
        cancel = requests.get_by_role("button", name=re.compile("^Cancel"))
        expect(cancel).to_have_count(1)
        requests.get_by_role("button", name=re.compile("^Trace")).first.click()
        until_seen(console.page, lambda: len(asked) > 1, "it is asked for while it runs")
        assert theirs.result()[0] == 200
    expect(cancel).to_have_count(0)
    console.page.wait_for_timeout(2000)  # the last look
    num = len(asked)
    console.page.wait_for_timeout(3000)
    assert len(asked) == num


def _milliseconds(words: str) -> float:
    sign, figure, unit = re.fullmatch(r"([+−]?)([\d.]+)\s(µs|ms|s)", words.strip()).groups()  # type: ignore[union-attr]
    return (-1 if sign == "−" else 1) * float(figure) * MS[unit]


def _trace(swarm: Swarm, request_id: str) -> dict[str, Any]:
    """As the gateway tells it, of a request with one continuation."""
    code, trace = swarm.ask(f"/console/trace/{request_id}")
    assert code == 200, trace
    (sequence,) = trace["sequences"]
    return dict(sequence)
