"""/tokenize and /detokenize, in the formats of vLLM's and llama.cpp's servers. Pure, apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from swarm.gateway.apis.bodies import Objects, Quick, check_extra
from swarm.gateway.apis.chat import length_of, tool_use
from swarm.gateway.apis.writer import Json
from swarm.gateway.ask import Ask
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, wrong
from swarm.params import SamplingParams

MAX_TOKENS = 1_000_000  # tokens accepted by /detokenize
MOST_TOKENS = 1 << 17  # tokens of a text returned by /tokenize, or
MORE_THAN_FIT = 4  # this multiple of the model's context, if that is more


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
    add_special_tokens: Annotated[bool | None, Field(description="With prompt; true unless given.")] = None
    add_special: Annotated[bool | None, Field(description="With content; false unless given.")] = None
    return_token_strs: Annotated[bool | None, Field(description="Also return token_strs, the tokens as texts.")] = None
    with_pieces: Annotated[bool | None, Field(description="Tokens as objects with id and piece.")] = None


class DetokenizeBody(BaseModel):
    """Body of /detokenize: token ids."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Quick]


def ask_of(body: TokenizeBody, served: Served) -> Ask | None:
    """Return the request whose prompt is tokenized; None if a text was given. Raises ApiError."""
    check_extra(body, ("parse_special",) if (body.model_extra or {}).get("parse_special") is not False else ())
    served.check_name(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise wrong("prompt", "give one of prompt, content and messages")
    if body.messages is None:
        return None
    template = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        template["add_generation_prompt"] = body.add_generation_prompt
    tools = tool_use(body.tools, None, None)
    params = SamplingParams(max_tokens=length_of(None))
    return Ask(params=params, messages=tuple(body.messages), tools=tools, template=template)


def ids_of(body: TokenizeBody, served: Served) -> tuple[int, ...]:
    """Return the tokens of a text. Raises ApiError, and ClientError for invalid text."""
    model = served.needs_text("it has no tokens")
    text = body.prompt if body.prompt is not None else body.content
    if not text:
        return ()
    special = body.add_special_tokens is not False if body.content is None else bool(body.add_special)
    most = max(MOST_TOKENS, MORE_THAN_FIT * served.manifest.context)
    return model.encode(text, add_special_tokens=special, most=most)


def tokenized(body: TokenizeBody, ids: Sequence[int], served: Served) -> Json:
    tokens: list[Any] = [_piece(token, served) for token in ids] if body.with_pieces else list(ids)
    result: Json = {"count": len(ids), "max_model_len": served.manifest.context, "tokens": tokens}
    if body.return_token_strs:
        model = served.needs_text("it has no tokens")
        result["token_strs"] = [model.tokenizer.id_to_token(token) for token in ids]
    return result


def _piece(token: int, served: Served) -> Json:
    """Return a token as an object. A token that is part of a character is returned as bytes."""
    content = served.token_bytes(token)
    try:
        return {"id": token, "piece": content.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(content)}


def detokenized(body: DetokenizeBody, served: Served) -> Json:
    """Return the text of the tokens, including special ones. Raises ApiError."""
    check_extra(body, ())
    served.check_name(body.model)
    if len(body.tokens) > MAX_TOKENS:
        raise wrong("tokens", f"at most {MAX_TOKENS}, not {len(body.tokens)}")
    vocabulary = served.manifest.vocab_size
    for token in body.tokens:
        if token >= vocabulary:
            raise Problem(400, f"tokens: {token} is not in the vocabulary of {vocabulary}", param="tokens")
    model = served.needs_text("there is no text for tokens")
    text = model.decode_all(body.tokens)
    return {"prompt": text, "content": text}
