"""Grammars compiled: what each kind accepts, what is refused in which words, and texts made to do harm."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import swarm.demo
from swarm import grammar as module
from swarm.errors import InvalidRequest, ModelError
from swarm.grammar import MAX_RULES, compile_grammar, grammar_vocabulary
from swarm.params import MAX_CHOICES, MAX_GRAMMAR, Grammar

TOKENIZER = (Path(swarm.demo.__file__).parent / "village" / "tokenizer.json").read_text()
WORDS = grammar_vocabulary(TOKENIZER, (1,))
OBJECT = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array","items":{"type":"string"}}}}'


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether this is a whole answer."""
    matcher = compile_grammar(grammar, WORDS)
    ids = WORDS.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refused(kind: str, text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(Grammar(kind, text), WORDS)  # type: ignore[arg-type]
    assert caught.value.code == "grammar"
    assert str(caught.value).startswith(f"grammar ({kind}): ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wide_schema(num: int) -> str:
    """One that has so many properties, each with a rule of its own."""
    return json.dumps(
        {"type": "object", "properties": {f"f{n}": {"type": "string", "maxLength": n} for n in range(num)}}
    )


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        (
            "json_schema",
            OBJECT,
            ['{"a":1,"b":["x"]}', "{}", '{"b": [], "c": null}'],
            ['{"a":"1"}', "[1]", '{"a":1', "x"],
        ),
        ("json_schema", '{"type":"array","items":{"enum":[1,2]},"maxItems":2}', ["[]", "[1,2]"], ["[3]", "[1,1,1]"]),
        ("json_schema", '{"type":"integer","multipleOf":1001}', ["0", "1001", "123123"], ["1", "1002", "x"]),
        ("json_schema", "{}", ["1", '"x"', "[]", "null"], ["", "x"]),
        ("json_object", "", ["{}", '{"a":{"b":[1,2,{"c":true}]}}'], ["[]", "1", "{"]),
        ("regex", r"\d{2}-\d{2}", ["12-34"], ["12-3", "12-345", " 12-34", "12-34 "]),
        ("regex", r"^a|b$", ["a", "b"], ["ab", "ax", "xb"]),
        ("regex", r"a/b\"c", ['a/b"c'], ["a/b"]),
        ("choice", '["yes","no"]', ["yes", "no"], ["maybe", "ye", "yesno", ""]),
        ("choice", json.dumps(['a"b\\c', "Ünı 😀", "two\nlines", "\x7f", "/x/i"]), ['a"b\\c', "Ünı 😀", "\x7f"], ["a"]),
        ("ebnf", 'start: "a" b\nb: /[0-9]+/\n', ["a1", "a123"], ["a", "b1"]),
        ("ebnf", 'root ::= "a" b?\nb ::= [0-9]+\n', ["a", "a12"], ["ab", ""]),
        ("ebnf", 'start: "<call>" args "</call>"\nargs: %json {"type":"object"}\n', ["<call>{}</call>"], ["{}"]),
    ],
)
def test_each_kind_accepts_whole_answers_and_no_others(
    kind: str, text: str, right: list[str], wrong: list[str]
) -> None:
    """Not their beginnings, and not with something before or after."""
    grammar = Grammar(kind, text)  # type: ignore[arg-type]
    assert [answer for answer in right if not accepts(grammar, answer)] == []
    assert [answer for answer in wrong if accepts(grammar, answer)] == []


def test_white_space_in_json_is_bounded() -> None:
    """Compact, as json.dumps writes it, and indented; but no run of it, of which a model may find no end."""
    value = {"a": 1, "b": ["x", "y"]}
    for kind in (Grammar("json_schema", OBJECT), Grammar("json_object")):
        for right in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=4)):
            assert accepts(kind, right)
        for wrong in ('{  "a":1}', '{\n\n"a":1}', '{"a":1}\n', ' {"a":1}', "{\n" + " " * 41 + "}"):
            assert not accepts(kind, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[1]", "a schema is a JSON object"),
        ("json_schema", "true", "a schema is a JSON object"),
        ("json_schema", '{"type":"foo"}', "Invalid type: foo"),
        ("json_schema", '{"enum":[]}', "Unsatisfiable"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json_schema", '{"$ref":"http://example.com/x"}', "not fetch"),
        ("json_schema", '{"a":' * 200 + "1" + "}" * 200, "recursion limit"),
        ("json_object", "{}", "takes no text"),
        ("regex", "", "empty"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "\ud800", "surrogates not allowed"),
        ("choice", "yes", "not JSON"),
        ("choice", "[]", "one or more"),
        ("choice", '["a",1]', "list of one or more texts"),
        ("choice", '["a",""]', "none of them empty"),
        ("choice", json.dumps([str(n) for n in range(MAX_CHOICES + 1)]), f"at most {MAX_CHOICES}"),
        ("ebnf", "", "empty"),
        ("ebnf", "start: b\n", 'unknown name: "b"'),
        ("ebnf", "hello", "GBNF"),
        ("ebnf", "root ::= a\na ::= " + "(" * 5000, "recursion"),
        ("ebnf", "start: " + "(" * 90_000 + '"a"' + ")" * 90_000, "too deeply nested"),
        ("ebnf", "root ::= " + "[a-z]" * 14_000, "more than 65536 characters"),
        ("json_schema", '{"type":"integer","multipleOf":1000003}', "multipleOf"),
        ("json_schema", '{"type":"integer","multipl\\u0065Of":1000003}', "multipleOf"),
        ("json_schema", '{"allOf":[{"type":"integer","multipleOf":9973},{"multipleOf":9967}]}', "multipleOf"),
        ("ebnf", 'start: %json {"type":"number","multipleOf" : 0.0000017}\n', "multipleOf"),
        ("json_schema", wide_schema(3000), "too big"),
        ("ebnf", "root ::= " + " | ".join(['("a" "b"? [c-d]+)'] * 3000), "can't be followed beyond 0 tokens"),
        ("ebnf", 'root ::= "a"\n' + "".join(f'r{n} ::= "b"\n' for n in range(MAX_RULES)), "more than 1000 rules"),
    ],
)
def test_a_mistake_is_told_in_one_line(kind: str, text: str, why: str) -> None:
    """With the kind of grammar, and what is wrong with it."""
    assert why in refused(kind, text)


def chains() -> dict[str, Grammar]:
    """As deep as definitions can name each other in a text of the greatest length."""

    def schema(num: int, make: str) -> Grammar:
        defs = {str(n): json.loads(make % (n + 1)) for n in range(num)} | {str(num): {"type": "string"}}
        return Grammar("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": defs}, separators=(",", ":")))

    rules = "".join(f"r{n}: r{n + 1}\n" for n in range(16_000))
    terminals = "".join(f'A{n}: "a" A{n + 1}\n' for n in range(12_000))
    return {
        "refs": schema(8500, '{"$ref":"#/$defs/%d"}'),
        "properties": schema(4500, '{"properties":{"a":{"$ref":"#/$defs/%d"}}}'),
        "all of": schema(4400, '{"allOf":[{"$ref":"#/$defs/%d"},{"minLength":1}]}'),
        "items": schema(300, '{"items":' * 60 + '{"$ref":"#/$defs/%d"}' + "}" * 60),
        "rules": Grammar("ebnf", f"start: r0\n{rules}r16000: /z/\n"),
        "terminals": Grammar("ebnf", f'start: A0\n{terminals}A12000: "z"\n'),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", list(chains()))
def test_no_text_takes_the_process_with_it(name: str) -> None:
    """Compiled or refused: in a process of its own, since what overflows a stack ends all that are in it."""
    grammar = chains()[name]
    assert MAX_GRAMMAR * 0.6 < len(grammar.text) <= MAX_GRAMMAR
    code = (
        "import sys; from tests.unit.test_grammar import *\n"
        "try: compile_grammar(chains()[sys.argv[1]], WORDS, 60).deep_copy().compute_bitmask()\n"
        "except InvalidRequest as error: print(error)\n"
        "print('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd()
    )
    assert done.stdout.splitlines()[-1:] == ["alive"], done.stderr[-2000:]


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits no longer than its patience."""
    looked = threading.Event()
    monkeypatch.setattr(module, "_compile", lambda *_: looked.wait(60.0))
    with pytest.raises(InvalidRequest, match=r"grammar \(json_object\): it is not compiled after 0.01 s"):
        compile_grammar(Grammar("json_object"), WORDS, 0.01)
    looked.set()


def test_the_compilers_stack_is_its_own() -> None:
    """Threads that others start have the stack that they had."""
    before = threading.stack_size()
    compile_grammar(Grammar("json_object"), WORDS)
    assert threading.stack_size() == before


def test_a_broken_tokenizer_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json can't be used for grammars"):
        grammar_vocabulary("{}", (1,))
