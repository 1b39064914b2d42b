"""OpenAI's /v1/embeddings, and /v1/rerank in the spelling of Jina and Cohere. Pure, apart from the tokenizer."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema

from swarm.client.results import RankedDocument, VectorAnswer
from swarm.client.vectors import to_embedding
from swarm.errors import PromptTooLong
from swarm.gateway.apis.bodies import (
    COMMON_IGNORED_FIELDS,
    QueuedBody,
    check_deadline,
    check_extra,
    split_inputs,
    to_input,
    to_priority,
)
from swarm.gateway.apis.completions import PROMPT_SCHEMA
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import invalid_field, unsupported_field
from swarm.wire.messages import Pooling

MAX_INPUTS = 2048  # texts or documents of one body, as OpenAI's
MODEL_LIMIT = -1  # value of ``truncate_prompt_tokens``: the model's context
_Limit = Annotated[
    int | None, Field(description="Keep at most this many tokens of an input; -1: what the model holds.")
]


class VectorBody(QueuedBody):
    """Fields of both bodies."""

    model: str | None = None
    truncate_prompt_tokens: _Limit = None
    add_special_tokens: Annotated[bool | None, Field(description="Only true.")] = None


class EmbeddingBody(VectorBody):
    """Body of /v1/embeddings."""

    # validated by hand: pydantic would report every wrong item of a union
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None


class RerankBody(VectorBody):
    """Body of /v1/rerank."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True)]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int | None, Field(description="Rejected: use truncate_prompt_tokens.")] = None


def check_body(body: VectorBody, served: ServedModel) -> tuple[int, float | None]:
    """Check the fields of both bodies; return priority and deadline. Raises ApiError."""
    check_extra(body, served, COMMON_IGNORED_FIELDS)
    served.check_name(body.model)
    if body.add_special_tokens is False:
        raise unsupported_field("add_special_tokens", "send token ids to leave them out")
    context, limit = served.manifest.context, body.truncate_prompt_tokens
    if limit is not None and limit != MODEL_LIMIT and not 1 <= limit <= context:
        raise invalid_field("truncate_prompt_tokens", f"must be -1 or between 1 and {context}, not {limit}")
    return to_priority(body), check_deadline(body)


def parse_inputs(given: Any) -> list[str | tuple[int, ...]]:
    """Return the inputs, as texts or token ids. Raises ApiError."""
    items = split_inputs(given, "input")
    if len(items) > MAX_INPUTS:
        raise invalid_field("input", f"at most {MAX_INPUTS} inputs, not {len(items)}")
    return [to_input(each, "input") for each in items]


def parse_documents(body: RerankBody) -> list[str]:
    """Return the documents' texts. Raises ApiError."""
    if not body.query:
        raise invalid_field("query", "is empty")
    if not 1 <= len(body.documents) <= MAX_INPUTS:
        raise invalid_field("documents", f"takes 1 to {MAX_INPUTS}, not {len(body.documents)}")
    if body.top_n is not None and body.top_n < 1:
        raise invalid_field("top_n", f"must be at least 1, not {body.top_n}")
    if body.max_tokens_per_doc is not None:
        raise unsupported_field("max_tokens_per_doc", "truncate_prompt_tokens limits query and document together")
    texts = [document if isinstance(document, str) else document.get("text") for document in body.documents]
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise invalid_field("documents", f"documents[{number}] must be a text, or an object with one")
    return [text for text in texts if isinstance(text, str)]


def encode_inputs(
    inputs: Sequence[str | tuple[int, ...]], body: VectorBody, served: ServedModel, *, query: str | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each input, after the query if there is one. Raises ApiError and InvalidRequest."""
    limit, context = body.truncate_prompt_tokens, served.manifest.context
    most = context if limit is None or limit == MODEL_LIMIT else limit
    encoded: list[tuple[int, ...]] = []
    for each in inputs:
        if isinstance(each, str):
            text = served.require_text_model("send token ids")
            first, second = (each, None) if query is None else (query, each)
            ids = text.encode_input(first, second, most=most, cuts=limit is not None)
        else:
            ids = each if limit is None else each[:most]
        if len(ids) > context:
            raise PromptTooLong(
                f"This model's maximum context length is {context} tokens. However, an input has {len(ids)} tokens. "
                "Please shorten it, or allow to truncate it.",
                len(ids),
            )
        encoded.append(ids)
    return encoded


def embedding_response(
    answers: Sequence[VectorAnswer], body: EmbeddingBody, served: ServedModel, pooling: Pooling
) -> Json:
    """Return the response of /v1/embeddings."""
    encoded = encode_embeddings(answers, pooling, body.dimensions, as_base64=body.encoding_format == "base64")
    data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(encoded)]
    num_prompt = sum(answer.num_prompt for answer in answers)
    usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def encode_embeddings(
    answers: Sequence[VectorAnswer], pooling: Pooling, dimensions: int | None, *, as_base64: bool = False
) -> list[msgspec.Raw]:
    """Return the embeddings as JSON, each encoded for itself: one call for all would hold the interpreter's lock for a
    long time, also in a thread."""
    vectors = (to_embedding(answer.vector, pooling, dimensions) for answer in answers)
    return [msgspec.Raw(msgspec.json.encode(_to_base64(each) if as_base64 else list(each))) for each in vectors]


def _to_base64(vector: array.array[float]) -> str:
    """Encode float32 in little-endian order."""
    if sys.byteorder == "big":
        vector = array.array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def rerank_response(
    ranked: Sequence[RankedDocument], body: RerankBody, texts: Sequence[str], served: ServedModel, request_id: str
) -> Json:
    """Return the response of /v1/rerank."""
    results: list[Json] = []
    for document in ranked[: body.top_n]:
        result: Json = {"index": document.index, "relevance_score": document.score}
        if body.return_documents:
            result["document"] = {"text": texts[document.index]}
        results.append(result)
    num_prompt = sum(document.num_prompt for document in ranked)
    usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
    return {"id": f"rerank-{request_id}", "model": served.name, "usage": usage, "results": results}
