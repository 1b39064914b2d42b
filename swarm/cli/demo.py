"""``swarm demo``: a worker is killed in the middle of an answer, and the answer goes on with the same tokens."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.options import JsonOption
from swarm.errors import RequestFailed, SwarmError

if TYPE_CHECKING:
    from swarm.client.client import AsyncClient
    from swarm.wire.messages import Json

_NUM_WORKERS = 3
_PROMPT = "Once upon a time"
_NUM_TOKENS = 200  # the story ends by itself before
_KILL_AFTER = 40  # tokens
_START_S = 120.0  # three imports of torch and three loads, on a busy machine
_POLL_S = 0.1
_WIDTH = 79
_NEXT = """\
Next:
  swarm up --detach                  # a swarm that stays; swarm down ends it
  swarm generate "Once upon a time"
  swarm up --model DIR               # your model; or FILE.gguf, or owner/name"""

Say = Callable[[str], object]


def demo(context: typer.Context, *, as_json: JsonOption = False) -> None:
    """Show in a minute what Swarm is for, with nothing to download.

    Starts three workers of the embedded demo model, streams an answer, kills one of the workers with SIGKILL in the
    middle, and compares the tokens with those of the same request undisturbed. Then all of it is stopped. With --json,
    one object at the end. Exit code 1 if the answers differ.
    """
    from swarm.cli.output import ConsoleProgress, print_json
    from swarm.cli.up.own_swarm import OwnSwarmOptions, run_with_own_swarm
    from swarm.demo import model_path

    # until the runner installs its handlers, SIGTERM cleans up like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say = _discard if as_json else _print_now
    say(f"Starting a broker and {_NUM_WORKERS} workers of the demo model …\n")
    wanted = OwnSwarmOptions(context, str(model_path()), _NUM_WORKERS, device="cpu")
    quiet = ConsoleProgress(io.StringIO())
    shown = run_with_own_swarm(wanted, quiet, lambda url: _show(url, say))
    if as_json:
        print_json(shown.data())
    if not shown.is_same:
        raise RequestFailed("the answers differ, which must never happen: please report it with the output above")
    say(f"\n{_NEXT}\n")


def _print_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(_text: str) -> None:
    pass


# --- pure parts -------------------------------------------------------------------------------------------------------


class WordWrap:
    """Breaks a stream of text between words."""

    def __init__(self, width: int = _WIDTH) -> None:
        self._width = width
        self._column = 0
        self._has_space = False  # before the word
        self._word = ""  # the last word, as far as it is known

    def feed(self, text: str) -> str:
        """Return what can be shown now: all but the last word, which may go on."""
        shown = []
        for character in text:
            if character == "\n":
                shown.append(self.end())
            elif character == " ":
                shown.append(self._end_word())
                self._has_space = True
            else:
                self._word += character
        return "".join(shown)

    def end(self) -> str:
        """Return the last word, and the end of its line."""
        shown = self._end_word()
        self._column, self._has_space = 0, False
        return shown + "\n"

    def _end_word(self) -> str:
        word, space = self._word, " " if self._has_space and self._column else ""
        if not word:
            return ""
        self._word, self._has_space = "", False
        if self._column and self._column + len(space + word) > self._width:
            self._column = len(word)
            return f"\n{word}"
        self._column += len(space + word)
        return space + word


@dataclass(slots=True)
class Pauses:
    """Times at which tokens came: how long the longest pause after the kill was, and the usual one before it."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)  # the first is the time of the kill

    def record(self, now: float) -> None:
        (self.after or self.before).append(now)

    def record_kill(self, now: float) -> None:
        self.after.append(now)

    @property
    def usual_s(self) -> float:
        return statistics.median(_gaps(self.before) or [0.0])

    @property
    def longest_s(self) -> float:
        return max(_gaps(self.after), default=0.0)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def digest(tokens: Sequence[int]) -> str:
    """Return a short digest of token ids."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Victim:
    """The worker to kill."""

    name: str
    pid: int
    layers: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What was shown: both answers, and the death in the first one."""

    victim: Victim
    pauses: Pauses
    disturbed: tuple[int, ...]
    undisturbed: tuple[int, ...]

    @property
    def is_same(self) -> bool:
        return self.disturbed == self.undisturbed

    def data(self) -> Json:
        return {
            "killed": {"worker": self.victim.name, "pid": self.victim.pid, "layers": self.victim.layers},
            "after_tokens": _KILL_AFTER,
            "pause_s": round(self.pauses.longest_s, 3),
            "usual_s": round(self.pauses.usual_s, 4),
            "num_tokens": len(self.disturbed),
            "digests": [digest(self.disturbed), digest(self.undisturbed)],
            "same": self.is_same,
        }


# --- the demonstration ------------------------------------------------------------------------------------------------


async def _show(url: str, say: Say) -> Demonstration:
    from swarm.client.client import AsyncClient

    async with AsyncClient(url, connect_timeout_s=_START_S) as client:
        stages = await _wait_until_serving(client)
        for stage in stages:
            say(f"  {stage.name} has layers {stage.layers} (process {stage.pid})\n")
        victim, pauses = stages[1], Pauses()
        say("\nThey answer, and one of them is killed in the middle:\n\n")
        disturbed = await _answer(client, say, pauses, victim)
        say(
            f"\n{victim.name} died after {_KILL_AFTER} tokens. The answer paused for {pauses.longest_s:.2f} s "
            f"and went on;\notherwise, a token took {pauses.usual_s * 1000:.0f} ms.\n\n"
            "Now the same request without a death:\n\n"
        )
        undisturbed = await _answer(client, say, Pauses())
    shown = Demonstration(victim, pauses, disturbed, undisturbed)
    say("\n")
    for name, tokens in (("with a death", disturbed), ("without one", undisturbed)):
        say(f"{name:<13} {len(tokens)} tokens, SHA-256 {digest(tokens)}\n")
    say("The tokens are the same.\n" if shown.is_same else "The tokens differ.\n")
    return shown


async def _wait_until_serving(client: AsyncClient) -> list[Victim]:
    """Return the stages, once all workers have one."""
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at:
        rows: list[dict[str, Any]] = (await client.query("nodes")).get("workers") or []  # type: ignore[assignment]
        rows = sorted((row for row in rows if row.get("layers")), key=lambda row: row["layers"])
        if len(rows) == _NUM_WORKERS and (await client.query("status")).get("state") == "serving":
            return [Victim(row["name"], row["pid"], f"{row['layers'][0]}–{row['layers'][1] - 1}") for row in rows]
        await asyncio.sleep(_POLL_S)
    raise SwarmError(f"the workers did not serve within {_START_S:.0f} s; swarm doctor checks this machine")


async def _answer(client: AsyncClient, say: Say, pauses: Pauses, victim: Victim | None = None) -> tuple[int, ...]:
    """Stream the answer; kill the victim in the middle. Return the tokens. Raises SwarmError without a kill."""
    wrap = WordWrap()
    say(wrap.feed(_PROMPT))
    stream = client.stream(_PROMPT, max_tokens=_NUM_TOKENS)
    async for piece in stream:
        pauses.record(time.monotonic())
        say(wrap.feed(piece.text))
        if victim is not None and piece.index + 1 == _KILL_AFTER:
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                raise SwarmError(
                    f"{victim.name} ended before it was killed; swarm doctor checks this machine"
                ) from None
            pauses.record_kill(time.monotonic())
            say(f"{wrap.end()}\n  kill -9 {victim.pid}: {victim.name} is dead, and with it layers {victim.layers}\n\n")
    say(wrap.end())
    if victim is not None and not pauses.after:
        raise SwarmError(f"the answer ended before its token {_KILL_AFTER}, so that no worker was killed: try again")
    completion = stream.completion
    assert completion is not None  # the stream ended without an error
    return tuple(completion.tokens)
