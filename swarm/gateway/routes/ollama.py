"""Routes of Ollama's API, below /api. Only those that use models are offered, not those that manage them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from swarm.client.results import VectorAnswer
from swarm.gateway.apis import ollama, ollama_models, ollama_vectors, shapes
from swarm.gateway.apis.ollama_writer import OllamaWriter, line
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import invalid_field
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import caller_of, select_service, swarms_of
from swarm.gateway.routes import conversation
from swarm.gateway.routes.vectors import answer_embeddings
from swarm.version import __version__
from swarm.wire.messages import Pooling

router = APIRouter()
root_router = APIRouter(include_in_schema=False)  # for gateways without a console


@root_router.head("/")
@root_router.get("/")
async def root() -> Response:
    """Answer a health check of Ollama's clients."""
    return PlainTextResponse("Ollama is running")


@router.post("/api/chat", responses=shapes.response_or_lines_doc(shapes.OllamaAnswer))
async def chat(request: Request, body: ollama.OllamaChatBody) -> Response:
    """Answer a conversation."""
    if body.only_loads:
        return await _load(request, body, is_chat=True)
    return await conversation.answer_conversation(
        request, body, ollama.to_chat_request, ollama.to_resume_state, OllamaWriter
    )


@router.post("/api/generate", responses=shapes.response_or_lines_doc(shapes.OllamaAnswer))
async def generate(request: Request, body: ollama.GenerateBody) -> Response:
    """Answer a prompt, or continue a text."""
    if body.only_loads:
        return await _load(request, body, is_chat=False)
    return await conversation.answer_conversation(
        request, body, ollama.to_generate_request, ollama.to_resume_state, OllamaWriter
    )


@router.post("/api/embed", responses=shapes.response_doc(shapes.OllamaEmbeddings))
async def embed(request: Request, body: ollama_vectors.EmbedBody) -> Response:
    """Return the embedding of each input."""
    return await _embed(request, body, "input", {"model": body.model, "embeddings": []})


@router.post("/api/embeddings", responses=shapes.response_doc(shapes.OllamaEmbedding))
async def embed_prompt(request: Request, body: ollama_vectors.PromptEmbeddingBody) -> Response:
    """Return the embedding of a prompt."""
    return await _embed(request, body, "prompt", {"embedding": []})


async def _embed(
    request: Request, body: ollama_vectors.EmbedBody | ollama_vectors.PromptEmbeddingBody, field: str, empty: Json
) -> Response:
    """Answer with embeddings, or with ``empty`` if there are no inputs."""
    began_at = time.monotonic()
    service, served = await select_service(request, body.model)
    converted = body.to_embedding_body(served)
    if converted is None:
        return JsonResponse(empty)

    def respond(answers: Sequence[VectorAnswer], pooling: Pooling) -> Json:
        return body.to_response(answers, served, pooling, time.monotonic() - began_at)

    return await answer_embeddings(request, service, served, converted, respond, api="ollama", field=field)


async def _load(request: Request, body: ollama.OllamaBody, *, is_chat: bool) -> Response:
    """Answer a request that only loads or unloads the model, which is loaded in any case."""
    _, served = await select_service(request, body.model)
    served.check_name(body.model)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    return JsonResponse(line(served.name, int(time.time()), {}, is_chat=is_chat, done=True, done_reason=reason))


@router.get("/api/tags", responses=shapes.response_doc(shapes.OllamaModels))
async def tags(request: Request) -> Response:
    """List the models."""
    created = request.app.state.created
    return JsonResponse({"models": [ollama_models.describe(served, created) for served in await _models(request)]})


@router.get("/api/ps", responses=shapes.response_doc(shapes.OllamaModels))
async def loaded(request: Request) -> Response:
    """List the models that serve now."""
    created = request.app.state.created
    rows: list[Json] = [
        ollama_models.describe_loaded(served, created) for served in await _models(request, only_serving=True)
    ]
    return JsonResponse({"models": rows})


async def _models(request: Request, *, only_serving: bool = False) -> list[ServedModel]:
    models = await swarms_of(request).models(caller_of(request))
    return [served for served, state in models if not only_serving or state == "serving"]


@router.post("/api/show", responses=shapes.response_doc(shapes.OllamaModel))
async def show(request: Request, body: ollama.NamedBody) -> Response:
    """Describe a model."""
    name = body.model or body.name
    if not name:
        raise invalid_field("model", "is missing")
    _, served = await select_service(request, name)
    served.check_name(name)
    return JsonResponse(ollama_models.describe_fully(served, request.app.state.created))


@router.get("/api/version", responses=shapes.response_doc(shapes.OllamaVersion))
async def version() -> Response:
    """Return the version of Ollama whose API this is, and our own."""
    return JsonResponse({"version": ollama_models.API_VERSION, "swarm": __version__})
