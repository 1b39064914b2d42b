"""OpenAI's /v1/completions: continues a text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, WithJsonSchema

from swarm.gateway.answer import Counts, End, Part, Text
from swarm.gateway.apis.bodies import (
    Biases,
    Body,
    KeepSeconds,
    Number,
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
from swarm.gateway.apis.chat import DONE, StreamOptions, check_stream_options
from swarm.gateway.apis.tokens import hops_of, text_logprobs, usage
from swarm.gateway.apis.writer import Json, Mould, Sse
from swarm.gateway.ask import Ask
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, unsupported, wrong
from swarm.gateway.memo import Memo

DEFAULT_LENGTH = 16  # OpenAI's default
MAX_PROMPTS = 256  # also the limit of answers in total
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}


class CompletionBody(Body):
    """Body of /v1/completions."""

    called: ClassVar[Mapping[str, str]] = {"grammar": "response_format"}

    model: str
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
    response_format: Annotated[dict[str, Any] | None, Field(description="As in /v1/chat/completions.")] = None
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None


def asks_of(body: CompletionBody, served: Served) -> list[Ask]:
    """Convert a body into completion requests, one per prompt. Raises ApiError."""
    check_extra(body)
    check_stream_options(body.stream_options, bool(body.stream))
    served.check_name(body.model)
    if body.suffix:
        raise unsupported("suffix", "models here only continue text")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "every generated answer is returned: use n")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "there are no log probabilities of a prompt: leave out one of echo and logprobs")
    params = sampling(
        body,
        {
            "max_tokens": _length(body.max_tokens),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p,
            "n": body.n,
            "stop": stops(body.stop),
            "seed": body.seed,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": biases(body.logit_bias),
            "logprobs": body.logprobs,
            "grammar": response_grammar(body.response_format),
        },
    )
    prompts, keep_s = prompts_of(body.prompt), keep_of(body.keep_s, body.stream)
    if keep_s and len(prompts) > 1:
        raise wrong("keep_s", "is only for a single prompt")
    if len(prompts) * params.n > MAX_PROMPTS:
        raise wrong("n", f"{len(prompts)} prompts with {params.n} answers each: at most {MAX_PROMPTS} answers in all")
    return [
        Ask(
            params=params,
            prompt=prompt,
            priority=priority_of(body),
            deadline_s=deadline_of(body),
            hops=bool(body.hops),
            keep_s=keep_s,
            called=body.names(),
        )
        for prompt in prompts
    ]


def _length(given: int | None) -> int:
    if given is not None and given < 1:
        raise wrong("max_tokens", f"must be at least 1, not {given}")
    return DEFAULT_LENGTH if given is None else given


def prompts_of(given: Any) -> list[str | tuple[int, ...]]:
    """Return the prompts, as text or as token ids. Raises ApiError."""
    if given is None or given in ("", []):
        raise wrong("prompt", "is empty")
    many = isinstance(given, list) and not isinstance(given[0], int)
    prompts = [_prompt_of(each) for each in (given[: MAX_PROMPTS + 1] if many else [given])]
    if len(prompts) > MAX_PROMPTS:
        raise wrong("prompt", f"at most {MAX_PROMPTS} prompts, not {len(given)}")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise wrong("prompt", "texts and token ids can't be mixed")
    return prompts


def _prompt_of(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return tuple(given)
    raise wrong("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists; none empty")


def memo_of(body: CompletionBody, asks: Sequence[Ask], served: Served, created: int) -> Memo:
    wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Memo(
        "completions",
        created,
        usage=wanted,
        logprobs=body.logprobs is not None,
        hops=bool(body.hops),
        echoes=_echoes(asks, served) if body.echo else (),
    )


def _echoes(asks: Sequence[Ask], served: Served) -> tuple[str, ...]:
    """Return the prompts as texts, one per choice. A single prompt stands for all choices."""
    texts = [
        ask.prompt if isinstance(ask.prompt, str) else served.needs_text("leave out echo").decode(ask.prompt)
        for ask in asks
    ]
    return tuple(texts) if len(texts) == 1 else tuple(text for text in texts for _ in range(asks[0].params.n))


class CompletionWriter:
    """Encodes the answer to one or several prompts in the format of OpenAI's /v1/completions."""

    def __init__(self, memo: Memo, served: Served, request_id: str) -> None:
        self._memo, self._served, self._echoes = memo, served, memo.echoes
        self._id = "cmpl-" + request_id
        self._offsets: dict[int, int] = {}  # characters so far, by choice
        self._begun: set[int] = set()  # choices whose echo has been returned
        self._moulds: dict[int, Mould] = {}  # by choice

    def _base(self) -> Json:
        return {"id": self._id, "object": "text_completion", "created": self._memo.created, "model": self._served.name}

    def _said(self, part: Text) -> Sse:
        """Return the event of a text without other fields, which make up most of a stream."""
        mould = self._moulds.get(part.choice)
        if mould is None:
            mould = self._moulds[part.choice] = Mould(self._body(part.choice, Mould.HOLE))
        return mould.cast(part.text)

    def _chunk(self, choice: int, text: str, reason: str | None = None, part: Text | None = None) -> Sse:
        return Sse(msgspec.json.encode(self._body(choice, text, reason, part)))

    def _body(self, choice: int, text: str, reason: str | None = None, part: Text | None = None) -> Json:
        entry: Json = {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}
        if part is not None and self._memo.logprobs:
            entry["logprobs"] = self._logprobs(part)
        if part is not None and self._memo.hops:
            entry["hops"] = hops_of(part.pieces)
        body = {**self._base(), "choices": [entry]}
        if self._memo.usage:
            body["usage"] = None
        return body

    def _logprobs(self, part: Text) -> Json:
        result, self._offsets[part.choice] = text_logprobs(self._served, part.pieces, self._offsets.get(part.choice, 0))
        return result

    def _echo(self, choice: int) -> str:
        """Return the text that precedes the choice."""
        return self._echoes[choice if len(self._echoes) > 1 else 0] if self._echoes else ""

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        return ()

    def write(self, part: Part) -> Sequence[Sse]:
        events = []
        if self._echoes and part.choice not in self._begun:
            self._begun.add(part.choice)
            events.append(self._chunk(part.choice, self._echo(part.choice)))
        if isinstance(part, Text) and not self._memo.logprobs and not self._memo.hops:
            events.append(self._said(part))
        elif isinstance(part, Text):
            events.append(self._chunk(part.choice, part.text, part=part))
        elif isinstance(part, End):
            events.append(self._chunk(part.choice, "", part.reason))
        return events

    def tail(self, counts: Counts) -> Sequence[Sse]:
        if not self._memo.usage:
            return (DONE,)
        return (Sse(msgspec.json.encode({**self._base(), "choices": [], "usage": usage(counts)})), DONE)

    def failed(self, problem: Problem) -> Sequence[Sse]:
        return (Sse(json.dumps(problem.openai()).encode()), DONE)

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        choices: dict[int, Json] = {}
        for part in parts:
            empty: Json = {"index": part.choice, "text": "", "logprobs": None, "finish_reason": None}
            choice = choices.setdefault(part.choice, empty)
            if isinstance(part, Text):
                self._collect(choice, part)
            elif isinstance(part, End):
                choice["finish_reason"] = part.reason
        for index, choice in choices.items():
            choice["text"] = self._echo(index) + choice["text"]
        return {**self._base(), "choices": [choices[index] for index in sorted(choices)], "usage": usage(counts)}

    def _collect(self, choice: Json, part: Text) -> None:
        choice["text"] += part.text
        if self._memo.hops:
            choice.setdefault("hops", []).extend(hops_of(part.pieces))
        if self._memo.logprobs:
            told = self._logprobs(part)
            if choice["logprobs"] is None:
                choice["logprobs"] = told
            else:
                for name, values in told.items():
                    choice["logprobs"][name] += values
