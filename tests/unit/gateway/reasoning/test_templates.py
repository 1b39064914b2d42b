"""Formats and switches of thinking in templates as real models have them, and what a budget or a grammar needs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from swarm.client.results import Piece
from swarm.client.text.tokenizer import ChatRendering, TextModel
from swarm.gateway.answer import CallArgumentsPart, CallStartPart, ReasoningPart, TextPart
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import prepare_prompt
from swarm.gateway.completion_request import CompletionRequest, ReasoningOptions, Tool, ToolOptions
from swarm.gateway.reasoning.formats import detect_format, visible_marks
from swarm.gateway.reasoning.marks import think
from swarm.gateway.reasoning.switches import ThinkingSwitches
from swarm.gateway.tool_calls.template_adapter import adapt_conversation
from swarm.params import Grammar, SamplingParams, Thinking
from swarm.testing import fake_manifest
from tests.integration.fake_broker import tokenizer_files

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = {
    "qwen3": "think",
    "qwen3_instruct": "think",
    "r1": "think",
    "deepseek31": "think",
    "glm45": "think",
    "minimax": "think",
    "gptoss": "harmony",
    "magistral": "magistral",
    "granite32": "granite",
    "seedoss": "seed",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "[THINK]", "[/THINK]")
ADDED = ("<think>", "</think>")
JSON = Grammar("json_object")
USER = {"role": "user", "content": "ask"}


@cache
def model(name: str) -> ServedModel:
    """A served model with this chat template. Marks of thinking are tokens, special or not, as in the real ones."""
    files = tokenizer_files()
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ADDED])
    files["tokenizer.json"] = tokenizer.to_str().encode()
    files["tokenizer_config.json"] = b'{"bos_token": "<s>", "eos_token": "</s>"}'
    files["chat_template.jinja"] = (TEMPLATES / f"{name}.jinja").read_bytes()
    text = TextModel.load(files)
    assert text is not None
    return ServedModel.create(fake_manifest(vocab_size=300, context=4096), text, 4096, ())


def prepared(name: str, **fields: Any) -> tuple[Thinking | None, str, str]:
    """What the stage is told about thinking, the end of the prompt, and how the answer begins."""
    served = model(name)
    params = SamplingParams(max_tokens=5, grammar=fields.pop("grammar", None))
    request = CompletionRequest(params=params, messages=(USER,), **fields)
    request, ids, start = prepare_prompt(request, served, ChatRendering())
    assert served.text is not None
    return request.params.thinking, served.text.decode_all(ids)[-24:], start


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_s_format_is_found(name: str) -> None:
    found = model(name).reasoning_format
    assert found is not None
    assert found.name == FAMILIES[name]


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "<tool_call> {{ tools }}"])
def test_templates_without_marks_have_no_format(template: str | None) -> None:
    assert detect_format(template) is None


def test_only_tokens_that_the_model_has_are_made_visible() -> None:
    assert visible_marks(think(), {"</think>": 9, "[OTHER]": 8}) == (9,)


def test_switches_are_found_by_what_they_do() -> None:
    found = {name: model(name).switches for name in FAMILIES}
    assert found["qwen3"] == found["glm45"] == ThinkingSwitches(("enable_thinking",), is_on=True)
    assert found["deepseek31"] == found["granite32"] == ThinkingSwitches(("thinking",), is_on=False)
    assert found["r1"] == found["minimax"] == found["magistral"] == found["qwen3_instruct"] == ThinkingSwitches()
    assert found["seedoss"] == ThinkingSwitches(takes_budget=True)
    efforts = found["gptoss"].efforts
    assert efforts is not None
    assert [efforts[each] for each in ("none", "low", "medium", "high", "max")] == [
        "low",
        "low",
        "medium",
        "high",
        "high",
    ]


@pytest.mark.parametrize(
    ("options", "qwen3", "gptoss", "seedoss"),
    [
        (ReasoningOptions(), {}, {}, {}),
        (ReasoningOptions(enabled=False), {"enable_thinking": False}, {"reasoning_effort": "low"}, {}),
        (ReasoningOptions(enabled=True), {"enable_thinking": True}, {}, {}),
        (ReasoningOptions(effort="none"), {"enable_thinking": False}, {"reasoning_effort": "low"}, {}),
        (ReasoningOptions(effort="xhigh"), {"enable_thinking": True}, {"reasoning_effort": "high"}, {}),
        (ReasoningOptions(budget=64), {}, {}, {"thinking_budget": 64}),
    ],
)
def test_options_reach_the_template_where_it_knows_them(
    options: ReasoningOptions, qwen3: dict[str, Any], gptoss: dict[str, Any], seedoss: dict[str, Any]
) -> None:
    assert model("qwen3").switches.variables(options) == qwen3
    assert model("gptoss").switches.variables(options) == gptoss
    assert model("seedoss").switches.variables(options) == seedoss
    assert model("r1").switches.variables(options) == {}


def test_the_prompt_tells_how_the_answer_begins() -> None:
    off = ReasoningOptions(enabled=False)
    assert [prepared(name)[2] for name in ("qwen3", "r1", "minimax", "gptoss", "magistral", "deepseek31")] == [
        *("optional", "opened", "opened", "opened", "optional", "none")
    ]
    assert [prepared(name, reasoning=off)[2] for name in ("qwen3", "glm45", "deepseek31")] == ["none"] * 3
    assert prepared("deepseek31", reasoning=ReasoningOptions(effort="high"))[2] == "opened"
    assert prepared("qwen3", template={"enable_thinking": False}, reasoning=ReasoningOptions(enabled=True))[2] == "none"


def test_a_text_that_ends_like_an_opened_prompt_opens_nothing() -> None:
    served = model("qwen3")
    request = CompletionRequest(params=SamplingParams(), messages=({"role": "user", "content": "<think>"},))
    assert prepare_prompt(request, served, ChatRendering())[2] == "optional"


@pytest.mark.parametrize("fields", [{"grammar": JSON}, {"reasoning": ReasoningOptions(budget=9)}])
@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen3", "assistant\n<think>\n"), ("r1", "<think>\n"), ("glm45", "<|assistant|><think>\n")],
)
def test_a_budget_or_a_grammar_needs_thinking_that_the_prompt_has_opened(
    name: str, end: str, fields: dict[str, Any]
) -> None:
    thinking, prompt, start = prepared(name, **fields)
    assert thinking is not None
    assert prompt.endswith(end)
    assert (start, thinking.ends) == ("opened", ("</think>",))
    text = model(name).text
    assert text is not None
    assert text.decode_all(thinking.closing) == "\n</think>\n\n"
    assert thinking.budget == (9 if "reasoning" in fields else None)


def test_where_thinking_is_off_or_unknown_a_grammar_applies_at_once() -> None:
    for name, options in (
        ("qwen3", ReasoningOptions(enabled=False)),
        ("qwen3_instruct", ReasoningOptions(enabled=True)),
        ("granite32", ReasoningOptions()),
        ("magistral", ReasoningOptions()),
    ):
        thinking, _, start = prepared(name, grammar=JSON, reasoning=options)
        assert (thinking, start) == (None, "none"), name
    thinking, prompt, _ = prepared("granite32", grammar=JSON, reasoning=ReasoningOptions(effort="low"))
    assert thinking is not None
    assert prompt.endswith("thought process:\n")


def test_a_budget_without_thinking_has_no_effect() -> None:
    thinking, _, start = prepared("qwen3_instruct", reasoning=ReasoningOptions(budget=9))
    assert (thinking, start) == (None, "optional")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"grammar": JSON}, "<|channel|>final<|message|>"),
        ({"reasoning": ReasoningOptions(budget=9)}, "<|channel|>final"),
    ],
)
def test_the_channels_end_thinking(fields: dict[str, Any], end: str) -> None:
    thinking, _, _ = prepared("gptoss", **fields)
    assert thinking is not None
    assert thinking.ends[0] == end


# --- calls, and histories

TOOLS = ToolOptions((Tool("f", "Does.", {"type": "object", "properties": {"a": {"type": "integer"}}}),))
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_a_call_of_a_channel_is_found_after_the_thinking() -> None:
    """By its tool-call format, from what the reasoning format passes on: with the recipient before or after the
    channel."""
    served, use = model("gptoss"), TOOLS
    assert served.tool_format.name == "harmony"
    for head in ("<|channel|>commentary to=functions.f <|constrain|>json", " to=functions.f<|channel|>commentary json"):
        text = f'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{head}<|message|>{{"a": 1}}<|call|>'
        assembler = AnswerAssembler("r", use, served.tool_format, 1, lambda: served.reasoning_parser("opened"))
        pieces = [*(Piece(1, char, n) for n, char in enumerate(text)), Piece(2, "", len(text), finish_reason="stop")]
        parts = [part for piece in pieces for part in assembler.add(piece)]
        assert "".join(part.text for part in parts if isinstance(part, ReasoningPart)) == "Hm."
        assert "".join(part.text for part in parts if isinstance(part, CallArgumentsPart)) == '{"a": 1}'
        assert [part.name for part in parts if isinstance(part, CallStartPart)] == ["f"]
        assert not [part for part in parts if isinstance(part, TextPart)]


def test_a_call_that_is_forced_follows_the_thinking() -> None:
    thinking, _, start = prepared("gptoss", tools=ToolOptions(TOOLS.tools, "required"))
    assert thinking is not None
    assert (start, thinking.ends) == ("opened", ("<|end|>",))


def rendered(name: str, answer: dict[str, Any]) -> str:
    served = model(name)
    assert served.text is not None
    messages = [USER, {"role": "assistant", **answer, "tool_calls": [CALL]}, RESULT]
    adapted = adapt_conversation(messages, TOOLS, served.tool_format, served.template_features)
    return served.text.render_chat(adapted.messages, **adapted.variables)


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "because"},
        {"reasoning": "because"},
        {"content": [{"type": "thinking", "thinking": "because"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "because"}]}]},
    ],
)
def test_earlier_thinking_reaches_the_template_where_it_knows_it(answer: dict[str, Any]) -> None:
    """In whatever field the client sends it."""
    assert "<think>\nbecause\n</think>" in rendered("qwen3", answer)
    assert "<think>because</think>" in rendered("glm45", answer)
    assert "analysis<|message|>because<|end|>" in rendered("gptoss", answer)
    for name in ("r1", "qwen3_instruct", "magistral"):
        assert "because" not in rendered(name, answer)


def test_a_template_that_takes_no_text_beside_thinking_gets_the_text() -> None:
    text = rendered("gptoss", {"content": "I look.", "reasoning_content": "because"})
    assert "I look." in text
    assert "because" not in text
    assert "because" in rendered("qwen3", {"content": "I look.", "reasoning_content": "because"})


def test_the_fields_are_found_by_trying_them() -> None:
    features = {name: model(name).template_features for name in FAMILIES}
    assert {name for name in FAMILIES if features[name].reasoning == "reasoning_content"} == {
        *("qwen3", "glm45", "minimax", "seedoss")
    }
    assert {name for name in FAMILIES if features[name].reasoning == "thinking"} == {"gptoss"}
    assert [name for name in FAMILIES if not features[name].reasoning_beside_text] == ["gptoss"]


@pytest.mark.parametrize("name", ["qwen3", "glm45", "deepseek31", "seedoss"])
def test_an_answer_that_continues_a_message_does_not_begin_to_think(name: str) -> None:
    """So its grammar applies at once."""
    served = model(name)
    messages = (USER, {"role": "assistant", "content": "It is"})
    request = CompletionRequest(params=SamplingParams(grammar=JSON), messages=messages, continues=True)
    request, ids, start = prepare_prompt(request, served, ChatRendering(continues=True))
    assert served.text is not None
    assert (request.params.thinking, start) == (None, "none")
    assert served.text.decode_all(ids).endswith("It is")


def test_a_grammar_of_calls_that_need_not_come_leaves_text_for_thinking() -> None:
    tools = ToolOptions((Tool("search", parameters={"type": "object"}, strict=True),))
    thinking, _, start = prepared("qwen3_instruct", tools=tools)
    assert (thinking, start) == (None, "optional")
    assert prepared("qwen3_instruct", grammar=JSON)[2] == "none"
