"""The application and its main routes. Each route passes a body to its API and the result to the completion handler."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from swarm.gateway.apis import chat, completions, shapes
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.apis.models import model_of
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.ask import Ask
from swarm.gateway.console.console import Console
from swarm.gateway.desk.desk import Desk
from swarm.gateway.errors import Problem
from swarm.gateway.http.accounts import Accounts, api_of
from swarm.gateway.http.counter import Counter, Job, MakeWriter
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import beside, counter_of, desk_of, owner_of
from swarm.gateway.memo import Memo
from swarm.gateway.routes import asking, messages, responses, tokenizing
from swarm.gateway.routes import console as pages
from swarm.numbers.exposition import render
from swarm.numbers.http import HttpNumbers
from swarm.version import __version__

WRITERS: dict[str, MakeWriter] = {
    "chat": chat.ChatWriter,
    "completions": completions.CompletionWriter,
    "responses": ResponseWriter,
    "messages": MessageWriter,
}

_ERRORS = (400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 504)
Answers = dict[int | str, dict[str, Any]]
ERRORS: Answers = {status: {"description": "An error object.", "model": shapes.Error} for status in _ERRORS}
MESSAGE_ERRORS: Answers = {status: {**told, "model": shapes.MessageError} for status, told in ERRORS.items()}


def make_app(desk: Desk, accounts: Accounts | None = None, console: Console | None = None) -> FastAPI:
    """Return the application on this completion service. ``usage`` records the usage of its answers."""
    accounts = accounts or Accounts(HttpNumbers())

    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        yield
        if console is not None:
            await console.aclose()
        await accounts.aclose()
        await desk.aclose()
        await desk.client.aclose()

    app = FastAPI(
        title="Swarm", version=__version__, lifespan=live, docs_url=None, redoc_url=None, strict_content_type=False
    )
    app.state.desk, app.state.counter, app.state.created = desk, Counter(desk, WRITERS, accounts), int(time.time())
    app.state.numbers = accounts.numbers
    app.state.more_models = []  # names of other servers' models
    for each in (router, responses.router, tokenizing.router):
        app.include_router(each, responses=ERRORS)
    app.include_router(messages.router, responses=MESSAGE_ERRORS)
    if console is not None:
        app.state.console = console
        app.include_router(pages.router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, broken)
    return app


router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=shapes.answer(shapes.StateShape))
async def health() -> Response:
    """Report that the gateway is alive."""
    return JsonResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=shapes.answer(shapes.StateShape))
async def ready(request: Request) -> Response:
    """Report whether a plan is serving."""
    description = await desk_of(request).description()
    if description.state != "serving":
        text = f"the swarm is {description.state}" + (f": {description.waits_for}" if description.waits_for else "")
        raise Problem(503, text, code="unavailable", retry_after_s=2.0)
    return JsonResponse({"status": "ok", "state": description.state})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return metrics for Prometheus: the swarm's, and this gateway's."""
    text, kind = await render(desk_of(request).client.query, request.app.state.numbers)
    return Response(text, media_type=kind)


@router.get("/v1/models", responses=shapes.answer(shapes.ModelsShape))
async def models(request: Request) -> Response:
    served = await desk_of(request).served()
    created = request.app.state.created
    others = [_other(name, created) for name in request.app.state.more_models]
    return JsonResponse({"object": "list", "data": [model_of(served, created), *others]})


@router.get("/v1/models/{name:path}", responses=shapes.answer(shapes.ModelShape))
async def model(request: Request, name: str) -> Response:
    if name in request.app.state.more_models:
        return JsonResponse(_other(name, request.app.state.created))
    served = await desk_of(request).served()
    served.check_name(name)
    return JsonResponse(model_of(served, request.app.state.created))


def _other(name: str, created: int) -> dict[str, Any]:
    """Describe a model of another server."""
    return {"id": name, "object": "model", "created": created, "owned_by": "upstream"}


@router.post("/v1/chat/completions", responses=shapes.answer_or_stream(shapes.ChatShape))
async def chat_completions(request: Request, body: chat.ChatBody) -> Response:
    """Answer a conversation."""
    return await asking.answer(request, body, chat.ask_of, chat.memo_of, chat.ChatWriter)


@router.post("/v1/completions", responses=shapes.answer_or_stream(shapes.TextShape))
async def text_completions(request: Request, body: completions.CompletionBody) -> Response:
    """Continue a text, or several."""
    served = await desk_of(request).served()

    def read() -> tuple[list[Ask], Memo]:
        asks = completions.asks_of(body, served)
        return asks, completions.memo_of(body, asks, served, int(time.time()))

    asks, memo = await beside(request, read)
    request_id = secrets.token_hex(16)
    job = Job(request_id, asks, memo, completions.CompletionWriter(memo, served, request_id), bool(body.stream))
    return await counter_of(request).serve(request, served, owner_of(request), job)


@router.get("/v1/streams/{event_id}", responses={200: {"content": shapes.EVENTS}})
async def go_on(request: Request, event_id: str) -> Response:
    """Resume a stream after the event with this id."""
    return await counter_of(request).resume(request.headers.get("last-event-id") or event_id, owner_of(request))


# --- errors


def is_anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages")


def refuse(request: Request, problem: Problem) -> Response:
    """Return the error response in the format of the API that was called."""
    problem.forget()
    numbers: HttpNumbers = request.app.state.numbers
    if not problem.is_counted:
        # middleware that may ask another server counts refusals itself
        count = request.scope.get("swarm.refused", numbers.refused)
        count(api_of(request.url.path), problem.status)
    body = problem.anthropic() if is_anthropic(request) else problem.openai()
    return JsonResponse(body, status_code=problem.status, headers=problem.headers)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return refuse(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return refuse(request, first_wrong(error.errors()))


def first_wrong(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Return the first of the errors that pydantic found in a body."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or None
    text = f"{field}: {first['msg']}" if field else f"the body can't be read: {first['msg']}"
    return Problem(400, text, param=field, code="invalid_value")


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    problem = Problem(error.status_code, text, code="not_found" if error.status_code == 404 else None)
    return refuse(request, problem)


async def broken(request: Request, error: Exception) -> Response:
    """Answer an internal error. Its cause is in the log, not in the response."""
    return refuse(request, Problem(500, "internal error of the gateway: see its log"))
