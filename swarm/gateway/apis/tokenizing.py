"""/tokenize and /detokenize, in the formats of vLLM's and llama.cpp's servers. Pure, apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from swarm.gateway.apis.bodies import FailFast, Objects, check_extra
from swarm.gateway.apis.chat import first_length, parse_tools
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.errors import ApiError, invalid_field
from swarm.params import SamplingParams

MAX_TOKENS = 1_000_000  # tokens accepted by /detokenize
MAX_RETURNED_TOKENS = 1 << 17  # tokens of a text returned by /tokenize, or
CONTEXT_MULTIPLE = 4  # this multiple of the model's context, if that is more


class TokenizeBody(BaseModel):
    """Body of /tokenize: one of ``prompt`` (vLLM's), ``content`` (llama.cpp's) and ``messages``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[bool | None, Field(description="With prompt; true unless given.")] = None
    add_special: Annotated[bool | None, Field(description="With content; false unless given.")] = None
    return_token_strs: Annotated[bool | None, Field(description="Also return token_strs, the tokens as texts.")] = None
    with_pieces: Annotated[bool | None, Field(description="Tokens as objects with id and piece.")] = None


class DetokenizeBody(BaseModel):
    """Body of /detokenize: token ids."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast]


def to_request(body: TokenizeBody, served: ServedModel) -> CompletionRequest | None:
    """Return the request whose prompt is tokenized; None if a text was given. Raises ApiError."""
    check_extra(body, served, ("parse_special",) if (body.model_extra or {}).get("parse_special") is not False else ())
    served.check_name(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_field("prompt", "give one of prompt, content and messages")
    if body.messages is None:
        return None
    template = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        template["add_generation_prompt"] = body.add_generation_prompt
    tools = parse_tools(body.tools, None, None)
    params = SamplingParams(max_tokens=first_length(None))
    return CompletionRequest(
        params=params,
        messages=tuple(body.messages),
        continues=bool(body.continue_final_message),
        tools=tools,
        template=template,
    )


def encode_text(body: TokenizeBody, served: ServedModel) -> tuple[int, ...]:
    """Return the tokens of a text. Raises ApiError, and ClientError for invalid text."""
    model = served.require_text_model("it has no tokens")
    text = body.prompt if body.prompt is not None else body.content
    if not text:
        return ()
    special = body.add_special_tokens is not False if body.content is None else bool(body.add_special)
    most = max(MAX_RETURNED_TOKENS, CONTEXT_MULTIPLE * served.manifest.context)
    return model.encode(text, add_special_tokens=special, most=most)


def token_response(body: TokenizeBody, ids: Sequence[int], served: ServedModel) -> Json:
    tokens: list[Any] = [_token_object(token, served) for token in ids] if body.with_pieces else list(ids)
    result: Json = {"count": len(ids), "max_model_len": served.manifest.context, "tokens": tokens}
    if body.return_token_strs:
        model = served.require_text_model("it has no tokens")
        result["token_strs"] = [model.tokenizer.id_to_token(token) for token in ids]
    return result


def _token_object(token: int, served: ServedModel) -> Json:
    """Return a token as an object. A token that is part of a character is returned as bytes."""
    content = served.token_bytes(token)
    try:
        return {"id": token, "piece": content.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(content)}


def text_response(body: DetokenizeBody, served: ServedModel) -> Json:
    """Return the text of the tokens, including special ones. Raises ApiError."""
    check_extra(body, served, ())
    served.check_name(body.model)
    if len(body.tokens) > MAX_TOKENS:
        raise invalid_field("tokens", f"at most {MAX_TOKENS}, not {len(body.tokens)}")
    vocabulary = served.manifest.vocab_size
    for token in body.tokens:
        if token >= vocabulary:
            raise ApiError(400, f"tokens: {token} is not in the vocabulary of {vocabulary}", param="tokens")
    model = served.require_text_model("there is no text for tokens")
    text = model.decode_all(body.tokens)
    return {"prompt": text, "content": text}
