"""Input of /v1/responses: converts items into chat messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.gateway.apis.writer import Json
from swarm.gateway.errors import unsupported, wrong

ROLES = ("user", "assistant", "system", "developer")
# types of content parts, and the field that has their text
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> tuple[Json, ...]:
    """Convert the input into a conversation. Consecutive texts and calls of an assistant become one message. Raises
    ApiError."""
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    messages: list[Json] = []
    for number, item in enumerate(given):
        if item:  # some clients keep empty items in their histories
            _add(messages, item, f"input[{number}]")
    return tuple(message for message in messages if not _says_nothing(message))


def _says_nothing(message: Json) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _add(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    take = _ITEMS.get(str(kind))
    if take is None:
        why = "nothing is stored here: send the item itself" if kind == "item_reference" else "leave the item out"
        raise unsupported(f"{place}.type", f"{kind!r}; {why}")
    take(messages, item, place)


def _message(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    text = text_of(item.get("content"), f"{place}.content")
    if role == "assistant" and messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] += text
    else:
        messages.append({"role": role, "content": text})


def text_of(content: object, place: str) -> str:
    """Return the text of a content, given as a string or a list of parts. Raises ApiError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(place, "must be a text or a list of parts")
    return "".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise wrong(place, "must be an object with a type")
    if not part:
        return ""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise unsupported(f"{place}.type", f"{kind!r}; models here read text only")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise wrong(f"{place}.{TEXTS[kind]}", "must be a text")
    return text


def _function_call(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    _call(messages, item, place, "function", "arguments")


def _custom_call(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    _call(messages, item, place, "custom", "input")


def _call(messages: list[Json], item: Mapping[str, Any], place: str, kind: str, field: str) -> None:
    for name in ("call_id", "name", field):
        if not isinstance(item.get(name), str):
            raise wrong(f"{place}.{name}", "must be a text")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": item["call_id"], "type": kind, kind: {"name": item["name"], field: item[field]}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _output(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    if not isinstance(item.get("call_id"), str):
        raise wrong(f"{place}.call_id", "must be a text")
    text = text_of(item.get("output"), f"{place}.output")
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})


def _nothing(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    """Drop other models' reasoning: its text is encrypted, and models here have none."""


_ITEMS: dict[str, Callable[[list[Json], Mapping[str, Any], str], None]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "reasoning": _nothing,
}
