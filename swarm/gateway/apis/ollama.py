"""Request bodies of Ollama's /api/chat and /api/generate. Pure. ``ollama_writer`` encodes the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.gateway.apis.bodies import (
    Body,
    Ids,
    Number,
    Objects,
    Texts,
    check_deadline,
    check_extra,
    check_speculation,
    encode_json,
    json_grammar,
    to_priority,
    to_sampling_params,
    to_stops,
)
from swarm.gateway.apis.chat import default_length, parse_tools
from swarm.gateway.apis.reasoning import check_budget
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.completion_request import CompletionRequest, ReasoningOptions, ToolOptions
from swarm.gateway.errors import ApiError, invalid_field, unsupported_field
from swarm.gateway.images import image_part
from swarm.gateway.reasoning.switches import EFFORTS
from swarm.gateway.resume_state import ResumeState, offered_tools
from swarm.params import Grammar, SamplingParams

# Options that are accepted and ignored: they concern another engine's memory and processors.
IGNORED_OPTIONS = frozenset({
    "embedding_only",
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_gqa",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
})  # fmt: skip

# Samplers that Ollama has, with the values that switch them off. Their details have no effect then.
NEUTRAL_OPTIONS: Mapping[str, float] = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
_DETAILS = frozenset({"mirostat_eta", "mirostat_tau", "penalize_newline"})
NO_TOOLS = ToolOptions()
RANDOM_SEED = -1


class OllamaOptions(Body):
    """The field ``options``. Swarm's own fields are options, too."""

    num_predict: Annotated[int | None, Field(description="Below 1: up to the context's end, which is the default.")] = (
        None
    )
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Annotated[int | None, Field(description="-1: at random.")] = None
    stop: str | Texts | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Annotated[int | None, Field(description="-1 if there is a repeat_penalty: the whole text.")] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    thinking_budget: Annotated[int | None, Field(description="Swarm extension: most tokens of thinking.")] = None

    def names(self) -> Mapping[str, str]:
        return {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}

    def penalty(self) -> float | None:
        """Return the repetition penalty. Raises ApiError if it applies to a part of the text."""
        penalty = self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        if penalty not in (None, 1) and self.repeat_last_n not in (None, -1):
            raise unsupported_field("options.repeat_last_n", "penalties apply to the whole text: leave it out, or -1")
        return penalty


class NamedModelBody(BaseModel):
    """Fields of all requests that compute."""

    model_config = ConfigDict(extra="allow")

    model: str
    options: OllamaOptions | None = None
    keep_alive: Annotated[Any, Field(description="Ignored: the model stays loaded.")] = None


class OllamaBody(NamedModelBody):
    """Fields of /api/chat and /api/generate."""

    api_names: ClassVar[Mapping[str, str]] = {"grammar": "format", "logprobs": "top_logprobs"}

    stream: Annotated[bool, BeforeValidator(lambda given: True if given is None else given)] = True
    format: Annotated[str | dict[str, Any] | None, Field(description="json, or a JSON schema.")] = None
    think: Annotated[bool | str | None, Field(description="Whether to think, or how much: low, medium, high.")] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def only_loads(self) -> bool:
        """Whether the request only loads the model: it has no prompt."""
        raise NotImplementedError

    def names(self) -> Mapping[str, str]:
        """Return the client's names of parameters, where they differ from ours."""
        return {**self.api_names, **(self.options or OllamaOptions()).names()}


class OllamaChatBody(OllamaBody):
    """Body of /api/chat."""

    api_names: ClassVar[Mapping[str, str]] = {**OllamaBody.api_names, "prompt": "messages"}

    messages: Objects = []
    tools: Objects | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages


class GenerateBody(OllamaBody):
    """Body of /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: Annotated[bool | None, Field(description="Continue the prompt without the chat template.")] = None
    suffix: Annotated[str | None, Field(description="Refused: models here only continue text.")] = None
    template: Annotated[str | None, Field(description="Refused: the model's own template is used.")] = None
    images: Annotated[Texts | None, Field(description="In base64, if the model sees images.")] = None
    context: Annotated[Ids | None, Field(description="Refused: /api/chat takes earlier messages.")] = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt


class NamedBody(BaseModel):
    """Body of /api/show."""

    model: str | None = None
    name: Annotated[str | None, Field(description="Older clients' name of model.")] = None
    verbose: bool | None = None


def to_chat_request(body: OllamaChatBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a completion request. Raises ApiError."""
    check_fields(body, served)
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type", "function") != "function":
            raise unsupported_field(f"tools[{number}].type", "tools are of type function")
    tools = parse_tools(body.tools, None, None)
    return _to_request(body, served, tools=tools, messages=to_messages(body.messages))


def to_generate_request(body: GenerateBody, served: ServedModel) -> CompletionRequest:
    """Convert a body into a completion request. Without ``raw``, the prompt is a user's message, if the model has a
    chat template. Raises ApiError."""
    check_fields(body, served)
    for name, why in (
        ("suffix", "models here only continue text"),
        ("template", "the model's own template is used"),
        ("context", "/api/chat takes earlier messages"),
    ):
        if getattr(body, name):
            raise unsupported_field(name, why)
    if body.raw and body.system:
        raise invalid_field("system", "can't be combined with raw, which uses no template")
    if not body.raw and served.text is not None and served.text.template is not None:
        messages = [{"role": "user", "content": _with_images(body.prompt, body.images, "images")}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        return _to_request(body, served, messages=tuple(messages))
    if body.images:
        raise invalid_field("images", "need the model's chat template: leave raw out")
    return _to_request(body, served, prompt="\n\n".join(text for text in (body.system, body.prompt) if text))


def check_fields(body: NamedModelBody, served: ServedModel) -> None:
    """Check the model's name and the fields that a request may not have. Raises ApiError."""
    check_extra(body, served)
    options = body.options or OllamaOptions()
    extra = options.model_extra or {}
    for name, neutral in NEUTRAL_OPTIONS.items():
        if extra.get(name) not in (None, neutral) and not served.ignores_unknown_fields:
            raise unsupported_field(f"options.{name}")
    check_extra(options, served, IGNORED_OPTIONS | NEUTRAL_OPTIONS.keys() | _DETAILS)
    if options.hops:
        raise unsupported_field("options.hops", "/v1/chat/completions and /v1/completions report them")
    served.check_name(body.model)


def _to_request(
    body: OllamaBody,
    served: ServedModel,
    *,
    tools: ToolOptions = NO_TOOLS,
    messages: tuple[Json, ...] | None = None,
    prompt: str = "",
) -> CompletionRequest:
    options = body.options or OllamaOptions()
    grammar = _to_grammar(body.format)
    if grammar is not None and tools.are_offered:
        raise invalid_field("format", "an answer either has a format or may call tools: leave one of them out")
    length = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    return CompletionRequest(
        params=_to_params(body, options, served, length, grammar),
        messages=messages,
        prompt=prompt,
        tools=tools,
        template=options.chat_template_kwargs or {},
        reasoning=_reasoning_options(body.think, body.options.thinking_budget if body.options else None, served),
        priority=to_priority(options),
        deadline_s=check_deadline(options),
        speculation=check_speculation(options),
        rest_limit=default_length(served, options.num_predict),
        api_names=body.names(),
    )


def _to_params(
    body: OllamaBody, options: OllamaOptions, served: ServedModel, length: int | None, grammar: Grammar | None
) -> SamplingParams:
    return to_sampling_params(
        options,
        {
            "max_tokens": REST_OF_CONTEXT if length is None else length,
            "temperature": served.temperature_of(options.temperature),
            "top_p": options.top_p,
            "stop": to_stops(options.stop),
            "seed": None if options.seed == RANDOM_SEED else options.seed,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "repetition_penalty": options.penalty(),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "grammar": grammar,
        },
    )


def _to_grammar(given: str | Mapping[str, Any] | None) -> Grammar | None:
    if not given:
        return None
    if isinstance(given, str):
        if given != "json":
            raise invalid_field("format", f"must be json or a JSON schema, not {given[:80]!r}")
        return Grammar("json_object")
    return json_grammar(given)


def _reasoning_options(think: bool | str | None, budget: int | None, served: ServedModel) -> ReasoningOptions:
    if think and served.reasoning_format is None:
        raise ApiError(400, f"{served.name!r} does not support thinking", param="think", code="unsupported_parameter")
    limit = None if budget is None else check_budget("options.thinking_budget", budget)
    if isinstance(think, str):
        if think not in EFFORTS:
            raise invalid_field("think", f"must be true, false or one of {', '.join(EFFORTS)}, not {think[:80]!r}")
        return ReasoningOptions(effort=think, budget=limit)
    return ReasoningOptions(enabled=False if limit == 0 else think, budget=limit)


# --- the conversation


def to_messages(given: Sequence[Mapping[str, Any]]) -> tuple[Json, ...]:
    """Convert a conversation into chat messages, whose calls have ids. A result belongs to the first call without one,
    of its tool if it has a ``tool_name``. Raises ApiError."""
    messages: list[Json] = []
    waiting: list[Json] = []  # calls without a result
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        converted = {key: message.get(key) for key in ("role", "content", "thinking")}
        converted["content"] = _with_images(message.get("content"), message.get("images"), f"{place}.images")
        if message.get("role") == "tool":
            converted |= _match_result(message, waiting)
        elif calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise invalid_field(f"{place}.tool_calls", "must be a list")
            converted["tool_calls"] = waiting = [
                _convert_call(call, f"call_{number}_{index}", f"{place}.tool_calls[{index}]")
                for index, call in enumerate(calls)
            ]
            waiting = list(waiting)
        messages.append({key: value for key, value in converted.items() if value is not None})
    return tuple(messages)


def _with_images(text: Any, images: object, place: str) -> Any:
    """Return a message's content: its images, given in base64, then its text."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise invalid_field(place, "must be a list of images in base64")
    return [*(image_part(f"data:;base64,{image}") for image in images), {"type": "text", "text": text or ""}]


def _match_result(message: Mapping[str, Any], waiting: list[Json]) -> Json:
    """Return the fields that connect a result with its call, which is removed from ``waiting``."""
    call_id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    for call in waiting:
        if call_id == call["id"] or (not call_id and name in (None, call["function"]["name"])):
            waiting.remove(call)
            return {"tool_call_id": call["id"], "name": call["function"]["name"]}
    return {"tool_call_id": call_id, "name": name}


def _convert_call(call: object, own_id: str, place: str) -> Json:
    given = call if isinstance(call, Mapping) else {}
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid_field(place, "must have a function with a name and arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = encode_json(arguments or {}, f"{place}.function.arguments")
    return {
        "id": given.get("id") or own_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def to_resume_state(body: OllamaBody, request: CompletionRequest, created: int) -> ResumeState:
    return ResumeState(
        "ollama",
        created,
        tools=offered_tools(request.tools),
        parallel=request.tools.parallel,
        logprobs=bool(body.logprobs),
        told={"generate": True} if isinstance(body, GenerateBody) else {},
    )
