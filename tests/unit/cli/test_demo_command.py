"""``swarm demo``: how its text is broken, and what it measures. The demonstration itself: ``test_detached``."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.cli.demo import Demonstration, Pauses, Victim, WordWrap, _answer, digest
from swarm.errors import SwarmError

STORY = "Once upon a time there was a teacher called Clara who lived next to the school. Every morning she ate cake."


def wrapped(text: str, *, width: int, seed: int) -> str:
    """The text fed in pieces of any length."""
    wrap, chance, shown = WordWrap(width), random.Random(seed), ""
    while text:
        length = chance.randrange(1, 7)
        shown += wrap.feed(text[:length])
        text = text[length:]
    return shown + wrap.end()


def test_lines_are_broken_between_words_whatever_the_pieces() -> None:
    for width, seed in itertools.product((20, 33, 79), range(20)):
        shown = wrapped(STORY, width=width, seed=seed)
        assert shown == wrapped(STORY, width=width, seed=0)
        assert max(map(len, shown.splitlines())) <= width
        assert not any(line != line.strip() for line in shown.splitlines())
        assert shown.split() == STORY.split()


def test_a_word_longer_than_a_line_stands_whole() -> None:
    assert wrapped("a " + "x" * 30 + " b", width=10, seed=1) == "a\n" + "x" * 30 + "\nb\n"


def test_a_models_own_lines_stay() -> None:
    assert wrapped("one\n\ntwo", width=20, seed=2) == "one\n\ntwo\n"


def test_after_an_interruption_the_line_begins_without_a_space() -> None:
    wrap = WordWrap(20)
    assert wrap.feed("met the") + wrap.end() + wrap.feed(" frog") + wrap.end() == "met the\nfrog\n"


def test_the_pause_is_the_longest_one_after_the_kill() -> None:
    pauses = Pauses()
    for now in (0.0, 0.5, 0.51, 0.52):  # the first token takes long, before the kill
        pauses.record(now)
    pauses.record_kill(0.525)
    for now in (0.53, 0.83, 0.84):
        pauses.record(now)
    assert (round(pauses.usual_s, 6), round(pauses.longest_s, 6)) == (0.01, 0.3)


def test_digests_differ_by_the_tokens() -> None:
    assert digest((1, 23)) != digest((12, 3))
    shown = Demonstration(Victim("w1", 7, "3–5"), Pauses(), (1, 2), (1, 3))
    assert not shown.is_same
    data = shown.data()
    assert (data["same"], data["num_tokens"]) == (False, 2)
    digests = data["digests"]
    assert isinstance(digests, list)
    assert digests[0] != digests[1]


class Stream:
    """An answer of some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.completion = None
        self._pieces = [SimpleNamespace(index=index, text="a ") for index in range(num_tokens)]

    async def __aiter__(self) -> AsyncIterator[SimpleNamespace]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(39, "no worker was killed"), (40, "w1 ended before it was killed")]
)
def test_a_death_that_did_not_happen_is_not_claimed(num_tokens: int, reason: str) -> None:
    client = cast(Any, SimpleNamespace(stream=lambda *_args, **_options: Stream(num_tokens)))
    gone = Victim("w1", 1 << 22, "3–5")  # no process has such a number
    with pytest.raises(SwarmError, match=reason):
        asyncio.run(_answer(client, lambda _text: None, Pauses(), gone))
