"""Request bodies of Anthropic's /v1/messages. Pure. ``anthropic_writer`` encodes the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from swarm.gateway.apis.bodies import (
    Body,
    KeepSeconds,
    Number,
    Objects,
    Texts,
    as_json,
    check_extra,
    deadline_of,
    keep_of,
    priority_of,
    response_grammar,
    sampling,
)
from swarm.gateway.apis.chat import tool_use
from swarm.gateway.apis.writer import Json
from swarm.gateway.ask import Ask, ToolUse
from swarm.gateway.desk.desk import ALL_LEFT
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import unsupported, wrong
from swarm.gateway.memo import Memo, noted

# Accepted and ignored. Thinking is among them: models served here mark no thoughts, so none are returned.
IGNORED = frozenset({
    "metadata",
    "service_tier",
    "cache_control",
    "thinking",
    "betas",
    "anthropic_beta",
    "anthropic_version",
    "context_management",
    "diagnostics",
    "inference_geo",
    "speed",
})  # fmt: skip

THOUGHTS = ("thinking", "redacted_thinking")  # blocks of a history that are dropped
THINKING = ("disabled", "enabled", "adaptive")


class CountBody(Body):
    """Body of /v1/messages/count_tokens."""

    called: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "grammar": "output_config.format",
    }

    model: str
    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Annotated[dict[str, Any] | None, Field(description="Accepted; no thinking is returned.")] = None
    output_config: Annotated[dict[str, Any] | None, Field(description="format: a json_schema.")] = None


class MessageBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: Texts | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Annotated[int | None, Field(description="Swarm extension.")] = None
    stream: bool | None = None
    keep_s: KeepSeconds = None


def ask_of(body: MessageBody, served: Served) -> Ask:
    """Convert a body into a completion request. Raises ApiError."""
    _refuse(body, served)
    if body.max_tokens < 1:
        raise wrong("max_tokens", f"must be at least 1, not {body.max_tokens}")
    tools = tools_of(body.tools, body.tool_choice)
    grammar = _grammar_of(body.output_config)
    if grammar is not None and tools.choice in ("required", "named"):
        raise wrong("output_config.format", "can't be combined with a required tool call")
    params = sampling(
        body,
        {
            "max_tokens": body.max_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p,
            "stop": tuple(body.stop_sequences or ()),
            "seed": body.seed,
            "grammar": grammar,
        },
    )
    return Ask(
        params=params,
        messages=messages_of(body.system, body.messages),
        tools=tools,
        template=body.chat_template_kwargs or {},
        priority=priority_of(body),
        deadline_s=deadline_of(body),
        keep_s=keep_of(body.keep_s, body.stream),
        called=body.names(),
    )


def count_of(body: CountBody, served: Served) -> Ask:
    """Convert a body into a request whose prompt is only counted. Raises ApiError."""
    _refuse(body, served)
    tools = tools_of(body.tools, body.tool_choice)
    params = sampling(body, {"max_tokens": ALL_LEFT})
    messages = messages_of(body.system, body.messages)
    return Ask(params=params, messages=messages, tools=tools, template=body.chat_template_kwargs or {})


def _refuse(body: CountBody, served: Served) -> None:
    check_extra(body, IGNORED)
    if body.hops:
        raise unsupported("hops", "/v1/chat/completions and /v1/completions report them")
    if body.thinking is not None and body.thinking.get("type") not in THINKING:
        raise wrong("thinking.type", f"must be one of {', '.join(THINKING)}")
    served.check_name(body.model)


def _grammar_of(config: Mapping[str, Any] | None) -> Any:
    for name, value in (config or {}).items():
        if name not in ("format", "effort") and value is not None:
            raise unsupported(f"output_config.{name}")
    given = (config or {}).get("format")
    if given is not None and (not isinstance(given, dict) or given.get("type") != "json_schema"):
        raise wrong("output_config.format", "must be of type json_schema")
    return response_grammar(given, "output_config.format")


# --- tools


def tools_of(given: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> ToolUse:
    """Return the tools of a body. Raises ApiError."""
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(given or ())]
    choice = choice or {}
    wanted = choice.get("type", "auto")
    parallel = not choice.get("disable_parallel_tool_use")
    if wanted == "tool":
        return tool_use(tools, {"type": "function", "name": choice.get("name")}, parallel)
    if wanted not in ("auto", "any", "none"):
        raise wrong("tool_choice.type", f"must be auto, any, tool or none, not {wanted!r}")
    return tool_use(tools, "required" if wanted == "any" else str(wanted), parallel)


def _tool(given: Mapping[str, Any], place: str) -> Json:
    kind = given.get("type") or "custom"
    if kind != "custom":
        raise unsupported(f"{place}.type", f"{kind!r} runs at Anthropic; tools here are described by an input_schema")
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong(f"{place}.input_schema", "must be a JSON schema")
    described = {"name": given.get("name"), "description": given.get("description"), "parameters": schema}
    return {"type": "function", "function": {**described, "strict": bool(given.get("strict"))}}


# --- the conversation


def messages_of(system: object, given: Sequence[Mapping[str, Any]]) -> tuple[Json, ...]:
    """Convert the conversation into chat messages. Raises ApiError."""
    messages: list[Json] = []
    if text := _text_of(system, "system"):
        messages.append({"role": "system", "content": text})
    for number, message in enumerate(given):
        messages += _message(message, f"messages[{number}]")
    if not given:
        raise wrong("messages", "at least one message is needed")
    if messages and messages[-1]["role"] == "assistant":
        raise unsupported("messages", "the last message is the assistant's, and answers can't be prefilled")
    return tuple(messages)


def _message(message: Mapping[str, Any], place: str) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{place}.role", f"must be user or assistant, not {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong(f"{place}.content", "must be a text or a list of blocks")
    blocks = [(_block(block, at), at) for number, block in enumerate(content) for at in (f"{place}.content[{number}]",)]
    if role == "assistant":
        return _said(blocks)
    return _asked(role, blocks)


def _block(block: object, place: str) -> Json:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise wrong(place, "must be an object with a type")
    return block


def _said(blocks: Sequence[tuple[Json, str]]) -> list[Json]:
    texts: list[str] = []
    calls: list[Json] = []
    for block, place in blocks:
        if block["type"] == "tool_use":
            calls.append(_call(block, place))
        elif block["type"] not in THOUGHTS:
            texts.append(_block_text(block, place))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [message] if texts or calls else []


def _call(block: Json, place: str) -> Json:
    for name, kind in (("id", str), ("name", str), ("input", dict)):
        if not isinstance(block.get(name), kind):
            raise wrong(f"{place}.{name}", "must be an object" if kind is dict else "must be a text")
    arguments = as_json(block["input"], f"{place}.input")
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _asked(role: str, blocks: Sequence[tuple[Json, str]]) -> list[Json]:
    """Convert a user's blocks: results of tools come first, each as a message of its own, then the texts as one
    message."""
    results: list[Json] = []
    texts: list[str] = []
    for block, place in blocks:
        if block["type"] == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise wrong(f"{place}.tool_use_id", "must be a text")
            text = _text_of(block.get("content"), f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            texts.append(_block_text(block, place))
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts or not results else [])]


def _text_of(content: object, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(place, "must be a text or a list of blocks")
    found = ((block, f"{place}[{number}]") for number, block in enumerate(content))
    return "\n".join(_block_text(_block(block, at), at) for block, at in found)


def _block_text(block: Json, place: str) -> str:
    source = block.get("source")
    if block["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        text = source.get("data")
    elif block["type"] == "text":
        text = block.get("text")
    else:
        raise unsupported(f"{place}.type", f"{block['type']!r}; models here read text only")
    if not isinstance(text, str):
        raise wrong(f"{place}.text", "must be a text")
    return text


def memo_of(body: MessageBody, ask: Ask, created: int) -> Memo:
    return Memo("messages", created, tools=noted(ask.tools), parallel=ask.tools.parallel)
