"""Fields in the spelling of vLLM's and llama.cpp's servers, and fields that nobody knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm.gateway.apis import anthropic, chat, completions, responses, tokenizing
from swarm.gateway.completion.served_model import RequestDefaults, ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT, _visible_tokens
from swarm.gateway.completion_request import CompletionRequest, ToolOptions
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState
from swarm.params import Grammar
from tests.unit.gateway.apis.feeding import Json, served

TOY = served()
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'


def asked(api: str, **fields: Any) -> CompletionRequest:
    if api == "chat":
        return chat.to_request(chat.ChatBody.model_validate({"model": "toy", "messages": MESSAGES} | fields), TOY)
    body = completions.CompletionBody.model_validate({"model": "toy", "prompt": "a"} | fields)
    (ask,) = completions.to_requests(body, TOY)
    return ask


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar("choice", '["é", "b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, Grammar("json_object")),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["é", "b"]}, Grammar("choice", '["é", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("ebnf", 'start: "a"')),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "text"}}, Grammar("ebnf", 'root ::= "a"')),
        ({"grammar": ""}, None),
    ],
)
def test_a_format_is_the_same_in_every_spelling(api: str, fields: Json, grammar: Grammar | None) -> None:
    assert asked(api, **fields).params.grammar == grammar


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_wrote_it(api: str, fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(api, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_changes_nothing_is_ignored(api: str) -> None:
    """Such as front ends send with every request."""
    fields = {"cache_prompt": True, "id_slot": -1, "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0}
    assert asked(api, **fields, tfs_z=1, use_beam_search=False, keep_alive="5m") == asked(api)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_numbers_in_llamacpps_spelling(api: str) -> None:
    """Our own spelling goes first."""
    assert asked(api, n_predict=7).params.max_tokens == 7
    assert asked(api, n_predict=7, max_tokens=5).params.max_tokens == 5
    assert asked(api, n_predict=-1).params.max_tokens == REST_OF_CONTEXT
    assert asked(api, repeat_penalty=1.5).params.repetition_penalty == 1.5
    assert asked(api, repeat_penalty=1.5, repetition_penalty=1.2).params.repetition_penalty == 1.2
    assert asked(api, n_predict=7).client_name_of("max_tokens") == "n_predict"
    assert asked(api, guided_regex="a").client_name_of("grammar") == "guided_regex"


def test_defaults_are_as_before() -> None:
    assert asked("chat").params.max_tokens == REST_OF_CONTEXT
    assert asked("completions").params.max_tokens == completions.DEFAULT_LENGTH
    assert asked("chat", verbosity="high") == asked("chat")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_special_tokens_are_shown_where_a_request_asks_for_them(api: str) -> None:
    """Also when its answer is read by another gateway."""
    plain, shown = asked(api), asked(api, skip_special_tokens=False)
    assert (plain.show_special, shown.show_special) == (False, True)
    body = {"model": "toy", "skip_special_tokens": False}
    if api == "chat":
        memo = chat.to_resume_state(chat.ChatBody.model_validate(body | {"messages": MESSAGES}), shown, 7)
    else:
        memo = completions.to_resume_state(
            completions.CompletionBody.model_validate(body | {"prompt": "a"}), [shown], TOY, 7
        )
    assert memo.special
    assert ResumeState.decode(memo.encode()) == memo
    text = TOY.text
    assert text is not None
    assert set(_visible_tokens(TOY, ToolOptions(), "none", show_special=True)) == text.silent
    assert _visible_tokens(TOY, ToolOptions(), "none", show_special=False) == ()


def test_an_answer_continues_the_last_message() -> None:
    history = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    assert not asked("chat", messages=history).continues
    assert asked("chat", messages=history, continue_final_message=True, add_generation_prompt=False).continues
    assert asked("chat", add_generation_prompt=False).template == {"add_generation_prompt": False}
    for fields in ({"messages": MESSAGES}, {"messages": history, "add_generation_prompt": True}):
        with pytest.raises(ApiError) as caught:
            asked("chat", continue_final_message=True, **fields)
        assert caught.value.param == "continue_final_message"


BODIES: list[tuple[Any, Any, Json]] = [
    (chat.ChatBody, chat.to_request, {"messages": MESSAGES}),
    (completions.CompletionBody, completions.to_requests, {"prompt": "a"}),
    (responses.ResponseBody, responses.to_request, {"input": "a"}),
    (anthropic.MessageBody, anthropic.to_request, {"messages": MESSAGES, "max_tokens": 3}),
    (anthropic.CountBody, anthropic.to_count_request, {"messages": MESSAGES}),
    (tokenizing.TokenizeBody, tokenizing.to_request, {"messages": MESSAGES}),
]


@pytest.mark.parametrize(("kind", "convert", "fields"), BODIES)
def test_a_field_that_nobody_knows_is_refused_by_name_or_ignored(kind: Any, convert: Any, fields: Json) -> None:
    """By gateway.unknown_fields."""
    body = kind.model_validate({"model": "toy", **fields, "frobnicate": 1})
    with pytest.raises(ApiError) as caught:
        convert(body, TOY)
    assert (caught.value.param, caught.value.code) == ("frobnicate", "unsupported_parameter")
    lenient = replace(TOY, ignores_unknown_fields=True)
    assert convert(body, lenient) == convert(kind.model_validate({"model": "toy", **fields}), TOY)


GIVING = [
    (chat.ChatBody, chat.to_request, {"messages": MESSAGES}, ("max_tokens", "max_completion_tokens", "n_predict")),
    (completions.CompletionBody, completions.to_requests, {"prompt": "a"}, ("max_tokens", "n_predict")),
    (responses.ResponseBody, responses.to_request, {"input": "a"}, ("max_output_tokens",)),
    (anthropic.MessageBody, anthropic.to_request, {"messages": MESSAGES, "max_tokens": 3}, ("max_tokens",)),
]


@pytest.mark.parametrize(("kind", "convert", "fields", "lengths"), GIVING)
def test_defaults_of_the_gateway_are_for_requests_that_give_none(
    kind: Any, convert: Any, fields: Json, lengths: tuple[str, ...]
) -> None:
    """By gateway.default_max_tokens and gateway.default_temperature. Anthropic's always give a length."""
    model = replace(TOY, defaults=RequestDefaults(7, 0.25))

    def ask(served: ServedModel, **more: object) -> CompletionRequest:
        made = convert(kind.model_validate({"model": "toy", **fields, **more}), served)
        request: CompletionRequest = made[0] if isinstance(made, list) else made
        return request

    assert ask(TOY).params.temperature == 1.0
    assert ask(model).params.temperature == 0.25
    assert ask(model, temperature=0).params.temperature == 0
    if "max_tokens" in fields:
        assert (ask(model).params.max_tokens, ask(model).rest_limit) == (3, None)
    else:
        assert (ask(model).params.max_tokens, ask(model).rest_limit) == (REST_OF_CONTEXT, 7)
        assert ask(TOY).rest_limit is None
    for name in lengths:
        given = ask(model, **{name: 5})
        assert (given.params.max_tokens, given.rest_limit) == (5, None)
    if "n_predict" in lengths:
        given = ask(model, n_predict=-1)
        assert (given.params.max_tokens, given.rest_limit) == (REST_OF_CONTEXT, None)


def test_known_fields_are_refused_where_unknown_ones_are_ignored() -> None:
    lenient = replace(TOY, ignores_unknown_fields=True)
    body: Json = {"model": "toy", "messages": MESSAGES}
    options = {"stream": True, "stream_options": {"frobnicate": 1}, "mirostat": 2}
    assert chat.to_request(chat.ChatBody.model_validate(body | options), lenient)
    with pytest.raises(ApiError) as caught:
        chat.to_request(chat.ChatBody.model_validate(body | {"audio": {"voice": "x"}}), lenient)
    assert caught.value.param == "audio"
