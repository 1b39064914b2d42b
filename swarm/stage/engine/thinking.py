"""Thinking at the beginning of an answer, on the last stage: where it ends, and the tokens that end it when its budget
is used.

Both are functions of the request's parameters and of the answer's tokens so far, and of nothing else, as the masks of
grammars are. The readers here are caches: one that is missing, or has read other tokens, is replaced by a new one that
reads all tokens again. Any worker therefore draws the same tokens, whatever happened before.

An end is a text, and is looked for in the text of the tokens, because a model may write it with other tokens than the
tokenizer would. The token that completes it is the last one of the thinking, also if it goes on behind the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.params import Thinking
    from swarm.stage.executor import SampleJob

MAX_READERS = 4096  # more than rows in a step, so that no step drops a reader that it needs again


@dataclass(slots=True)
class ThinkingReader:
    """Reader of one answer."""

    thinking: Thinking
    tokens: list[int] = field(default_factory=list)  # read so far; the end of the thinking is the last one
    start: int | None = None  # number of the first token after the thinking; None: it goes on
    _ends: tuple[bytes, ...] = ()
    _tail: bytes = b""  # the end of the text, in which an end may have begun

    def __post_init__(self) -> None:
        self._ends = tuple(end.encode("utf-8", "surrogatepass") for end in self.thinking.ends)

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that follow because the budget is used; empty if there is a choice."""
        budget = self.thinking.budget
        if self.start is not None or budget is None or len(self.tokens) < budget:
            return ()
        return self.thinking.closing[len(self.tokens) - budget :]

    def read(self, token: int, token_bytes: Callable[[int], bytes]) -> None:
        """Read the next token. Tokens after the thinking change nothing."""
        if self.start is not None:
            return
        forced = self.forced
        self.tokens.append(token)
        if forced:
            self.start = len(self.tokens) if len(forced) == 1 else None
        else:
            self._tail += token_bytes(token)
            if any(end in self._tail for end in self._ends):
                self.start = len(self.tokens)
            self._tail = self._tail[-max(map(len, self._ends)) :]


class ThinkingReaders:
    """Readers of all sequences of the last stage. ``token_bytes``: the bytes of a token's text."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._readers: OrderedDict[int, ThinkingReader] = OrderedDict()  # by sequence, least recently used first

    def read(self, sequence: int, job: SampleJob) -> ThinkingReader:
        """Return the sequence's reader after it has read the whole answer."""
        thinking = job.params.thinking
        assert thinking is not None
        reader = self._readers.get(sequence)
        if reader is None or reader.thinking != thinking or not _has_read(reader, job):
            reader = self._readers[sequence] = ThinkingReader(thinking)
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(sequence)
        if reader.start is None:
            for token in job.history[job.num_prompt + len(reader.tokens) :]:
                reader.read(token, self._token_bytes)
        return reader

    def forced_after(self, sequence: int, token: int) -> tuple[int, ...]:
        """Return the tokens that follow ``token``, which was drawn after the last call of ``read``, because the budget
        is used then."""
        reader = self._readers.get(sequence)
        if reader is None:
            return ()
        reader.read(token, self._token_bytes)
        return reader.forced

    def drop(self, sequence: int) -> None:
        """Drop the cached reader of a sequence."""
        self._readers.pop(sequence, None)

    def clear(self) -> None:
        """Drop the cached readers of all sequences."""
        self._readers.clear()


def _has_read(reader: ThinkingReader, job: SampleJob) -> bool:
    """Whether the reader has read the beginning of this answer."""
    read: Sequence[int] = job.history[job.num_prompt : job.num_prompt + len(reader.tokens)]
    return (read if isinstance(read, list) else list(read)) == reader.tokens
