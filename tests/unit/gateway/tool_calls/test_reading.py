"""What families write is read back, wherever the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ParseResult,
    TextDelta,
    ToolCallParser,
)
from swarm.gateway.tool_calls.formats import BUILT_IN
from swarm.gateway.tool_calls.parser import MAX_HELD

WEATHER = Tool(
    "get_weather",
    "Say how the weather is.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"$ref": "#/$defs/Place"}},
        "required": ["city"],
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
)
TIME = Tool("get_time", parameters={"type": "object", "properties": {}})
PATCH = Tool("apply_patch", "Change files.", custom=True)
USE = ToolOptions((WEATHER, TIME, PATCH))

CITY = '{"city": "Zürich ☂ \\"a}\\\\", "days": 3}'
CALL: list[ParseResult] = [CallStarted("get_weather"), ArgumentsDelta(CITY), CallFinished()]
TIMED: list[ParseResult] = [CallStarted("get_time"), ArgumentsDelta("{}"), CallFinished()]
PATCHED: list[ParseResult] = [CallStarted("apply_patch"), ArgumentsDelta('*** "é"\n\t\\😀'), CallFinished()]
INPUT = '{"input": "*** \\"\\u00e9\\"\\n\\t\\\\\\ud83d\\ude00"}'
OBJECT = '{"name": "get_weather", "arguments": ' + CITY + "}"
TIME_OBJECT = '{"name": "get_time", "arguments": {}}'
PATCH_OBJECT = '{"name": "apply_patch", "arguments": ' + INPUT + "}"

CODER_CALL = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich ☂ "a}\\\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)

# family, text, what is found
CASES: list[tuple[str, str, list[ParseResult]]] = [
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", CALL),
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_c", CALL),  # max_tokens came first
    (
        "hermes",
        f"I look.\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{TIME_OBJECT}\n</tool_call>\n",
        [TextDelta("I look."), *CALL, *TIMED],
    ),
    ("hermes", f"<tool_call>{PATCH_OBJECT}</tool_call>\n\nDone.", [*PATCHED, TextDelta("\n\nDone.")]),
    ("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "get_weather"}}</tool_call>', CALL),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', TIMED),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', TIMED),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(CITY)}}}</tool_call>', CALL),
    ("hermes", f'<tool_call>{{"type": "function", "function": {OBJECT}, "id": "7"}}</tool_call>', CALL),
    (
        "hermes",
        '<tool_call>{"name": "apply_patch", "input": "x"}</tool_call>',
        [CallStarted("apply_patch"), ArgumentsDelta("x"), CallFinished()],
    ),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {"a": [1, {}]}}</tool_call>',
        [CallStarted("unknown"), ArgumentsDelta('{"a": [1, {}]}'), CallFinished()],
    ),
    ("hermes", f"<tool_call>{OBJECT} <tool_call>{TIME_OBJECT}", [*CALL, *TIMED]),
    ("hermes", f"<tool_call><tool_call>{TIME_OBJECT}</tool_call>", [TextDelta("<tool_call>"), *TIMED]),
    (
        "hermes",
        "a < b, <tool, <tool_call> </tool_call> </b>",
        [TextDelta("a < b, <tool, <tool_call> </tool_call> </b>")],
    ),
    ("hermes", '<tool_call>{"city": "Rome"}</tool_call> x', [TextDelta('<tool_call>{"city": "Rome"}</tool_call> x')]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"a": ]}}</tool_call>Hm.',
        [CallStarted("get_weather"), ArgumentsDelta('{"a": '), CallFinished(), TextDelta("Hm.")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro',
        [CallStarted("get_weather"), ArgumentsDelta('{"city": "Ro'), CallFinished()],
    ),
    ("hermes", '  <tool_call>{"na', [TextDelta('  <tool_call>{"na')]),
    ("hermes", " text \n", [TextDelta(" text \n")]),
    ("plain", f"<tool_call>\n{OBJECT}\n</tool_call>", CALL),
    ("qwen3-coder", CODER_CALL, CALL),
    ("qwen3-coder", "Well.\n" + CODER_CALL.replace("<tool_call>\n", ""), [TextDelta("Well."), *CALL]),
    ("qwen3-coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", TIMED),
    ("qwen3-coder", '<function=apply_patch>\n<parameter=input>\n*** "é"\n\t\\😀\n</parameter>\n</function>', PATCHED),
    (
        "qwen3-coder",
        '<function=get_weather><parameter=city>\n\na</parameter\n</parameter><parameter=where>\n{"x": 1.5}\n'
        "</parameter><parameter=days>soon</parameter></function>",
        [
            CallStarted("get_weather"),
            ArgumentsDelta('{"city": "\\na</parameter", "where": {"x": 1.5}, "days": "soon"}'),
            CallFinished(),
        ],
    ),
    ("llama3", OBJECT.replace("arguments", "parameters"), CALL),
    ("llama3", f"<|python_tag|>{OBJECT}; {TIME_OBJECT}", [*CALL, *TIMED]),
    ("llama3", f"\n{OBJECT};{PATCH_OBJECT}", [*CALL, *PATCHED]),
    ("llama3", '{"name": "Bob", "parameters": {}} is JSON', [TextDelta('{"name": "Bob", "parameters": {}} is JSON')]),
    ("llama3", '{"name": "get_time"}', [TextDelta('{"name": "get_time"}')]),
    ("llama3", '[1, 2] and {"name": "get_time"}', [TextDelta('[1, 2] and {"name": "get_time"}')]),
    (
        "llama3",
        '[get_weather(city="Z\\xfcrich \\u2602 \\"a}\\\\", days=3), get_time(), apply_patch(input=\'a"\\n\')]',
        [*CALL, *TIMED, CallStarted("apply_patch"), ArgumentsDelta('a"\n'), CallFinished()],
    ),
    (
        "llama3",
        "<|python_start|>[get_weather(city='x', where={'x': -.5, 'y': [True, None, (1, 2.5e3)]})]<|python_end|>",
        [
            CallStarted("get_weather"),
            ArgumentsDelta('{"city": "x", "where": {"x": -0.5, "y": [true, null, [1, 2.5e3]]}}'),
            CallFinished(),
        ],
    ),
    ("llama3", f"<function=get_weather>{CITY}</function>", CALL),
    ("llama3", "<|python_tag|>print(1)", [TextDelta("<|python_tag|>print(1)")]),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}, {TIME_OBJECT}]", [*CALL, *TIMED]),
    ("mistral", f"See [1].[TOOL_CALLS][{PATCH_OBJECT}]", [TextDelta("See [1]."), *PATCHED]),
    ("mistral", "[TOOL_CALLS][]", [TextDelta("[TOOL_CALLS][]")]),
    ("mistral-args", f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]get_time{{}}", [*CALL, *TIMED]),
    ("mistral-args", f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS] {CITY}", CALL),
    ("granite", f"<|tool_call|>[{OBJECT}, {TIME_OBJECT}]", [*CALL, *TIMED]),
    ("granite", f"<tool_call>[{OBJECT}]</tool_call>", CALL),
    ("phi", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", CALL),
    (
        "deepseek",
        f"Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [TextDelta("Ok"), *CALL, *TIMED],
    ),
    (
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>apply_patch<｜tool▁sep｜>{INPUT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*CALL, *PATCHED],
    ),
]


def reader_of(family: str, use: ToolOptions = USE) -> ToolCallParser:
    return BUILT_IN[family]({}).parser(use)


def joined(found: Sequence[ParseResult]) -> list[ParseResult]:
    """Neighbours of one kind put together."""
    whole: list[ParseResult] = []
    for part in found:
        last = whole[-1] if whole else None
        if isinstance(part, TextDelta) and isinstance(last, TextDelta):
            whole[-1] = TextDelta(last.text + part.text)
        elif isinstance(part, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            whole[-1] = ArgumentsDelta(last.text + part.text)
        else:
            whole.append(part)
    return whole


def read(reader: ToolCallParser, *pieces: str) -> list[ParseResult]:
    found = [part for piece in pieces for part in reader.push(piece)] + list(reader.finish())
    assert all(part.text for part in found if isinstance(part, TextDelta | ArgumentsDelta))  # no empty deltas
    return joined(found)


@pytest.mark.parametrize(("family", "text", "found"), CASES)
def test_what_a_family_writes_is_read(family: str, text: str, found: list[ParseResult]) -> None:
    """In one piece, and character by character."""
    assert read(reader_of(family), text) == found
    assert read(reader_of(family), *text) == found


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_cuts_change_nothing(case: tuple[str, str, list[ParseResult]], data: st.DataObject) -> None:
    """Also in marks, in escapes and before the end of a text that was cut off."""
    family, text, _ = case
    text = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", " \n", "<", text]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader_of(family), *pieces) == read(reader_of(family), text)


MARKS = [mark for make in BUILT_IN.values() for mark in make({}).marks]
BITS = [
    "get_weather",
    "(",
    ")",
    "=",
    '{"name": "',
    '"',
    ', "arguments": ',
    "{",
    "}",
    "[",
    "]",
    ",",
    ";",
    "\\",
    "\n",
    " ",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(BUILT_IN)), st.lists(st.sampled_from([*MARKS, *BITS, "x", "é"]), max_size=30), st.data())
def test_nonsense_is_borne(family: str, bits: list[str], data: st.DataObject) -> None:
    """Nothing raises, calls begin and end in turn, cuts change nothing; text without any call comes out as it is."""
    text = "".join(bits)
    found = read(reader_of(family), text)
    assert read(reader_of(family), *bits) == found
    kinds = [type(part) for part in found if not isinstance(part, TextDelta | ArgumentsDelta)]
    assert kinds == [CallStarted, CallFinished] * (len(kinds) // 2)
    inside = False
    for part in found:
        inside = isinstance(part, CallStarted) or (inside and not isinstance(part, CallFinished))
        assert isinstance(part, CallStarted | CallFinished) or inside == isinstance(part, ArgumentsDelta)
    if not kinds:
        assert found == ([TextDelta(text)] if text else [])


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from(sorted(BUILT_IN)))
def test_any_text_is_said(text: str, family: str) -> None:
    """What has no call in it comes out as it is."""
    assert read(reader_of(family), *text) == ([TextDelta(text)] if text else [])


def test_arguments_stream() -> None:
    """The name is told before the arguments, and each piece of them goes out when it comes."""
    reader = reader_of("hermes")
    assert reader.push('<tool_call>\n{"name": "get_weather"') == [CallStarted("get_weather")]
    assert reader.push(', "arguments": {"ci') == [ArgumentsDelta('{"ci')]
    assert reader.push('ty": "R') == [ArgumentsDelta('ty": "R')]
    assert reader.push('"}') == [ArgumentsDelta('"}')]
    assert reader.push("}\n</tool") == [CallFinished()]
    assert reader.push("_call>") == []
    assert reader.finish() == []


def test_text_streams() -> None:
    """Only what could belong to a mark waits, and the whitespace before it."""
    reader = reader_of("hermes")
    assert reader.push("a b ") == [TextDelta("a b")]
    assert reader.push("c <") == [TextDelta(" c")]
    assert reader.push("tool_") == []
    assert reader.push("x") == [TextDelta(" <tool_x")]


def test_a_custom_tools_text_streams() -> None:
    """An escape waits for its end; all else goes out when it comes."""
    reader = reader_of("hermes")
    assert reader.push('<tool_call>{"name": "apply_patch", "arguments": {"input": "a\\') == [
        CallStarted("apply_patch"),
        ArgumentsDelta("a"),
    ]
    assert reader.push("nb\\ud83d") == [ArgumentsDelta("\nb")]
    assert reader.push('\\ude00c"') == [ArgumentsDelta("😀c")]


def test_only_the_first_call_counts_where_one_is_allowed() -> None:
    """The rest is not said either, and the reader tells that the answer may be stopped."""
    reader = reader_of("hermes", ToolOptions(USE.tools, parallel=False))
    text = f"Hm <tool_call>{OBJECT}"
    assert joined(reader.push(text)) == [TextDelta("Hm"), *CALL]
    assert reader.done
    assert reader.push(f"</tool_call> and <tool_call>{TIME_OBJECT}</tool_call>") == []
    assert reader.finish() == []


@pytest.mark.parametrize("use", [ToolOptions(), ToolOptions(USE.tools, choice="none")])
def test_without_tools_all_is_text(use: ToolOptions) -> None:
    """Nobody waits for a call."""
    text = f"<tool_call>{OBJECT}</tool_call> "
    assert read(reader_of("hermes", use), *text) == [TextDelta(text)]


def test_what_is_held_is_bounded() -> None:
    """Arguments that come before the name can't grow without end, nor can whitespace before a mark."""
    reader = reader_of("hermes")
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD
    assert sum(len(part.text) for part in reader.push(text) if isinstance(part, TextDelta)) >= MAX_HELD
    reader = reader_of("hermes")
    assert sum(len(part.text) for part in reader.push("\n" * 10_000) if isinstance(part, TextDelta)) > 9_000
