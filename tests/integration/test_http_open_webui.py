"""A conversation as Open WebUI 0.12.4 has it with a server of OpenAI's API, by the fields that its sources send.

It was not run: what it asks was read in the package, whose dependencies are gigabytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.gateway import MODEL, Served, events_in, request

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

Json = dict[str, Any]
# With user information forwarded, which is a setting of its own.
HEADERS = [("authorization", "Bearer none"), ("x-openwebui-user-name", "Anna"), ("x-openwebui-chat-id", "0198")]
QUESTION = {"role": "user", "content": "Where is the cat?"}
CLOCK: Json = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
    },
}
# Each parameter of a chat that its page can set and sends on.
PARAMETERS: Json = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "max_tokens": 12,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 7,
    "stop": ["\n\n"],
    "logit_bias": {"7": -5},
}


class OpenWebUi:
    def __init__(self, served: Served) -> None:
        self._v1 = served.v1

    def models(self) -> list[Json]:
        """As it fetches them for its list, and when a connection is verified."""
        code, headers, content = request(self._v1 + "/models", headers=HEADERS)
        assert (code, headers["content-type"]) == (200, "application/json")
        rows: list[Json] = json.loads(content)["data"]
        return rows

    def task(self, words: str, **fields: Any) -> str:
        """A title, tags, what to ask next: in one piece, beside the conversation."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "stream": False, **fields}
        code, headers, content = request(self._v1 + "/chat/completions", body, HEADERS)
        assert (code, headers["content-type"]) == (200, "application/json"), content
        answer = json.loads(content)
        assert answer["usage"]["total_tokens"] > 0
        return str(answer["choices"][0]["message"]["content"])

    def chat(self, *messages: Json, **fields: Any) -> str:
        """A turn, read as it reads: lines of data, deltas put together, the usage wherever it comes."""
        body = {"stream": True, "model": MODEL, "messages": list(messages)} | fields
        code, headers, content = request(self._v1 + "/chat/completions", body, HEADERS)
        assert code == 200, content
        assert headers["content-type"].startswith("text/event-stream")
        lines = [
            line.removeprefix("data:").strip() for line in content.decode().splitlines() if line.startswith("data:")
        ]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert not any("error" in chunk for chunk in chunks)
        if "stream_options" in fields:
            assert [chunk["usage"]["total_tokens"] > 0 for chunk in chunks if chunk.get("usage")] == [True]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.fixture
def open_webui(served: Served) -> OpenWebUi:
    return OpenWebUi(served)


def test_it_finds_the_model(open_webui: OpenWebUi) -> None:
    """Each row has an id, which is its name where it has none; a name that is null is an error of its page."""
    rows = open_webui.models()
    assert MODEL in [row["id"] for row in rows]
    assert all(row.get("name", row["id"]) for row in rows)


def test_a_conversation_with_its_title_and_tags(open_webui: OpenWebUi) -> None:
    """A turn, what it asks beside it, a second turn with every parameter that its page has."""
    system = {"role": "system", "content": "User Context:\n\nAnswer in a line."}
    said = open_webui.chat(system, QUESTION, stream_options={"include_usage": True})
    assert said
    history = f"### Task:\nGenerate a concise title.\n<chat_history>\nUSER: {QUESTION['content']}\nASSISTANT: {said}\n"
    assert open_webui.task(history, max_tokens=1000)
    assert open_webui.task(history.replace("concise title", "list of tags"))
    assert open_webui.task("Which emoji fits?", max_tokens=4)
    again = open_webui.chat(system, QUESTION, {"role": "assistant", "content": said}, QUESTION, **PARAMETERS)
    assert again == open_webui.chat(system, QUESTION, {"role": "assistant", "content": said}, QUESTION, **PARAMETERS)
    form = {"type": "json_schema", "json_schema": {"name": "title", "schema": {"enum": ["a", "b"]}}}
    assert json.loads(open_webui.chat(QUESTION, response_format=form)) in ("a", "b")


def test_tools_of_its_own_and_what_they_found(open_webui: OpenWebUi) -> None:
    """Offered with each turn; a call and its result are part of the history then."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_current_timestamp", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{**call, "index": 0}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "1795568096"}
    assert isinstance(open_webui.chat(QUESTION, tools=[CLOCK]), str)
    assert open_webui.chat(QUESTION, called, result, tools=[CLOCK])


def test_a_connection_of_the_other_kind(served: Served) -> None:
    """Set to OpenAI's responses, it sends the same conversation as items."""
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION["content"]}]}
    body = {"stream": True, "model": MODEL, "input": [message], "instructions": "Be brief.", "max_output_tokens": 12}
    code, _, content = request(served.v1 + "/responses", body, HEADERS)
    assert code == 200, content
    kinds = [event.json["type"] for event in events_in(content.decode())]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_what_is_wrong_comes_as_an_error_that_it_shows(served: Served) -> None:
    """No stream, but a status and JSON with the words: here a conversation that has grown too long."""
    body = {"stream": True, "model": MODEL, "messages": [QUESTION] * 600}
    code, headers, content = request(served.v1 + "/chat/completions", body, HEADERS)
    assert (code, headers["content-type"]) == (400, "application/json")
    assert "2048" in json.loads(content)["error"]["message"]
