"""Format of gpt-oss ("harmony"): an answer is a list of messages, each in a channel.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``. The channel ``analysis`` is
thinking; ``final``, and ``commentary`` for the user, are the answer. A message to a tool is passed on with its marks,
so that the tool-call parser finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.gateway.reasoning.format import (
    AfterThinking,
    AnswerDelta,
    ComposedFormat,
    Phase,
    ReasoningDelta,
    ReasoningFormat,
    ReasoningResult,
    ReasoningStart,
    ThinkingEnd,
)
from swarm.gateway.reasoning.marks import SPACE, num_open

START, CHANNEL, MESSAGE, END, CALL, RETURN = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
CONSTRAIN = "<|constrain|>"
ANALYSIS, FINAL = "analysis", "final"
_HEADS = (START, CHANNEL, MESSAGE, "assistant", "to=")  # what the head of a message can begin with
_ENDS = (END, CALL, RETURN, START, CHANNEL)  # the last two: the end was left out
_MAX_HEAD = 512  # characters


class HarmonyParser:
    """Parser of one answer, which begins with the head of a message."""

    def __init__(self) -> None:
        self.phase = Phase.THINKING
        self._held = ""
        self._in_head = True
        self._has_recipient = False  # of the current message: it is a call
        self._is_first = True  # nothing of the current message but white space has been read
        self._has_thought = False  # an earlier message was thinking
        self._is_plain = False  # the text has no heads: it is the answer

    def push(self, text: str) -> Sequence[ReasoningResult]:
        if self._is_plain:
            return [AnswerDelta(text)] if text else []
        self._held += text
        results: list[ReasoningResult] = []
        while self._read_head(results) if self._in_head else self._read_body(results):
            pass
        return _merge(results)

    def finish(self) -> Sequence[ReasoningResult]:
        held, self._held = self._held, ""
        results: list[ReasoningResult] = []
        if self._in_head and "<" not in held:
            self.phase = Phase.ANSWERING
            self._emit(held, results)
        elif not self._in_head:
            self._emit(held.rstrip(SPACE) if self.phase is Phase.THINKING else held, results)
        return _merge(results)

    def _read_head(self, results: list[ReasoningResult]) -> bool:
        """Read the head of a message. Returns whether it is complete."""
        at = self._held.find(MESSAGE)
        begun = self._held.lstrip(SPACE)
        is_head = not begun or any(begun.startswith(head) or head.startswith(begun) for head in _HEADS)
        if not is_head or (at if at >= 0 else len(self._held)) > _MAX_HEAD:
            self._is_plain, self.phase = True, Phase.ANSWERING
            self._emit(self._held, results)
            self._held = ""
            return False
        if at < 0:
            return False
        head, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        self._in_head, self._is_first = False, True
        channel = head.partition(CHANNEL)[2].strip(SPACE)
        self._has_recipient = "to=" in head
        is_thinking = channel.startswith(ANALYSIS) and not self._has_recipient
        self.phase = Phase.THINKING if is_thinking else Phase.ANSWERING
        if self._has_recipient:
            results.append(AnswerDelta(_plain_head(head)))
        return True

    def _read_body(self, results: list[ReasoningResult]) -> bool:
        """Read the text of a message. Returns whether its end has been read."""
        ends = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if not ends:
            stop = len(self._held) - num_open(self._held, _ENDS)
            if self.phase is Phase.THINKING:
                stop = len(self._held[:stop].rstrip(SPACE))
            text, self._held = self._held[:stop], self._held[stop:]
            self._emit(text, results)
            return False
        at, mark = min(ends)
        text, self._held = self._held[:at], self._held[at if mark in (START, CHANNEL) else at + len(mark) :]
        self._emit(text.rstrip(SPACE) if self.phase is Phase.THINKING else text, results)
        if self._has_recipient:
            results.append(AnswerDelta(CALL))
        self._in_head = True
        return True

    def _emit(self, text: str, results: list[ReasoningResult]) -> None:
        if self.phase is not Phase.THINKING:
            if text:
                results.append(AnswerDelta(text))
            return
        text = text.lstrip(SPACE) if self._is_first else text
        if not text:
            return
        if self._is_first and self._has_thought:
            text = "\n" + text
        self._is_first, self._has_thought = False, True
        results.append(ReasoningDelta(text))


def _plain_head(head: str) -> str:
    """Return the head of a call in one form: the recipient may stand before the channel or after it."""
    recipient = head.partition("to=")[2].replace("<", " ").split()
    return f"{CHANNEL}commentary to={recipient[0] if recipient else ''} {MESSAGE}"


def _merge(results: Sequence[ReasoningResult]) -> list[ReasoningResult]:
    """Join neighbours of one kind."""
    merged: list[ReasoningResult] = []
    for result in results:
        if merged and type(merged[-1]) is type(result):
            merged[-1] = type(result)(merged[-1].text + result.text)
        else:
            merged.append(result)
    return merged


def _start(prompt_end: str) -> ReasoningStart:
    """An answer begins with a head, unless the prompt has begun the final message."""
    return "none" if prompt_end.rstrip(SPACE).endswith(f"{FINAL}{MESSAGE}") else "opened"


def _end_of(rest: AfterThinking) -> ThinkingEnd:
    if rest == "call":  # its grammar begins with the head of the next message
        return ThinkingEnd((END,), END)
    closing = f"{END}{START}assistant{CHANNEL}{FINAL}{MESSAGE}"
    if rest == "text":
        return ThinkingEnd((f"{CHANNEL}{FINAL}{MESSAGE}", f"{CHANNEL}{FINAL} {CONSTRAIN}json{MESSAGE}"), closing)
    return ThinkingEnd((f"{CHANNEL}{FINAL}", f"{CHANNEL}commentary", "to=functions."), closing)


def harmony() -> ReasoningFormat:
    return ComposedFormat(
        name="harmony",
        marks=(START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN),
        opening="",
        end_of=_end_of,
        fits=lambda template: CHANNEL in template and ANALYSIS in template,
        start=_start,
        make_parser=lambda _: HarmonyParser(),
    )
