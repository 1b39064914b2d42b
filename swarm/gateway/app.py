"""The application and its main routes. Each route passes a body to its API and the result to the completion handler."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match

from swarm.gateway.apis import chat, completions, shapes
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.apis.models import describe_model, to_anthropic_list, to_anthropic_model
from swarm.gateway.apis.ollama_writer import OllamaWriter
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.batches.lines import ENDPOINTS
from swarm.gateway.batches.service import BatchService
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.console.console import Console
from swarm.gateway.errors import ApiError
from swarm.gateway.http.handler import CompletionHandler, CompletionJob, WriterFactory
from swarm.gateway.http.identity import new_identity
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import caller_of, handler_for, parse_off_loop, resume_answer, select_service, swarms_of
from swarm.gateway.http.usage import UsageRecorder, api_of
from swarm.gateway.resume_state import ResumeState
from swarm.gateway.routes import batches as batch_routes
from swarm.gateway.routes import console as pages
from swarm.gateway.routes import conversation, messages, ollama, responses, tokenizing, vectors
from swarm.gateway.swarms import Swarms
from swarm.metrics.exposition import render
from swarm.metrics.http import HttpMetrics
from swarm.version import __version__

WRITERS: dict[str, WriterFactory] = {
    "chat": chat.ChatWriter,
    "completions": completions.CompletionWriter,
    "responses": ResponseWriter,
    "messages": MessageWriter,
    "ollama": OllamaWriter,
}

_ERRORS = (400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 504)
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {status: {"description": "An error object.", "model": shapes.Error} for status in _ERRORS}
OLLAMA_ERRORS: Responses = {status: {**told, "model": shapes.OllamaError} for status, told in ERRORS.items()}
MESSAGE_ERRORS: Responses = {status: {**told, "model": shapes.MessageError} for status, told in ERRORS.items()}


def make_app(
    swarms: Swarms,
    usage: UsageRecorder | None = None,
    console: Console | None = None,
    batches: BatchService | None = None,
) -> FastAPI:
    """Return the application on these swarms. ``usage`` records the usage of its answers."""
    usage = usage or UsageRecorder(HttpMetrics())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.aclose()
        if console is not None:
            await console.aclose()
        await usage.aclose()
        await swarms.aclose()

    app = FastAPI(
        title="Swarm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, strict_content_type=False
    )
    app.state.swarms, app.state.created = swarms, int(time.time())
    app.state.handlers = {service: CompletionHandler(service, WRITERS, usage) for service in swarms.services}
    app.state.numbers, app.state.usage = usage.metrics, usage
    app.state.more_models = []  # names of other servers' models
    app.state.batches = batches
    api_routers = (router, responses.router, tokenizing.router, vectors.router, batch_routes.router)
    for api_router in api_routers:
        app.include_router(api_router, responses=ERRORS)
    offered = {getattr(route, "path", "") for api_router in api_routers for route in api_router.routes}
    app.state.batch_endpoints = [path for path in ENDPOINTS if path in offered]
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    app.include_router(ollama.router, responses=OLLAMA_ERRORS)
    if console is not None:
        app.state.console = console
        app.include_router(pages.router)
    else:
        app.include_router(ollama.root_router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, internal_error)
    return app


router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=shapes.response_doc(shapes.StateShape))
async def health() -> Response:
    """Report that the gateway is alive."""
    return JsonResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=shapes.response_doc(shapes.StateShape))
async def ready(request: Request) -> Response:
    """Report whether a plan is serving, of any swarm."""
    description = await swarms_of(request).best_description()
    if description.state != "serving":
        text = f"the swarm is {description.state}" + (f": {description.waits_for}" if description.waits_for else "")
        raise ApiError(503, text, code="unavailable", retry_after_s=2.0)
    return JsonResponse({"status": "ok", "state": description.state})


_UNKNOWN_MODEL: Responses = {
    404: {"description": "An error object.", "content": {"application/json": {"schema": {"type": "object"}}}}
}


@router.get("/metrics", response_class=PlainTextResponse, responses=_UNKNOWN_MODEL)
async def metrics(request: Request, model: str | None = None) -> Response:
    """Return metrics for Prometheus: those of the swarm with this model, or of the first, and this gateway's."""
    client = swarms_of(request).client_for(model)
    text, kind = await render(client.query, request.app.state.numbers)
    return Response(text, media_type=kind)


@router.get("/v1/models", responses=shapes.response_doc(shapes.ModelsShape))
async def models(request: Request) -> Response:
    created, caller = request.app.state.created, caller_of(request)
    own = await swarms_of(request).models(caller)
    others = [_describe_other_model(name, created) for name in request.app.state.more_models if caller.may_use(name)]
    described = [*(describe_model(served, created, state) for served, state in own), *others]
    if is_anthropic(request):
        return JsonResponse(to_anthropic_list(described))
    return JsonResponse({"object": "list", "data": described})


@router.get("/v1/models/{name:path}", responses=shapes.response_doc(shapes.ModelShape))
async def model(request: Request, name: str) -> Response:
    if name in request.app.state.more_models and caller_of(request).may_use(name):
        described = _describe_other_model(name, request.app.state.created)
    else:
        service, served = await select_service(request, name)
        served.check_name(name)
        described = describe_model(served, request.app.state.created, service.state)
    return JsonResponse(to_anthropic_model(described) if is_anthropic(request) else described)


def _describe_other_model(name: str, created: int) -> dict[str, Any]:
    """Describe a model of another server."""
    return {"id": name, "object": "model", "created": created, "owned_by": "upstream"}


@router.post("/v1/chat/completions", responses=shapes.response_or_stream_doc(shapes.ChatShape))
async def chat_completions(request: Request, body: chat.ChatBody) -> Response:
    """Answer a conversation."""
    return await conversation.answer_conversation(request, body, chat.to_request, chat.to_resume_state, chat.ChatWriter)


@router.post("/v1/completions", responses=shapes.response_or_stream_doc(shapes.TextShape))
async def text_completions(request: Request, body: completions.CompletionBody) -> Response:
    """Continue a text, or several."""
    (service, served), identity = await select_service(request, body.model), new_identity(request)

    def parse_body() -> tuple[list[CompletionRequest], ResumeState]:
        asks = completions.to_requests(body, served)
        return asks, completions.to_resume_state(body, asks, served, identity.created)

    asks, memo = await parse_off_loop(request, parse_body)
    request_id = identity.request_id
    job = CompletionJob(
        request_id, asks, memo, completions.CompletionWriter(memo, served, request_id), bool(body.stream)
    )
    return await handler_for(request, service).serve(request, served, caller_of(request), job)


@router.get("/v1/streams/{event_id}", responses={200: {"content": shapes.EVENTS}})
async def go_on(request: Request, event_id: str) -> Response:
    """Resume a stream after the event with this id."""
    return await resume_answer(request, request.headers.get("last-event-id") or event_id)


# --- errors


def is_anthropic(request: Request) -> bool:
    """Whether the client uses Anthropic's API."""
    path = request.url.path
    is_shared = path == "/v1/models" or path.startswith("/v1/models/")
    return path.startswith("/v1/messages") or (is_shared and "anthropic-version" in request.headers)


def error_response(request: Request, problem: ApiError) -> Response:
    """Return the error response in the format of the API that was called."""
    problem.drop_traceback()
    numbers: HttpMetrics = request.app.state.numbers
    if not problem.is_counted:
        # middleware that may ask another server counts refusals itself
        count = request.scope.get("swarm.refused", numbers.count_refused)
        count(api_of(request.url.path), problem.status)
    body = problem.to_anthropic() if is_anthropic(request) else problem.body_for(request.url.path)
    return JsonResponse(body, status_code=problem.status, headers=problem.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request, error)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request, first_validation_error(error.errors()))


def first_validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of the errors that pydantic found in a body."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or None
    text = f"{field}: {first['msg']}" if field else f"the body can't be read: {first['msg']}"
    return ApiError(400, text, param=field, code="invalid_value")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        similar = _similar_path(request, path)
        hint = f"{similar} is: check the client's base URL" if similar else "/openapi.json lists what is"
        text = f"{request.method} {path} is not offered here; {hint}"
        problem = ApiError(404, text, code="unsupported_endpoint")
    elif error.status_code == 405:
        problem = ApiError(405, f"{path} does not take {request.method}", code="unsupported_method")
    else:
        problem = ApiError(error.status_code, f"{request.method} {path}: {error.detail}")
    return error_response(request, problem)


def _similar_path(request: Request, path: str) -> str | None:
    """Return an offered path with one ``/v1`` more or less in front: APIs differ in whether a base URL has it."""
    for similar in (f"/v1{path}", path.removeprefix("/v1")):
        scope = {**request.scope, "path": similar}
        is_other_api = similar != path and similar.startswith(("/v1/", "/api/"))
        if is_other_api and any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return similar
    return None


async def internal_error(request: Request, error: Exception) -> Response:
    """Answer an internal error. Its cause is in the log, not in the response."""
    return error_response(request, ApiError(500, "internal error of the gateway: see its log"))
