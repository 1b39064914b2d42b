"""Compilation of grammars by llguidance, within limits, for a model's own tokens.

The client library compiles a grammar before a request runs, so that the caller gets an error immediately; the last
stage compiles it again, to compute the allowed tokens. Both use this module, so they agree.

* The answer must match as a whole: nothing may come before or after the match.
* White space in JSON is limited to a single blank, or a newline and up to 40 blanks or tabs, at the places where JSON
  allows it. A model that may write any amount of it sometimes writes nothing else. A schema can change that with
  ``x-guidance``.
* Compiling is limited by the amount of work, not by time alone, so that all machines reject the same grammars: symbols
  of all rules, "multipleOf" numbers, text of a grammar that is translated. The worst known grammar takes a second. A
  grammar whose first tokens can't be computed within the limits is rejected here, too: for some texts that takes longer
  than compiling.
* The compiler recurses as deep as definitions refer to each other, with 8 to 16 KiB of stack each, and a stack overflow
  would kill the process. It therefore runs in a thread whose stack suffices for every text of the maximum length.
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

COMPILE_TIMEOUT_S: Final = 5.0  # Allowed grammars compile in about a second at most.
MAX_RULES: Final = 1000  # Rules of a grammar in llama.cpp's form: translating takes time quadratic in the rules.
MAX_GBNF: Final = 64 << 10  # Characters of such a grammar: the translation is Python code, which holds the GIL.
# Limit of the least common multiple of a schema's "multipleOf" values, in their smallest unit: each number up to it
# becomes a state.
MAX_MULTIPLE: Final = 100_000
_WHITESPACE_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
# Reserved; pages are used only as deep as the recursion goes: 256 Ki characters take 16 to 300 MiB.
_STACK_BYTES = 512 << 20
_STACK_LOCK = threading.Lock()  # The stack size for new threads is a setting of the whole process.

# Parser items per token. With the library's own limit of 50,000, a token of an ambiguous grammar takes up to two
# seconds; with this one the worst known grammar takes a tenth of a second.
_STEP_ITEMS = 10_000

# Symbols of all rules together (the library's own limit is 500,000). Enough for 10,000 choices; a schema with 10,000
# properties, which compiled for eight seconds and then exceeded other limits, is rejected in a tenth of a second.
_SYMBOLS = 20_000
_BYTES_PER_PART = 500  # Memory per character and per "multipleOf" state: measured, and rounded up.

_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_BLANK = r"(?:\s|//[^\n]*\n|#[^\n]*\n)*"
_MULTIPLE = re.compile(rf'"multipleOf"{_BLANK}:{_BLANK}([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}})?)')


def grammar_vocabulary(tokenizer_json: str, stop_tokens: Sequence[int]) -> LLTokenizer:
    """Return the tokens of a model in the form that grammars need, from its tokenizer.json and its stop tokens.

    Holds the GIL meanwhile: 0.2 s for 32,000 tokens, 1.5 s and 240 MiB for 256,000. Raises ModelError.
    """
    try:
        tokenizer = LLTokenizer(tokenizer_json)
        stop_ids = [end for end in stop_tokens if end < tokenizer.vocab_size]
        return (
            LLTokenizer(tokenizer_json, eos_token=stop_ids)
            if stop_ids and stop_ids != tokenizer.eos_tokens
            else tokenizer
        )
    except ValueError as error:
        raise ModelError(f"the model's tokenizer.json can't be used for grammars: {error}") from None


def estimate_bytes(grammar: Grammar) -> int:
    """Estimate the bytes of the compiled grammar, rather too high than too low."""
    return _BYTES_PER_PART * (100 + len(grammar.text) + _common_multiple(grammar.text))


class Compilation:
    """Compilation of a grammar in a thread of its own. Raises InvalidRequest (code "grammar") if there is no memory for
    one."""

    def __init__(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._result: LLMatcher | InvalidRequest | None = None
        try:
            self._thread = _start_deep_thread(self._work)
        except (RuntimeError, MemoryError) as error:
            raise _not_now_error(grammar, f"there is no memory for compiling it: {error}") from None

    def result(self, wait_s: float = 0.0) -> LLMatcher | InvalidRequest | None:
        """Return the compiled grammar, or the error; None if the compilation takes longer than ``wait_s``."""
        self._thread.join(max(0.0, wait_s))
        if self._thread.is_alive():
            return None
        return self._result or grammar_error(self._grammar, "the compiler failed")

    def _work(self) -> None:
        try:
            self._result = _compile(self._grammar, self._tokenizer)
        except InvalidRequest as error:
            self._result = error


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer, timeout_s: float = COMPILE_TIMEOUT_S) -> LLMatcher:
    """Compile a grammar. Raises InvalidRequest (code "grammar") with the reason if it can't be used."""
    result = Compilation(grammar, tokenizer).result(timeout_s)
    if result is None:
        raise timeout_error(grammar, timeout_s)
    if isinstance(result, InvalidRequest):
        raise result
    return result


class CompilationFailed(InvalidRequest):
    """A grammar could not be compiled under the current conditions; the grammar itself may be fine."""


def grammar_error(grammar: Grammar, why: str) -> InvalidRequest:
    """Return the error for an unusable grammar: one line that names its kind."""
    return InvalidRequest(f"grammar ({grammar.kind}): {' '.join(why.split())[:600]}", code="grammar")


def timeout_error(grammar: Grammar, patience_s: float) -> CompilationFailed:
    """Return the error for a compilation that timed out."""
    return _not_now_error(grammar, f"it is not compiled after {patience_s:g} s: make it smaller")


def _not_now_error(grammar: Grammar, why: str) -> CompilationFailed:
    return CompilationFailed(str(grammar_error(grammar, why)), code="grammar")


def matcher_error(matcher: LLMatcher) -> str:
    """Return a matcher's error without the library's hints for its own developers."""
    return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()


def _start_deep_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _common_multiple(text: str) -> int:
    """Return the least common multiple of all "multipleOf" numbers, in units of their smallest fraction.

    Memory and time of the compilation grow with it: 50 MiB and 0.6 s for 100,000.
    """
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


def _compile(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    if _common_multiple(grammar.text) > MAX_MULTIPLE:
        raise grammar_error(
            grammar,
            f'numbers of "multipleOf" that have no common multiple up to {MAX_MULTIPLE:,}, in their smallest unit',
        )
    limits = LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS, max_grammar_size=_SYMBOLS)
    try:
        matcher = LLMatcher(tokenizer, _SOURCES[grammar.kind](grammar), log_level=0, limits=limits)
    except ValueError as error:  # Also raised for invalid Unicode.
        raise grammar_error(grammar, str(error)) from None
    if matcher.is_error():
        raise grammar_error(grammar, matcher_error(matcher))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise grammar_error(grammar, f"it can't be followed beyond 0 tokens of the answer: {matcher_error(matcher)}")
    return matcher


def _schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise grammar_error(grammar, f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise grammar_error(grammar, "a schema is a JSON object")
    return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=_WHITESPACE_OPTIONS))


def _object(grammar: Grammar) -> str:
    if grammar.text:
        raise grammar_error(grammar, "it takes no text; a schema is of kind json_schema")
    return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=_WHITESPACE_OPTIONS))


def _regex(grammar: Grammar) -> str:
    if not grammar.text:
        raise grammar_error(grammar, "the expression is empty")
    return str(LLMatcher.grammar_from_regex(grammar.text))


def _choice(grammar: Grammar) -> str:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise grammar_error(grammar, f"the choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise grammar_error(grammar, "the choices are a JSON list of one or more texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise grammar_error(grammar, f"{len(choices)} choices, at most {MAX_CHOICES} are taken")
    literals = (json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in choices)
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(literals)))


def _ebnf(grammar: Grammar) -> str:
    if not grammar.text.strip():
        raise grammar_error(grammar, "the grammar is empty")
    if grammar.text.startswith("%llguidance"):
        # Lark's form with an explicit marker, whatever strings it contains.
        return str(grammar_from("lark", grammar.text))
    num_rules = grammar.text.count("::=")
    if num_rules > MAX_RULES:
        raise grammar_error(grammar, f"it has more than {MAX_RULES} rules; write it in Lark's form, or make it smaller")
    if num_rules and len(grammar.text) > MAX_GBNF:
        raise grammar_error(
            grammar, f"it has more than {MAX_GBNF} characters; write it in Lark's form, or make it smaller"
        )
    return str(grammar_from("ebnf", grammar.text))


_SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _ebnf,
}
