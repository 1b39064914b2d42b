"""Adapts a client's conversation to what the model's chat template can render.

Templates differ in what they support, and fail in different ways: some raise at a second system message, some drop it
silently; some take a call's arguments as an object, some as text. So each template is probed once with small
conversations (``probe_template``), and features that it lacks are expressed in another way (``adapt_conversation``), so
that nothing of the client's conversation is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.client.text.tokenizer import TextModel
from swarm.errors import InvalidRequest
from swarm.gateway.completion_request import Json, ToolOptions
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.gateway.json_scanner import has_few_values
from swarm.gateway.tool_calls.format import ToolCallFormat
from swarm.gateway.tool_calls.hermes import describe_tool

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# types of content parts, and the field that has their text
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# fields of a message that templates use
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")
# fields and types of content parts in which clients send earlier thinking
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """Features of a chat template."""

    system: bool = True  # renders a system message at the beginning
    late_system: bool = True  # renders system messages later on
    developer: bool = False  # renders messages of that role
    repeated: bool = True  # accepts two user messages in a row
    tools: bool = True  # describes the tools to the model
    calls: bool = True  # renders earlier calls
    several_calls: bool = True  # accepts more than one call in a message
    objects: bool = True  # needs the arguments of calls as objects, not as text
    results: bool = True  # renders messages of the role "tool"
    short_ids: bool = False  # needs ids of calls to be nine letters and digits
    reasoning: str = ""  # field of a message whose text it renders as the thinking before a call; "" if none
    reasoning_beside_text: bool = True  # accepts that field and a text in one message with calls


@dataclass(frozen=True, slots=True)
class AdaptedChat:
    """Messages and variables with which the chat template is rendered."""

    messages: tuple[Json, ...]
    variables: Mapping[str, Any]


# --- probing a template

_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_USER: Json = {"role": "user", "content": "ask"}
_ANSWER: Json = {"role": "assistant", "content": "answer"}


def probe_template(text: TextModel) -> TemplateFeatures:
    """Determine the features of the model's template by rendering test conversations. Takes some milliseconds, once per
    model."""
    long, short = "call_0123456789abcdef", "abcdef123"
    objects = _renders(text, _probe_history(long, {"probe_key": "v"}), '"probe_key"')
    objects = objects or _renders(text, _probe_history(short, {"probe_key": "v"}), '"probe_key"')
    objects = objects or _renders(text, _probe_history(short, {"probe_key": "v"}), "probe_key>", "=probe_key")
    arguments: object = {"probe_key": "v"} if objects else '{"probe_key": "v"}'
    short_ids = not _renders(text, _probe_history(long, arguments), "probe_key")
    call_id = short if short_ids else long
    calls = _renders(text, _probe_history(call_id, arguments), "probe_key")
    thought = _probe_history(call_id, arguments)[:3] if calls else [_USER, {**_ANSWER}]
    reasoning = next((name for name in _REASONING if _renders(text, _with_thinking(thought, name), "probe_why")), "")
    return TemplateFeatures(
        system=_renders(text, [{"role": "system", "content": "probe_s"}, _USER], "probe_s"),
        late_system=_renders(text, [_USER, _ANSWER, {"role": "system", "content": "probe_s"}, _USER], "probe_s"),
        developer=_renders(text, [{"role": "developer", "content": "probe_s"}, _USER], "probe_s")
        and "developer" in text.template_source,
        repeated=_renders(text, [{"role": "user", "content": "probe_a"}, {"role": "user", "content": "b"}], "probe_a"),
        tools=_renders(text, [_USER], "probe_tool", tools=[_TOOL]),
        calls=calls,
        several_calls=calls and _renders(text, _with_two_calls(_probe_history(call_id, arguments)), "probe_key"),
        objects=objects,
        results=calls and _renders(text, _probe_history(call_id, arguments), "probe_result"),
        short_ids=calls and short_ids,
        reasoning=reasoning,
        reasoning_beside_text=not reasoning or _renders(text, _with_thinking(thought, reasoning, "so"), "probe_why"),
    )


def _probe_history(call_id: str, arguments: object) -> list[Json]:
    call = {"type": "function", "id": call_id, "function": {"name": "probe_tool", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": "probe_result"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result, _ANSWER, _USER]


def _with_two_calls(history: list[Json]) -> list[Json]:
    user, call, result, *rest = history
    return [user, {**call, "tool_calls": call["tool_calls"] * 2}, result, result, *rest]


def _with_thinking(history: list[Json], field: str, content: str = "") -> list[Json]:
    user, answer, *rest = history
    return [user, {**answer, "content": content or answer["content"], field: "probe_why"}, *rest]


def _renders(text: TextModel, messages: Sequence[Json], *wanted: str, **variables: object) -> bool:
    """Whether the template renders these messages with at least one of the wanted texts in the result."""
    try:
        rendered = text.render_chat(messages, **{"tools": [_TOOL], **variables})
    except InvalidRequest:
        return False
    return any(each in rendered for each in wanted)


# --- adapting a conversation


def adapt_conversation(
    messages: Sequence[Json], options: ToolOptions, tool_format: ToolCallFormat, features: TemplateFeatures
) -> AdaptedChat:
    """Return the conversation in a form that this chat template can render. Raises ApiError if that is impossible."""
    instructions = tool_format.instructions(options) if options.are_offered else ""
    adapted = [_normalize_message(message, number, features) for number, message in enumerate(messages)]
    adapted = _add_tool_names([message for message in adapted if not _is_empty(message)])
    adapted = _join_answers(adapted)
    adapted = _place_instructions(adapted, instructions, features)
    adapted = _convert_calls(adapted, features)
    if not features.repeated:
        adapted = _alternate_turns(adapted)
    elif not features.late_system:
        adapted = _join_users(adapted)
    tools = [describe_tool(tool) for tool in options.tools] if options.are_offered and not instructions else []
    return AdaptedChat(tuple(adapted), {"tools": tools} if tools else {})


def check_continued(last: Sequence[Json]) -> None:
    """Check that an answer can continue the last message, if there is one. Raises ApiError."""
    if not last or last[0]["role"] != "assistant" or last[0].get("tool_calls") or not last[0]["content"]:
        raise invalid_field("messages", "only a text of the assistant can be continued, and it must not be empty")


def _normalize_message(message: Json, number: int, features: TemplateFeatures) -> Json:
    """Return a message with plain text as content, and only the fields that templates use."""
    role = message.get("role")
    if role not in _ROLES:
        raise invalid_field(f"messages[{number}].role", f"must be one of {', '.join(sorted(_ROLES))}, not {role!r}")
    normalized = {key: message[key] for key in _KEPT if message.get(key) is not None}
    normalized["role"] = "tool" if role == "function" else role
    content = message.get("content")
    if role == "assistant":
        thinking, content = _split_thinking(message)
        if thinking and features.reasoning:
            normalized[features.reasoning] = thinking
    normalized["content"] = _text(content, "" if role == "assistant" else "\n", number)
    calls = normalized.pop("tool_calls", None) or []
    if not isinstance(calls, list | tuple):
        raise invalid_field(f"messages[{number}].tool_calls", "must be a list")
    for place, call in enumerate(calls):
        _check_call(call, f"messages[{number}].tool_calls[{place}]")
    if calls and normalized["content"] and not features.reasoning_beside_text:
        normalized.pop(features.reasoning, None)
    return {**normalized, "tool_calls": list(calls)} if calls else normalized


def _split_thinking(message: Json) -> tuple[str, object]:
    """Return an earlier answer's thinking, and its content without it."""
    content = message.get("content")
    texts = [text for name in _REASONING if isinstance(text := message.get(name), str) and text]
    if isinstance(content, list | tuple):
        thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _REASONING]
        texts += [_thought_text(part) for part in thoughts]
        content = [part for part in content if part not in thoughts]
    return texts[0] if texts else "", content


def _thought_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part with thinking: a text, or a list of parts with one."""
    inner = next((part[name] for name in (*_REASONING, "text") if part.get(name)), "")
    if isinstance(inner, list):
        return "".join(str(each.get("text", "")) for each in inner if isinstance(each, Mapping))
    return inner if isinstance(inner, str) else ""


def _text(content: object, between: str, number: int) -> str:
    """Return the content's text. Parts of an answer are joined as one text; other parts become separate lines."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise invalid_field(f"messages[{number}].content", "must be a text or a list of parts")
    parts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and kind in _TEXTS and isinstance(part.get(_TEXTS[kind]), str):
            parts.append(part[_TEXTS[kind]])
        else:
            raise unsupported_field(
                f"messages[{number}].content[{place}].type", f"{kind!r}; this model reads text only"
            )
    return between.join(parts)


def _is_empty(message: Json) -> bool:
    """Whether a message is an empty answer or instruction, as clients leave them in histories."""
    return message["role"] in ("assistant", "system", "developer") and not any(
        message.get(key) for key in ("content", "tool_calls", *_REASONING)
    )


def _add_tool_names(messages: Sequence[Json]) -> list[Json]:
    """Add the name of the tool to each result, since some templates show it."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = str(_call_body(call).get("name", ""))
        name = names.get(str(message.get("tool_call_id")), "")
        is_nameless = message["role"] == "tool" and name and not message.get("name")
        named.append({**message, "name": name} if is_nameless else message)
    return named


def _join_answers(messages: Sequence[Json]) -> list[Json]:
    """Join consecutive messages of the assistant into one: its text, then its calls."""
    joined: list[Json] = []
    for message in messages:
        if joined and message["role"] == "assistant" and joined[-1]["role"] == "assistant":
            before = joined[-1]
            calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
            content = "\n".join(text for text in (before["content"], message["content"]) if text)
            joined[-1] = {**before, **message, "content": content} | ({"tool_calls": calls} if calls else {})
        else:
            joined.append(message)
    return joined


def _place_instructions(messages: Sequence[Json], tool_text: str, features: TemplateFeatures) -> list[Json]:
    """Join the instructions at the beginning into one message; keep later ones in place if the template supports them,
    or turn them into user messages. ``tool_text`` is appended to the first."""
    first = 0
    while first < len(messages) and messages[first]["role"] in ("system", "developer"):
        first += 1
    texts = [*(message["content"] for message in messages[:first]), *([tool_text] if tool_text else [])]
    role = "developer" if features.developer and first and messages[0]["role"] == "developer" else "system"
    rest = [_convert_late_instruction(message, features) for message in messages[first:]]
    if not texts:
        return rest
    text = "\n\n".join(texts)
    if features.system:
        return [{"role": role, "content": text}, *rest]
    return _join_users([{"role": "user", "content": text}, *rest])


def _convert_late_instruction(message: Json, features: TemplateFeatures) -> Json:
    if message["role"] not in ("system", "developer"):
        return message
    if message["role"] == "developer" and features.developer:
        return message
    return {"role": "system" if features.late_system else "user", "content": message["content"]}


def _join_users(messages: Sequence[Json]) -> list[Json]:
    joined: list[Json] = []
    for message in messages:
        if joined and message["role"] == "user" and joined[-1]["role"] == "user":
            content = "\n\n".join(text for text in (joined[-1]["content"], message["content"]) if text)
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
    return joined


def _alternate_turns(messages: Sequence[Json]) -> list[Json]:
    """Make user and assistant alternate: insert an empty answer where a user message directly follows a tool's result,
    for templates that raise otherwise."""
    turns: list[Json] = []
    for message in _join_users(messages):
        if turns and message["role"] == "user" and turns[-1]["role"] == "tool":
            turns.append({"role": "assistant", "content": ""})
        turns.append(message)
    return turns


# --- earlier calls and their results


def _convert_calls(messages: Sequence[Json], features: TemplateFeatures) -> list[Json]:
    shown: list[Json] = []
    for message in _split_calls(messages) if features.calls and not features.several_calls else messages:
        if message.get("tool_calls"):
            shown.append(_convert_call_message(message, features))
        elif message["role"] == "tool":
            shown.append(_convert_result(message, features))
        else:
            shown.append(message)
    return shown


def _convert_call_message(message: Json, features: TemplateFeatures) -> Json:
    calls = [_convert_call(call, features) for call in message["tool_calls"]]
    if features.calls:
        return {**message, "tool_calls": calls}
    objects = [_convert_call(call, replace(features, objects=True))["function"] for call in message["tool_calls"]]
    texts = [f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in objects]
    content = "\n".join([*([message["content"]] if message["content"] else []), *texts])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _convert_result(message: Json, features: TemplateFeatures) -> Json:
    if not features.results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if features.short_ids and "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(str(message["tool_call_id"]))}
    return message


def _convert_call(call: Json, features: TemplateFeatures) -> Json:
    body = _call_body(call)
    arguments: object = body.get("arguments", "")
    if "input" in body and "arguments" not in body:  # a custom tool's call
        arguments = {"input": body["input"]}
    if features.objects:
        arguments = _as_object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments = "{}" if arguments == "" else arguments
    call_id = str(call.get("id", ""))
    return {
        "type": "function",
        "id": _short_id(call_id) if features.short_ids else call_id,
        "function": {"name": str(body.get("name", "")), "arguments": arguments},
    }


def _check_call(call: object, place: str) -> None:
    if not isinstance(call, Mapping) or not isinstance(call.get("custom") or call.get("function"), Mapping):
        raise invalid_field(place, "must have a function with a name and arguments")


def _call_body(call: Json) -> Mapping[str, Any]:
    body: Mapping[str, Any] = call.get("custom") or call.get("function") or {}
    return body


def _as_object(arguments: object) -> object:
    """Return the arguments as an object. Other values, as of a call that was cut off, are wrapped as text in one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}") if has_few_values(arguments) else {"input": arguments}
        except (ValueError, RecursionError):
            return {"input": arguments}
    return arguments if isinstance(arguments, Mapping) else {"input": arguments}


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, always the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _split_calls(messages: Sequence[Json]) -> list[Json]:
    """Split messages with several calls, so that each message has one call, followed by its result."""
    parted: list[Json] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            parted.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        parted += _split_message(message, calls, results)
    return parted


def _split_message(message: Json, calls: Sequence[Json], results: list[Json]) -> list[Json]:
    parted: list[Json] = []
    for call in calls:
        parted.append({**message, "content": "" if parted else message["content"], "tool_calls": [call]})
        own = next((result for result in results if result.get("tool_call_id") == call.get("id")), None)
        if own is not None:
            results.remove(own)
            parted.append(own)
    return parted + results
