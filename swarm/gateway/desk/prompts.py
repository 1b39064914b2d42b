"""From an ask to the token ids of its prompt. Takes time where the text is long."""

from __future__ import annotations

from swarm.gateway.ask import Ask
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import wrong
from swarm.gateway.tools.chat import prepare


def encode(ask: Ask, served: Served) -> tuple[int, ...]:
    """The prompt's tokens. Raises InvalidRequest, or Problem if the model has no tokenizer."""
    if ask.messages is not None:
        text = served.needs_text("pass token ids to /v1/completions")
        if clash := ask.template.keys() & {"self", "messages", "tools"}:
            raise wrong("chat_template_kwargs", f"{min(clash)} has a field of its own")
        ready = prepare(ask.messages, ask.tools, served.family, served.habits)
        return text.encode_chat(ready.messages, **{**ask.template, **ready.variables})
    if isinstance(ask.prompt, tuple):
        return ask.prompt
    return served.needs_text("pass token ids").encode(ask.prompt)
