"""Separates the control tokens of a chat template from look-alikes in messages. Pure.

A control token is an added token that controls the model: one that the tokenizer marks as special, or one of the form
``<|…|>``. A message may contain the text of such a token, which must not become the token: it would end the message, or
begin one of another role.

So templates are rewritten once, when they are loaded (``rewriting``): each control token in a template is replaced by a
secret word. Messages are passed unchanged, so a template can still inspect them. In the rendered output, secret words
are control tokens and everything else is text, no matter how the template has cut, joined or repeated it.

Some templates assemble a control token from parts (``'<|' + message.role + '|>'``). There, two more secret words
enclose the gap between the two literals, and the enclosed text is a control token if its middle is the name of a role.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

ROLES = frozenset({
    "assistant",
    "bot",
    "context",
    "developer",
    "function",
    "human",
    "ipython",
    "model",
    "observation",
    "system",
    "tool",
    "user",
})  # fmt: skip
_BARRED = re.compile(r"[<\[][|｜].*[|｜][>\]]")  # the form <|…|> in its spellings
_PIECE = 1 << 16  # characters searched at a time
_SHORTEST = 3  # characters; shorter texts occur in ordinary ones
_MIDDLE = re.compile(r"^\W+|\W+$")


def is_control(text: str, *, special: bool) -> bool:
    """Whether an added token controls the model. Marks that models write in their answers, such as ``<think>``, do not,
    unless the tokenizer marks them as special."""
    if len(text) < _SHORTEST or text.isspace():
        return False
    return special or _BARRED.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Spelling:
    """Replacement of a model's control tokens by secret words, which no message can contain."""

    tokens: tuple[str, ...]  # texts of the control tokens
    # Beginning of every secret word; random, so that no message can contain it.
    nonce: str = field(default_factory=lambda: "swarm" + secrets.token_hex(16), repr=False)
    _plain: re.Pattern[str] = field(init=False, repr=False)
    _numbers: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.tokens, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"  # without tokens, match nothing
        set_field = object.__setattr__  # the instance is frozen
        set_field(self, "_plain", re.compile(pattern))
        set_field(self, "_numbers", {token: number for number, token in enumerate(self.tokens)})

    @property
    def _opened(self) -> str:
        return f"{self.nonce}oe"

    @property
    def _closed(self) -> str:
        return f"{self.nonce}ce"

    def secret_word(self, token: str) -> str:
        """Return the secret word that replaces a control token in a rendered chat template."""
        return f"{self.nonce}{self._numbers[token]:06}e"

    def spell(self, literal: str) -> str:
        """Return a literal of a chat template with secret words in place of its control tokens."""
        if not self.tokens:
            return literal
        parts: list[str] = []
        end = 0
        for match in self._plain.finditer(literal):
            parts += (literal[end : match.start()], self.secret_word(match[0]))
            end = match.end()
        parts.append(literal[end:])
        if parts[0] and (cut := self._num_open_chars(parts[0], is_suffix=True)):
            parts[0] = parts[0][:cut] + self._closed + parts[0][cut:]
        if parts[-1] and (cut := self._num_open_chars(parts[-1], is_suffix=False)):
            parts[-1] = parts[-1][:-cut] + self._opened + parts[-1][-cut:]
        return "".join(parts)

    def _num_open_chars(self, text: str, *, is_suffix: bool) -> int:
        """Return how many characters at the text's start may end a control token (``is_suffix``), or at its end may
        begin one."""
        longest = 0
        for token in self.tokens:
            for length in range(min(len(token) - 1, len(text)), longest, -1):
                if text.startswith(token[-length:]) if is_suffix else text.endswith(token[:length]):
                    longest = length
                    break
        return longest

    def split_rendered(self, rendered: str) -> RenderedChat:
        """Split a template's output into control tokens and text."""
        first, *rest = rendered.split(self.nonce)
        texts, tokens = [first], list[str]()
        for place, part in enumerate(rest):
            if part[0].isdigit():
                tokens.append(self.tokens[int(part[:6])])
                texts.append(part[7:])
            elif (
                part[0] == "o" and place + 1 < len(rest) and rest[place + 1][0] == "c" and self._is_assembled(part[2:])
            ):
                tokens.append(part[2:])
                texts.append("")
            else:
                texts[-1] += part[2:]
        return RenderedChat(self, texts, tokens)

    def _is_assembled(self, text: str) -> bool:
        """Whether a template has assembled this control token from its own brackets and the name of a role."""
        return text in self._numbers and _MIDDLE.sub("", text).lower() in ROLES

    def to_plain(self, rendered: str) -> str:
        """Return the text with control tokens in their usual spelling."""
        return self.split_rendered(rendered).to_plain()

    def has_look_alikes(self, spelled: str) -> bool:
        """Whether the text contains a control token's text that is not a control token. Searches in pieces, since each
        search blocks other threads."""
        longest = max(map(len, self.tokens), default=0)
        starts = range(0, len(spelled), _PIECE)
        return any(self._plain.search(spelled, start, start + _PIECE + longest) for start in starts)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A template's output: a first text, then control tokens, each followed by a text."""

    spelling: Spelling
    texts: list[str]
    tokens: list[str]

    def to_plain(self) -> str:
        """Return the output with control tokens in their usual spelling."""
        return self._join(self.tokens)

    def to_spelled(self) -> str:
        """Return the output with secret words in place of the control tokens."""
        return self._join([self.spelling.secret_word(token) for token in self.tokens])

    def _join(self, between: list[str]) -> str:
        behind = (part for pair in zip(between, self.texts[1:], strict=True) for part in pair)
        return "".join((self.texts[0], *behind))
