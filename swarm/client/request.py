"""Request options: checks every value that a caller passes, before anything leaves the machine, and builds the message
to send."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypedDict, TypeVar

import msgspec

from swarm.errors import InvalidRequest
from swarm.params import (
    PRIORITIES,
    SPECULATION_MODES,
    Grammar,
    ImageSpan,
    SamplingParams,
    SpeculationMode,
    Thinking,
    VectorKind,
)
from swarm.wire.messages import MAX_KEEP_S, MAX_MEMO, MAX_TOKENS, Submit

Prompt = str | Sequence[int]
# for a batch: one parameter set for all prompts, or one for each
Params = SamplingParams | Sequence[SamplingParams] | None

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that the model's chat template turns into a prompt."""

    messages: Sequence[Mapping[str, object]]


Source = str | tuple[int, ...] | Conversation


class RequestOptions(TypedDict, total=False):
    """Keywords of every method that makes a request: the fields of :class:`SamplingParams`, and these.

    - ``timeout``: seconds until the caller gives up: it gets RequestTimeout and the request is cancelled. Pauses of the
      caller's own process that are longer than a second count as half a second.
    - ``deadline_s``: seconds after which the swarm stops working on the request.
    - ``priority``: "high", "normal", "low", or a number from -100 to 100; higher goes first.
    - ``tenant``: the account that the request belongs to. Tenants get equal shares; without a name, each connection is
      a tenant.
    - ``request_id``: an idempotency key: a repeated request with this id is the same request.
    - ``hops``: report where the time of each token went.
    - ``detached``: the request continues when its client leaves or vanishes, and any client that has its id may
      ``attach``.
    - ``keep_s``: the request continues for this many seconds each time its reader leaves or vanishes.
    - ``speculation``: "auto", "off", "suffix" or "draft": what may guess tokens ahead, among the broker's proposers.
      The answer is the same with each.
    - ``memo``: a text that ``recall`` returns.
    - ``pixels``: of each of the ``images``, in the form of ``Submit``.
    - ``visible``: special tokens that appear in the answer's text, as marks of tool calls must; all others are left
      out. This stays on the client.
    """

    timeout: float | None
    deadline_s: float | None
    priority: int | str
    tenant: str
    request_id: str | None
    hops: bool
    detached: bool
    keep_s: float
    speculation: SpeculationMode | None
    memo: str
    visible: Sequence[int]
    pixels: Sequence[bytes]

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    n: int
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    grammar: Grammar | None
    thinking: Thinking | None
    vector: VectorKind | None
    prompt_logprobs: int | None
    adapter: str
    images: Sequence[ImageSpan]


class _ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Request options that are not sampling parameters."""

    timeout: float | None = None
    deadline_s: float | None = None
    priority: int | str = 0
    tenant: str = ""
    request_id: str | None = None
    hops: bool = False
    detached: bool = False
    keep_s: float = 0.0
    speculation: str | None = None
    memo: str = ""
    visible: tuple[int, ...] = ()
    pixels: tuple[bytes, ...] = ()


_SAMPLING_OPTIONS = SamplingParams.__struct_fields__
_CLIENT_OPTIONS = _ClientOptions.__struct_fields__


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Checked options of one request, without its prompt."""

    params: SamplingParams
    timeout_s: float | None = None
    deadline_s: float | None = None
    priority: int = 0
    tenant: str = ""
    request_id: str | None = None
    hops: bool = False
    detached: bool = False
    keep_s: float = 0.0
    speculation: SpeculationMode | None = None
    memo: str = ""
    visible: tuple[int, ...] = ()
    pixels: tuple[bytes, ...] = ()

    @classmethod
    def from_submit(cls, submit: Submit, timeout_s: float | None, visible: tuple[int, ...] = ()) -> RequestSpec:
        """Reconstruct the options of an existing request from its submission. ``visible`` is not stored there: each
        reader passes its own."""
        return cls(
            submit.params,
            timeout_s,
            request_id=submit.request_id,
            hops=submit.hops,
            detached=submit.detached,
            keep_s=submit.keep_s,
            speculation=submit.speculation,
            visible=visible,
        )

    def to_submit(self, prompt: tuple[int, ...]) -> Submit:
        """Return the message for this prompt. Draws a seed and an id if the caller gave none."""
        seed = self.params.seed if self.params.seed is not None else secrets.randbits(63)
        return Submit(
            request_id=self.request_id or secrets.token_hex(16),
            prompt=prompt,
            params=self.params,
            seed=seed,
            priority=self.priority,
            deadline_s=self.deadline_s,
            tenant=self.tenant,
            hops=self.hops,
            detached=self.detached,
            keep_s=self.keep_s,
            speculation=self.speculation,
            memo=self.memo,
            pixels=self.pixels,
        )


def check_options(params: SamplingParams | None, options: Mapping[str, object]) -> RequestSpec:
    """Check and merge ``params`` and keywords; keywords override ``params``. Raises InvalidRequest that names the first
    wrong value."""
    unknown = [name for name in options if name not in _SAMPLING_OPTIONS and name not in _CLIENT_OPTIONS]
    if unknown:
        known = ", ".join(sorted({*_SAMPLING_OPTIONS, *_CLIENT_OPTIONS}))
        raise InvalidRequest(f"unknown option {unknown[0]!r}; known are {known}", code=unknown[0])
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}", code="params")
    sampling = {} if params is None else msgspec.structs.asdict(params)
    sampling |= {name: value for name, value in options.items() if name in _SAMPLING_OPTIONS}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    checked = _convert(sampling, SamplingParams)
    checked.check()
    own = _convert({name: value for name, value in options.items() if name in _CLIENT_OPTIONS}, _ClientOptions)
    _check_client_options(own)
    return RequestSpec(
        params=checked,
        timeout_s=own.timeout,
        deadline_s=own.deadline_s,
        priority=_priority_number(own.priority),
        tenant=own.tenant,
        request_id=own.request_id,
        hops=own.hops,
        detached=own.detached,
        keep_s=own.keep_s,
        speculation=_speculation_mode(own.speculation),
        memo=own.memo,
        visible=own.visible,
        pixels=own.pixels,
    )


def batch_specs(params: Params, options: Mapping[str, object], num_prompts: int) -> list[RequestSpec | InvalidRequest]:
    """Return the checked options for each prompt of a batch, or the error in that prompt's own parameters. Raises
    InvalidRequest for a mistake that concerns the whole batch."""
    if params is None or isinstance(params, SamplingParams):
        return [check_options(params, options)] * num_prompts
    if isinstance(params, str | bytes) or not isinstance(params, Sequence):
        wanted = "SamplingParams, or a sequence of them with one for each prompt"
        raise InvalidRequest(f"params must be {wanted}, not {type(params).__name__}", code="params")
    if len(params) != num_prompts:
        reason = f"{len(params)} sets of params for {num_prompts} prompts: give one for each prompt, or one for all"
        raise InvalidRequest(reason, code="params")
    check_options(None, options)
    return [_spec_or_error(own, options) for own in params]


def _spec_or_error(params: SamplingParams, options: Mapping[str, object]) -> RequestSpec | InvalidRequest:
    try:
        return check_options(params, options)
    except InvalidRequest as error:
        return error


def _priority_number(priority: int | str) -> int:
    if isinstance(priority, str):
        if priority not in PRIORITIES:
            names = ", ".join(PRIORITIES)
            reason = f"priority must be one of {names}, or a number between -100 and 100, not {priority!r}"
            raise InvalidRequest(reason, code="priority")
        return PRIORITIES[priority]
    if not -100 <= priority <= 100:
        raise InvalidRequest(f"priority must be between -100 and 100, not {priority}", code="priority")
    return priority


def _speculation_mode(mode: str | None) -> SpeculationMode | None:
    if mode is None or mode in SPECULATION_MODES:
        return mode
    reason = f"speculation must be one of {', '.join(SPECULATION_MODES)}, not {mode!r}"
    raise InvalidRequest(reason, code="speculation")


def _convert(values: Mapping[str, object], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        complaint, _, place = str(error).partition(" - at ")
        name = place.strip("`").removeprefix("$.") or "options"
        raise InvalidRequest(f"{name}: {complaint[:1].lower()}{complaint[1:]}", code=name) from None


def _check_client_options(options: _ClientOptions) -> None:
    for name in ("timeout", "deadline_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise InvalidRequest(f"{name} must be a positive number of seconds, not {value}", code=name)
    if not 0 <= options.keep_s <= MAX_KEEP_S:
        raise InvalidRequest(
            f"keep_s must be between 0 and {MAX_KEEP_S:g} seconds, not {options.keep_s}", code="keep_s"
        )
    if len(options.tenant) > 128:
        raise InvalidRequest("tenant must have at most 128 characters", code="tenant")
    if len(options.memo) > MAX_MEMO:
        raise InvalidRequest(f"memo must have at most {MAX_MEMO} characters", code="memo")
    if options.request_id is not None and not 1 <= len(options.request_id) <= 128:
        raise InvalidRequest("request_id must have 1 to 128 characters", code="request_id")


def check_attach_args(
    request_id: str, next_index: int, timeout_s: float | None, visible: Sequence[int] = ()
) -> tuple[int, ...]:
    """Check the arguments of ``attach`` and return the special tokens to show. Raises InvalidRequest that names the
    first wrong value."""
    own = _convert({"request_id": request_id, "timeout": timeout_s, "visible": visible}, _ClientOptions)
    _check_client_options(own)
    if not 0 <= next_index <= MAX_TOKENS:
        raise InvalidRequest(f"next_index must be between 0 and {MAX_TOKENS}, not {next_index}", code="next_index")
    return own.visible


def check_prompt(prompt: Prompt) -> Source:
    """Return a prompt, checked as far as that is possible without the model."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty", code="prompt")
        return prompt
    return check_token_ids(prompt)


def check_token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as the wire takes them. Only the broker can check whether the model has them."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequest("a prompt is text or token ids, not bytes", code="prompt")
    try:
        ids = tuple(index(token) for token in prompt)
    except TypeError as error:
        raise InvalidRequest(f"a prompt is text or a sequence of token ids: {error}", code="prompt") from error
    if not ids:
        raise InvalidRequest("the prompt is empty", code="prompt")
    if len(ids) > MAX_TOKENS:
        raise InvalidRequest(f"a prompt has at most {MAX_TOKENS} tokens, not {len(ids)}", code="prompt")
    wrong = next((token for token in ids if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise InvalidRequest(f"{wrong} is not a token id", code="prompt")
    return ids
