"""Ollama's /api/embed, and the older /api/embeddings, as bodies of /v1/embeddings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from swarm.client.results import VectorAnswer
from swarm.gateway.apis.ollama import NamedModelBody, OllamaOptions, check_fields
from swarm.gateway.apis.ollama_writer import NS_PER_S
from swarm.gateway.apis.vectors import MODEL_LIMIT, EmbeddingBody, encode_embeddings
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import invalid_field
from swarm.wire.messages import Pooling

_TEXTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class EmbedBody(NamedModelBody):
    """Body of /api/embed."""

    # validated by hand: pydantic would report every wrong item of a union
    input: Annotated[Any, WithJsonSchema(_TEXTS_SCHEMA)] = None
    truncate: Annotated[bool | None, Field(description="Cut inputs that are too long: the default.")] = None
    dimensions: Annotated[int | None, Field(description="0: all.")] = None

    def to_embedding_body(self, served: ServedModel) -> EmbeddingBody | None:
        """Return the body of /v1/embeddings; None if the request only loads the model. Raises ApiError."""
        check_fields(self, served)
        if not self.input:
            return None
        if not isinstance(self.input, str | list) or not all(isinstance(each, str) for each in self.input):
            raise invalid_field("input", "must be a text or a list of texts")
        return _embedding_body(self, self.input, self.dimensions or None, cuts=self.truncate is not False)

    def to_response(
        self, answers: Sequence[VectorAnswer], served: ServedModel, pooling: Pooling, elapsed_s: float
    ) -> Json:
        return {
            "model": served.name,
            "embeddings": encode_embeddings(answers, pooling, self.dimensions or None),
            "total_duration": int(elapsed_s * NS_PER_S),
            "load_duration": int(max(answer.queued_s for answer in answers) * NS_PER_S),
            "prompt_eval_count": sum(answer.num_prompt for answer in answers),
        }


class PromptEmbeddingBody(NamedModelBody):
    """Body of /api/embeddings."""

    prompt: str = ""

    def to_embedding_body(self, served: ServedModel) -> EmbeddingBody | None:
        """Return the body of /v1/embeddings; None if the request only loads the model. Raises ApiError."""
        check_fields(self, served)
        return _embedding_body(self, self.prompt, None, cuts=True) if self.prompt else None

    def to_response(self, answers: Sequence[VectorAnswer], _: ServedModel, pooling: Pooling, _elapsed_s: float) -> Json:
        [embedding] = encode_embeddings(answers, pooling, None)
        return {"embedding": embedding}


def _embedding_body(
    body: NamedModelBody, given: str | list[str], dimensions: int | None, *, cuts: bool
) -> EmbeddingBody:
    options = body.options or OllamaOptions()
    return EmbeddingBody(
        model=body.model,
        input=given,
        dimensions=dimensions,
        truncate_prompt_tokens=MODEL_LIMIT if cuts else None,
        priority=options.priority,
        deadline_s=options.deadline_s,
    )
