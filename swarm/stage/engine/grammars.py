"""Which tokens a sequence's grammar allows next, on the last stage.

That is a function of the grammar and of the answer's tokens so far, and of nothing else. What is kept here are caches:
grammars, compiled, by their texts; and for each sequence a reader that has read the beginning of its answer. A reader
that has read something else, or is not there (after a recovery, a preemption, a fork), is made anew from the grammar
and reads all tokens again: two microseconds each. So whoever draws, and whatever happened before, draws the same.

**Ends.** Tokens that end an answer (the model's, and those that the request names) are allowed exactly where the
grammar is satisfied, also those that are text: drawn in the middle they would end the answer there. While
``min_tokens`` are not reached they are forbidden, unless there is no other way on: what the grammar says comes first.

**Nobody waits unawares.** The tokenizer is read when the worker starts, before anybody counts its beats: reading it
holds up all threads. Grammars are compiled in a thread of their own, and the compute thread says that it is alive.

**What can't go on** ends its own sequence with a reason, and touches no other: a grammar that doesn't compile here, one
whose parser grows past its limits, one that the model has no token for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swarm.errors import InvalidRequest, ModelError
from swarm.grammar import NotNow, compiled, refusal, trouble, vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swarm.params import Grammar
    from swarm.stage.engine.sampling import Mask
    from swarm.stage.executor import SampleJob

MOST_GRAMMARS = 64  # compiled; some hundred KiB each, more for large ones
MOST_READERS = 512  # of 40 KiB as a rule; with more sequences than that, some read all their tokens anew each time
PATIENCE_S = 30.0  # for what a client has compiled within five seconds; a machine that is that slow has other troubles


@dataclass(slots=True)
class _Reader:
    """A grammar that has read these tokens of an answer."""

    grammar: Grammar
    matcher: LLMatcher
    tokens: list[int]


class Grammars:
    """``folder``: the model's, where its tokenizer is. ``ends``: the tokens by which the model ends an answer."""

    def __init__(self, folder: Path, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        self._words = _words_of(folder / "tokenizer.json", self._ends)
        self._compiled: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._readers: OrderedDict[int, _Reader] = OrderedDict()

    def mask(self, sequence: int, job: SampleJob, words: int, waiting: Callable[[], None] = lambda: None) -> Mask | str:
        """The tokens, of so many, that may come next; or why none can. ``waiting`` is called while that takes long."""
        grammar = job.params.grammar
        assert grammar is not None
        try:
            reader = self._reader(sequence, grammar, list(job.history[job.num_prompt :]), waiting)
            return self._allowed(reader, job, words)
        except (InvalidRequest, ModelError) as error:
            self.forget(sequence)
            return str(error)

    def forget(self, sequence: int) -> None:
        """Drop what was kept for a sequence."""
        self._readers.pop(sequence, None)

    def clear(self) -> None:
        """Drop what was kept for any sequence."""
        self._readers.clear()

    def _allowed(self, reader: _Reader, job: SampleJob, words: int) -> Mask:
        matcher = reader.matcher
        found = np.frombuffer(matcher.compute_bitmask(), "<u4")
        if matcher.is_error():
            raise refusal(reader.grammar, f"it can't be followed beyond {_said(reader)}: {trouble(matcher)}")
        mask = _of_width(found, words)
        ends = [end for end in (*self._ends, *job.params.stop_token_ids) if end < words]
        _put(mask, [end for end in (*ends, *self._vocabulary().eos_tokens) if end < words], allowed=False)
        goes_on, may_end = bool(mask.any()), bool(ends) and matcher.is_accepting()
        if may_end and not (goes_on and len(reader.tokens) < job.params.min_tokens):
            _put(mask, ends, allowed=True)
        elif not goes_on:
            why = "no token of the model continues it" if ends else "the model has no token that ends an answer"
            raise refusal(reader.grammar, f"it can't be followed beyond {_said(reader)}: {why}")
        return mask

    def _reader(self, sequence: int, grammar: Grammar, answer: list[int], waiting: Callable[[], None]) -> _Reader:
        """The sequence's reader, with the whole answer read."""
        reader = self._readers.get(sequence)
        if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:
            reader = self._readers[sequence] = _Reader(grammar, self._begun(grammar, waiting), [])
            if len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(sequence)
        unread = answer[len(reader.tokens) :]
        if unread and not reader.matcher.consume_tokens(unread):
            raise refusal(grammar, f"it can't be followed beyond {_said(reader)}: {trouble(reader.matcher)}")
        reader.tokens += unread
        return reader

    def _begun(self, grammar: Grammar, waiting: Callable[[], None]) -> LLMatcher:
        """The grammar before the first token: a copy, since a reader changes it."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar, waiting)
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        known = self._compiled[grammar]
        if isinstance(known, NotNow):
            del self._compiled[grammar]  # another time it may be compiled
        if isinstance(known, InvalidRequest):
            raise known
        return known.deep_copy()

    def _compile(self, grammar: Grammar, waiting: Callable[[], None]) -> LLMatcher | InvalidRequest:
        try:
            return compiled(grammar, self._vocabulary(), PATIENCE_S, waiting)
        except InvalidRequest as error:
            return error

    def _vocabulary(self) -> LLTokenizer:
        if isinstance(self._words, ModelError):
            raise self._words
        return self._words


def _words_of(path: Path, ends: Sequence[int]) -> LLTokenizer | ModelError:
    """The tokenizer; or why there is none, which only who has a grammar wants to know."""
    try:
        return vocabulary(path.read_text("utf-8"), ends)
    except (OSError, UnicodeDecodeError) as error:
        return ModelError(f"the model's tokenizer.json, which grammars need, can't be read: {error}")
    except ModelError as error:
        return error


def _of_width(mask: Mask, words: int) -> Mask:
    """A copy for so many tokens. What the tokenizer doesn't know is forbidden."""
    wide: Mask = np.zeros(-(-words // 32), np.uint32)
    count = min(len(mask), len(wide))
    wide[:count] = mask[:count]
    if words % 32:
        wide[-1] &= np.uint32((1 << words % 32) - 1)
    return wide


def _put(mask: Mask, tokens: Sequence[int], *, allowed: bool) -> None:
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        mask[token >> 5] = mask[token >> 5] | bit if allowed else mask[token >> 5] & ~bit


def _said(reader: _Reader) -> str:
    return f"{len(reader.tokens)} tokens of the answer"
