"""Input of /v1/responses: converts items into chat messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.gateway.apis.writer import Json
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.gateway.images import image_part

ROLES = ("user", "assistant", "system", "developer")
MAX_ANSWERS = 128  # that references of an input may name: each is a lookup at the broker
MAX_REFERENCED = 16 << 20  # bytes of the items that references of an input stand for
# types of content parts, and the field that has their text
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def to_messages(given: str | Sequence[Mapping[str, Any]]) -> tuple[Json, ...]:
    """Convert the input into a conversation. Consecutive texts and calls of an assistant become one message. Raises
    ApiError."""
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    messages: list[Json] = []
    for number, item in enumerate(given):
        if item:  # some clients keep empty items in their histories
            _add_item(messages, item, f"input[{number}]")
    for message in messages:
        if all(isinstance(part, str) for part in message["content"]):
            message["content"] = "".join(message["content"])
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return tuple(message for message in messages if not _is_empty(message))


def find_references(given: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, str]]]:
    """Return the places of each ``item_reference`` of an input and the items' ids, by the id of the answer that has
    them. Raises ApiError."""
    references: dict[str, list[tuple[int, str]]] = {}
    for number, item in enumerate(given):
        if item.get("type") == "item_reference":
            if not isinstance(item.get("id"), str):
                raise invalid_field(f"input[{number}].id", "must be a text")
            request_id = item["id"].partition("_")[2].rpartition("_")[0]  # ResponseWriter makes these ids
            references.setdefault(request_id, []).append((number, item["id"]))
    if len(references) > MAX_ANSWERS:
        text = f"refers to items of more than {MAX_ANSWERS} answers: send the items themselves, with store: false"
        raise invalid_field("input", text)
    return references


def _is_empty(message: Json) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _assistant(messages: list[Json]) -> Json:
    """Return the assistant's message at the end of the conversation; a new one if another role has the last word."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _add_item(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    convert = _ITEMS.get(str(kind))
    if convert is None:
        why = "send the item itself" if kind == "item_reference" else "leave the item out"  # a batch's reference
        raise unsupported_field(f"{place}.type", f"{kind!r}; {why}")
    convert(messages, item, place)  # texts are lists until all items are converted: appending to a text copies it


def _add_message(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid_field(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    content = item.get("content")
    if role == "user" and isinstance(content, list):
        messages.append({"role": role, "content": _convert_parts(content, f"{place}.content")})
        return
    text = join_text(content, f"{place}.content")
    if role == "assistant":
        _assistant(messages)["content"].append(text)
    else:
        messages.append({"role": role, "content": [text]})


def _convert_parts(content: list[object], place: str) -> list[str | Json]:
    """Return a user's texts, and images as /v1/chat/completions has them."""
    parts: list[str | Json] = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "input_image":
            parts.append(_part_text(part, f"{place}[{number}]"))
        elif isinstance(part.get("image_url"), str):
            parts.append(image_part(part["image_url"]))
        else:
            raise unsupported_field(f"{place}[{number}].image_url", "no files are stored here: send a data: URL")
    return parts


def join_text(content: object, place: str) -> str:
    """Return the text of a content, given as a string or a list of parts. Raises ApiError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid_field(place, "must be a text or a list of parts")
    return "".join(_part_text(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part_text(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise invalid_field(place, "must be an object with a type")
    if not part:
        return ""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise unsupported_field(f"{place}.type", f"{kind!r}; only texts, and users' images, are read here")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise invalid_field(f"{place}.{TEXTS[kind]}", "must be a text")
    return text


def _add_function_call(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    _add_call(messages, item, place, "function", "arguments")


def _add_custom_call(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    _add_call(messages, item, place, "custom", "input")


def _add_call(messages: list[Json], item: Mapping[str, Any], place: str, kind: str, field: str) -> None:
    for name in ("call_id", "name", field):
        if not isinstance(item.get(name), str):
            raise invalid_field(f"{place}.{name}", "must be a text")
    call = {"id": item["call_id"], "type": kind, kind: {"name": item["name"], field: item[field]}}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    if not isinstance(item.get("call_id"), str):
        raise invalid_field(f"{place}.call_id", "must be a text")
    text = join_text(item.get("output"), f"{place}.output")
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": [text]})


def _add_reasoning(messages: list[Json], item: Mapping[str, Any], place: str) -> None:
    """Add thinking to the assistant's message. Another model's encrypted thinking is dropped."""
    text = _reasoning_text(item, "content", place) or _reasoning_text(item, "summary", place)
    if text:
        _assistant(messages).setdefault("reasoning_content", []).append(text)


def _reasoning_text(item: Mapping[str, Any], field: str, place: str) -> str:
    parts = item.get(field) or []
    if not isinstance(parts, list):
        raise invalid_field(f"{place}.{field}", "must be a list of parts")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise invalid_field(f"{place}.{field}", "each part must have a text")
    return "\n".join(str(text) for text in texts)


_ITEMS: dict[str, Callable[[list[Json], Mapping[str, Any], str], None]] = {
    "message": _add_message,
    "function_call": _add_function_call,
    "function_call_output": _add_output,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_output,
    "reasoning": _add_reasoning,
}
