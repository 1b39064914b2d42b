"""Compiles grammars before a request is sent, so that a mistake in one fails its caller immediately.

No asyncio here: compiling usually takes a millisecond and at most some seconds, so event loops run it in threads
(``grammar_checks``).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from swarm.errors import InvalidRequest
from swarm.grammar import CompilationFailed, compile_grammar, grammar_error, grammar_vocabulary
from swarm.params import Grammar, SamplingParams

MAX_GRAMMARS = 256  # verdicts kept, by digests of the grammars' texts
_ACCEPTED = ""  # verdict of a grammar that can be followed


class GrammarChecker:
    """Checks whether a model can follow a grammar. ``end_tokens``: the tokens that end an answer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = tuple(end_tokens)
        self._words: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # the reason of a refusal, or _ACCEPTED
        self._lock = threading.Lock()  # held only briefly, so that a cached verdict never waits for a compilation

    def has_verdict(self, params: SamplingParams) -> bool:
        """Whether the verdict is cached, so that ``check`` need not compile. Raises InvalidRequest if the verdict is a
        refusal."""
        grammar = params.grammar
        if grammar is None:
            return True
        if self._tokenizer is None:
            raise grammar_error(grammar, "this model has no tokenizer, which grammars need")
        if not self._end_tokens and not params.stop_token_ids:
            raise grammar_error(grammar, "this model has no token that ends an answer: name one in stop_token_ids")
        verdict = self._cached_verdict(digest(grammar))
        if verdict:
            raise InvalidRequest(verdict, "grammar")
        return verdict is not None

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest (code "grammar") with the reason if this grammar cannot be followed."""
        if self.has_verdict(params):
            return
        assert params.grammar is not None
        assert self._tokenizer is not None
        try:
            compile_grammar(params.grammar, self._vocabulary(self._tokenizer))
        except CompilationFailed:
            raise  # not a verdict: it may compile another time
        except InvalidRequest as error:
            self._cache_verdict(digest(params.grammar), str(error))
            raise
        self._cache_verdict(digest(params.grammar), _ACCEPTED)

    @property
    def ready(self) -> LLTokenizer | None:
        """The vocabulary if ``words`` has built it before."""
        return self._words

    def words(self) -> LLTokenizer | None:
        """Return the model's tokens as bytes; None if it has no tokenizer. Built on first use, which takes up to two
        seconds."""
        return None if self._tokenizer is None else self._vocabulary(self._tokenizer)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._words is None:
                self._words = grammar_vocabulary(tokenizer.to_str(), self._end_tokens)
            return self._words

    def _cached_verdict(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _cache_verdict(self, key: bytes, verdict: str) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_GRAMMARS:
                self._verdicts.popitem(last=False)


def digest(grammar: Grammar) -> bytes:
    """Return a fixed-size key for a grammar, whose text may be too long to keep."""
    return hashlib.sha256(f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
