"""Conversations as clients send them are rendered by each kind of template, and nothing in them is lost."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swarm.client.text.tokenizer import ChatRendering, TextModel
from swarm.errors import InvalidRequest
from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.errors import ApiError
from swarm.gateway.tool_calls.format import ArgumentsDelta, CallStarted
from swarm.gateway.tool_calls.formats import detect_format
from swarm.gateway.tool_calls.template_adapter import (
    AdaptedChat,
    TemplateFeatures,
    adapt_conversation,
    check_continued,
    probe_template,
)
from swarm.params import Grammar
from tests.integration.fake_broker import tokenizer_files

TEMPLATES = Path(__file__).parent / "templates"
DEMO = Path(__file__).parents[4] / "swarm" / "demo" / "village"
FAMILIES = {
    "hermes": "hermes",
    "llama31": "llama3",
    "mistral": "mistral",
    "granite": "granite",
    "deepseek": "deepseek",
    "coder": "qwen3-coder",
    "demo": "plain",
}

WEATHER = Tool("get_weather", "Say how the weather is.", {"type": "object", "properties": {"city": {"type": "string"}}})
PATCH = Tool("apply_patch", "Change files.", custom=True, grammar=Grammar("regex", "[a-z]+"))
USE = ToolOptions((WEATHER, PATCH))
USER = {"role": "user", "content": "How is it in Rome?"}


def called(number: int, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": f"call_{number}_of_many_letters", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}_of_many_letters", "content": text}


@cache
def model(name: str) -> TextModel:
    files = tokenizer_files()
    if name == "demo":
        files = {each: (DEMO / each).read_bytes() for each in ("tokenizer.json", "tokenizer_config.json")}
    else:
        files["tokenizer_config.json"] = b'{"bos_token": "<s>", "eos_token": "</s>"}'
        files["chat_template.jinja"] = (TEMPLATES / f"{name}.jinja").read_bytes()
    loaded = TextModel.load(files)
    assert loaded is not None
    return loaded


def prepared(name: str, *messages: dict[str, Any], use: ToolOptions = USE) -> AdaptedChat:
    text = model(name)
    return adapt_conversation(messages, use, detect_format(text.template_source, text.added), probe_template(text))


def rendered(name: str, *messages: dict[str, Any], use: ToolOptions = USE) -> str:
    ready = prepared(name, *messages, use=use)
    return model(name).render_chat(ready.messages, **ready.variables)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_templates_family_is_found(name: str) -> None:
    assert detect_format(model(name).template_source).name == FAMILIES[name]


def test_no_template_is_plain() -> None:
    """The model may still be asked by messages that somebody else renders."""
    assert detect_format(None).name == detect_format("").name == "plain"


def test_what_templates_can_do_is_found_out() -> None:
    """Each by trying it: they don't say."""
    assert probe_template(model("hermes")) == TemplateFeatures()
    assert probe_template(model("coder")) == TemplateFeatures()
    assert probe_template(model("granite")) == TemplateFeatures()
    assert probe_template(model("llama31")) == TemplateFeatures(several_calls=False)
    assert probe_template(model("mistral")) == TemplateFeatures(late_system=False, repeated=False, short_ids=True)
    assert probe_template(model("deepseek")) == TemplateFeatures(objects=False)
    assert probe_template(model("demo")) == TemplateFeatures(
        tools=False, calls=False, several_calls=False, objects=False, results=False
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_told(name: str) -> None:
    """By the template, or by our system text; not if they must not be used."""
    text = rendered(name, USER)
    assert "get_weather" in text
    assert "apply_patch" in text
    assert "How is it in Rome?" in text
    assert "get_weather" not in rendered(name, USER, use=ToolOptions((WEATHER,), choice="none"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_conversation_is_rendered(name: str) -> None:
    """With parts, instructions in the middle, several calls at once, results, empty items; each text once, in order."""
    text = rendered(
        name,
        {"role": "developer", "content": [{"type": "input_text", "text": "first rule"}]},
        {"role": "system", "content": "second rule"},
        {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "tool_calls": []},
        {"role": "assistant", "tool_calls": [called(1, "Rome")]},
        {"role": "assistant", "content": "", "tool_calls": [called(2, "Oslo")]},
        result(1, "sunny"),
        result(2, "rainy"),
        {"role": "developer", "content": "third rule"},
        {"role": "user", "content": "And now?"},
    )
    wanted = ["first rule", "second rule", "part one", "part two", "Rome", "Oslo", "sunny", "rainy", "And now?"]
    for each in [*wanted, "third rule"]:
        assert text.count(each) == 1, each
    calls = [text.index(each) for each in ("part one", "Rome", "sunny", "And now?")]
    assert calls == sorted(calls)
    assert text.index("Oslo") < text.index("rainy")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama31",)])
def test_an_earlier_call_is_shown_as_the_family_writes_it(name: str) -> None:
    """What the template makes of it, the family's reader reads: the model sees its own way of writing."""
    text = rendered(name, USER, {"role": "assistant", "content": "", "tool_calls": [called(1, "Zürich")]})
    found = detect_format(model(name).template_source).parser(USE).push(text[text.index("How is it in Rome?") :])
    assert [part.name for part in found if isinstance(part, CallStarted)] == ["get_weather"]
    assert json.loads("".join(part.text for part in found if isinstance(part, ArgumentsDelta))) == {"city": "Zürich"}


def test_parallel_calls_are_parted_where_a_template_takes_one() -> None:
    """Each with its result behind it; ids may come again in later turns."""
    turn = [
        {"role": "assistant", "content": "x", "tool_calls": [called(1, "a"), called(2, "b")]},
        result(2, "of b"),
        result(1, "of a"),
    ]
    ready = prepared("llama31", USER, *turn, USER, *turn)
    assert [m["content"] for m in ready.messages] == [USER["content"], "x", "of a", "", "of b"] * 2
    assert all(len(m.get("tool_calls", "1")) == 1 for m in ready.messages)


def test_ids_are_shortened_where_a_template_wants_it() -> None:
    """The call's and its result's alike; those that fit stay."""
    call = {**called(1, "a"), "id": "abcdEF123"}
    ready = prepared(
        "mistral", USER, {"role": "assistant", "tool_calls": [called(1, "a"), call]}, result(1, "x"),
        {"role": "tool", "tool_call_id": "abcdEF123", "content": "y"},
    )  # fmt: skip
    ids = [each["id"] for each in ready.messages[1]["tool_calls"]]
    assert [m["tool_call_id"] for m in ready.messages[2:]] == ids
    assert ids[1] == "abcdEF123"
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


def test_arguments_are_objects_where_a_template_wants_it() -> None:
    """Those that are no JSON, of a call that was cut off, and a custom tool's text, stand in one."""
    custom = {"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": "*** é"}}
    broken = {"id": "2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ro'}}
    none = {"id": "3", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    message = {"role": "assistant", "content": None, "tool_calls": [custom, broken, none]}
    arguments = [c["function"]["arguments"] for c in prepared("hermes", USER, message).messages[1]["tool_calls"]]
    assert arguments == [{"input": "*** é"}, {"input": '{"city": "Ro'}, {}]
    arguments = [c["function"]["arguments"] for c in prepared("deepseek", USER, message).messages[1]["tool_calls"]]
    assert arguments == ['{"input": "*** é"}', '{"city": "Ro', "{}"]


def test_results_have_their_tools_names() -> None:
    """Some templates show them; clients leave them out."""
    ready = prepared("hermes", USER, {"role": "assistant", "tool_calls": [called(1, "a")]}, result(1, "x"))
    assert ready.messages[2]["name"] == "get_weather"


def test_our_own_system_text_says_how_to_call() -> None:
    """And what must be called, and by what grammar."""
    text = rendered("demo", {"role": "system", "content": "Be brief."}, USER)
    assert text.index("Be brief.") < text.index("<tools>") < text.index(USER["content"])
    assert '<tool_call>\n{"name":' in text
    assert "[a-z]+" in text
    assert "Now call get_weather." in rendered("demo", USER, use=ToolOptions((WEATHER,), "named", "get_weather"))
    assert "<tool_response>\nsunny\n</tool_response>" in rendered(
        "demo", USER, {"role": "assistant", "tool_calls": [called(1, "Rome")]}, result(1, "sunny")
    )


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "wizard", "content": "x"}, r"messages\[1\].role: must be one of .*not 'wizard'"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"messages\[1\].content\[0\].type is not supported",
        ),
        ({"role": "user", "content": 5}, r"messages\[1\].content: must be a text"),
        ({"role": "assistant", "tool_calls": 5}, r"messages\[1\].tool_calls: must be a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, "must have a function"),
    ],
)
def test_wrong_messages_are_named(message: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        prepared("hermes", USER, message)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("half", ["It is", "It is ", "</s>\n{", "How is it in Rome?"])
def test_an_answer_continues_the_last_message(name: str, half: str) -> None:
    """The prompt ends inside it, whatever the template writes behind messages."""
    text, last = model(name), {"role": "assistant", "content": half}
    ready = prepared(name, USER, last, use=ToolOptions())
    ids = text.encode_chat(ready.messages, ready.variables, how=ChatRendering(continues=True))
    shown = text.decode_all(ids)
    assert shown.endswith(half)
    assert shown.count("How is it in Rome?") == 1 + (half == USER["content"])
    assert text.render_chat(ready.messages, **ready.variables).startswith(shown.rstrip())


def test_a_multimodal_models_template_shows_every_text() -> None:
    """One that goes through the parts of contents: texts, lists of parts, and calls that it can't show."""
    template = (
        b"{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part['type'] == 'image' %}<image>"
        b"{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}|{% endfor %}"
    )
    text = TextModel.load({**tokenizer_files(), "chat_template.jinja": template})
    assert text is not None
    parts = [{"type": "text", "text": "How is it"}, {"type": "text", "text": "in Rome?"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    messages += [{"role": "assistant", "tool_calls": [called(1, "Rome")]}, result(1, "dry")]
    features = probe_template(text)
    assert features.system
    ready = adapt_conversation(messages, ToolOptions(()), detect_format(text.template_source, text.added), features)
    shown = text.render_chat(ready.messages, **ready.variables)
    assert shown.startswith("system:Be short.|user:How is it\nin Rome?|assistant:<tool_call>")
    assert "Rome" in shown.partition("assistant:")[2]
    assert "dry" in shown


def test_only_a_text_of_the_assistant_is_continued() -> None:
    call = {"role": "assistant", "content": "I look.", "tool_calls": [called(1, "Rome")]}
    for last in ([], [USER], [{"role": "assistant", "content": ""}], [call]):
        with pytest.raises(ApiError) as caught:
            check_continued(last)
        assert caught.value.param == "messages"
    check_continued([{"role": "assistant", "content": "It is"}])


def test_a_template_that_hides_the_last_message_continues_none() -> None:
    files = {**tokenizer_files(), "chat_template.jinja": b"{{ messages[0].content }}"}
    text = TextModel.load(files)
    assert text is not None
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        text.encode_chat([USER, {"role": "assistant", "content": "It"}], how=ChatRendering(continues=True))
