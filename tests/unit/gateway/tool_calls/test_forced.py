"""A model that is made to call can only write what its family's reader reads back as a valid call."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from types import SimpleNamespace

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from swarm.client.text.tokenizer import TextModel
from swarm.errors import InvalidRequest
from swarm.gateway.completion.service import add_tool_grammar
from swarm.gateway.completion_request import CompletionRequest, Tool, ToolOptions
from swarm.gateway.tool_calls.deepseek import ALL_BEGIN, BEGIN, SEP
from swarm.gateway.tool_calls.format import ArgumentsDelta, CallFinished, CallStarted, ParseResult, ToolCallFormat
from swarm.gateway.tool_calls.formats import BUILT_IN, visible_marks
from swarm.gateway.tool_calls.grammars import MAX_FORCED_CALLS
from swarm.params import Grammar, SamplingParams

SEARCH = Tool(
    "search",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 20},
            "sort": {"type": "string", "enum": ["new", 'o"ld']},
            "filter": {"$ref": "#/$defs/Filter"},
            "code": {"type": "string", "pattern": "^[a-f]{2,4}$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 5},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        },
        "required": ["query", "filter"],
        "$defs": {
            "Filter": {
                "type": "object",
                "properties": {"deep": {"type": "boolean"}, "word": {"type": "string", "maxLength": 4}},
                "required": ["deep"],
                "additionalProperties": False,
            }
        },
    },
)
STRICT = Tool(
    "search_strict",
    parameters={
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "number", "minimum": -9, "maximum": 9}, {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    strict=True,
)
EMPTY = Tool("no_arguments", parameters={"type": "object", "properties": {}})
FREE = Tool("free_text", custom=True)
BY_RULE = Tool("by_rule", custom=True, grammar=Grammar("regex", "[a-c]{1,5}/[0-9]"))
BY_CHOICE = Tool("by_choice", custom=True, grammar=Grammar("choice", '["yes", "n\\"o"]'))
TOOLS = (SEARCH, STRICT, EMPTY, FREE, BY_RULE, BY_CHOICE)

CLOSERS = ('"', "}", "]", "Ċ</parameter>", "<eos>", "</function>")  # chosen often, so that answers end


def text_model(family: str) -> TextModel:
    """A tokenizer of bytes, with the family's marks: as special tokens where its models have them so."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ċ</parameter>", "</function>"]  # Ċ is how bytes are written down: a line break
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [mark for mark in BUILT_IN[family]({}).marks if mark.startswith(("<|", "[", "<｜"))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ["<eos>", *special]])
    if family in ("hermes", "qwen3-coder"):  # as Qwen has it: tokens of their own, and no special ones
        own = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in own])
    model = TextModel.load({"tokenizer.json": tokenizer.to_str().encode()})
    assert model is not None
    return model


@cache
def of(family: str) -> tuple[TextModel, LLTokenizer]:
    model = text_model(family)
    return model, LLTokenizer(model.tokenizer.to_str(), eos_token=model.added["<eos>"])


def made(name: str) -> ToolCallFormat:
    return BUILT_IN[name](of(name)[0].added)


def matcher(family: str, grammar: Grammar) -> LLMatcher:
    compiled = LLMatcher.grammar_from_lark(grammar.text)
    assert LLMatcher.validate_grammar_with_warnings(compiled, of(family)[1]) == (False, [])
    return LLMatcher(of(family)[1], compiled)


def drawn(family: str, use: ToolOptions, seed: int) -> str:
    """An answer of random allowed tokens, as a client sees it."""
    return drawn_by(family, made(family).forced_call_grammar(use), seed)


def drawn_by(family: str, grammar: Grammar, seed: int, begun: str = "") -> str:
    """The same by any grammar, behind what the model has written."""
    model, _ = of(family)
    chance = random.Random(seed)
    state = matcher(family, grammar)
    closers = {model.tokenizer.token_to_id(text) for text in CLOSERS}
    detokenizer = model.detokenizer(visible_marks(made(family), model.added))
    text = ""
    for token in model.encode(begun, add_special_tokens=False) if begun else ():
        assert state.consume_token(token)
        text += detokenizer.push(token)
    for _ in range(3000):
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        closing = [token for token in allowed if token in closers]
        token = chance.choice(closing if closing and chance.random() < 0.4 else allowed)
        if token == model.added["<eos>"]:
            return text + detokenizer.finish()
        assert state.consume_token(token)
        text += detokenizer.push(token)
        if state.is_stopped():
            return text + detokenizer.finish()
    raise AssertionError(f"no end: {text!r}")


def calls(family: str, use: ToolOptions, text: str) -> list[tuple[str, str]]:
    """The calls that are read. There must be nothing else."""
    reader = BUILT_IN[family]({}).parser(use)
    found: list[ParseResult] = [*reader.push(text), *reader.finish()]
    assert all(isinstance(part, CallStarted | ArgumentsDelta | CallFinished) for part in found), text
    read: list[tuple[str, str]] = []
    for part in found:
        if isinstance(part, CallStarted):
            read.append((part.name, ""))
        elif isinstance(part, ArgumentsDelta):
            read[-1] = (read[-1][0], read[-1][1] + part.text)
    return read


def check(name: str, arguments: str) -> None:
    tool = next(tool for tool in TOOLS if tool.name == name)
    if not tool.custom:
        jsonschema_rs.validate(dict(tool.parameters), json.loads(arguments))
    elif tool.grammar is not None and tool.grammar.kind == "regex":
        assert re.fullmatch(tool.grammar.text, arguments)
    elif tool.grammar is not None:
        assert arguments in json.loads(tool.grammar.text)


@pytest.mark.parametrize("family", sorted(BUILT_IN))
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_named_tool_is_called_once(family: str, tool: Tool) -> None:
    """With arguments by its schema, or text by its grammar."""
    use = ToolOptions(TOOLS, choice="named", required_name=tool.name)
    for seed in range(4):
        ((name, arguments),) = calls(family, use, drawn(family, use, seed))
        assert name == tool.name
        check(name, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_any_tool_is_called_once_where_one_call_is_allowed(family: str) -> None:
    use = ToolOptions(TOOLS, choice="required", parallel=False)
    seen = set()
    for seed in range(12):
        ((name, arguments),) = calls(family, use, drawn(family, use, seed))
        check(name, arguments)
        seen.add(name)
    assert len(seen) > 1


@pytest.mark.parametrize("family", sorted(BUILT_IN.keys() - {"harmony"}))  # its call is the end of the answer
def test_several_calls_may_come(family: str) -> None:
    """Each is valid; there is a bound."""
    use = ToolOptions((EMPTY, BY_CHOICE), choice="required")
    counts = set()
    for seed in range(12):
        read = calls(family, use, drawn(family, use, seed))
        for name, arguments in read:
            check(name, arguments)
        counts.add(len(read))
    assert max(counts) > 1
    assert max(counts) <= MAX_FORCED_CALLS


@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_marks_that_are_special_tokens_are_written_as_such(family: str) -> None:
    """Their text, letter by letter, is something else to the model."""
    model, _ = of(family)
    use = ToolOptions((EMPTY,), choice="required", parallel=False)
    text = drawn(family, use, 0)
    shown = [mark for mark in made(family).marks if mark in model.added and mark in text]
    ids = model.encode(text, add_special_tokens=False)
    state = matcher(family, made(family).forced_call_grammar(use))
    assert state.consume_tokens(list(ids))
    assert all(model.added[mark] in ids for mark in shown)


def test_a_custom_tools_lark_grammar_is_forced_where_its_text_is_bare() -> None:
    """In JSON it would have to be escaped: that is refused, and the error says what to do."""
    tool = Tool("calc", custom=True, grammar=Grammar("ebnf", 'start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,2}/'))
    use = ToolOptions((tool,), choice="required", parallel=False)
    ((_, text),) = calls("qwen3-coder", use, drawn("qwen3-coder", use, 1))
    assert re.fullmatch(r"\d{1,2}( \+ \d{1,2})*", text)
    with pytest.raises(InvalidRequest, match="tool_choice auto"):
        made("hermes").forced_call_grammar(use)


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (ToolOptions(TOOLS, choice="named", required_name="nobody"), "names 'nobody'"),
        (
            ToolOptions((Tool("list", parameters={"type": "array"}),), choice="required"),
            "must be a schema of type object",
        ),
        (ToolOptions((Tool("big", parameters={"title": "x" * 300_000}),), choice="required"), "offer fewer tools"),
    ],
)
def test_what_cant_be_forced_is_refused(use: ToolOptions, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        made("hermes").forced_call_grammar(use)


# --- calls that need not come

# the mark, then what stands before the arguments of STRICT
HEADS = {
    "deepseek": (ALL_BEGIN, f"{BEGIN}function{SEP}search_strict\n```json\n"),
    "deepseek-v3.1": (ALL_BEGIN, f"{BEGIN}search_strict{SEP}"),
    "granite": ("<|tool_call|>", '[{"name": "search_strict", "arguments": '),
    "hermes": ("<tool_call>", '\n{"name": "search_strict", "arguments": '),
    "llama3": ("", '{"name": "search_strict", "parameters": '),
    "mistral": ("[TOOL_CALLS]", '[{"name": "search_strict", "arguments": '),
    "mistral-args": ("[TOOL_CALLS]", "search_strict[ARGS]"),
    "phi": ("<|tool_call|>", '[{"name": "search_strict", "arguments": '),
    "plain": ("<tool_call>", '\n{"name": "search_strict", "arguments": '),
    "qwen3-coder": ("<tool_call>", "\n<function=search_strict>\n"),
}
OFFERED = ToolOptions((STRICT, SEARCH, BY_RULE))


def test_every_format_but_one_can_restrict_calls_that_need_not_come() -> None:
    """gpt-oss's answers are messages with marks of their own, which no rule describes yet."""
    assert BUILT_IN.keys() - HEADS.keys() == {"harmony"}


def optional(family: str, use: ToolOptions = OFFERED) -> Grammar:
    grammar = made(family).optional_call_grammar(use)  # type: ignore[attr-defined]
    assert isinstance(grammar, Grammar)
    return grammar


def is_taken(family: str, text: str) -> bool:
    state = matcher(family, optional(family))
    return bool(state.consume_tokens(list(of(family)[0].encode(text, add_special_tokens=False))))


def may_end(family: str, text: str) -> bool:
    state = matcher(family, optional(family))
    assert state.consume_tokens(list(of(family)[0].encode(text, add_special_tokens=False)))
    return bool(state.is_accepting())


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_strict_tool_that_the_model_calls_has_arguments_by_its_schema(family: str) -> None:
    """Behind any text, where the model begins a call by its own choice."""
    mark, head = HEADS[family]
    before = "Let me see.\n" if mark else ""
    for seed in range(4):
        text = drawn_by(family, optional(family), seed, before + mark + head)
        reader = BUILT_IN[family]({}).parser(OFFERED)
        arguments = "".join(
            part.text for part in [*reader.push(text), *reader.finish()] if isinstance(part, ArgumentsDelta)
        )
        value, _ = json.JSONDecoder().raw_decode(arguments)
        jsonschema_rs.validate(dict(STRICT.parameters), value)
    assert not is_taken(family, before + mark + head + '{"b')
    if mark:  # without one, only an offered tool's name makes a call
        assert not is_taken(family, before + mark + head.replace("search_strict", "unknown"))


@pytest.mark.parametrize("family", sorted(HEADS))
def test_an_answer_without_a_call_is_any_text(family: str) -> None:
    """It may end anywhere, but not inside a call."""
    for text in ("", "Hello <b>!\n", '{"name": "Bob", "age": 5}', "[1] (see) [a](b)", "a < b, <tool", "\n\n"):
        assert text == "" or may_end(family, text)
    assert matcher(family, optional(family)).is_accepting()
    assert not may_end(family, "".join(HEADS[family]))


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_tool_that_is_not_strict_takes_any_arguments(family: str) -> None:
    """In JSON; where parameters are written by name they are those of the tool."""
    mark, head = HEADS[family]
    loose = head.replace("search_strict", "search")
    assert is_taken(family, mark + loose + ("<parameter=query>\n" if family == "qwen3-coder" else '{"other": [1'))


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"])
def test_a_model_thinks_before_it_answers_or_calls(family: str) -> None:
    """Its marks are tokens, which text has none of."""
    mark, head = HEADS[family]
    thought = "<think>\nThe <b> weather?</think>\n\n"
    assert may_end(family, thought + "It is sunny.")
    assert is_taken(family, thought + mark + head)
    assert not is_taken(family, thought + mark + head + '{"b')


def test_llamas_other_forms_of_calls_are_no_way_around() -> None:
    ways = ("[search_strict(", ' { "name" : "search_strict"', '{"parameters"', "Yes <function=", '{"type": "function"')
    for text in ways:
        assert not is_taken("llama3", text)
    assert is_taken("llama3", '<|python_tag|>{"name": "search_strict", "parameters": {"a": 1')


def test_a_mark_cannot_be_spelled_letter_by_letter_around_its_token() -> None:
    model, _ = of("hermes")
    state = matcher("hermes", optional("hermes"))
    letters = [token for char in "<tool_call" for token in model.encode(char, add_special_tokens=False)]
    assert state.consume_tokens(letters)
    [last] = model.encode(">", add_special_tokens=False)
    assert state.try_consume_tokens([last]) == 0


def test_only_strict_tools_restrict_an_answer_that_may_call() -> None:
    """As docs/how-to/tool-calls.md says. An error of the grammar names the tools."""
    model = SimpleNamespace(tool_format=made("hermes"))

    def grammar_of(use: ToolOptions, given: Grammar | None = None) -> Grammar | None:
        ask = CompletionRequest(SamplingParams(grammar=given), messages=(), tools=use)
        if given is None and use.are_offered and STRICT in use.tools:
            assert ask.client_name_of("grammar") == "tools"
        return add_tool_grammar(ask, model).params.grammar  # type: ignore[arg-type]

    assert grammar_of(ToolOptions((STRICT,))) == optional("hermes", ToolOptions((STRICT,)))
    assert grammar_of(ToolOptions((SEARCH,))) is None
    assert grammar_of(ToolOptions((STRICT,), "none")) is None
    own = Grammar("regex", "a+")
    assert grammar_of(ToolOptions((STRICT,)), own) == own
    assert grammar_of(ToolOptions((STRICT,), "required")) == made("hermes").forced_call_grammar(
        ToolOptions((STRICT,), "required")
    )
    model.tool_format = SimpleNamespace()  # of a package that knows of no such grammar
    assert grammar_of(ToolOptions((STRICT,))) is None
