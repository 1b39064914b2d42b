"""What the page is told, by a test in the gateway's place: a swarm of any size, from a real one's view."""

from __future__ import annotations

import copy
import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

View = dict[str, Any]
SCRIPT = Path(__file__).with_name("feed.js").read_text()


def first_view(url: str) -> View:
    """What a gateway tells first at /console/live."""
    with urllib.request.urlopen(url + "/console/live", timeout=30) as live:
        event = ""
        for line in live:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            event = value if name == "event" else event
            if name == "data" and event == "snapshot":
                view: View = json.loads(value)
                return view
    raise AssertionError("it told no snapshot")


def crowded(view: View, num_workers: int, num_requests: int) -> View:
    """The same swarm with more of all: each worker is a stage, each request is under way. ``view`` has one of each."""
    crowd = copy.deepcopy(view)
    workers, stages = list(view["workers"].values()), view["plan"]["stages"]
    crowd["workers"] = {}
    for number in range(num_workers):
        name = f"w{number}"
        row = {**workers[number % len(workers)], "name": name, "host": f"host-{number % 12}"}
        crowd["workers"][f"{name}-{number:08x}"] = {
            **row,
            "incarnation": f"{name}-{number:08x}",
            "layers": [number, number + 1],
        }
    crowd["plan"]["stages"] = [
        {**stages[number % len(stages)], "worker": f"w{number}", "layers": [number, number + 1]}
        for number in range(num_workers)
    ]
    (request, *_) = view["requests"].values()
    ids = [f"{number:032x}" for number in range(num_requests)]
    crowd["requests"] = {own: {**request, "request_id": own, "tenant": f"tenant {own[-2:]}"} for own in ids}
    crowd["status"] |= {"num_workers": num_workers, "num_stages": num_workers, "num_requests": num_requests}
    return crowd


def feed(context: BrowserContext, view: View) -> None:
    """Have all pages of this context hear of ``view`` in place of the gateway's."""
    context.add_init_script(f"{SCRIPT}\nwindow.feed.view = {json.dumps(view)};")


def tell(page: Page, event: str, data: Any) -> None:
    page.evaluate("([event, data]) => window.feed.push(event, data)", [event, data])


def hurry(page: Page, count: int, each: int) -> list[float]:
    """Tell so many deltas, ``each`` a frame; the milliseconds between frames."""
    frames: list[float] = page.evaluate("([count, each]) => window.feed.hurry(count, each)", [count, each])
    return frames


def heap(page: Page) -> dict[str, float]:
    """What the page holds after a collection of garbage: bytes of scripts' heap, nodes, listeners."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    for _ in range(2):  # what the first one lets go of frees more
        session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return {name: found[name] for name in ("JSHeapUsedSize", "Nodes", "JSEventListeners")}
