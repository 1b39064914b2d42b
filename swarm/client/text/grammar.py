"""Grammars compiled before anything runs, so that a mistake in one is its caller's at once. No asyncio: compiling takes
a millisecond as a rule and seconds at most, so event loops have it done in a thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from swarm.errors import InvalidRequest
from swarm.grammar import NotNow, compiled, refusal, vocabulary
from swarm.params import SamplingParams

MOST_GRAMMARS = 256  # whose verdicts are remembered


class GrammarChecker:
    """Says whether a model can follow a grammar. ``ends``: the tokens by which it ends an answer. Any thread
    may ask."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(ends)
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._verdicts: OrderedDict[object, InvalidRequest | None] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest (code "grammar") that says why these parameters' grammar can't be followed."""
        grammar = params.grammar
        if grammar is None:
            return
        if self._tokenizer is None:
            raise refusal(grammar, "this model has no tokenizer, which grammars need")
        if not self._ends and not params.stop_token_ids:
            raise refusal(grammar, "this model has no token that ends an answer: name one in stop_token_ids")
        with self._lock:  # one at a time: the machine has other work, too
            if grammar not in self._verdicts:
                self._verdicts[grammar] = self._verdict(params)
            self._verdicts.move_to_end(grammar)
            if len(self._verdicts) > MOST_GRAMMARS:
                self._verdicts.popitem(last=False)
            verdict = self._verdicts[grammar]
            if isinstance(verdict, NotNow):
                del self._verdicts[grammar]  # another time it may be compiled
        if verdict is not None:
            raise InvalidRequest(str(verdict), verdict.code)

    @property
    def ready(self) -> LLTokenizer | None:
        """What ``words`` has made before."""
        return self._words

    def words(self) -> LLTokenizer | None:
        """The model's tokens as bytes; None if it has no tokenizer. Made once, which takes up to two seconds."""
        with self._lock:
            return None if self._tokenizer is None else self._vocabulary(self._tokenizer)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        if self._words is None:
            self._words = vocabulary(tokenizer.to_str(), self._ends)
        return self._words

    def _verdict(self, params: SamplingParams) -> InvalidRequest | None:
        assert params.grammar is not None
        assert self._tokenizer is not None
        try:
            compiled(params.grammar, self._vocabulary(self._tokenizer))
        except InvalidRequest as error:
            return error
        return None
