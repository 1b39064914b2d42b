"""OpenAI's /v1/chat/completions: its body, its answer and its stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from swarm.gateway.answer import (
    AnswerPart,
    CallArgumentsPart,
    CallStartPart,
    ChoiceEndPart,
    ReasoningPart,
    TextPart,
    TokenCounts,
)
from swarm.gateway.apis.bodies import (
    COMMON_IGNORED_FIELDS,
    Biases,
    KeepSeconds,
    Number,
    Objects,
    Texts,
    check_deadline,
    check_extra,
    check_keep_s,
    check_speculation,
    to_biases,
    to_priority,
    to_sampling_params,
    to_stops,
)
from swarm.gateway.apis.other_servers import SharedBody, check_neutral, rest_or_length, to_grammar
from swarm.gateway.apis.reasoning import ConversationBody, chat_options
from swarm.gateway.apis.tokens import chat_logprobs, list_hops, usage_object
from swarm.gateway.apis.writer import EventTemplate, Json, SseEvent
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.completion_request import CompletionRequest, Tool, ToolOptions
from swarm.gateway.errors import ApiError, invalid_field, unsupported_field
from swarm.gateway.resume_state import ResumeState, offered_tools
from swarm.params import MAX_LOGPROBS, Grammar

DONE = SseEvent(b"[DONE]")
TEXT_FIELDS = ("content",)
REASONING_FIELDS = ("reasoning_content", "reasoning")  # clients of other servers read one or the other


class StreamOptions(BaseModel):
    """Options of a stream. ``continuous_usage_stats`` and other servers' options are rejected by name."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(ConversationBody, SharedBody):
    """Body of /v1/chat/completions."""

    api_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
    }

    model: str | None = None  # None: the first model that the key may use
    messages: Objects
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, Field(description="none, minimal, low, medium, high, xhigh or max.")] = None
    reasoning: Annotated[dict[str, Any] | None, Field(description="Swarm extension: effort, max_tokens, enabled.")] = (
        None
    )
    thinking: Annotated[
        bool | dict[str, Any] | None, Field(description="Swarm extension: a switch, or type and budget_tokens.")
    ] = None
    keep_s: KeepSeconds = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="vLLM's: false leaves out the beginning of an answer; true unless given.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="vLLM's: the answer continues the last message, which is the assistant's.")
    ] = None
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None

    def names(self) -> Mapping[str, str]:
        lengths = ("max_completion_tokens", "max_tokens", "n_predict")
        given = next((name for name in lengths if getattr(self, name) is not None), "max_tokens")
        return {**super().names(), "max_tokens": given}


DEFAULT_VALUES = {  # fields that are accepted with these values, which request the default behaviour
    "modalities": (["text"],),
    "verbosity": ("low", "medium", "high"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


def to_request(body: ChatBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a completion request. Raises ApiError."""
    for name, fine in DEFAULT_VALUES.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in fine:
            raise unsupported_field(name)
    check_extra(body, served, COMMON_IGNORED_FIELDS | DEFAULT_VALUES.keys() | check_neutral(body, served))
    check_stream_options(body.stream_options, served, stream=bool(body.stream))
    served.check_name(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs to be true")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise invalid_field("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    tools = parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = to_sampling_params(
        body,
        {
            "max_tokens": first_length(body.max_completion_tokens, body.max_tokens, field=body.names()["max_tokens"])
            or rest_or_length(body.n_predict)
            or REST_OF_CONTEXT,
            "temperature": served.temperature_of(body.temperature),
            "top_p": body.top_p,
            "n": body.n,
            "stop": to_stops(body.stop),
            "seed": body.seed,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": to_biases(body.logit_bias),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "repetition_penalty": body.penalty(),
        },
    )
    grammar = to_grammar(body)
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=_check_exclusive(grammar, tools, body.names()["grammar"]))
    return CompletionRequest(
        params=params,
        messages=tuple(body.messages),
        continues=_continues(body),
        tools=tools,
        template=_template_variables(body),
        reasoning=chat_options(body, body.reasoning_effort, body.reasoning, body.thinking),
        priority=to_priority(body),
        deadline_s=check_deadline(body),
        speculation=check_speculation(body),
        hops=bool(body.hops),
        show_special=body.skip_special_tokens is False,
        rest_limit=default_length(served, body.max_completion_tokens, body.max_tokens, body.n_predict),
        keep_s=check_keep_s(body.keep_s, body.stream),
        api_names=body.names(),
    )


def _continues(body: ChatBody) -> bool:
    """Whether the answer continues the last message. Raises ApiError."""
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise invalid_field("continue_final_message", "can't be combined with add_generation_prompt")
    if body.messages and body.messages[-1].get("role") != "assistant":
        raise invalid_field("continue_final_message", "the last message must be the assistant's")
    return True


def _template_variables(body: ChatBody) -> Mapping[str, Any]:
    variables = body.chat_template_kwargs or {}
    if body.add_generation_prompt is None:
        return variables
    return {**variables, "add_generation_prompt": body.add_generation_prompt}


def _check_exclusive(grammar: Grammar, tools: ToolOptions, field: str) -> Grammar:
    """Return the grammar. Raises ApiError if tools are offered, too: an answer follows one or the other."""
    if tools.are_offered:
        why = "an answer either has a format or may call tools: leave one of them out, or set tool_choice to none"
        raise invalid_field(field, why)
    return grammar


def check_stream_options(options: StreamOptions | None, served: ServedModel, *, stream: bool) -> None:
    if options is None:
        return
    if not stream:
        raise invalid_field("stream_options", "is only for streams")
    for name, value in (options.model_extra or {}).items():
        if value and not served.ignores_unknown_fields:
            raise unsupported_field(f"stream_options.{name}")


def first_length(*given: int | None, field: str = "max_tokens") -> int:
    """Return the first given length; REST_OF_CONTEXT if there is none."""
    for number in given:
        if number is not None:
            if number < 1:
                raise invalid_field(field, f"must be at least 1, not {number}")
            return number
    return REST_OF_CONTEXT


def default_length(served: ServedModel, *given: int | None) -> int | None:
    """Return the default for the length of an answer, if the request gives none and the gateway has one."""
    return served.defaults.max_tokens if all(length is None for length in given) else None


def parse_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolOptions:
    """Return the tools of a body. Raises ApiError."""
    offered = tuple(parse_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ()))
    if len({tool.name for tool in offered}) < len(offered):
        raise invalid_field("tools", "two tools have the same name")
    if choice is None or isinstance(choice, str):
        chosen = choice or "auto"
        if chosen not in ("auto", "none", "required"):
            raise invalid_field("tool_choice", f"must be auto, none, required or a tool, not {chosen!r}")
        if chosen == "required" and not offered:
            raise invalid_field("tool_choice", "no tools were given")
        return ToolOptions(offered, chosen, parallel=parallel is not False)  # type: ignore[arg-type]
    if choice.get("type") == "allowed_tools":
        return _restrict_tools(offered, choice.get("allowed_tools", choice), parallel is not False)
    name = _name_in(choice)
    if name is None or name not in {tool.name for tool in offered}:
        raise invalid_field("tool_choice", f"there is no tool {name!r}")
    return ToolOptions(offered, "named", name, parallel=parallel is not False)


def _name_in(given: object) -> str | None:
    """Return the tool that a choice names, in the form of /v1/chat/completions or of /v1/responses."""
    if not isinstance(given, dict):
        return None
    inner = given.get(str(given.get("type", "function")), given)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _restrict_tools(offered: tuple[Tool, ...], choice: Any, parallel: bool) -> ToolOptions:
    if not isinstance(choice, dict) or not isinstance(choice.get("tools"), list):
        raise invalid_field("tool_choice", "allowed_tools needs a list of tools")
    mode = choice.get("mode", "auto")
    names = {_name_in(each) for each in choice["tools"]}
    allowed = tuple(tool for tool in offered if tool.name in names)
    if mode not in ("auto", "required") or not allowed:
        raise invalid_field("tool_choice", "allowed_tools needs a mode (auto or required) and tools that were given")
    return ToolOptions(allowed, mode, parallel=parallel)


def parse_tool(given: Mapping[str, Any], place: str) -> Tool:
    """Return a function or a custom tool, given in the form of /v1/chat/completions or of /v1/responses."""
    kind = given.get("type", "function")
    if kind not in ("function", "custom"):
        raise unsupported_field(f"{place}.type", f"{kind!r}; tools are of type function or custom")
    inner = given.get(kind, given)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        raise invalid_field(f"{place}.name", "a tool needs a name of 1 to 128 characters")
    description = str(inner.get("description") or "")
    if kind == "custom":
        return Tool(name, description, custom=True, grammar=_format_of(inner.get("format"), place))
    parameters = inner.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise invalid_field(f"{place}.parameters", "must be a JSON schema")
    return Tool(name, description, parameters, strict=bool(inner.get("strict")))


def _format_of(given: Any, place: str) -> Grammar | None:
    """Return the grammar of a custom tool's text."""
    if not isinstance(given, dict) or given.get("type", "text") == "text":
        return None
    inner = given.get("grammar", given)
    if not isinstance(inner, dict):
        raise invalid_field(f"{place}.format", "must be an object")
    syntax, definition = inner.get("syntax"), inner.get("definition")
    if given.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise invalid_field(
            f"{place}.format", "must be text, or a grammar with a syntax (lark or regex) and a definition"
        )
    return Grammar("ebnf" if syntax == "lark" else "regex", definition)


def to_resume_state(body: ChatBody, request: CompletionRequest, created: int) -> ResumeState:
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return ResumeState(
        "chat",
        created,
        tools=offered_tools(request.tools),
        parallel=request.tools.parallel,
        usage=include_usage,
        logprobs=bool(body.logprobs),
        hops=request.hops,
        special=request.show_special,
    )


@dataclass(slots=True)
class _Message:
    """A choice's message, while it is assembled for a response without streaming."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    hops: list[Any] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    end: ChoiceEndPart | None = None


class ChatWriter:
    """Encodes one answer in the format of OpenAI's /v1/chat/completions."""

    def __init__(self, memo: ResumeState, served: ServedModel, request_id: str) -> None:
        self._memo, self._served = memo, served
        self._id = "chatcmpl-" + request_id
        self._custom = {tool.name for tool in memo.tools if tool.custom}
        self._started_choices: set[int] = set()  # choices whose first event has been returned
        self._templates: dict[tuple[int, str], EventTemplate] = {}  # by choice and field
        self._custom_calls: set[tuple[int, int]] = set()  # calls of custom tools, by choice and number

    def _base(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._memo.created, "model": self._served.name}

    def _text_event(self, part: TextPart | ReasoningPart) -> SseEvent:
        """Return the event of a text. Those without other fields make up most of a stream."""
        names = REASONING_FIELDS if isinstance(part, ReasoningPart) else TEXT_FIELDS
        if self._memo.logprobs or self._memo.hops:
            delta: Json = dict.fromkeys(names, part.text)
            if self._memo.hops:
                delta["hops"] = list_hops(part.pieces)
            return self._chunk(part.choice, delta, logprobs=self._logprobs(part))
        key = part.choice, names[0]
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = EventTemplate(
                self._body(part.choice, dict.fromkeys(names, EventTemplate.PLACEHOLDER))
            )
        return template.render(part.text)

    def _chunk(self, choice: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> SseEvent:
        return SseEvent(msgspec.json.encode(self._body(choice, delta, reason, logprobs)))

    def _body(self, choice: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> Json:
        body = self._base("chat.completion.chunk")
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        if self._memo.usage:
            body["usage"] = None
        return body

    def start_events(self, num_prompt: int = 0) -> Sequence[SseEvent]:
        return ()

    def write(self, part: AnswerPart) -> Sequence[SseEvent]:
        events = []
        if part.choice not in self._started_choices:
            self._started_choices.add(part.choice)
            events.append(self._chunk(part.choice, {"role": "assistant", "content": "", "refusal": None}))
        if isinstance(part, TextPart | ReasoningPart):
            events.append(self._text_event(part))
        elif isinstance(part, CallStartPart):
            events.append(self._call(part.choice, part.number, self._begin_call(part)))
        elif isinstance(part, CallArgumentsPart):
            events.append(self._call(part.choice, part.number, self._call_delta(part)))
        elif isinstance(part, ChoiceEndPart):
            events.append(self._chunk(part.choice, {}, part.reason))
        return events

    def _call(self, choice: int, number: int, fields: Json) -> SseEvent:
        return self._chunk(choice, {"tool_calls": [{"index": number, **fields}]})

    def _begin_call(self, part: CallStartPart) -> Json:
        if part.name in self._custom:
            self._custom_calls.add((part.choice, part.number))
            return {"id": part.call_id, "type": "custom", "custom": {"name": part.name, "input": ""}}
        return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def _call_delta(self, part: CallArgumentsPart) -> Json:
        if (part.choice, part.number) in self._custom_calls:
            return {"custom": {"input": part.text}}
        return {"function": {"arguments": part.text}}

    def _logprobs(self, part: TextPart | ReasoningPart) -> Json | None:
        if not self._memo.logprobs:
            return None
        return {"content": chat_logprobs(self._served, part.pieces), "refusal": None}

    def end_events(self, counts: TokenCounts) -> Sequence[SseEvent]:
        if not self._memo.usage:
            return (DONE,)
        body = {**self._base("chat.completion.chunk"), "choices": [], "usage": usage_object(counts)}
        return (SseEvent(msgspec.json.encode(body)), DONE)

    def error_events(self, problem: ApiError) -> Sequence[SseEvent]:
        return (SseEvent(json.dumps(problem.to_openai()).encode()), DONE)

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        messages: dict[int, _Message] = {}
        for part in parts:
            self._collect(messages.setdefault(part.choice, _Message()), part)
        choices = [self._choice(index, messages[index]) for index in sorted(messages)]
        return {**self._base("chat.completion"), "choices": choices, "usage": usage_object(counts)}

    def _collect(self, message: _Message, part: AnswerPart) -> None:
        if isinstance(part, TextPart | ReasoningPart):
            (message.text if isinstance(part, TextPart) else message.reasoning).append(part.text)
            if self._memo.logprobs:
                message.logprobs += chat_logprobs(self._served, part.pieces)
            if self._memo.hops:
                message.hops += list_hops(part.pieces)
        elif isinstance(part, CallStartPart):
            message.calls.append(self._begin_call(part))
        elif isinstance(part, CallArgumentsPart):
            call = message.calls[part.number]
            inner, name = (call["custom"], "input") if call["type"] == "custom" else (call["function"], "arguments")
            inner[name] += part.text
        elif isinstance(part, ChoiceEndPart):
            message.end = part

    def _choice(self, index: int, message: _Message) -> Json:
        text = "".join(message.text)
        body: Json = {"role": "assistant", "content": text or (None if message.calls else ""), "refusal": None}
        if message.reasoning:
            body |= dict.fromkeys(REASONING_FIELDS, "".join(message.reasoning))
        if message.calls:
            body["tool_calls"] = message.calls
        if self._memo.hops:
            body["hops"] = message.hops
        reason = None if message.end is None else message.end.reason
        logprobs = {"content": message.logprobs, "refusal": None} if self._memo.logprobs else None
        return {"index": index, "message": body, "logprobs": logprobs, "finish_reason": reason}
