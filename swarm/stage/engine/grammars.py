"""Masks of the tokens that a sequence's grammar allows next, on the last stage.

A mask is a function of the grammar and of the answer's tokens so far, and of nothing else. All state here is a cache:
compiled grammars by their texts, and for each sequence a reader that has consumed the beginning of its answer. If a
sequence's reader has consumed other tokens or is missing (after a recovery, a preemption, a fork), a new one is made
from the grammar and consumes all tokens again, at two microseconds each. Any worker therefore draws the same token,
whatever happened before.

**End tokens.** Tokens that end an answer (the model's, and those in the request) are allowed exactly where the grammar
is satisfied, including end tokens that are text: drawn in the middle, they would end the answer there. Before
``min_tokens`` is reached they are forbidden, unless the grammar allows no other token: the grammar takes precedence.

**Thinking** precedes what the grammar describes (``thinking``): the matcher consumes the tokens after it. Meanwhile all
tokens but end tokens are allowed, or the one token that ends the thinking because its budget is used.

**Other sequences do not wait.** The tokenizer is read when the worker starts, before the broker expects heartbeats,
because reading it blocks all threads. Grammars are compiled on threads of their own (``GrammarCompiler``). A sequence
whose grammar is not compiled yet is drawn in a later step: the broker has its last position computed again. The delay
does not change the token, since a draw is a function of the tokens.

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
from swarm.grammar import Compilation, estimate_bytes, grammar_error, grammar_vocabulary, matcher_error, timeout_error
from swarm.stage.engine.thinking import ThinkingReader, ThinkingReaders
from swarm.wire.messages import MAX_PROPOSED

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swarm.params import Grammar, SamplingParams
    from swarm.stage.engine.sampling import Mask
    from swarm.stage.executor import SampleJob

MAX_GRAMMARS = 64  # compiled grammars kept; some hundred KiB each, more for large ones
MAX_GRAMMAR_BYTES = 256 << 20  # of all compiled grammars, as ``weight`` estimates them
MAX_COMPILATIONS = 2  # compilations in flight
STEP_WAIT_S = 0.02  # time for which one step may wait for compilations
# Limit of one compilation. The client has checked that it takes under five seconds; a machine this much slower has
# other problems.
COMPILE_TIMEOUT_S = 30.0
# Of about 40 KiB each. With more sequences than this, some consume all their tokens again in each step.
MAX_READERS = 512


@dataclass(slots=True)
class _GrammarReader:
    """Matcher of a grammar that has consumed these tokens of an answer."""

    grammar: Grammar
    matcher: LLMatcher
    tokens: list[int]


class GrammarMasks:
    """Masks of all sequences of the last stage, with their caches.

    ``folder`` is the model's folder, which contains its tokenizer. ``ends`` are the tokens by which the model ends an
    answer.
    """

    def __init__(self, folder: Path, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        # the vocabulary, or the error that every use of a grammar raises
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json", self._ends)
        self._compiler = GrammarCompiler()
        self._readers: OrderedDict[int, _GrammarReader] = OrderedDict()  # by sequence, least recently used first
        self._thinking = ThinkingReaders(self._token_bytes)

    def mask(self, sequence: int, job: SampleJob, words: int, start: int = 0) -> Mask | str | None:
        """Return the tokens that may come next as a mask of ``words`` bits. The grammar describes the answer from
        token ``start`` on.

        Returns the reason as a string if none can, and None if the grammar is not compiled yet.
        """
        grammar = job.params.grammar
        assert grammar is not None
        try:
            reader = self._reader(sequence, grammar, list(job.history[job.num_prompt + start :]))
            return None if reader is None else self._compute_mask(reader, job, words)
        except (InvalidRequest, ModelError) as error:
            self.drop(sequence)
            return str(error)

    def read_thinking(self, sequence: int, job: SampleJob) -> ThinkingReader | str:
        """Return the reader of the answer's thinking, or the reason why it can't be read."""
        try:
            self._vocabulary()
        except ModelError as error:
            return str(error)
        return self._thinking.read(sequence, job)

    def thinking_mask(self, job: SampleJob, words: int, forced: Sequence[int]) -> Mask | None:
        """Return the tokens that may come next within the thinking; None if all may."""
        if forced:
            mask: Mask = np.zeros(-(-words // 32), np.uint32)
            _set_bits(mask, forced[:1], allowed=True)
            return mask
        if job.params.grammar is None:
            return None
        mask = _resize_mask(np.full(-(-words // 32), 0xFFFFFFFF, np.uint32), words)
        ends = (*self._ends, *job.params.stop_token_ids)
        _set_bits(mask, [end for end in ends if end < words], allowed=False)
        return mask

    def forced_tokens(self, sequence: int, params: SamplingParams, token: int) -> tuple[int, ...]:
        """Return the tokens with which the answer continues after ``token``, which was drawn by the last mask of the
        sequence, because the grammar demands them or the thinking must end; none if there is a choice.

        A forced text can have several tokenizations. These are the tokenizer's own, and the masks that follow allow no
        others. The next mask needs the same computation, and finds it done.
        """
        if params.thinking is not None and (forced := self._thinking.forced_after(sequence, token)):
            return forced[:MAX_PROPOSED]
        reader = self._readers.get(sequence)
        if reader is None or token in self._ends or token in params.stop_token_ids:
            return ()
        if not reader.matcher.consume_tokens([token]):
            self.drop(sequence)  # the next mask reports the error
            return ()
        reader.tokens.append(token)
        return tuple(reader.matcher.compute_ff_tokens()[:MAX_PROPOSED])

    def begin_step(self) -> None:
        """Start a new step: its calls of ``mask`` may together wait for a limited time."""
        self._compiler.begin_step()

    def wait_for_compilation(self) -> None:
        """Wait for a grammar that is being compiled, for as long as this step may."""
        self._compiler.wait_for_one()

    def drop(self, sequence: int) -> None:
        """Drop the cached readers of a sequence."""
        self._readers.pop(sequence, None)
        self._thinking.drop(sequence)

    def clear(self) -> None:
        """Drop the cached readers of all sequences."""
        self._readers.clear()
        self._thinking.clear()

    def _compute_mask(self, reader: _GrammarReader, job: SampleJob, words: int) -> Mask:
        matcher = reader.matcher
        bitmask = np.frombuffer(matcher.compute_bitmask(), "<u4")
        if matcher.is_error():
            raise grammar_error(
                reader.grammar, f"it can't be followed beyond {_describe_progress(reader)}: {matcher_error(matcher)}"
            )
        mask = _resize_mask(bitmask, words)
        ends = [end for end in (*self._ends, *job.params.stop_token_ids) if end < words]
        _set_bits(mask, [end for end in (*ends, *self._vocabulary().eos_tokens) if end < words], allowed=False)
        goes_on, may_end = bool(mask.any()), bool(ends) and matcher.is_accepting()
        if may_end and not (goes_on and len(job.history) - job.num_prompt < job.params.min_tokens):
            _set_bits(mask, ends, allowed=True)
        elif not goes_on:
            why = "no token of the model continues it" if ends else "the model has no token that ends an answer"
            raise grammar_error(reader.grammar, f"it can't be followed beyond {_describe_progress(reader)}: {why}")
        return mask

    def _reader(self, sequence: int, grammar: Grammar, answer: list[int]) -> _GrammarReader | None:
        """Return the sequence's reader after it has consumed the whole answer; None if its grammar is not compiled."""
        reader = self._readers.get(sequence)
        if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:
            compiled = self._compiler.get(grammar, self._vocabulary())
            if compiled is None:
                return None
            # a reader changes its matcher, so copy the cached one
            reader = self._readers[sequence] = _GrammarReader(grammar, compiled.deep_copy(), [])
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(sequence)
        unread = answer[len(reader.tokens) :]
        if unread and not reader.matcher.consume_tokens(unread):
            raise grammar_error(
                grammar, f"it can't be followed beyond {_describe_progress(reader)}: {matcher_error(reader.matcher)}"
            )
        reader.tokens += unread
        return reader

    def _token_bytes(self, token: int) -> bytes:
        vocabulary = self._vocabulary()
        if token >= vocabulary.vocab_size:  # models may have more tokens than their tokenizers
            return b""
        content: bytes = vocabulary.decode_bytes([token])
        return content

    def _vocabulary(self) -> LLTokenizer:
        if isinstance(self._tokenizer, ModelError):
            raise self._tokenizer
        return self._tokenizer


class GrammarCompiler:
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
        self._results: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._bytes = 0  # estimated memory of ``_results``
        self._wait_s = 0.0  # what is left of this step's waiting time
        self._in_flight: dict[Grammar, tuple[Compilation, float]] = {}  # with the time at which each began

    @property
    def num_cached(self) -> int:
        """Number of grammars whose result is cached."""
        return len(self._results)

    def begin_step(self) -> None:
        """Start a new step with its full waiting time."""
        self._wait_s = STEP_WAIT_S

    def wait_for_one(self) -> None:
        """Wait for one of the compilations in flight, because no sequence can be drawn."""
        for work, _ in list(self._in_flight.values())[:1]:
            self._result(work)

    def get(self, grammar: Grammar, words: LLTokenizer) -> LLMatcher | None:
        """Return the compiled grammar before its first token, which must not be changed; None if it is not compiled
        yet.

        Raises ``InvalidRequest`` with the reason if the grammar can't be used.
        """
        self._collect_finished()
        if grammar not in self._results and not self._compile(grammar, words):
            return None
        self._results.move_to_end(grammar)
        result = self._results[grammar]
        if isinstance(result, InvalidRequest):
            raise result
        return result

    def _compile(self, grammar: Grammar, words: LLTokenizer) -> bool:
        """Start the compilation, or check its progress. Return whether the result is available now."""
        pending = self._in_flight.get(grammar)
        if pending is not None:
            if self._clock() - pending[1] > COMPILE_TIMEOUT_S:
                raise timeout_error(grammar, COMPILE_TIMEOUT_S)
            return False
        if len(self._in_flight) >= MAX_COMPILATIONS:
            return False
        work = Compilation(grammar, words)
        result = self._result(work)
        if result is None:
            self._in_flight[grammar] = (work, self._clock())
            return False
        self._store_result(grammar, result)
        return True

    def _result(self, work: Compilation) -> LLMatcher | InvalidRequest | None:
        """Return the compilation's result, waiting as long as the step may; None if it is not finished."""
        began = self._clock()
        result = work.result(self._wait_s)
        self._wait_s = max(0.0, self._wait_s - (self._clock() - began))
        return result

    def _collect_finished(self) -> None:
        """Store the results of all finished compilations."""
        ended = [(grammar, found) for grammar, (work, _) in self._in_flight.items() if (found := work.result())]
        for grammar, found in ended:
            del self._in_flight[grammar]
            self._store_result(grammar, found)

    def _store_result(self, grammar: Grammar, found: LLMatcher | InvalidRequest) -> None:
        self._results[grammar] = found
        self._bytes += estimate_bytes(grammar)
        while len(self._results) > 1 and (len(self._results) > MAX_GRAMMARS or self._bytes > MAX_GRAMMAR_BYTES):
            old, _ = self._results.popitem(last=False)
            self._bytes -= estimate_bytes(old)


def _load_tokenizer(path: Path, ends: Sequence[int]) -> LLTokenizer | ModelError:
    """Return the tokenizer, or the error that is raised when a grammar needs it."""
    try:
        return grammar_vocabulary(path.read_text("utf-8"), ends)
    except (OSError, UnicodeDecodeError) as error:
        return ModelError(f"the model's tokenizer.json, which grammars need, can't be read: {error}")
    except ModelError as error:
        return error


def _resize_mask(mask: Mask, words: int) -> Mask:
    """Return a copy of the mask for ``words`` tokens. Tokens that the tokenizer does not have are forbidden."""
    wide: Mask = np.zeros(-(-words // 32), np.uint32)
    count = min(len(mask), len(wide))
    wide[:count] = mask[:count]
    if words % 32:
        wide[-1] &= np.uint32((1 << words % 32) - 1)
    return wide


def _set_bits(mask: Mask, tokens: Sequence[int], *, allowed: bool) -> None:
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        mask[token >> 5] = mask[token >> 5] | bit if allowed else mask[token >> 5] & ~bit


def _describe_progress(reader: _GrammarReader) -> str:
    return f"{len(reader.tokens)} tokens of the answer"
