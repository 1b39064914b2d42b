"""From an ask to the token ids of its prompt. Takes time where the text is long."""

from __future__ import annotations

from swarm.gateway.ask import Ask, Json
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import wrong


def encode(ask: Ask, served: Served) -> tuple[int, ...]:
    if ask.messages is not None:
        text = served.needs_text("pass token ids to /v1/completions")
        return text.encode_chat([_flat(message, number) for number, message in enumerate(ask.messages)], **ask.template)
    if isinstance(ask.prompt, tuple):
        return ask.prompt
    return served.needs_text("pass token ids").encode(ask.prompt)


def _flat(message: Json, number: int) -> Json:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise wrong(f"messages[{number}].content", "must be a text or a list of parts")
    return {**message, "content": content or ""}
