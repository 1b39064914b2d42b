#!/usr/bin/env python3
"""Make the README's pictures of the console: a real swarm of the embedded model, seen through Debian's Chromium.

Into docs/pictures: console-light.png, console-dark.png (during a recovery), console-phone.png, and console.gif: a
prompt streams, a worker is killed by its button, the recovery is told, the text goes on. The GIF's time is the swarm's
own, ``--slower`` times slower, for a small model says more than anybody can read. Needs Pillow: pip install pillow.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, CDPSession, Page, Route, expect

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.chromium import launched, why_none  # noqa: E402
from tests.browser.console import SLOW_MS, SOME_WORDS, Console  # noqa: E402
from tests.browser.swarms import Swarm  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
MOST_PICTURE = 300 << 10
MOST_FILM = 2 << 20
DESK = {"width": 1360, "height": 900}
PHONE = {"width": 390, "height": 844}
FILM = {"width": 1020, "height": 675}  # of a window as on a desk
SLOW = {"SWARM_BROKER__SPECULATION": "off"}  # an answer lasts until a worker is killed
NUM_COLOURS = 192
STILL_MS = 2500  # the last picture stays for as long
SHORTEST_MS = 60
DIED = re.compile(r"died|was lost")


def opened(browser: Browser, swarm: Swarm, **options: Any) -> Console:
    """A window of its own, in which an answer goes on to its last token."""
    page = browser.new_context(**options).new_page()
    page.route("**/v1/completions", without_an_end)
    console = Console(page, swarm.url)
    console.open()
    return console


def without_an_end(route: Route) -> None:
    """The village's stories are short: none ends before its last token."""
    body = json.loads(route.request.post_data or "{}")
    route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))


def story(console: Console, num_tokens: int) -> None:
    console.ask_for_story(num_tokens, temperature="0")
    expect(console.answer()).to_have_text(SOME_WORDS)


# --- pictures


def light(console: Console, swarm: Swarm) -> None:
    """A conversation, and an answer that a death did not change."""
    question(console, "What colour is the cat?")
    story(console, 1500)
    console.kill(swarm.chain()[1])
    healed = console.region("Answer").get_by_role("group", name="Healed answer")
    expect(healed).to_contain_text("equal", timeout=SLOW_MS)


def question(console: Console, words: str) -> None:
    console.choose("Chat")
    console.write(words)
    console.generate()
    console.until_answered()


def during_a_recovery(console: Console, swarm: Swarm) -> None:
    story(console, 1500)
    console.kill(swarm.chain()[1])
    expect(console.region("Recovery")).to_contain_text(DIED, timeout=SLOW_MS)


def phone(console: Console, swarm: Swarm) -> None:
    question(console, "What colour is the cat?")
    question(console, "Where is the dog?")


def pictures(browser: Browser, swarm: Swarm) -> None:
    wanted: dict[str, tuple[Callable[[Console, Swarm], None], dict[str, Any]]] = {
        "light": (light, {"color_scheme": "light", "viewport": DESK, "device_scale_factor": 1.25}),
        "dark": (during_a_recovery, {"color_scheme": "dark", "viewport": DESK, "device_scale_factor": 1.25}),
        "phone": (phone, {"color_scheme": "light", "viewport": PHONE, "device_scale_factor": 2}),
    }
    for name, (act, options) in wanted.items():
        swarm.until_well()
        console = opened(browser, swarm, **options)
        act(console, swarm)
        taken = Image.open(io.BytesIO(console.page.screenshot()))
        console.page.context.close()
        path = FOLDER / f"console-{name}.png"
        with_colours(taken).save(path, optimize=True)
        say(path, MOST_PICTURE)


def with_colours(picture: Image.Image) -> Image.Image:
    """As few as can't be told from all."""
    return picture.convert("RGB").quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


# --- film


class Film:
    """What a page shows, each time that it changes, with the time."""

    def __init__(self, page: Page) -> None:
        self.frames: list[tuple[float, bytes]] = []
        self._session: CDPSession = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._take)
        self._session.send(
            "Page.startScreencast", {"format": "png", "maxWidth": FILM["width"], "maxHeight": FILM["height"]}
        )

    def _take(self, frame: dict[str, Any]) -> None:
        self.frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        self._session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def stop(self) -> None:
        self._session.send("Page.stopScreencast")

    def save(self, path: Path, slower: float) -> None:
        """As a GIF; frames that would be shown for too short are left out."""
        kept: list[tuple[float, bytes]] = []
        for frame in self.frames:
            if kept and (frame[0] - kept[-1][0]) * 1000 * slower < SHORTEST_MS:
                kept[-1] = (kept[-1][0], frame[1])
            else:
                kept.append(frame)
        times = [at for at, _ in kept]
        lasts = [round((after - at) * 1000 * slower) for at, after in itertools.pairwise(times)]
        images = [Image.open(io.BytesIO(frame)).convert("RGB") for _, frame in kept]
        palette = with_colours(images[-1])
        painted = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        painted[0].save(
            path, save_all=True, append_images=painted[1:], duration=[*lasts, STILL_MS], loop=0, optimize=True
        )
        print(f"{len(kept)} of {len(self.frames)} frames, {sum(lasts) / 1000:.1f} s")


def film(browser: Browser, swarm: Swarm, slower: float) -> None:
    swarm.until_well()
    console = opened(browser, swarm, color_scheme="light", viewport=DESK)
    shot = Film(console.page)
    victim = swarm.chain()[1]
    story(console, 1500)
    console.page.wait_for_timeout(1200)
    console.stage(victim).get_by_role("button", name="Kill this worker").click()
    console.page.wait_for_timeout(400)
    console.agree()
    expect(console.region("Recovery")).to_contain_text(DIED, timeout=SLOW_MS)
    healed = console.region("Answer").get_by_role("group", name="Healed answer")
    expect(healed).to_contain_text("equal", timeout=SLOW_MS)
    console.page.wait_for_timeout(500)
    shot.stop()
    path = FOLDER / "console.gif"
    shot.save(path, slower)
    console.page.context.close()
    say(path, MOST_FILM)


def say(path: Path, most: int) -> None:
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size >> 10} KiB")
    if size > most:
        raise SystemExit(f"{path} is larger than {most >> 10} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("only", nargs="?", choices=["pictures", "film"])
    options = parser.parse_args()
    if (reason := why_none()) is not None:
        raise SystemExit(reason)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), **SLOW) as swarm, launched() as browser:
        if options.only != "pictures":
            film(browser, swarm, options.slower)  # first, while no recovery has been told yet
        if options.only != "film":
            pictures(browser, swarm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
