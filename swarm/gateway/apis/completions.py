"""OpenAI's /v1/completions: continues a text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from swarm.gateway.answer import AnswerPart, ChoiceEndPart, PromptPart, TextPart, TokenCounts
from swarm.gateway.apis.bodies import (
    COMMON_IGNORED_FIELDS,
    Biases,
    KeepSeconds,
    Number,
    Texts,
    check_deadline,
    check_extra,
    check_keep_s,
    check_speculation,
    split_inputs,
    to_biases,
    to_input,
    to_priority,
    to_sampling_params,
    to_stops,
)
from swarm.gateway.apis.chat import DONE, StreamOptions, check_stream_options, default_length
from swarm.gateway.apis.other_servers import SharedBody, check_neutral, rest_or_length, to_grammar
from swarm.gateway.apis.tokens import list_hops, prompt_logprobs, text_logprobs, usage_object
from swarm.gateway.apis.writer import EventTemplate, Json, SseEvent
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import REST_OF_CONTEXT
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.errors import ApiError, invalid_field, unsupported_field
from swarm.gateway.resume_state import ResumeState

DEFAULT_LENGTH = 16  # OpenAI's default
MAX_PROMPTS = 256  # also the limit of answers in total
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}


class CompletionBody(SharedBody):
    """Body of /v1/completions."""

    model: str | None = None  # None: the first model that the key may use
    # validated by hand: pydantic would report every wrong item of a union
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    best_of: Annotated[int | None, Field(description="Only the value of n.")] = None
    stop: str | Texts | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, Field(description="Rejected: models here only continue text.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    keep_s: KeepSeconds = None
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None

    def names(self) -> Mapping[str, str]:
        is_other = self.max_tokens is None and self.n_predict is not None
        return {**super().names(), "max_tokens": "n_predict" if is_other else "max_tokens"}


def to_requests(body: CompletionBody, served: ServedModel) -> list[CompletionRequest]:
    """Convert a body into completion requests, one per prompt. Raises ApiError."""
    check_extra(body, served, COMMON_IGNORED_FIELDS | check_neutral(body, served))
    check_stream_options(body.stream_options, served, stream=bool(body.stream))
    served.check_name(body.model)
    if body.suffix:
        raise unsupported_field("suffix", "models here only continue text")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported_field("best_of", "every generated answer is returned: use n")
    if body.echo and body.logprobs is not None and body.stream:
        raise unsupported_field("stream", "log probabilities of the prompt come with the whole answer: leave it out")
    is_empty = body.max_tokens == 0 and bool(body.echo)  # the prompt is all that is computed
    rest_limit = 0 if is_empty else default_length(served, body.max_tokens, body.n_predict)
    params = to_sampling_params(
        body,
        {
            "max_tokens": _length(body) if rest_limit is None else REST_OF_CONTEXT,
            "temperature": served.temperature_of(body.temperature),
            "top_p": body.top_p,
            "n": body.n,
            "stop": to_stops(body.stop),
            "seed": body.seed,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": to_biases(body.logit_bias),
            "logprobs": body.logprobs,
            "prompt_logprobs": (body.logprobs or 0) if is_empty or (body.echo and body.logprobs is not None) else None,
            "grammar": to_grammar(body),
            "repetition_penalty": body.penalty(),
        },
    )
    prompts, keep_s = parse_prompts(body.prompt), check_keep_s(body.keep_s, body.stream)
    if keep_s and len(prompts) > 1:
        raise invalid_field("keep_s", "is only for a single prompt")
    if len(prompts) * params.n > MAX_PROMPTS:
        raise invalid_field(
            "n", f"{len(prompts)} prompts with {params.n} answers each: at most {MAX_PROMPTS} answers in all"
        )
    return [
        CompletionRequest(
            params=params,
            prompt=prompt,
            priority=to_priority(body),
            deadline_s=check_deadline(body),
            speculation=check_speculation(body),
            hops=bool(body.hops),
            show_special=body.skip_special_tokens is False,
            rest_limit=rest_limit,
            keep_s=keep_s,
            api_names=body.names(),
        )
        for prompt in prompts
    ]


def _length(body: CompletionBody) -> int:
    if body.max_tokens is None:
        length = rest_or_length(body.n_predict)
        return DEFAULT_LENGTH if length is None else length
    if body.max_tokens < 1:
        raise invalid_field("max_tokens", f"must be at least 1, or 0 with echo, not {body.max_tokens}")
    return body.max_tokens


def parse_prompts(given: Any) -> list[str | tuple[int, ...]]:
    """Return the prompts, as text or as token ids. Raises ApiError."""
    items = split_inputs(given, "prompt")
    prompts = [to_input(each, "prompt") for each in items[: MAX_PROMPTS + 1]]
    if len(prompts) > MAX_PROMPTS:
        raise invalid_field("prompt", f"at most {MAX_PROMPTS} prompts, not {len(items)}")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise invalid_field("prompt", "texts and token ids can't be mixed")
    return prompts


def to_resume_state(
    body: CompletionBody, requests: Sequence[CompletionRequest], served: ServedModel, created: int
) -> ResumeState:
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return ResumeState(
        "completions",
        created,
        usage=include_usage,
        logprobs=body.logprobs is not None,
        hops=bool(body.hops),
        special=body.skip_special_tokens is False,
        echoes=_echo_texts(requests, served) if body.echo else (),
    )


def _echo_texts(requests: Sequence[CompletionRequest], served: ServedModel) -> tuple[str, ...]:
    """Return the prompts as texts, one per choice. A single prompt stands for all choices."""
    texts = [
        ask.prompt if isinstance(ask.prompt, str) else served.require_text_model("leave out echo").decode(ask.prompt)
        for ask in requests
    ]
    return tuple(texts) if len(texts) == 1 else tuple(text for text in texts for _ in range(requests[0].params.n))


class CompletionWriter:
    """Encodes the answer to one or several prompts in the format of OpenAI's /v1/completions."""

    def __init__(self, memo: ResumeState, served: ServedModel, request_id: str) -> None:
        self._memo, self._served, self._echoes = memo, served, memo.echoes
        self._id = "cmpl-" + request_id
        self._offsets: dict[int, int] = {}  # characters so far, by choice
        self._started_choices: set[int] = set()  # choices whose echo has been returned
        self._templates: dict[int, EventTemplate] = {}  # by choice

    def _base(self) -> Json:
        return {"id": self._id, "object": "text_completion", "created": self._memo.created, "model": self._served.name}

    def _text_event(self, part: TextPart) -> SseEvent:
        """Return the event of a text without other fields, which make up most of a stream."""
        template = self._templates.get(part.choice)
        if template is None:
            template = self._templates[part.choice] = EventTemplate(self._body(part.choice, EventTemplate.PLACEHOLDER))
        return template.render(part.text)

    def _chunk(self, choice: int, text: str, reason: str | None = None, part: TextPart | None = None) -> SseEvent:
        return SseEvent(msgspec.json.encode(self._body(choice, text, reason, part)))

    def _body(self, choice: int, text: str, reason: str | None = None, part: TextPart | None = None) -> Json:
        entry: Json = {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}
        if part is not None and self._memo.logprobs:
            entry["logprobs"] = self._logprobs(part)
        if part is not None and self._memo.hops:
            entry["hops"] = list_hops(part.pieces)
        body = {**self._base(), "choices": [entry]}
        if self._memo.usage:
            body["usage"] = None
        return body

    def _logprobs(self, part: TextPart) -> Json:
        offset = self._offsets.get(part.choice, len(self._echo(part.choice)))
        result, self._offsets[part.choice] = text_logprobs(self._served, part.pieces, offset)
        return result

    def _echo(self, choice: int) -> str:
        """Return the text that precedes the choice."""
        return self._echoes[choice if len(self._echoes) > 1 else 0] if self._echoes else ""

    def start_events(self, num_prompt: int = 0) -> Sequence[SseEvent]:
        return ()

    def write(self, part: AnswerPart) -> Sequence[SseEvent]:
        events = []
        if self._echoes and part.choice not in self._started_choices:
            self._started_choices.add(part.choice)
            events.append(self._chunk(part.choice, self._echo(part.choice)))
        if isinstance(part, TextPart) and not self._memo.logprobs and not self._memo.hops:
            events.append(self._text_event(part))
        elif isinstance(part, TextPart):
            events.append(self._chunk(part.choice, part.text, part=part))
        elif isinstance(part, ChoiceEndPart):
            events.append(self._chunk(part.choice, "", part.reason))
        return events

    def end_events(self, counts: TokenCounts) -> Sequence[SseEvent]:
        if not self._memo.usage:
            return (DONE,)
        return (SseEvent(msgspec.json.encode({**self._base(), "choices": [], "usage": usage_object(counts)})), DONE)

    def error_events(self, problem: ApiError) -> Sequence[SseEvent]:
        return (SseEvent(json.dumps(problem.to_openai()).encode()), DONE)

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        choices: dict[int, Json] = {}
        of_prompts: dict[int, Json] = {}  # by completion: all choices have the same
        for part in parts:
            empty: Json = {"index": part.choice, "text": "", "logprobs": None, "finish_reason": None}
            choice = choices.setdefault(part.choice, empty)
            if isinstance(part, TextPart):
                self._collect(choice, part)
            elif isinstance(part, ChoiceEndPart):
                choice["finish_reason"] = part.reason
            elif isinstance(part, PromptPart) and self._memo.logprobs:
                logprobs, answer = of_prompts.get(id(part.completion)), choice["logprobs"] or {}
                if logprobs is None:
                    logprobs = of_prompts[id(part.completion)] = prompt_logprobs(self._served, part)
                choice["logprobs"] = {name: values + answer.get(name, []) for name, values in logprobs.items()}
        for index, choice in choices.items():
            choice["text"] = self._echo(index) + choice["text"]
        return {**self._base(), "choices": [choices[index] for index in sorted(choices)], "usage": usage_object(counts)}

    def _collect(self, choice: Json, part: TextPart) -> None:
        choice["text"] += part.text
        if self._memo.hops:
            choice.setdefault("hops", []).extend(list_hops(part.pieces))
        if self._memo.logprobs:
            logprobs = self._logprobs(part)
            if choice["logprobs"] is None:
                choice["logprobs"] = logprobs
            else:
                for name, values in logprobs.items():
                    choice["logprobs"][name] += values
