"""Masks of the tokens that a sequence's grammar allows next, on the last stage.

A mask is a function of the grammar and of the answer's tokens so far, and of nothing else. All state here is a cache:
compiled grammars by their texts, and for each sequence a reader that has consumed the beginning of its answer. If a
sequence's reader has consumed other tokens or is missing (after a recovery, a preemption, a fork), a new one is made
from the grammar and consumes all tokens again, at two microseconds each. Any worker therefore draws the same token,
whatever happened before.

**End tokens.** Tokens that end an answer (the model's, and those in the request) are allowed exactly where the grammar
is satisfied, including end tokens that are text: drawn in the middle, they would end the answer there. Before
``min_tokens`` is reached they are forbidden, unless the grammar allows no other token: the grammar takes precedence.

**Other sequences do not wait.** The tokenizer is read when the worker starts, before the broker expects heartbeats,
because reading it blocks all threads. Grammars are compiled on threads of their own (``Compiler``). A sequence whose
grammar is not compiled yet is drawn in a later step: the broker has its last position computed again. The delay does
not change the token, since a draw is a function of the tokens.

**A grammar that fails** ends its own sequence with a reason and affects no other. That happens if it does not compile
here, if its parser exceeds its limits, or if the model has no token for it.
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

MOST_GRAMMARS = 64  # compiled grammars kept; some hundred KiB each, more for large ones
MOST_BYTES = 256 << 20  # of all compiled grammars, as ``weight`` estimates them
MOST_AT_ONCE = 2  # compilations in flight
STEP_WAIT_S = 0.02  # time for which one step may wait for compilations
# Limit of one compilation. The client has checked that it takes under five seconds; a machine this much slower has
# other problems.
PATIENCE_S = 30.0
# Of about 40 KiB each. With more sequences than this, some consume all their tokens again in each step.
MOST_READERS = 512


@dataclass(slots=True)
class _Reader:
    """Matcher of a grammar that has consumed these tokens of an answer."""

    grammar: Grammar
    matcher: LLMatcher
    tokens: list[int]


class Grammars:
    """Masks of all sequences of the last stage, with their caches.

    ``folder`` is the model's folder, which contains its tokenizer. ``ends`` are the tokens by which the model ends an
    answer.
    """

    def __init__(self, folder: Path, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        # the vocabulary, or the error that every use of a grammar raises
        self._words = _words_of(folder / "tokenizer.json", self._ends)
        self._compiler = Compiler()
        self._readers: OrderedDict[int, _Reader] = OrderedDict()  # by sequence, least recently used first

    def mask(self, sequence: int, job: SampleJob, words: int) -> Mask | str | None:
        """Return the tokens that may come next as a mask of ``words`` bits.

        Returns the reason as a string if none can, and None if the grammar is not compiled yet.
        """
        grammar = job.params.grammar
        assert grammar is not None
        try:
            reader = self._reader(sequence, grammar, list(job.history[job.num_prompt :]))
            return None if reader is None else self._allowed(reader, job, words)
        except (InvalidRequest, ModelError) as error:
            self.forget(sequence)
            return str(error)

    def begin_step(self) -> None:
        """Start a new step: its calls of ``mask`` may together wait for a limited time."""
        self._compiler.begin_step()

    def pause(self) -> None:
        """Wait for a grammar that is being compiled, for as long as this step may."""
        self._compiler.pause()

    def forget(self, sequence: int) -> None:
        """Drop the cached reader of a sequence."""
        self._readers.pop(sequence, None)

    def clear(self) -> None:
        """Drop the cached readers of all sequences."""
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
        """Return the sequence's reader after it has consumed the whole answer; None if its grammar is not compiled."""
        reader = self._readers.get(sequence)
        if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:
            begun = self._compiler.ask(grammar, self._vocabulary())
            if begun is None:
                return None
            # a reader changes its matcher, so copy the cached one
            reader = self._readers[sequence] = _Reader(grammar, begun.deep_copy(), [])
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
    """Compiles grammars on threads of their own, without blocking steps. Called by one thread.

    A caller gets the result that is available now. A sequence whose grammar is not compiled yet is drawn in a later
    step, and the others of the step are drawn now. A step waits a limited time for all its grammars: when it starts
    compiling new ones, most of which finish within that time, and when it has no sequence to draw. A few grammars are
    compiled concurrently. The next one starts when one has finished and its step asks again, so there is no queue here,
    and a slow grammar occupies only one of several slots. Results are cached by text, as long as there is memory for
    them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # finished compilations, least recently used first
        self._known: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._bytes = 0  # estimated memory of ``_known``
        self._wait_s = 0.0  # what is left of this step's waiting time
        self._under_way: dict[Grammar, tuple[Compilation, float]] = {}  # with the time at which each began

    @property
    def num_kept(self) -> int:
        """Number of grammars whose result is cached."""
        return len(self._known)

    def begin_step(self) -> None:
        """Start a new step with its full waiting time."""
        self._wait_s = STEP_WAIT_S

    def pause(self) -> None:
        """Wait for one of the compilations in flight, because no sequence can be drawn."""
        for work, _ in list(self._under_way.values())[:1]:
            self._result(work)

    def ask(self, grammar: Grammar, words: LLTokenizer) -> LLMatcher | None:
        """Return the compiled grammar before its first token, which must not be changed; None if it is not compiled
        yet.

        Raises ``InvalidRequest`` with the reason if the grammar can't be used.
        """
        self._collect()
        if grammar not in self._known and not self._compile(grammar, words):
            return None
        self._known.move_to_end(grammar)
        found = self._known[grammar]
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def _compile(self, grammar: Grammar, words: LLTokenizer) -> bool:
        """Start the compilation, or check its progress. Whether the result is available now."""
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
        """Return the compilation's result, waiting as long as the step may; None if it is not finished."""
        began = self._clock()
        found = work.result(self._wait_s)
        self._wait_s = max(0.0, self._wait_s - (self._clock() - began))
        return found

    def _collect(self) -> None:
        """Store the results of all finished compilations."""
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
    """Return the tokenizer, or the error that is raised when a grammar needs it."""
    try:
        return vocabulary(path.read_text("utf-8"), ends)
    except (OSError, UnicodeDecodeError) as error:
        return ModelError(f"the model's tokenizer.json, which grammars need, can't be read: {error}")
    except ModelError as error:
        return error


def _of_width(mask: Mask, words: int) -> Mask:
    """Return a copy of the mask for ``words`` tokens. Tokens that the tokenizer does not have are forbidden."""
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
