"""What a grammar's text means: compiled by llguidance, within bounds, for a model's own tokens.

The client library compiles a grammar before anything runs, so that a mistake is the caller's at once; the last stage
compiles it again, to say which tokens are allowed. Both do it here, so they agree.

* An answer matches as a whole: nothing may stand before it or after it.
* White space in JSON is bounded: where it may stand, a single blank, or a line's end and up to 40 blanks or tabs. A
  model that may write any amount of it sometimes writes nothing else. Who wants it otherwise says so in the schema's
  ``x-guidance``.
* The compiler goes as deep as definitions name each other, 8 to 16 KiB of stack for each, and where there is none left
  the process dies. So it has a thread with a stack for every text of the greatest length that is allowed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from swarm.errors import InvalidRequest, ModelError
from swarm.params import MAX_CHOICES, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PATIENCE_S: Final = 5.0  # what is allowed compiles in about a second at most; the worst known text in four
MAX_RULES: Final = 1000  # of a grammar in llama.cpp's form: translating them takes time that grows with the square
_WHITE_SPACE: Final[JsonCompileOptions] = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
_STACK_BYTES = 512 << 20  # reserved, and used only as deep as it goes: 256 Ki characters are 16 MiB to 300 MiB
_LOOK_S = 0.1
_STACK_LOCK = threading.Lock()  # the size for new threads is the process's

# Parser's items per token; by the library's own limit of 50,000, a token of an ambiguous grammar takes up to two
# seconds. With this the worst known one takes a tenth of one.
_STEP_ITEMS = 10_000


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


def compiled(
    grammar: Grammar,
    words: LLTokenizer,
    patience_s: float = PATIENCE_S,
    waiting: Callable[[], None] = lambda: None,
) -> LLMatcher:
    """The grammar before the first token. ``waiting`` is called now and then until it is there. Raises InvalidRequest
    (code "grammar") that says why it can't be used."""
    found: list[LLMatcher | InvalidRequest] = []

    def work() -> None:
        try:
            found.append(_compiled(grammar, words))
        except InvalidRequest as error:
            found.append(error)

    try:
        thread = _deep_thread(work)
    except (RuntimeError, MemoryError) as error:
        raise _not_now(grammar, f"there is no memory for compiling it: {error}") from None
    for _ in range(max(1, round(patience_s / _LOOK_S))):
        thread.join(min(_LOOK_S, patience_s))
        if not thread.is_alive():
            break
        waiting()
    if not found and not thread.is_alive():
        raise refusal(grammar, "the compiler broke down over it")
    if not found:
        raise _not_now(grammar, f"it is not compiled after {patience_s:g} s: make it smaller")
    if isinstance(found[0], InvalidRequest):
        raise found[0]
    return found[0]


class NotNow(InvalidRequest):
    """A grammar could not be compiled as things are, which says nothing about it."""


def refusal(grammar: Grammar, why: str) -> InvalidRequest:
    """Say why a grammar can't be used, in one line that names its kind."""
    return InvalidRequest(f"grammar ({grammar.kind}): {' '.join(why.split())[:600]}", code="grammar")


def _not_now(grammar: Grammar, why: str) -> NotNow:
    return NotNow(str(refusal(grammar, why)), code="grammar")


def trouble(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, without the library's hints for its own developers."""
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


def _compiled(grammar: Grammar, words: LLTokenizer) -> LLMatcher:
    limits = LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS)
    try:
        matcher = LLMatcher(words, _SOURCES[grammar.kind](grammar), log_level=0, limits=limits)
    except ValueError as error:  # also for what is no Unicode
        raise refusal(grammar, str(error)) from None
    if matcher.is_error():
        raise refusal(grammar, trouble(matcher))
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
    if grammar.text.count("::=") > MAX_RULES:
        raise refusal(grammar, f"it has more than {MAX_RULES} rules; write it in Lark's form, or make it smaller")
    if grammar.text.startswith("%llguidance"):
        return str(grammar_from("lark", grammar.text))  # it says so itself, whatever strings it has
    return str(grammar_from("ebnf", grammar.text))


_SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _ebnf,
}
