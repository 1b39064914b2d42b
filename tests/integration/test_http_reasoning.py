"""Thinking apart from the answer, as the clients of each API read it, from real processes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.zygote import Zygote
from tests.integration.http_swarm import http_swarm
from tests.thinking_model import make_thinking_model

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

Json = dict[str, Any]
MODEL = "village"
USER = {"role": "user", "content": "Hello"}
BUDGET = 12
# The model's own thinking has no end, so the budget ends it.
OWN: Json = {"seed": 3, "thinking_budget": BUDGET, "min_tokens": 40}
SCHEMA: Json = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}},
    "required": ["town"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = make_thinking_model(tmp_path_factory.mktemp("model"))
    with http_swarm(tmp_path_factory.mktemp("logs"), zygote, model) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def chat(client: Any, **fields: Any) -> Any:
    own = OWN | fields.pop("extra_body", {})
    return client.chat.completions.create(
        **{"model": MODEL, "messages": [USER], "max_tokens": 48, "extra_body": own, **fields}
    )


def post(url: str, body: Json) -> tuple[list[tuple[str, str]], bytes]:
    """The id and data of each event of a stream, and all of it."""
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        content: bytes = answer.read()
    events = [event.split("\n") for event in content.decode().split("\n\n") if event.startswith("id: ")]
    return [(lines[0].removeprefix("id: "), lines[-1]) for lines in events], content


# --- chat


def test_chat_splits_the_thinking(client: Any) -> None:
    """Whole and streamed alike, in both fields by which clients know it."""
    whole = chat(client)
    message = whole.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert message.reasoning == message.reasoning_content
    assert "think>" not in message.content + message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True) if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    first_text = next(number for number, delta in enumerate(deltas) if delta.content)
    assert not any(hasattr(delta, "reasoning_content") for delta in deltas[first_text:])


def test_a_budget_ends_the_thinking(client: Any) -> None:
    """The same tokens until then, then the answer in the same request; all of them are counted."""
    long = chat(client, extra_body={"thinking_budget": 30})
    short = chat(client)
    assert short.usage.completion_tokens == long.usage.completion_tokens == 48
    counts = [each.usage.completion_tokens_details.reasoning_tokens for each in (short, long)]
    assert counts[1] - counts[0] == 18
    assert BUDGET < counts[0] < BUDGET + 20
    thoughts = [each.choices[0].message.reasoning for each in (short, long)]
    assert thoughts[1].startswith(thoughts[0])
    for spelling in ({"max_reasoning_tokens": BUDGET}, {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}):
        again = chat(client, extra_body={"thinking_budget": None, **spelling})
        assert again.choices[0].message == short.choices[0].message
    with pytest.raises(openai.BadRequestError, match=r"thinking\.type"):
        chat(client, extra_body={"thinking": {"type": "perhaps"}})


def test_each_token_has_its_log_probability_once(client: Any) -> None:
    whole = chat(client, logprobs=True)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = [chunk.choices[0] for chunk in chat(client, logprobs=True, stream=True) if chunk.choices]
    streamed = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert streamed == [entry.token for entry in whole.choices[0].logprobs.content]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"thinking": False}},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"thinking_budget": 0}},
        {"extra_body": {"reasoning": {"enabled": False}}},
    ],
)
def test_thinking_can_be_turned_off(client: Any, fields: Json) -> None:
    whole = chat(client, **fields)
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0


def test_an_effort_is_accepted(client: Any) -> None:
    """Also without a variable for it in the template."""
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert chat(client, reasoning_effort=effort).choices[0].message.reasoning
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        chat(client, reasoning_effort="most")


def test_an_answer_by_a_schema_follows_the_thinking(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    whole = chat(client, response_format=form, max_tokens=120, extra_body={"min_tokens": 0})
    assert whole.choices[0].finish_reason == "stop"
    assert set(json.loads(whole.choices[0].message.content)) == {"town"}
    assert whole.choices[0].message.reasoning == chat(client).choices[0].message.reasoning


def test_a_required_call_follows_the_thinking(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    whole = chat(client, tools=[tool], tool_choice="required", max_tokens=120, extra_body={"min_tokens": 0})
    assert whole.choices[0].message.reasoning
    (call,) = whole.choices[0].message.tool_calls[:1]
    assert set(json.loads(call.function.arguments)) == {"town"}


def test_thinking_is_sent_back(client: Any) -> None:
    """The template shows it, in whatever field it comes."""
    counts = [
        chat(client, messages=[USER, {"role": "assistant", "content": "Well.", **fields}, USER]).usage.prompt_tokens
        for fields in ({}, {"reasoning_content": "Hm."}, {"reasoning": "Hm."})
    ]
    assert counts[0] < counts[1] == counts[2]


def test_a_stream_is_resumed_within_its_thinking(url: str) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 48, "stream": True, **OWN}
    events, _ = post(url + "/v1/chat/completions", body)
    for seen in (2, 5, 20):
        with urllib.request.urlopen(f"{url}/v1/streams/{events[seen - 1][0]}", timeout=60) as answer:
            rest = answer.read().decode()
        data = [line for line in rest.split("\n") if line.startswith("data: ")]
        assert data == [line for _, line in events[seen:]]


def test_completions_show_the_marks(client: Any) -> None:
    """A text completion is the model's text as it is."""
    answer = client.completions.create(model=MODEL, prompt="Once<think>\n", max_tokens=5, seed=1)
    assert not hasattr(answer.choices[0], "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


# --- responses


@pytest.mark.parametrize("summary", [None, "auto"])
def test_responses_have_an_item_of_thinking(client: Any, summary: str | None) -> None:
    fields: Json = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 48,
        "reasoning": {"effort": "low", "summary": summary},
        "extra_body": OWN,
    }
    whole = client.responses.create(**fields)
    thought, message = whole.output
    assert (thought.type, message.type) == ("reasoning", "message")
    text = (thought.content if summary is None else thought.summary)[0].text
    assert text
    assert whole.usage.output_tokens_details.reasoning_tokens > BUDGET
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    final = events[-1].response
    kind = "response.reasoning_text.delta" if summary is None else "response.reasoning_summary_text.delta"
    assert "".join(event.delta for event in events if event.type == kind) == text
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[1].content == message.content
    history = [*(item.model_dump(exclude_none=True) for item in whole.output), USER]
    longer = client.responses.create(**{**fields, "input": history})
    without = client.responses.create(**{**fields, "input": history[1:]})
    assert longer.usage.input_tokens > without.usage.input_tokens


# --- messages


def test_messages_have_a_block_of_thinking(claude: Any) -> None:
    fields: Json = {
        "model": MODEL,
        "messages": [USER],
        "max_tokens": 48,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        "extra_body": {"seed": 3, "min_tokens": 40},
    }
    whole = claude.messages.create(**fields)
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking
    assert thought.signature
    assert whole.usage.output_tokens_details.thinking_tokens > BUDGET
    with claude.messages.stream(**fields) as stream:
        shown = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(shown) == thought.thinking
    assert [block.model_dump(exclude_none=True) for block in final.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    history = [USER, {"role": "assistant", "content": [block.model_dump() for block in whole.content]}, USER]
    bare = [USER, {"role": "assistant", "content": [{"type": "text", "text": text.text}]}, USER]
    counts = [claude.messages.count_tokens(model=MODEL, messages=each).input_tokens for each in (history, bare)]
    assert counts[0] > counts[1]
    off = claude.messages.create(**{**fields, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]


def test_chat_and_messages_think_the_same(client: Any, claude: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    answer = claude.messages.create(
        model=MODEL, messages=[USER], max_tokens=48, thinking=thinking, extra_body={"seed": 3, "min_tokens": 40}
    )
    message = chat(client).choices[0].message
    assert (answer.content[0].thinking, answer.content[1].text) == (message.reasoning, message.content)


# --- other clients


def test_langchain_sends_an_effort(url: str) -> None:
    chats = pytest.importorskip("langchain_openai", reason="LangChain's client is not installed")
    chat = chats.ChatOpenAI(
        model=MODEL, base_url=url + "/v1", api_key="none", reasoning_effort="low", extra_body=OWN, max_tokens=48
    )
    answer = chat.invoke("Hello")
    assert answer.content
    assert answer.usage_metadata["output_token_details"]["reasoning"] > BUDGET
