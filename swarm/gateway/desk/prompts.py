"""From an ask to the token ids of its prompt. Takes time where the text is long."""

from __future__ import annotations

from swarm.gateway.ask import Ask, Json
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import unsupported, wrong

# As templates know them: developer is what OpenAI calls system today.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXTS = ("text", "input_text", "output_text", "refusal")


def encode(ask: Ask, served: Served) -> tuple[int, ...]:
    if ask.messages is not None:
        text = served.needs_text("pass token ids to /v1/completions")
        return text.encode_chat([_flat(message, number) for number, message in enumerate(ask.messages)], **ask.template)
    if isinstance(ask.prompt, tuple):
        return ask.prompt
    return served.needs_text("pass token ids").encode(ask.prompt)


def _flat(message: Json, number: int) -> Json:
    """The message as templates know it: with a text, and a role that they have."""
    place = f"messages[{number}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    if isinstance(content, list):
        content = "".join(_text_of(part, f"{place}.content[{at}]") for at, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise wrong(f"{place}.content", "must be a text or a list of parts")
    return {**message, "role": ROLES[role], "content": content or ""}


def _text_of(part: object, place: str) -> str:
    """The text of a part. What is no text can't be left out in silence."""
    if not isinstance(part, dict):
        raise wrong(place, "must be an object with a type")
    kind = part.get("type", "text")
    if kind not in TEXTS:
        raise unsupported(f"{place}.type", f"{kind!r}; this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if text is not None and not isinstance(text, str):
        raise wrong(f"{place}.text", "must be a text")
    return text or ""
