"""Whole sessions of agents, replayed: what they send in turn after turn, with what was answered sent back as they do.

The demo model chooses no tool by itself, so turns that must call say so; a seed makes them the same each time. All else
stands as such clients send it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.gateway import MODEL, Served, events_in, request

pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from openai.types.responses import ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

Json = dict[str, Any]
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


# --- like Codex -------------------------------------------------------------------------------------------------------

PATCH_LARK = 'start: "*** Begin Patch\\n" line "*** End Patch"\nline: /[+-][a-z ]{1,8}\\n/'
PATCH_REGEX = r"\*\*\* Begin Patch\n[+-][a-z ]{1,8}\n\*\*\* End Patch"
CODEX_HEADERS = [("accept", "text/event-stream"), ("originator", "agent_cli"), ("session_id", "0198"), ("version", "1")]
SHELL: Json = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"enum": ["ls", "make"]}, "workdir": {"type": "string", "maxLength": 8}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_LARK},
}
# The demo model's family writes a custom tool's text as a JSON string: where it must call, only a regex can be kept.
MUST: Json = {"tools": [SHELL, {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": PATCH_REGEX}}]}
CODEX: Json = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "tools": [SHELL, PATCH],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "client_metadata": {"installation": "1"},
    "service_tier": None,
    "seed": 1,
}
OPENING: list[Json] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/src</cwd>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
]


class Codex:
    """A client that keeps the conversation itself, and sends all of it each time."""

    def __init__(self, served: Served) -> None:
        self._url = served.v1 + "/responses"
        self.history: list[Json] = list(OPENING)
        self.usage: list[Json] = []

    def turn(self, **fields: Any) -> list[Json]:
        """Ask, and take the items that are done into the history, as they came."""
        code, headers, content = request(self._url, CODEX | {"input": self.history} | fields, CODEX_HEADERS)
        assert code == 200, content
        assert headers["content-type"].startswith("text/event-stream")
        events = events_in(content.decode())
        items = [event.json["item"] for event in events if event.event == "response.output_item.done"]
        for number, event in enumerate(events):
            RESPONSE_EVENT.validate_python(event.json)
            assert (event.event, number) == (event.json["type"], event.json["sequence_number"])
        last = events[-1].json["response"]
        assert (last["status"], last["output"], last["prompt_cache_key"]) == ("completed", items, "0198")
        assert last["store"] is False
        self._check_ids([event.json for event in events], items)
        self.history += items
        self.usage.append(last["usage"])
        return items

    def _check_ids(self, events: list[Json], items: list[Json]) -> None:
        """Each item has one id and one place, from its first event to its last; no other call has its id."""
        for place, item in enumerate(items):
            own = [event for event in events if event.get("output_index") == place]
            assert {event.get("item_id", event.get("item", {}).get("id")) for event in own} == {item["id"]}
        ids = [item["call_id"] for item in self.history + items if item.get("type") in ("function_call", CUSTOM)]
        assert len(set(ids)) == len(ids)

    def do(self, items: list[Json]) -> None:
        """Run what was called, and say what came of it, each in the form of its tool."""
        for item in items:
            if item["type"] == "function_call":
                said: Any = json.dumps({"output": "main.py\n", "metadata": {"exit_code": 0}})
                self.history.append({"type": "function_call_output", "call_id": item["call_id"], "output": said})
            elif item["type"] == CUSTOM:
                said = [{"type": "input_text", "text": "Success."}]
                self.history.append({"type": CUSTOM + "_output", "call_id": item["call_id"], "output": said})

    def say(self, text: str) -> None:
        self.history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})


CUSTOM = "custom_tool_call"


def test_a_session_like_codexs(served: Served) -> None:
    """It talks, calls several tools at once, patches, and talks again; the history that it sends back is taken."""
    codex = Codex(served)
    (said,) = codex.turn()
    assert (said["type"], said["role"]) == ("message", "assistant")

    codex.say("Look at it.")
    looked = codex.turn(**MUST, tool_choice={"type": "function", "name": "shell"})
    calls = [item for item in looked if item["type"] == "function_call"]
    assert calls
    for call in calls:
        assert json.loads(call["arguments"])["command"] in ("ls", "make")
    codex.do(looked)

    patched = codex.turn(**MUST, tool_choice={"type": "custom", "name": "apply_patch"}, parallel_tool_calls=False)
    (patch,) = [item for item in patched if item["type"] == CUSTOM]
    assert patch["input"].startswith("*** Begin Patch\n")
    assert patch["input"].endswith("*** End Patch")
    codex.do(patched)

    # What agents put between the turns: thoughts of another model, an empty answer, an empty item, news of the sandbox.
    codex.history += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAA=="},
        {"type": "message", "role": "assistant", "content": []},
        {},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Writing is allowed."}]},
        {"type": "message", "role": "system", "content": "Be short."},
    ]
    codex.say("Hello!")
    said = codex.turn()[-1]
    assert said["type"] == "message"
    told = [usage["input_tokens"] for usage in codex.usage]
    assert told == sorted(set(told))
    assert codex.usage[-1]["input_tokens_details"]["cached_tokens"] > 0  # the history's beginning was there already


def test_several_calls_come_at_once_and_go_back(served: Served) -> None:
    """Parallel calls are items of their own, which a client may answer in any order."""
    codex = Codex(served)
    items = codex.turn(**MUST, tool_choice="required", min_tokens=100)  # a call has about forty
    calls = [item for item in items if item["type"] in ("function_call", CUSTOM)]
    assert len(calls) > 1
    codex.do(items[::-1])
    said = codex.turn()[-1]
    assert said["type"] == "message"
    assert codex.usage[-1]["input_tokens"] > codex.usage[-2]["input_tokens"]


def test_what_agents_ask_for_and_nobody_has_is_named(served: Served) -> None:
    """The web search that Codex asks for unless it is switched off, and items that only OpenAI can read."""
    for fields, param in (
        ({"tools": [*CODEX["tools"], {"type": "web_search", "external_web_access": False}]}, "tools[2].type"),
        ({"input": [*OPENING, {"type": "compaction", "encrypted_content": "gAAA"}]}, "input[3].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        code, _, content = request(served.v1 + "/responses", CODEX | {"input": OPENING} | fields, CODEX_HEADERS)
        assert (code, json.loads(content)["error"]["param"]) == (400, param)


# --- like Claude Code -------------------------------------------------------------------------------------------------

MARK: Json = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_HEADERS = [
    ("anthropic-version", "2023-06-01"),
    ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14,prompt-caching-scope-2026-01-05"),
    ("x-app", "cli"),
    ("x-stainless-lang", "js"),
    ("authorization", "Bearer none"),
]
USER_ID = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s"})


def tool(name: str, properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {
        "name": name,
        "description": f"{name}s a file.",
        "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema},
    }


PATH = {"file_path": {"enum": ["/src/main.py", "/src/test.py"]}}
CLAUDE: Json = {
    "model": MODEL,
    "max_tokens": 400,
    "system": [
        {"type": "text", "text": "x-billing: v=1; entry=cli;"},
        {"type": "text", "text": "You are a coding agent.", **MARK},
        {"type": "text", "text": "Answer in a line.", **MARK},
    ],
    "tools": [tool("Read", PATH), {**tool("Edit", PATH | {"new": {"type": "string", "maxLength": 8}}), **MARK}],
    "metadata": {"user_id": USER_ID},
    "thinking": {"type": "disabled"},
    "context_management": {"edits": []},
    "temperature": 1,
    "seed": 1,
    "stream": True,
}
REMINDER = {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"}


class Claude:
    """A client that keeps the conversation itself, and marks its last block as worth keeping computed."""

    def __init__(self, served: Served) -> None:
        self._url = served.url + "/v1/messages"
        self.history: list[Json] = []

    def ask(self, *blocks: Json, **fields: Any) -> list[Json]:
        """Say these blocks; the answer's blocks go into the history as they came."""
        self.history.append({"role": "user", "content": [*blocks[:-1], {**blocks[-1], **MARK}]})
        body = CLAUDE | {"messages": self.history} | fields
        code, headers, content = request(self._url + "?beta=true", body, CLAUDE_HEADERS)
        assert code == 200, content
        assert headers["content-type"].startswith("text/event-stream")
        events = [event.json for event in events_in(content.decode())]
        assert [event["type"] for event in events] == [event.event for event in events_in(content.decode())]
        message = put_together(events)
        counted = {name: value for name, value in body.items() if name in COUNTED}
        code, _, content = request(self._url + "/count_tokens?beta=true", counted, CLAUDE_HEADERS)
        usage = message["usage"]
        assert (code, json.loads(content)) == (
            200,
            {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]},
        )
        self.history.append({"role": "assistant", "content": message["content"]})
        del self.history[-2]["content"][-1]["cache_control"]  # the mark goes on to the next
        return [*message["content"], {"stop_reason": message["stop_reason"]}]


COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking", "context_management"}


def put_together(events: list[Json]) -> Json:
    """The message that a stream tells: its blocks one after the other, each with a beginning and an end."""
    for event in events:
        if event["type"] != "ping":
            MESSAGE_EVENT.validate_python(event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    message: Json = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] > 0
    texts: list[str] = []
    is_open = False
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            message["content"].append(dict(event["content_block"]))
            texts.append("")
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
            texts[-1] += event["delta"].get("text", event["delta"].get("partial_json"))
        elif event["type"] == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
            is_open = False
        elif event["type"] == "message_delta":
            assert not is_open
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "text":
            block["text"] = text
        else:
            assert block["input"] == {}
            block["input"] = json.loads(text)
    Message.model_validate(message)
    return message


def test_a_session_like_claude_codes(served: Served) -> None:
    """A look at the quota, a title, talk, calls with results of all kinds, and talk about them."""
    quota = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    code, _, content = request(served.url + "/v1/messages?beta=true", quota | {"metadata": {"user_id": USER_ID}})
    assert (code, json.loads(content)["stop_reason"]) == (200, "max_tokens")

    schema = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 20}}, "required": ["title"]}
    form = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    ask = {"role": "user", "content": [{"type": "text", "text": "Name it."}]}
    body = CLAUDE | {"messages": [ask], "tools": [], "output_config": form}
    code, _, content = request(served.url + "/v1/messages?beta=true", body, CLAUDE_HEADERS)
    assert code == 200, content
    title = put_together([event.json for event in events_in(content.decode())])
    assert json.loads(title["content"][0]["text"]).keys() == {"title"}

    claude = Claude(served)
    (said, end) = claude.ask(REMINDER, {"type": "text", "text": "Fix the bug."})
    assert (said["type"], end["stop_reason"]) == ("text", "end_turn")

    must = {"type": "any", "disable_parallel_tool_use": False}
    *blocks, end = claude.ask({"type": "text", "text": "Go on."}, tool_choice=must)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert calls
    assert end["stop_reason"] == "tool_use"
    assert all(call["input"]["file_path"] in PATH["file_path"]["enum"] for call in calls)
    read = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "1: x = 1"}]}
    failed = [{"type": "tool_result", "tool_use_id": call["id"], "is_error": True, "content": ""} for call in calls[1:]]

    *blocks, end = claude.ask(read, *failed, REMINDER, tool_choice={"type": "tool", "name": "Edit"})
    (edit, *_) = [block for block in blocks if block["type"] == "tool_use"]
    assert (edit["name"], edit["input"].keys()) == ("Edit", {"file_path", "new"})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"]}  # nothing came of it, which is no content
        for block in blocks
        if block["type"] == "tool_use"
    ]
    *blocks, end = claude.ask(*results, {"type": "text", "text": "Hello!"})
    assert [block["type"] for block in blocks] == ["text"]
    assert end["stop_reason"] == "end_turn"


def test_thinking_that_is_off_or_on_changes_no_answer(served: Served) -> None:
    """This model marks no thoughts, and its template shows none of a history."""
    ask = {"role": "user", "content": "Hello"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    sealed = {"type": "redacted_thinking", "data": "x"}
    told = []
    for said, thinking in (
        ([{"type": "text", "text": "Yes?"}], {"type": "disabled"}),
        ([thought, {"type": "text", "text": "Yes?"}], {"type": "enabled", "budget_tokens": 1024}),
        ([sealed, {"type": "text", "text": "Yes?"}], {"type": "adaptive"}),
    ):
        messages = [ask, {"role": "assistant", "content": said}, ask]
        body = CLAUDE | {"messages": messages, "thinking": thinking, "stream": False, "max_tokens": 5}
        code, _, content = request(served.url + "/v1/messages", body, CLAUDE_HEADERS)
        assert code == 200, content
        told.append(json.loads(content)["content"])
    assert told[0] == told[1] == told[2]
    assert {block["type"] for block in told[0]} == {"text"}
