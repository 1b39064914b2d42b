#!/usr/bin/env python3
"""Keep the console open for minutes while answers stream into it and workers die, and see that its memory is flat.

A swarm of the embedded model, and its console in Debian's Chromium, which asks for one answer after the other; every
``--kill-every`` seconds a worker is killed. What the page's scripts hold after a collection of garbage, its nodes and
its listeners are read all the while, and the nodes of the document by region. In the last quarter they must be what
they were in the second one (what is kept for display, such as charts, is full by then), within ``--more-mib``.

The prompt is written once: for its own Undo a browser keeps what was typed into a field, with nodes of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import expect  # noqa: E402

from tests.browser.chromium import launched, why_none  # noqa: E402
from tests.browser.console import SOME_WORDS, Console  # noqa: E402
from tests.browser.feed import heap  # noqa: E402
from tests.browser.guards import Guards  # noqa: E402
from tests.browser.swarms import Swarm  # noqa: E402

ANSWER_S = 120.0
READ_EVERY_S = 10.0
MORE_NODES = 150  # a stage that was lost and is still shown has some 60
MORE_LISTENERS = 30
BY_REGION = """() => {
  const found = {};
  const count = (node, region) => {
    const own = node.nodeName === "SECTION" ? node.id : region;
    found[own] = (found[own] ?? 0) + 1;
    for (const child of node.childNodes) count(child, own);
  };
  count(document, "page");
  return found;
}"""


def soak(swarm: Swarm, console: Console, options: argparse.Namespace) -> list[dict[str, float]]:
    """Ask, read and kill until the time is over; what the page held each time."""
    began = killed_at = read_at = time.monotonic()
    seen: list[dict[str, float]] = []
    regions: dict[str, int] = {}
    answers = kills = 0
    while (now := time.monotonic()) < began + 60 * options.minutes:
        if console.button("Generate").is_enabled():
            console.page.wait_for_timeout(1000 * options.rest)
            if answers == 0:
                console.ask_for_much()
            else:
                console.generate()
            answers += 1
            expect(console.answer()).to_have_text(SOME_WORDS, timeout=ANSWER_S * 1000)
        if now > killed_at + options.kill_every:
            killed_at, kills = now, kills + 1
            workers = sorted(name for name in swarm.processes() if name.startswith("w"))
            swarm.kill(workers[kills % len(workers)])
        if now > read_at + READ_EVERY_S:
            read_at = now
            seen.append(heap(console.page))
            told = ", ".join(f"{value:.0f} {name}" for name, value in list(seen[-1].items())[1:])
            held = seen[-1]["JSHeapUsedSize"] / (1 << 20)
            print(
                f"{(now - began) / 60:5.1f} min  {held:6.2f} MiB  {told}  {answers} answers, {kills} kills", flush=True
            )
            former, regions = regions, console.page.evaluate(BY_REGION)
            moved = {name: num - former.get(name, 0) for name, num in regions.items() if num != former.get(name, 0)}
            print(f"{sum(regions.values()):>22} nodes in the document; {moved or 'as before'}", flush=True)
        console.page.wait_for_timeout(200)
    return seen


def verdict(seen: list[dict[str, float]], more_mib: float) -> list[str]:
    """What grew, in words."""
    quarters = [seen[len(seen) * part // 4 : len(seen) * (part + 1) // 4] for part in range(4)]
    wrong = []
    bounds = {"JSHeapUsedSize": more_mib * (1 << 20), "Nodes": MORE_NODES, "JSEventListeners": MORE_LISTENERS}
    for name, more in bounds.items():
        level = [statistics.median(each[name] for each in part) for part in quarters]
        print(f"{name} by quarter: {', '.join(f'{value:,.0f}' for value in level)}")
        if level[3] > level[1] + more:
            wrong.append(f"{name} grew from {level[1]:,.0f} to {level[3]:,.0f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=45.0, metavar="SECONDS")
    parser.add_argument(
        "--rest", type=float, default=0.0, metavar="SECONDS", help="between answers: leaves the machine to others"
    )
    parser.add_argument("--more-mib", type=float, default=1.0)
    options = parser.parse_args()
    if (reason := why_none()) is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder)) as swarm, launched() as browser:
        guards = Guards([swarm.url])
        guards.expect("status of 503")  # while a worker's layers are on the way to another
        context = browser.new_context()
        guards.watch(context)
        console = Console(context.new_page(), swarm.url)
        console.open()
        console.choose("Raw")  # a conversation would fill the model's context
        seen = soak(swarm, console, options)
        context.close()
        guards.check()
    if len(seen) < 8:
        raise SystemExit("that was too short to tell")
    wrong = verdict(seen, options.more_mib)
    print("; ".join(wrong) or "the page's memory is flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
