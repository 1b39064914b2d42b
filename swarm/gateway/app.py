"""The routes. Each takes a body to its API, and what comes of it to the counter."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from swarm.gateway.apis import chat, completions
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.apis.models import model_of
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.desk.desk import Desk
from swarm.gateway.errors import Problem
from swarm.gateway.http.counter import Counter, Job, MakeWriter
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import counter_of, desk_of, owner_of
from swarm.gateway.routes import messages, responses, tokenizing
from swarm.version import __version__

WRITERS: dict[str, MakeWriter] = {
    "chat": chat.ChatWriter,
    "completions": completions.CompletionWriter,
    "responses": ResponseWriter,
    "messages": MessageWriter,
}

_ERRORS = (400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 504)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"description": "An error object."} for status in _ERRORS}


def make_app(desk: Desk, lifespan: Callable[[], Awaitable[None]] | None = None) -> FastAPI:
    """The application on this desk."""

    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        yield
        await desk.client.aclose()

    app = FastAPI(
        title="Swarm", version=__version__, lifespan=live, docs_url=None, redoc_url=None, strict_content_type=False
    )
    app.state.desk, app.state.counter, app.state.created = desk, Counter(desk, WRITERS), int(time.time())
    for each in (router, responses.router, messages.router, tokenizing.router):
        app.include_router(each, responses=ERRORS)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    return app


router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """The gateway is alive."""
    return JsonResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """A plan serves."""
    description = await desk_of(request).description()
    if description.state != "serving":
        text = f"the swarm is {description.state}" + (f": {description.waits_for}" if description.waits_for else "")
        raise Problem(503, text, code="unavailable", retry_after_s=2.0)
    return JsonResponse({"status": "ok", "state": description.state})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    served = await desk_of(request).served()
    return JsonResponse({"object": "list", "data": [model_of(served, request.app.state.created)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    served = await desk_of(request).served()
    served.check_name(name)
    return JsonResponse(model_of(served, request.app.state.created))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: chat.ChatBody) -> Response:
    """Answer a conversation."""
    if last := request.headers.get("last-event-id"):
        return await counter_of(request).resume(last, owner_of(request))
    served = await desk_of(request).served()
    ask = chat.ask_of(body, served)
    memo, request_id = chat.memo_of(body, ask, int(time.time())), secrets.token_hex(16)
    job = Job(request_id, [ask], memo, chat.ChatWriter(memo, served, request_id), bool(body.stream))
    return await counter_of(request).serve(request, served, owner_of(request), job)


@router.post("/v1/completions")
async def text_completions(request: Request, body: completions.CompletionBody) -> Response:
    """Go on with a text, or with several."""
    if last := request.headers.get("last-event-id"):
        return await counter_of(request).resume(last, owner_of(request))
    served = await desk_of(request).served()
    asks = completions.asks_of(body, served)
    memo, request_id = completions.memo_of(body, asks, served, int(time.time())), secrets.token_hex(16)
    job = Job(request_id, asks, memo, completions.CompletionWriter(memo, served, request_id), bool(body.stream))
    return await counter_of(request).serve(request, served, owner_of(request), job)


@router.get("/v1/streams/{event_id}")
async def go_on(request: Request, event_id: str) -> Response:
    """Go on with a stream behind the event of this id."""
    return await counter_of(request).resume(request.headers.get("last-event-id") or event_id, owner_of(request))


# --- errors


def is_anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages")


def refuse(request: Request, problem: Problem) -> Response:
    """The answer in the words of the API that was asked."""
    body = problem.anthropic() if is_anthropic(request) else problem.openai()
    return JsonResponse(body, status_code=problem.status, headers=problem.headers)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return refuse(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong with a body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or None
    text = f"{field}: {first['msg']}" if field else f"the body can't be read: {first['msg']}"
    return refuse(request, Problem(400, text, param=field, code="invalid_value"))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    problem = Problem(error.status_code, text, code="not_found" if error.status_code == 404 else None)
    return refuse(request, problem)
