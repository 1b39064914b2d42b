"""Common parts of request bodies: sampling fields, and rules for which fields are accepted, ignored or rejected.
Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from swarm.errors import InvalidRequest
from swarm.gateway.closed_schemas import close_schema
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.params import MAX_BIASES, MAX_SEED, PRIORITIES, SPECULATION_MODES, Grammar, SamplingParams, SpeculationMode

# Accepted and ignored: they change nothing about an answer.
COMMON_IGNORED_FIELDS = frozenset({
    "metadata",
    "store",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "client_metadata",
    "service_tier",
    "safety_identifier",
    "user",
})  # fmt: skip

MAX_KEEP_S = 600.0  # seconds


def _limit_biases(given: object) -> object:
    """Limit the number of biases before each one is validated, since every invalid one would be reported."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise PydanticCustomError("too_many", f"takes at most {MAX_BIASES} tokens, not {len(given)}")
    return given


Number = Annotated[float, Field(allow_inf_nan=False)]
FailFast = Field(fail_fast=True)  # report only the first invalid item, however many there are
Biases = Annotated[dict[str, Number], BeforeValidator(_limit_biases)]
Ids = Annotated[list[int], FailFast]
Texts = Annotated[list[str], FailFast]
Objects = Annotated[list[dict[str, Any]], FailFast]
KeepSeconds = Annotated[
    Number | None,
    Field(description="Swarm extension: seconds that a streamed answer continues without its reader, to be resumed."),
]


class QueuedBody(BaseModel):
    """Swarm's own fields about the queue."""

    model_config = ConfigDict(extra="allow")

    priority: Annotated[int | str | None, Field(description="Swarm extension: high, normal, low, or -100 to 100.")] = (
        None
    )
    deadline_s: Annotated[
        Number | None, Field(description="Swarm extension: seconds after which it is not needed.")
    ] = None


class Body(QueuedBody):
    """Fields that several APIs share, and Swarm's own fields."""

    # the API's names of parameters, where they differ from ours; see ``names``
    api_names: ClassVar[Mapping[str, str]] = {}

    top_k: Annotated[int | None, Field(description="Swarm extension: sample among this many of the likeliest.")] = None
    min_p: Annotated[Number | None, Field(description="Swarm extension: least share of the likeliest.")] = None
    repetition_penalty: Annotated[Number | None, Field(description="Swarm extension: 1 disables it.")] = None
    min_tokens: Annotated[int | None, Field(description="Swarm extension: least length of the answer.")] = None
    ignore_eos: Annotated[bool | None, Field(description="Swarm extension: end only at the maximum length.")] = None
    stop_token_ids: Annotated[Ids | None, Field(description="Swarm extension: tokens that end the answer.")] = None
    hops: Annotated[bool | None, Field(description="Swarm extension: where each token's time went.")] = None
    speculation: Annotated[
        str | None, Field(description="Swarm extension: auto, off, suffix or draft: what may guess tokens ahead.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Swarm extension: variables for the chat template.")
    ] = None

    def names(self) -> Mapping[str, str]:
        """Return the client's names of parameters, where they differ from ours."""
        return self.api_names


def check_extra(body: BaseModel, served: ServedModel, bookkeeping: Iterable[str] = COMMON_IGNORED_FIELDS) -> None:
    """Reject unknown fields, since they may be meant to change the answer, unless this gateway ignores them. An
    empty list asks for nothing."""
    if served.ignores_unknown_fields:
        return
    for name, value in (body.model_extra or {}).items():
        if name not in bookkeeping and value not in (None, []):
            raise unsupported_field(name)


def to_sampling_params(body: Body, fields: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters from a body's shared fields and ``fields``; None stands for an absent field.
    Raises ApiError."""
    shared = {
        name: getattr(body, name)
        for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
    }
    given = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    if isinstance(given.get("seed"), int):
        given["seed"] &= MAX_SEED  # OpenAI's may be negative
    try:
        params = msgspec.convert(given, SamplingParams)
        check = params if params.max_tokens else msgspec.structs.replace(params, max_tokens=1_000_000)
        check.check()
    except InvalidRequest as error:
        raise invalid_field(body.names().get(error.code, error.code), str(error)) from None
    except msgspec.ValidationError as error:
        complaint, _, place = str(error).partition(" - at ")
        name = place.strip("`").removeprefix("$.") or "body"
        raise invalid_field(body.names().get(name, name), complaint) from None
    return params


def to_priority(body: QueuedBody) -> int:
    given = body.priority
    if given is None:
        return 0
    if isinstance(given, str) and given in PRIORITIES:
        return PRIORITIES[given]
    if isinstance(given, int) and -100 <= given <= 100:
        return given
    raise invalid_field(
        "priority", f"must be one of {', '.join(PRIORITIES)}, or a number between -100 and 100, not {given!r}"
    )


def check_deadline(body: QueuedBody) -> float | None:
    if body.deadline_s is not None and not 0 < body.deadline_s <= 1e9:
        raise invalid_field("deadline_s", f"must be a positive number of seconds, not {body.deadline_s}")
    return body.deadline_s


def check_speculation(body: Body) -> SpeculationMode | None:
    if body.speculation is not None and body.speculation not in SPECULATION_MODES:
        raise invalid_field("speculation", f"must be one of {', '.join(SPECULATION_MODES)}, not {body.speculation!r}")
    return body.speculation


def check_keep_s(keep_s: float | None, stream: bool | None) -> float:
    """Return the seconds for which an answer continues without its reader. Raises ApiError."""
    if not keep_s:
        return 0.0
    if not 0 < keep_s <= MAX_KEEP_S:
        raise invalid_field("keep_s", f"must be between 0 and {MAX_KEEP_S:g} seconds, not {keep_s:g}")
    if not stream:
        raise invalid_field("keep_s", "is only for streams: other answers can't be resumed")
    return keep_s


def to_biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (ValueError, TypeError):
        raise invalid_field("logit_bias", "maps token ids to numbers") from None


def to_stops(given: str | list[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)


def split_inputs(given: Any, field: str) -> list[Any]:
    """Return the items of a field that takes one text or list of token ids, or a list of those. Raises ApiError."""
    if given is None or given in ("", []):
        raise invalid_field(field, "is empty")
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def to_input(given: Any, field: str) -> str | tuple[int, ...]:
    """Return an item of ``split_inputs`` as a text or as token ids. Raises ApiError."""
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return tuple(given)
    raise invalid_field(
        field, "must be a text, a list of texts, a list of token ids, or a list of such lists; none empty"
    )


def encode_json(value: object, field: str) -> str:
    """Encode a value of a body. Raises ApiError if it cannot be encoded as JSON."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise invalid_field(field, f"can't be encoded as JSON: {error}") from None


def json_grammar(schema: object) -> Grammar:
    """Return the grammar of a JSON schema, whose objects have no properties that it does not name or allow."""
    closed = close_schema(schema) if isinstance(schema, dict) else schema
    return Grammar("json_schema", json.dumps(closed, ensure_ascii=False))


def response_grammar(given: Mapping[str, Any] | None, field: str = "response_format") -> Grammar | None:
    """Return the grammar of OpenAI's ``response_format``. Raises ApiError."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            raise invalid_field(field, "a json_schema needs a schema, which is an object")
        return json_grammar(schema)
    if kind in ("regex", "choice", "ebnf"):  # Swarm's own types
        text = given.get(kind)
        if kind == "choice" and isinstance(text, list):
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, str):
            raise invalid_field(field, f"a {kind} needs the field {kind!r}")
        return Grammar(kind, text)
    raise invalid_field(
        field, f"the type {kind!r} is not known; known are text, json_object, json_schema, regex, choice, ebnf"
    )
