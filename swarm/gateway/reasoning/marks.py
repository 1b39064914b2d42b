"""Formats with a mark before the thinking and one after it: ``<think>…</think>`` and others.

Thinking stands at the beginning of an answer only; the same marks later on are text. White space around the thinking
and before the answer is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.gateway.reasoning.format import (
    AnswerDelta,
    ComposedFormat,
    Phase,
    ReasoningDelta,
    ReasoningFormat,
    ReasoningResult,
    ReasoningStart,
    ThinkingEnd,
)

SPACE = " \t\r\n"


class MarkParser:
    """Parser of one answer. ``is_opened``: the prompt has opened the thinking."""

    def __init__(self, opens: Sequence[str], closes: Sequence[str], *, is_opened: bool) -> None:
        self._opens, self._closes = tuple(opens), tuple(closes)
        self.phase = Phase.THINKING if is_opened else Phase.UNDECIDED
        self._held = ""
        self._is_first = True  # nothing of this phase but white space has been read
        self._may_repeat = is_opened  # the model may write the prompt's opening mark once more

    def push(self, text: str) -> Sequence[ReasoningResult]:
        if self.phase is Phase.ANSWERING and not self._is_first:
            return [AnswerDelta(text)] if text else []
        self._held += text
        results: list[ReasoningResult] = []
        if self.phase is Phase.UNDECIDED:
            self._decide()
        if self.phase is Phase.THINKING:
            self._think(results)
        if self.phase is Phase.ANSWERING:
            self._answer(results)
        return results

    def finish(self) -> Sequence[ReasoningResult]:
        held, self._held = self._held, ""
        if self.phase is Phase.THINKING:
            held = held.strip(SPACE) if self._is_first else held.rstrip(SPACE)
            return [ReasoningDelta(held)] if held else []
        self.phase = Phase.ANSWERING
        return [AnswerDelta(held)] if held else []

    def _decide(self) -> None:
        """Look for the mark that opens thinking at the beginning of the answer."""
        begun = self._held.lstrip(SPACE)
        mark = next((mark for mark in self._opens if begun.startswith(mark)), None)
        if mark is not None:
            self.phase, self._held = Phase.THINKING, begun[len(mark) :]
        elif not any(mark.startswith(begun) for mark in self._opens):
            self.phase, self._is_first = Phase.ANSWERING, False

    def _think(self, results: list[ReasoningResult]) -> None:
        if self._is_first and not self._begin_thinking():
            return
        ends = [(at, mark) for mark in self._closes if (at := self._held.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            thought, self._held = self._held[:at].rstrip(SPACE), self._held[at + len(mark) :]
            self.phase, self._is_first = Phase.ANSWERING, True
        else:
            stop = len(self._held[: len(self._held) - num_open(self._held, self._closes)].rstrip(SPACE))
            thought, self._held = self._held[:stop], self._held[stop:]
        if thought:
            results.append(ReasoningDelta(thought))

    def _begin_thinking(self) -> bool:
        """Drop white space and a repeated opening mark. Returns whether that is done."""
        self._held = self._held.lstrip(SPACE)
        if self._may_repeat:
            mark = next((mark for mark in self._opens if self._held.startswith(mark)), None)
            if mark is not None:
                self._held, self._may_repeat = self._held[len(mark) :].lstrip(SPACE), False
            elif any(mark.startswith(self._held) for mark in self._opens):
                return False
        self._is_first = not self._held
        return not self._is_first

    def _answer(self, results: list[ReasoningResult]) -> None:
        text, self._held = self._held.lstrip(SPACE) if self._is_first else self._held, ""
        if text:
            self._is_first = False
            results.append(AnswerDelta(text))


def num_open(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of the text that is the beginning of a mark."""
    last = max((text.rfind(mark[0]) for mark in marks), default=-1)
    if last < 0:
        return 0
    longest = min(max(map(len, marks)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(len(mark) > length and text.endswith(mark[:length]) for mark in marks):
            return length
    return 0


def make_mark_format(
    name: str,
    opens: tuple[str, ...],
    closes: tuple[str, ...],
    *,
    fits: Callable[[str], bool] | None = None,
    space: str = "\n",
) -> ReasoningFormat:
    """Return a format. ``space``: white space after the opening mark and before the closing one."""

    def start(prompt_end: str) -> ReasoningStart:
        end = prompt_end.rstrip(SPACE)
        if any(end.endswith(mark) for mark in opens):
            return "opened"
        return "none" if any(end.endswith(mark) for mark in closes) else "optional"

    return ComposedFormat(
        name=name,
        marks=(*opens, *closes),
        opening=opens[0] + space,
        end_of=lambda _: ThinkingEnd(closes, f"{space}{closes[0]}{space * 2}"),
        fits=fits or (lambda template: closes[0] in template),
        start=start,
        make_parser=lambda is_opened: MarkParser(opens, closes, is_opened=is_opened),
    )


def think() -> ReasoningFormat:
    """Return the format of Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, MiniMax, Nemotron and many more."""
    return make_mark_format("think", ("<think>",), ("</think>",))


def seed() -> ReasoningFormat:
    """Return the format of Seed-OSS."""
    return make_mark_format("seed", ("<seed:think>",), ("</seed:think>",))


def exaone() -> ReasoningFormat:
    """Return the format of EXAONE Deep."""
    return make_mark_format("exaone", ("<thought>",), ("</thought>",))


def kimi() -> ReasoningFormat:
    """Return the format of Kimi-VL-Thinking."""
    return make_mark_format("kimi", ("◁think▷",), ("◁/think▷",))


def magistral() -> ReasoningFormat:
    """Return the format of Magistral and later models of Mistral."""
    return make_mark_format("magistral", ("[THINK]",), ("[/THINK]",), space="")


def command() -> ReasoningFormat:
    """Return the format of Command A Reasoning and Command R7B."""
    return make_mark_format("command", ("<|START_THINKING|>",), ("<|END_THINKING|>",), space="")


def apertus() -> ReasoningFormat:
    """Return the format of Apertus."""
    return make_mark_format("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), space="")


def granite() -> ReasoningFormat:
    """Return the format of Granite 3.2 and 3.3, which marks both with sentences."""
    opens = ("Here is my thought process:", "Here's my thought process:")
    closes = ("Here is my response:", "Here's my response:")
    return make_mark_format("granite", opens, closes, fits=lambda template: "my thought process:" in template)
