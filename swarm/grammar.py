"""What a grammar's text means: compiled by llguidance, within bounds, for a model's own tokens.

The client library compiles a grammar before anything runs, so that a mistake is the caller's at once; the last stage
compiles it again, to say which tokens are allowed. Both do it here, so they agree.

* An answer matches as a whole: nothing may stand before it or after it.
* White space in JSON is bounded: where it may stand, a single blank, or a line's end and up to 40 blanks or tabs. A
  model that may write any amount of it sometimes writes nothing else. Who wants it otherwise says so in the schema's
  ``x-guidance``.
* Compiling is bounded by what it has to do, not by time alone, so that all machines refuse the same: the symbols of all
  rules, numbers of which others are to be multiples, the text of a grammar that is translated. The worst known one
  takes a second. What can't even say which tokens come first is refused here, too: for some texts, finding that out
  takes longer than the compiling.
* The compiler goes as deep as definitions name each other, 8 to 16 KiB of stack for each, and where there is none left
  the process dies. So it has a thread with a stack for every text of the greatest length that is allowed.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from swarm.errors import InvalidRequest, ModelError
from swarm.params import MAX_CHOICES, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PATIENCE_S: Final = 5.0  # what is allowed compiles in about a second at most
MAX_RULES: Final = 1000  # of a grammar in llama.cpp's form: translating them takes time that grows with the square
MAX_GBNF: Final = 64 << 10  # characters of one: translating is Python's work, which other threads wait for
MAX_MULTIPLE: Final = 100_000  # of all "multipleOf" of a schema together: each number below it makes a state
_WHITE_SPACE: Final[JsonCompileOptions] = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
_STACK_BYTES = 512 << 20  # reserved, and used only as deep as it goes: 256 Ki characters are 16 MiB to 300 MiB
_STACK_LOCK = threading.Lock()  # the size for new threads is the process's

# Parser's items per token; by the library's own limit of 50,000, a token of an ambiguous grammar takes up to two
# seconds. With this the worst known one takes a tenth of one.
_STEP_ITEMS = 10_000

# Symbols of all rules together (the library's own limit is 500,000). 10,000 choices have room; a schema with 10,000
# properties, which took eight seconds and could not be followed then, is refused in a tenth of one.
_SYMBOLS = 20_000
_BYTES_A_PART = 500  # of memory for each character, or number of which others are multiples: measured, and rounded up

_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_BLANK = r"(?:\s|//[^\n]*\n|#[^\n]*\n)*"
_MULTIPLE = re.compile(rf'"multipleOf"{_BLANK}:{_BLANK}([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}})?)')


def vocabulary(tokenizer_json: str, ends: Sequence[int]) -> LLTokenizer:
    """The tokens of a model, as grammars need them, from its tokenizer.json and the ids of those that end an answer.
    Nothing else in the process goes on meanwhile: 0.2 s for 32,000 tokens, 1.5 s and 240 MiB for 256,000. Raises
    ModelError."""
    try:
        words = LLTokenizer(tokenizer_json)
        known = [end for end in ends if end < words.vocab_size]
        return LLTokenizer(tokenizer_json, eos_token=known) if known and known != words.eos_tokens else words
    except ValueError as error:
        raise ModelError(f"the model's tokenizer.json is of no use for grammars: {error}") from None


def weight(grammar: Grammar) -> int:
    """Bytes that it takes up when it is compiled, rather too many than too few."""
    return _BYTES_A_PART * (100 + len(grammar.text) + _multiple(grammar.text))


class Compilation:
    """A grammar that is being compiled, in a thread of its own. Raises InvalidRequest (code "grammar") if there is no
    memory for one."""

    def __init__(self, grammar: Grammar, words: LLTokenizer) -> None:
        self._grammar = grammar
        self._words = words
        self._found: LLMatcher | InvalidRequest | None = None
        try:
            self._thread = _deep_thread(self._work)
        except (RuntimeError, MemoryError) as error:
            raise _not_now(grammar, f"there is no memory for compiling it: {error}") from None

    def result(self, wait_s: float = 0.0) -> LLMatcher | InvalidRequest | None:
        """The grammar before the first token, or why it can't be used; None if neither is known after so long."""
        self._thread.join(max(0.0, wait_s))
        if self._thread.is_alive():
            return None
        return self._found or refusal(self._grammar, "the compiler broke down over it")

    def _work(self) -> None:
        try:
            self._found = _compiled(self._grammar, self._words)
        except InvalidRequest as error:
            self._found = error


def compiled(grammar: Grammar, words: LLTokenizer, patience_s: float = PATIENCE_S) -> LLMatcher:
    """The grammar before the first token. Raises InvalidRequest (code "grammar") that says why it can't be used."""
    found = Compilation(grammar, words).result(patience_s)
    if found is None:
        raise too_slow(grammar, patience_s)
    if isinstance(found, InvalidRequest):
        raise found
    return found


class NotNow(InvalidRequest):
    """A grammar could not be compiled as things are, which says nothing about it."""


def refusal(grammar: Grammar, why: str) -> InvalidRequest:
    """Say why a grammar can't be used, in one line that names its kind."""
    return InvalidRequest(f"grammar ({grammar.kind}): {' '.join(why.split())[:600]}", code="grammar")


def too_slow(grammar: Grammar, patience_s: float) -> NotNow:
    """Say that nobody waits any longer for it."""
    return _not_now(grammar, f"it is not compiled after {patience_s:g} s: make it smaller")


def _not_now(grammar: Grammar, why: str) -> NotNow:
    return NotNow(str(refusal(grammar, why)), code="grammar")


def trouble(matcher: LLMatcher) -> str:
    """Say what is wrong with a matcher, without the library's hints for its own developers."""
    return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()


def _deep_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _multiple(text: str) -> int:
    """The least common multiple of all numbers of which others are to be multiples, in the smallest unit that one of
    them has. Memory and time grow with it: 50 MiB and 0.6 s for 100,000."""
    if "multiple" not in text and "\\u" not in text:
        return 1
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    least, unit = 1, 1
    for one in {Fraction(found) for found in _MULTIPLE.findall(plain)} - {Fraction(0)}:
        unit = math.lcm(unit, one.denominator)
        least = math.lcm(least, one.numerator)
        if least * unit > MAX_MULTIPLE:
            break
    return least * unit


def _compiled(grammar: Grammar, words: LLTokenizer) -> LLMatcher:
    if _multiple(grammar.text) > MAX_MULTIPLE:
        raise refusal(
            grammar,
            f'numbers of "multipleOf" that have no common multiple up to {MAX_MULTIPLE:,}, in their smallest unit',
        )
    limits = LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS, max_grammar_size=_SYMBOLS)
    try:
        matcher = LLMatcher(words, _SOURCES[grammar.kind](grammar), log_level=0, limits=limits)
    except ValueError as error:  # also for what is no Unicode
        raise refusal(grammar, str(error)) from None
    if matcher.is_error():
        raise refusal(grammar, trouble(matcher))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(grammar, f"it can't be followed beyond 0 tokens of the answer: {trouble(matcher)}")
    return matcher


def _schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refusal(grammar, f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refusal(grammar, "a schema is a JSON object")
    return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=_WHITE_SPACE))


def _object(grammar: Grammar) -> str:
    if grammar.text:
        raise refusal(grammar, "it takes no text; a schema is of kind json_schema")
    return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=_WHITE_SPACE))


def _regex(grammar: Grammar) -> str:
    if not grammar.text:
        raise refusal(grammar, "the expression is empty")
    return str(LLMatcher.grammar_from_regex(grammar.text))


def _choice(grammar: Grammar) -> str:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refusal(grammar, f"the choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise refusal(grammar, "the choices are a JSON list of one or more texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise refusal(grammar, f"{len(choices)} choices, at most {MAX_CHOICES} are taken")
    literals = (json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in choices)
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(literals)))


def _ebnf(grammar: Grammar) -> str:
    if not grammar.text.strip():
        raise refusal(grammar, "the grammar is empty")
    if grammar.text.startswith("%llguidance"):
        return str(grammar_from("lark", grammar.text))  # it says so itself, whatever strings it has
    num_rules = grammar.text.count("::=")
    if num_rules > MAX_RULES:
        raise refusal(grammar, f"it has more than {MAX_RULES} rules; write it in Lark's form, or make it smaller")
    if num_rules and len(grammar.text) > MAX_GBNF:
        raise refusal(grammar, f"it has more than {MAX_GBNF} characters; write it in Lark's form, or make it smaller")
    return str(grammar_from("ebnf", grammar.text))


_SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _ebnf,
}
