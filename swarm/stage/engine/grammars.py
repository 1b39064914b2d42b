"""Which tokens a sequence's grammar allows next, on the last stage.

That is a function of the grammar and of the answer's tokens so far, and of nothing else. What is kept here are caches:
grammars, compiled, by their texts; and for each sequence a reader that has read the beginning of its answer. A reader
that has read something else, or is not there (after a recovery, a preemption, a fork), is made anew from the grammar
and reads all tokens again: two microseconds each. So whoever draws, and whatever happened before, draws the same.

**Ends.** Tokens that end an answer (the model's, and those that the request names) are allowed exactly where the
grammar is satisfied, also those that are text: drawn in the middle they would end the answer there. While
``min_tokens`` are not reached they are forbidden, unless there is no other way on: what the grammar says comes first.

**Nobody else waits.** The tokenizer is read when the worker starts, before anybody counts its beats: reading it
holds up all threads. Grammars are compiled beside the steps (``Compiler``). A sequence whose grammar is not compiled
yet is drawn for in a later step: the broker has its last position computed again. When that is makes no difference,
since a draw is a function of the tokens.

**What can't go on** ends its own sequence with a reason, and touches no other: a grammar that doesn't compile here, one
whose parser grows past its limits, one that the model has no token for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swarm.errors import InvalidRequest, ModelError
from swarm.grammar import Compilation, refusal, too_slow, trouble, vocabulary, weight

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swarm.params import Grammar
    from swarm.stage.engine.sampling import Mask
    from swarm.stage.executor import SampleJob

MOST_GRAMMARS = 64  # compiled; some hundred KiB each, more for large ones
MOST_BYTES = 256 << 20  # of them together, as ``weight`` reckons
MOST_AT_ONCE = 2
STEP_WAIT_S = 0.02
PATIENCE_S = 30.0  # for what a client has compiled within five seconds; a machine that is that slow has other troubles
MOST_READERS = 512  # of 40 KiB as a rule; with more sequences than that, some read all their tokens anew each time


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
        self._compiler = Compiler()
        self._readers: OrderedDict[int, _Reader] = OrderedDict()

    def mask(self, sequence: int, job: SampleJob, words: int) -> Mask | str | None:
        """The tokens, of so many, that may come next; or why none can; None if the grammar is not compiled yet."""
        grammar = job.params.grammar
        assert grammar is not None
        try:
            reader = self._reader(sequence, grammar, list(job.history[job.num_prompt :]))
            return None if reader is None else self._allowed(reader, job, words)
        except (InvalidRequest, ModelError) as error:
            self.forget(sequence)
            return str(error)

    def begin_step(self) -> None:
        """Masks are asked for another step now, which waits a moment at most."""
        self._compiler.begin_step()

    def pause(self) -> None:
        """Wait a moment, if this step may, for a grammar that is being compiled."""
        self._compiler.pause()

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

    def _reader(self, sequence: int, grammar: Grammar, answer: list[int]) -> _Reader | None:
        """The sequence's reader, with the whole answer read; None if the grammar is not compiled yet."""
        reader = self._readers.get(sequence)
        if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:
            begun = self._compiler.ask(grammar, self._vocabulary())
            if begun is None:
                return None
            reader = self._readers[sequence] = _Reader(grammar, begun.deep_copy(), [])  # a reader changes it
            if len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(sequence)
        unread = answer[len(reader.tokens) :]
        if unread and not reader.matcher.consume_tokens(unread):
            raise refusal(grammar, f"it can't be followed beyond {_said(reader)}: {trouble(reader.matcher)}")
        reader.tokens += unread
        return reader

    def _vocabulary(self) -> LLTokenizer:
        if isinstance(self._words, ModelError):
            raise self._words
        return self._words


class Compiler:
    """Compiles grammars beside the steps. Asked by one thread.

    Who asks gets what is known by now. A sequence whose grammar is not compiled yet is drawn for another time; the
    others of the step are drawn for now. A step waits a moment at most for all its grammars: while it begins with new
    ones, most of which are compiled by then, and when it has nobody to draw for. A few are compiled at once; the next
    one begins when one of those has ended and somebody asks again, so nothing queues here, and a slow grammar keeps one
    place of several. What was found is kept, by the text, as long as there is room for it: a cache and nothing more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._bytes = 0
        self._wait_s = 0.0  # what is left of this step's time for waiting
        self._under_way: dict[Grammar, tuple[Compilation, float]] = {}

    @property
    def num_kept(self) -> int:
        """Grammars of which it is known what they are."""
        return len(self._known)

    def begin_step(self) -> None:
        """From now on it is another step that asks."""
        self._wait_s = STEP_WAIT_S

    def pause(self) -> None:
        """Wait for one of those under way: nobody can be drawn for."""
        for work, _ in list(self._under_way.values())[:1]:
            self._result(work)

    def ask(self, grammar: Grammar, words: LLTokenizer) -> LLMatcher | None:
        """The grammar before the first token, not to be changed; None if it is not compiled yet. Raises InvalidRequest
        that says why it can't be used."""
        self._collect()
        if grammar not in self._known and not self._compile(grammar, words):
            return None
        self._known.move_to_end(grammar)
        found = self._known[grammar]
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def _compile(self, grammar: Grammar, words: LLTokenizer) -> bool:
        """Begin, or look how far it is; whether it is known now."""
        begun = self._under_way.get(grammar)
        if begun is not None:
            if self._clock() - begun[1] > PATIENCE_S:
                raise too_slow(grammar, PATIENCE_S)
            return False
        if len(self._under_way) >= MOST_AT_ONCE:
            return False
        work = Compilation(grammar, words)
        found = self._result(work)
        if found is None:
            self._under_way[grammar] = (work, self._clock())
            return False
        self._keep(grammar, found)
        return True

    def _result(self, work: Compilation) -> LLMatcher | InvalidRequest | None:
        """Wait as long as the step may."""
        began = self._clock()
        found = work.result(self._wait_s)
        self._wait_s = max(0.0, self._wait_s - (self._clock() - began))
        return found

    def _collect(self) -> None:
        """Take what has ended, whoever asked for it."""
        ended = [(grammar, found) for grammar, (work, _) in self._under_way.items() if (found := work.result())]
        for grammar, found in ended:
            del self._under_way[grammar]
            self._keep(grammar, found)

    def _keep(self, grammar: Grammar, found: LLMatcher | InvalidRequest) -> None:
        self._known[grammar] = found
        self._bytes += weight(grammar)
        while len(self._known) > 1 and (len(self._known) > MOST_GRAMMARS or self._bytes > MOST_BYTES):
            old, _ = self._known.popitem(last=False)
            self._bytes -= weight(old)


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
