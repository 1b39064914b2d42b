"""Grammars compiled before anything runs, so that a mistake in one is its caller's at once. No asyncio: compiling takes
a millisecond as a rule and seconds at most, so event loops have it done in threads (``checking``)."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from swarm.errors import InvalidRequest
from swarm.grammar import NotNow, compiled, refusal, vocabulary
from swarm.params import Grammar, SamplingParams

MOST_GRAMMARS = 256  # whose verdicts are remembered, by digests of their texts
_FIT = ""


class GrammarChecker:
    """Says whether a model can follow a grammar. ``ends``: the tokens by which it ends an answer. Any thread
    may ask."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(ends)
        self._words: LLTokenizer | None = None
        self._making_words = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # why it is refused, or that it fits
        self._lock = threading.Lock()  # never held for long: whoever knows an answer need not wait for another's

    def knows(self, params: SamplingParams) -> bool:
        """Whether ``check`` answers without compiling. Raises InvalidRequest as that does."""
        grammar = params.grammar
        if grammar is None:
            return True
        if self._tokenizer is None:
            raise refusal(grammar, "this model has no tokenizer, which grammars need")
        if not self._ends and not params.stop_token_ids:
            raise refusal(grammar, "this model has no token that ends an answer: name one in stop_token_ids")
        verdict = self._remembered(digest(grammar))
        if verdict:
            raise InvalidRequest(verdict, "grammar")
        return verdict is not None

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest (code "grammar") that says why these parameters' grammar can't be followed."""
        if self.knows(params):
            return
        assert params.grammar is not None
        assert self._tokenizer is not None
        try:
            compiled(params.grammar, self._vocabulary(self._tokenizer))
        except NotNow:
            raise  # another time it may be compiled
        except InvalidRequest as error:
            self._remember(digest(params.grammar), str(error))
            raise
        self._remember(digest(params.grammar), _FIT)

    @property
    def ready(self) -> LLTokenizer | None:
        """Return what ``words`` has made before."""
        return self._words

    def words(self) -> LLTokenizer | None:
        """The model's tokens as bytes; None if it has no tokenizer. Made once, which takes up to two seconds."""
        return None if self._tokenizer is None else self._vocabulary(self._tokenizer)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        with self._making_words:
            if self._words is None:
                self._words = vocabulary(tokenizer.to_str(), self._ends)
            return self._words

    def _remembered(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _remember(self, key: bytes, verdict: str) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_GRAMMARS:
                self._verdicts.popitem(last=False)


def digest(grammar: Grammar) -> bytes:
    """Stand for a grammar where its text is too long to be kept."""
    return hashlib.sha256(f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
