"""Request bodies of Anthropic's /v1/messages. Pure. ``anthropic_writer`` encodes the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from swarm.gateway.apis.bodies import (
    KeepSeconds,
    Number,
    Objects,
    Texts,
    check_deadline,
    check_extra,
    check_keep_s,
    check_speculation,
    encode_json,
    response_grammar,
    to_priority,
    to_sampling_params,
)
from swarm.gateway.apis.chat import parse_tools
from swarm.gateway.apis.reasoning import ConversationBody, read_thinking, to_reasoning_options
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.completion_request import CompletionRequest, ReasoningOptions, ToolOptions
from swarm.gateway.errors import ThreadUnsupported, invalid_field, unsupported_field
from swarm.gateway.images import image_part
from swarm.gateway.resume_state import ResumeState, offered_tools
from swarm.params import SamplingParams

# Accepted and ignored.
IGNORED_FIELDS = frozenset({
    "metadata",
    "service_tier",
    "cache_control",
    "betas",
    "anthropic_beta",
    "anthropic_version",
    "context_management",
    "diagnostics",
    "inference_geo",
    "speed",
})  # fmt: skip

_SWITCHES = {"disabled": False, "enabled": True, "adaptive": True, "between_tools": True}  # types of thinking


class CountBody(ConversationBody):
    """Body of /v1/messages/count_tokens."""

    api_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "grammar": "output_config.format",
    }

    model: str
    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Annotated[dict[str, Any] | None, Field(description="type, budget_tokens, display.")] = None
    output_config: Annotated[dict[str, Any] | None, Field(description="format: a json_schema; effort.")] = None


class MessageBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: Texts | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Annotated[int | None, Field(description="Swarm extension.")] = None
    stream: bool | None = None
    keep_s: KeepSeconds = None


def to_request(body: MessageBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a completion request. Raises ApiError."""
    _check_fields(body, served)
    if body.max_tokens < 1:
        raise invalid_field("max_tokens", f"must be at least 1, not {body.max_tokens}")
    tools = to_tool_options(body.tools, body.tool_choice)
    grammar = _parse_grammar(body.output_config)
    if grammar is not None and tools.choice in ("required", "named"):
        raise invalid_field("output_config.format", "can't be combined with a required tool call")
    messages = to_messages(body.system, body.messages)
    if grammar is not None and _is_prefilled(messages):
        raise invalid_field("output_config.format", "can't be combined with a last message of the assistant")
    params = to_sampling_params(
        body,
        {
            "max_tokens": body.max_tokens,
            "temperature": served.temperature_of(body.temperature),
            "top_p": body.top_p,
            "stop": tuple(body.stop_sequences or ()),
            "seed": body.seed,
            "grammar": grammar,
        },
    )
    return replace(
        _conversation(body, params, messages, tools),
        priority=to_priority(body),
        deadline_s=check_deadline(body),
        speculation=check_speculation(body),
        keep_s=check_keep_s(body.keep_s, body.stream),
        api_names=body.names(),
    )


def to_count_request(body: CountBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a request whose prompt is only counted. Raises ApiError."""
    _check_fields(body, served)
    tools = to_tool_options(body.tools, body.tool_choice)
    params = to_sampling_params(body, {"max_tokens": REST_OF_CONTEXT})
    return _conversation(body, params, to_messages(body.system, body.messages), tools)


def _conversation(
    body: CountBody, params: SamplingParams, messages: tuple[Json, ...], tools: ToolOptions
) -> CompletionRequest:
    """Return a request with all that its prompt depends on."""
    return CompletionRequest(
        params=params,
        messages=messages,
        continues=_is_prefilled(messages),
        tools=tools,
        template=body.chat_template_kwargs or {},
        reasoning=_reasoning_options(body),
    )


def _is_prefilled(messages: Sequence[Json]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def _reasoning_options(body: CountBody) -> ReasoningOptions:
    enabled, budget = (None, ("", None)) if body.thinking is None else read_thinking(body.thinking, _SWITCHES)
    effort = ("output_config.effort", (body.output_config or {}).get("effort"))
    return to_reasoning_options(body, effort, enabled=enabled, budget=budget)


def _check_fields(body: CountBody, served: ServedModel) -> None:
    if (body.model_extra or {}).get("thread") is not None:  # never ignored: its next body has only new messages
        raise ThreadUnsupported()
    check_extra(body, served, IGNORED_FIELDS)
    if body.hops:
        raise unsupported_field("hops", "/v1/chat/completions and /v1/completions report them")
    served.check_name(body.model)


def _parse_grammar(config: Mapping[str, Any] | None) -> Any:
    for name, value in (config or {}).items():
        if name not in ("format", "effort") and value is not None:
            raise unsupported_field(f"output_config.{name}")
    given = (config or {}).get("format")
    if given is not None and (not isinstance(given, dict) or given.get("type") != "json_schema"):
        raise invalid_field("output_config.format", "must be of type json_schema")
    return response_grammar(given, "output_config.format")


# --- tools


def to_tool_options(given: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> ToolOptions:
    """Return the tools of a body. Raises ApiError."""
    tools = [_convert_tool(tool, f"tools[{number}]") for number, tool in enumerate(given or ())]
    choice = choice or {}
    wanted = choice.get("type", "auto")
    parallel = not choice.get("disable_parallel_tool_use")
    if wanted == "tool":
        return parse_tools(tools, {"type": "function", "name": choice.get("name")}, parallel)
    if wanted not in ("auto", "any", "none"):
        raise invalid_field("tool_choice.type", f"must be auto, any, tool or none, not {wanted!r}")
    return parse_tools(tools, "required" if wanted == "any" else str(wanted), parallel)


def _convert_tool(given: Mapping[str, Any], place: str) -> Json:
    kind = given.get("type") or "custom"
    if kind != "custom":
        raise unsupported_field(
            f"{place}.type", f"{kind!r} runs at Anthropic; tools here are described by an input_schema"
        )
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise invalid_field(f"{place}.input_schema", "must be a JSON schema")
    described = {"name": given.get("name"), "description": given.get("description"), "parameters": schema}
    return {"type": "function", "function": {**described, "strict": bool(given.get("strict"))}}


# --- the conversation


def to_messages(system: object, given: Sequence[Mapping[str, Any]]) -> tuple[Json, ...]:
    """Convert the conversation into chat messages. Raises ApiError."""
    messages: list[Json] = []
    if text := _text_of(system, "system"):
        messages.append({"role": "system", "content": text})
    for number, message in enumerate(given):
        messages += _convert_message(message, f"messages[{number}]")
    if not given:
        raise invalid_field("messages", "at least one message is needed")
    return tuple(messages)


def _convert_message(message: Mapping[str, Any], place: str) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid_field(f"{place}.role", f"must be user or assistant, not {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid_field(f"{place}.content", "must be a text or a list of blocks")
    blocks = [
        (_check_block(block, at), at) for number, block in enumerate(content) for at in (f"{place}.content[{number}]",)
    ]
    if role == "assistant":
        return _assistant_messages(blocks)
    return _user_messages(role, blocks)


def _check_block(block: object, place: str) -> Json:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise invalid_field(place, "must be an object with a type")
    return block


def _assistant_messages(blocks: Sequence[tuple[Json, str]]) -> list[Json]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block, place in blocks:
        if block["type"] == "tool_use":
            calls.append(_convert_call(block, place))
        elif block["type"] == "thinking":
            thoughts.append(_thinking_text(block, place))
        elif block["type"] != "redacted_thinking":  # another model's, and encrypted
            texts.append(_block_text(block, place))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return [message] if texts or calls else []


def _thinking_text(block: Json, place: str) -> str:
    text = block.get("thinking", "")
    if not isinstance(text, str):
        raise invalid_field(f"{place}.thinking", "must be a text")
    return text


def _convert_call(block: Json, place: str) -> Json:
    for name, kind in (("id", str), ("name", str), ("input", dict)):
        if not isinstance(block.get(name), kind):
            raise invalid_field(f"{place}.{name}", "must be an object" if kind is dict else "must be a text")
    arguments = encode_json(block["input"], f"{place}.input")
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _user_messages(role: str, blocks: Sequence[tuple[Json, str]]) -> list[Json]:
    """Convert a user's blocks: results of tools come first, each as a message of its own, then texts and images as one
    message."""
    results: list[Json] = []
    texts: list[str] = []
    parts: list[Json] = []  # texts and images, if there are images
    has_images = any(block["type"] == "image" for block, _ in blocks)
    for block, place in blocks:
        if block["type"] == "image":
            parts.append(_convert_image(block, place))
        elif block["type"] == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise invalid_field(f"{place}.tool_use_id", "must be a text")
            text = _text_of(block.get("content"), f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            texts.append(_block_text(block, place))
            parts.append({"type": "text", "text": texts[-1]})
    content = parts if has_images else "\n".join(texts)
    return [*results, *([{"role": role, "content": content}] if texts or has_images or not results else [])]


def _convert_image(block: Json, place: str) -> Json:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64" or not isinstance(source.get("data"), str):
        raise unsupported_field(f"{place}.source", "images are not fetched here: send them as base64, with data")
    return image_part(f"data:{source.get('media_type') or ''};base64,{source['data']}")


def _text_of(content: object, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid_field(place, "must be a text or a list of blocks")
    blocks = ((block, f"{place}[{number}]") for number, block in enumerate(content))
    return "\n".join(_block_text(_check_block(block, at), at) for block, at in blocks)


def _block_text(block: Json, place: str) -> str:
    source = block.get("source")
    if block["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        text = source.get("data")
    elif block["type"] == "text":
        text = block.get("text")
    else:
        raise unsupported_field(f"{place}.type", f"{block['type']!r}; only texts, and users' images, are read here")
    if not isinstance(text, str):
        raise invalid_field(f"{place}.text", "must be a text")
    return text


def to_resume_state(body: MessageBody, request: CompletionRequest, created: int) -> ResumeState:
    display = (body.thinking or {}).get("display")
    return ResumeState(
        "messages",
        created,
        tools=offered_tools(request.tools),
        parallel=request.tools.parallel,
        told={"thinking_display": "omitted"} if display == "omitted" else {},
    )
