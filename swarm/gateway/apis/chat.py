"""OpenAI's /v1/chat/completions: its body, its answer and its stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from swarm.gateway.answer import CallBegins, CallText, Counts, End, Part, Text
from swarm.gateway.apis.bodies import (
    BOOKKEEPING,
    Biases,
    Body,
    KeepSeconds,
    Number,
    Objects,
    Texts,
    biases,
    check_extra,
    deadline_of,
    keep_of,
    priority_of,
    response_grammar,
    sampling,
    stops,
)
from swarm.gateway.apis.tokens import chat_logprobs, hops_of, usage
from swarm.gateway.apis.writer import Json, Mould, Sse
from swarm.gateway.ask import Ask, Tool, ToolUse
from swarm.gateway.desk.desk import ALL_LEFT
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, unsupported, wrong
from swarm.gateway.memo import Memo, noted
from swarm.params import MAX_LOGPROBS, Grammar

DONE = Sse(b"[DONE]")


class StreamOptions(BaseModel):
    """Options of a stream. ``continuous_usage_stats`` and other servers' options are rejected by name."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    called: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "grammar": "response_format",
    }

    model: str
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
    response_format: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    keep_s: KeepSeconds = None
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None

    def names(self) -> Mapping[str, str]:
        if self.max_completion_tokens is None:
            return self.called
        return {**self.called, "max_tokens": "max_completion_tokens"}


HARMLESS = {  # fields that are accepted with these values, which request the default behaviour
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


def ask_of(body: ChatBody, served: Served) -> Ask:
    """Convert a body into a completion request. Raises ApiError."""
    for name, fine in HARMLESS.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in fine:
            raise unsupported(name)
    check_extra(body, BOOKKEEPING | HARMLESS.keys())
    check_stream_options(body.stream_options, bool(body.stream))
    served.check_name(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise wrong("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = sampling(
        body,
        {
            "max_tokens": length_of(
                body.max_completion_tokens, body.max_tokens, field=body.names().get("max_tokens", "max_tokens")
            ),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p,
            "n": body.n,
            "stop": stops(body.stop),
            "seed": body.seed,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": biases(body.logit_bias),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        },
    )
    grammar = response_grammar(body.response_format)
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=_alone(grammar, tools))
    return Ask(
        params=params,
        messages=tuple(body.messages),
        tools=tools,
        template=body.chat_template_kwargs or {},
        priority=priority_of(body),
        deadline_s=deadline_of(body),
        hops=bool(body.hops),
        keep_s=keep_of(body.keep_s, body.stream),
        called=body.names(),
    )


def _alone(grammar: Grammar, tools: ToolUse) -> Grammar:
    """Return the grammar. Raises ApiError if tools are offered, too: an answer follows one or the other."""
    if tools.offered:
        why = "an answer either has a format or may call tools: leave one of them out, or set tool_choice to none"
        raise wrong("response_format", why)
    return grammar


def check_stream_options(options: StreamOptions | None, stream: bool) -> None:
    if options is None:
        return
    if not stream:
        raise wrong("stream_options", "is only for streams")
    for name, value in (options.model_extra or {}).items():
        if value:
            raise unsupported(f"stream_options.{name}")


def length_of(*given: int | None, field: str = "max_tokens") -> int:
    """Return the first given length; REST_OF_CONTEXT if there is none."""
    for number in given:
        if number is not None:
            if number < 1:
                raise wrong(field, f"must be at least 1, not {number}")
            return number
    return ALL_LEFT


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolUse:
    """Return the tools of a body. Raises ApiError."""
    offered = tuple(tool_of(tool, f"tools[{number}]") for number, tool in enumerate(tools or ()))
    if len({tool.name for tool in offered}) < len(offered):
        raise wrong("tools", "two tools have the same name")
    if choice is None or isinstance(choice, str):
        chosen = choice or "auto"
        if chosen not in ("auto", "none", "required"):
            raise wrong("tool_choice", f"must be auto, none, required or a tool, not {chosen!r}")
        if chosen == "required" and not offered:
            raise wrong("tool_choice", "no tools were given")
        return ToolUse(offered, chosen, parallel=parallel is not False)  # type: ignore[arg-type]
    if choice.get("type") == "allowed_tools":
        return _allowed(offered, choice.get("allowed_tools", choice), parallel is not False)
    name = _name_in(choice)
    if name is None or name not in {tool.name for tool in offered}:
        raise wrong("tool_choice", f"there is no tool {name!r}")
    return ToolUse(offered, "named", name, parallel=parallel is not False)


def _name_in(given: object) -> str | None:
    """Return the tool that a choice names, in the form of /v1/chat/completions or of /v1/responses."""
    if not isinstance(given, dict):
        return None
    inner = given.get(str(given.get("type", "function")), given)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _allowed(offered: tuple[Tool, ...], choice: Any, parallel: bool) -> ToolUse:
    if not isinstance(choice, dict) or not isinstance(choice.get("tools"), list):
        raise wrong("tool_choice", "allowed_tools needs a list of tools")
    mode = choice.get("mode", "auto")
    names = {_name_in(each) for each in choice["tools"]}
    allowed = tuple(tool for tool in offered if tool.name in names)
    if mode not in ("auto", "required") or not allowed:
        raise wrong("tool_choice", "allowed_tools needs a mode (auto or required) and tools that were given")
    return ToolUse(allowed, mode, parallel=parallel)


def tool_of(given: Mapping[str, Any], place: str) -> Tool:
    """Return a function or a custom tool, given in the form of /v1/chat/completions or of /v1/responses."""
    kind = given.get("type", "function")
    if kind not in ("function", "custom"):
        raise unsupported(f"{place}.type", f"{kind!r}; tools are of type function or custom")
    inner = given.get(kind, given)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        raise wrong(f"{place}.name", "a tool needs a name of 1 to 128 characters")
    description = str(inner.get("description") or "")
    if kind == "custom":
        return Tool(name, description, custom=True, grammar=_format_of(inner.get("format"), place))
    parameters = inner.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong(f"{place}.parameters", "must be a JSON schema")
    return Tool(name, description, parameters, strict=bool(inner.get("strict")))


def _format_of(given: Any, place: str) -> Grammar | None:
    """Return the grammar of a custom tool's text."""
    if not isinstance(given, dict) or given.get("type", "text") == "text":
        return None
    inner = given.get("grammar", given)
    if not isinstance(inner, dict):
        raise wrong(f"{place}.format", "must be an object")
    syntax, definition = inner.get("syntax"), inner.get("definition")
    if given.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise wrong(f"{place}.format", "must be text, or a grammar with a syntax (lark or regex) and a definition")
    return Grammar("ebnf" if syntax == "lark" else "regex", definition)


def memo_of(body: ChatBody, ask: Ask, created: int) -> Memo:
    wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Memo(
        "chat",
        created,
        tools=noted(ask.tools),
        parallel=ask.tools.parallel,
        usage=wanted,
        logprobs=bool(body.logprobs),
        hops=ask.hops,
    )


@dataclass(slots=True)
class _Message:
    """A choice's message, while it is assembled for a response without streaming."""

    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    hops: list[Any] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    end: End | None = None


class ChatWriter:
    """Encodes one answer in the format of OpenAI's /v1/chat/completions."""

    def __init__(self, memo: Memo, served: Served, request_id: str) -> None:
        self._memo, self._served = memo, served
        self._id = "chatcmpl-" + request_id
        self._custom = {tool.name for tool in memo.tools if tool.custom}
        self._begun: set[int] = set()  # choices whose first event has been returned
        self._moulds: dict[int, Mould] = {}  # by choice
        self._customs: set[tuple[int, int]] = set()  # calls of custom tools, by choice and number

    def _base(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._memo.created, "model": self._served.name}

    def _said(self, part: Text) -> Sse:
        """Return the event of a text without other fields, which make up most of a stream."""
        mould = self._moulds.get(part.choice)
        if mould is None:
            mould = self._moulds[part.choice] = Mould(self._body(part.choice, {"content": Mould.HOLE}))
        return mould.cast(part.text)

    def _chunk(self, choice: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> Sse:
        return Sse(msgspec.json.encode(self._body(choice, delta, reason, logprobs)))

    def _body(self, choice: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> Json:
        body = self._base("chat.completion.chunk")
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        if self._memo.usage:
            body["usage"] = None
        return body

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        return ()

    def write(self, part: Part) -> Sequence[Sse]:
        events = []
        if part.choice not in self._begun:
            self._begun.add(part.choice)
            events.append(self._chunk(part.choice, {"role": "assistant", "content": "", "refusal": None}))
        if isinstance(part, Text) and not self._memo.logprobs and not self._memo.hops:
            events.append(self._said(part))
        elif isinstance(part, Text):
            delta: Json = {"content": part.text}
            if self._memo.hops:
                delta["hops"] = hops_of(part.pieces)
            events.append(self._chunk(part.choice, delta, logprobs=self._logprobs(part)))
        elif isinstance(part, CallBegins):
            events.append(self._call(part.choice, part.number, self._begin_call(part)))
        elif isinstance(part, CallText):
            events.append(self._call(part.choice, part.number, self._more(part)))
        elif isinstance(part, End):
            events.append(self._chunk(part.choice, {}, part.reason))
        return events

    def _call(self, choice: int, number: int, fields: Json) -> Sse:
        return self._chunk(choice, {"tool_calls": [{"index": number, **fields}]})

    def _begin_call(self, part: CallBegins) -> Json:
        if part.name in self._custom:
            self._customs.add((part.choice, part.number))
            return {"id": part.call_id, "type": "custom", "custom": {"name": part.name, "input": ""}}
        return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def _more(self, part: CallText) -> Json:
        if (part.choice, part.number) in self._customs:
            return {"custom": {"input": part.text}}
        return {"function": {"arguments": part.text}}

    def _logprobs(self, part: Text) -> Json | None:
        if not self._memo.logprobs:
            return None
        return {"content": chat_logprobs(self._served, part.pieces), "refusal": None}

    def tail(self, counts: Counts) -> Sequence[Sse]:
        if not self._memo.usage:
            return (DONE,)
        body = {**self._base("chat.completion.chunk"), "choices": [], "usage": usage(counts)}
        return (Sse(msgspec.json.encode(body)), DONE)

    def failed(self, problem: Problem) -> Sequence[Sse]:
        return (Sse(json.dumps(problem.openai()).encode()), DONE)

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        messages: dict[int, _Message] = {}
        for part in parts:
            self._collect(messages.setdefault(part.choice, _Message()), part)
        choices = [self._choice(index, messages[index]) for index in sorted(messages)]
        return {**self._base("chat.completion"), "choices": choices, "usage": usage(counts)}

    def _collect(self, message: _Message, part: Part) -> None:
        if isinstance(part, Text):
            message.text.append(part.text)
            if self._memo.logprobs:
                message.logprobs += chat_logprobs(self._served, part.pieces)
            if self._memo.hops:
                message.hops += hops_of(part.pieces)
        elif isinstance(part, CallBegins):
            message.calls.append(self._begin_call(part))
        elif isinstance(part, CallText):
            call = message.calls[part.number]
            inner, name = (call["custom"], "input") if call["type"] == "custom" else (call["function"], "arguments")
            inner[name] += part.text
        elif isinstance(part, End):
            message.end = part

    def _choice(self, index: int, message: _Message) -> Json:
        text = "".join(message.text)
        said: Json = {"role": "assistant", "content": text or (None if message.calls else ""), "refusal": None}
        if message.calls:
            said["tool_calls"] = message.calls
        if self._memo.hops:
            said["hops"] = message.hops
        reason = None if message.end is None else message.end.reason
        logprobs = {"content": message.logprobs, "refusal": None} if self._memo.logprobs else None
        return {"index": index, "message": said, "logprobs": logprobs, "finish_reason": reason}
