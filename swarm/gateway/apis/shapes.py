"""Response models for the OpenAPI document. The writers produce the actual responses; tests compare the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """The error. ``param`` names the field, ``code`` is a stable name for the reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Error response of all routes except /v1/messages, which has Anthropic's format."""

    error: ErrorObject


class UsageShape(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class FunctionShape(BaseModel):
    """A function's name, and its arguments as JSON in a string."""

    name: str
    arguments: str


class CustomShape(BaseModel):
    """A custom tool's name, and its text."""

    name: str
    input: str


class CallShape(BaseModel):
    """A call of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionShape | None = None
    custom: CustomShape | None = None


class MessageShape(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallShape] | None = None
    hops: list[Any] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoiceShape(BaseModel):
    """One continuation of a conversation."""

    index: int
    message: MessageShape
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatShape(BaseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceShape]
    usage: UsageShape


class TextChoiceShape(BaseModel):
    """One continuation of a text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    hops: list[Any] | None = None


class TextShape(BaseModel):
    """Response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoiceShape]
    usage: UsageShape


class ModelShape(BaseModel):
    """A model; ``swarm`` has its capabilities."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    swarm: dict[str, Any]


class ModelsShape(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelShape]


class VectorUsageShape(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingShape(BaseModel):
    """One input's embedding: numbers, or with encoding_format base64 float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsShape(BaseModel):
    """Response of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingShape]
    model: str
    usage: VectorUsageShape


class RankedShape(BaseModel):
    """A document's place in the request, and its score from 0 to 1."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankShape(BaseModel):
    """Response of /v1/rerank: the documents, the best first."""

    id: str
    model: str
    usage: VectorUsageShape
    results: list[RankedShape]


class InputTokensShape(BaseModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class StateShape(BaseModel):
    """State of a healthy service."""

    status: Literal["ok"]
    state: str | None = None


EVENTS: dict[str, Any] = {
    "text/event-stream": {"schema": {"type": "string", "description": "Events, with stream: true."}}
}


def response_doc(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return a route's documentation of responses of this shape."""
    return {200: {"model": shape}}


def response_or_stream_doc(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return a route's documentation of responses of this shape, or streams of events."""
    return {200: {"model": shape, "content": EVENTS}}


class MessageErrorObject(BaseModel):
    """The error, in Anthropic's format."""

    type: str
    message: str


class MessageError(BaseModel):
    """Error response in Anthropic's format."""

    type: Literal["error"]
    error: MessageErrorObject


class OllamaError(BaseModel):
    """Error response in Ollama's format."""

    error: str


class OllamaAnswer(BaseModel):
    """Answer of /api/chat (``message``) or /api/generate (``response``): whole, or the last line of a stream."""

    model: str
    created_at: str
    message: dict[str, Any] | None = None
    response: str | None = None
    done: bool
    done_reason: str


class OllamaEmbeddings(BaseModel):
    """Response of /api/embed; durations in nanoseconds. Without inputs, only the first two."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class OllamaEmbedding(BaseModel):
    """Response of /api/embeddings."""

    embedding: list[float]


class OllamaModels(BaseModel):
    """Models, as rows."""

    models: list[dict[str, Any]]


class OllamaModel(BaseModel):
    """A model."""

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str


class OllamaVersion(BaseModel):
    """The version of Ollama whose API is served, and Swarm's own."""

    version: str
    swarm: str


LINES: dict[str, Any] = {
    "application/x-ndjson": {"schema": {"type": "string", "description": "Lines of JSON, unless stream is false."}}
}


def response_or_lines_doc(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return a route's documentation of responses of this shape, or streams of lines."""
    return {200: {"model": shape, "content": LINES}}
