"""Request body of OpenAI's /v1/responses. Pure. ``items`` converts the input, ``response_writer`` encodes the
answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from swarm.gateway.apis.bodies import (
    COMMON_IGNORED_FIELDS,
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
    to_stops,
)
from swarm.gateway.apis.chat import StreamOptions, check_stream_options, default_length, first_length, parse_tools
from swarm.gateway.apis.items import to_messages
from swarm.gateway.apis.reasoning import ConversationBody, to_reasoning_options
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.gateway.resume_state import ResumeState, offered_tools

LOGPROBS = "message.output_text.logprobs"
# Accepted values of ``include``. All but the first concern features that do not exist here.
INCLUDE_VALUES = frozenset({
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
})  # fmt: skip

# Fields that are rejected unless empty, with the alternative to name.
REJECTED_FIELDS = {
    "previous_response_id": "answers can't be continued by id: send the whole conversation as input",
    "conversation": "no conversations are stored here: send the whole conversation as input",
    "background": "use stream and keep_s instead, and resume with Last-Event-ID",
    "prompt": "no prompts are stored here: send instructions and input",
    "hops": "/v1/chat/completions and /v1/completions report them",
}

# Accepted and ignored; those that OpenAI's answer contains are repeated in ours.
IGNORED_FIELDS = COMMON_IGNORED_FIELDS | {"max_tool_calls"}


class InputTokensBody(ConversationBody):
    """Body of /v1/responses/input_tokens: the fields of /v1/responses."""

    api_names: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "grammar": "text.format",
    }

    model: str | None = None
    input: str | Objects | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: int | None = None
    include: Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: Annotated[dict[str, Any] | None, Field(description="format: text, json_object or json_schema.")] = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[str | None, Field(description="Only disabled.")] = None
    previous_response_id: Annotated[str | None, Field(description="Rejected: send the whole conversation.")] = None
    background: Annotated[bool | None, Field(description="Rejected.")] = None
    store: Annotated[bool | None, Field(description="Unless false, GET /v1/responses/ID returns it for a while.")] = (
        None
    )
    metadata: Annotated[dict[str, Any] | None, Field(description="Repeated in the answer.")] = None
    reasoning: Annotated[dict[str, Any] | None, Field(description="effort; summary: thinking comes as one.")] = None
    seed: Annotated[int | None, Field(description="Swarm extension.")] = None
    stop: Annotated[str | Texts | None, Field(description="Swarm extension.")] = None
    presence_penalty: Annotated[Number | None, Field(description="Swarm extension.")] = None
    frequency_penalty: Annotated[Number | None, Field(description="Swarm extension.")] = None
    keep_s: KeepSeconds = None


class ResponseBody(InputTokensBody):
    """Body of /v1/responses."""

    model: str
    input: str | Objects


def to_request(body: InputTokensBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a completion request. Raises ApiError."""
    _check_fields(body, served)
    served.check_name(body.model)
    tools = parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = response_grammar(_format_of(body), "text.format")
    if tools.choice in ("required", "named"):
        grammar = None  # the answer is a call, which has no text
    params = to_sampling_params(
        body,
        {
            "max_tokens": first_length(body.max_output_tokens, field="max_output_tokens"),
            "temperature": served.temperature_of(body.temperature),
            "top_p": body.top_p,
            "seed": body.seed,
            "stop": to_stops(body.stop),
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logprobs": (body.top_logprobs or 0) if _wants_logprobs(body) else None,
            "grammar": grammar,
        },
    )
    messages = to_messages(body.input or "")
    if body.instructions:
        messages = ({"role": "system", "content": body.instructions}, *messages)
    return CompletionRequest(
        params=params,
        messages=messages,
        tools=tools,
        template=body.chat_template_kwargs or {},
        reasoning=to_reasoning_options(
            body,
            ("reasoning.effort", (body.reasoning or {}).get("effort")),
            budget=("reasoning.max_tokens", (body.reasoning or {}).get("max_tokens")),
        ),
        priority=to_priority(body),
        deadline_s=check_deadline(body),
        speculation=check_speculation(body),
        rest_limit=default_length(served, body.max_output_tokens),
        keep_s=check_keep_s(body.keep_s, body.stream),
        api_names=body.names(),
    )


def _check_fields(body: InputTokensBody, served: ServedModel) -> None:
    for name, instead in REJECTED_FIELDS.items():
        if getattr(body, name, None) or (body.model_extra or {}).get(name):
            raise unsupported_field(name, instead)
    check_extra(body, served, IGNORED_FIELDS | REJECTED_FIELDS.keys())
    check_stream_options(body.stream_options, served, stream=bool(body.stream))
    if body.truncation not in (None, "disabled"):
        raise unsupported_field("truncation", "only disabled: shorten the input yourself")
    for name in body.include or ():
        if name not in INCLUDE_VALUES:
            raise unsupported_field("include", f"{name!r} is not known; known are {', '.join(sorted(INCLUDE_VALUES))}")


def _format_of(body: InputTokensBody) -> Mapping[str, Any] | None:
    for name, value in (body.text or {}).items():
        if name not in ("format", "verbosity") and value is not None:
            raise unsupported_field(f"text.{name}")
    given = (body.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise invalid_field("text.format", "must be an object with a type")
    return given


def _wants_logprobs(body: InputTokensBody) -> bool:
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def to_resume_state(body: ResponseBody, request: CompletionRequest, created: int) -> ResumeState:
    """Return the data needed to write the answer. Raises ApiError for a field that cannot be repeated in the answer."""
    repeated = _repeated_fields(body, request)
    for name, value in repeated.items():
        encode_json(value, name)
    return ResumeState(
        "responses",
        created,
        tools=offered_tools(request.tools),
        parallel=request.tools.parallel,
        logprobs=request.params.logprobs is not None,
        told=repeated,
    )


def _repeated_fields(body: ResponseBody, request: CompletionRequest) -> Json:
    """Return the fields of the answer that repeat the request."""
    extra, reasoning, params = body.model_extra or {}, body.reasoning or {}, request.params
    return {
        "background": False,
        "frequency_penalty": params.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": extra.get("max_tool_calls"),
        "metadata": body.metadata or {},
        "parallel_tool_calls": request.tools.parallel,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": extra.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": extra.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": _format_of(body) or {"type": "text"}, "verbosity": (body.text or {}).get("verbosity")},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_complete_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": extra.get("user"),
    }


def _complete_tool(given: Json) -> Json:
    """Return a tool with all fields that OpenAI's answers have."""
    if given.get("type") == "custom":
        return {"format": {"type": "text"}, **given}
    return {"description": None, "parameters": None, "strict": False, **given}


def is_stored(memo: ResumeState) -> bool:
    """Whether an answer may be retrieved later, which OpenAI's clients expect unless they send ``store: false``."""
    return memo.api == "responses" and bool(memo.told.get("store"))
