"""Access to the application's objects for routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import Caller, CompletionService
from swarm.gateway.http.handler import CompletionHandler
from swarm.gateway.http.sse import parse_event_id
from swarm.gateway.http.usage import UsageRecorder
from swarm.gateway.swarms import Swarms
from swarm.gateway.thread_pool import LONG_BODY

R = TypeVar("R")


def swarms_of(request: Request) -> Swarms:
    swarms: Swarms = request.app.state.swarms
    return swarms


def service_of(request: Request) -> CompletionService:
    """Return the completion service of the first swarm."""
    return swarms_of(request).first


def handler_for(request: Request, service: CompletionService) -> CompletionHandler:
    """Return the completion handler of a service."""
    handlers: dict[CompletionService, CompletionHandler] = request.app.state.handlers
    return handlers[service]


async def select_service(request: Request, model: str | None) -> tuple[CompletionService, ServedModel]:
    """Return the service of the swarm that serves a model to this caller. Raises ApiError."""
    return await swarms_of(request).select(model, caller_of(request))


async def resume_answer(request: Request, event_id: str, num_seen: int = 0) -> Response:
    """Resume a stream after the event with this id, at the swarm that has the answer. Raises ApiError."""
    caller = caller_of(request)
    service = await swarms_of(request).find_answer(parse_event_id(event_id)[0], caller)
    return await handler_for(request, service).resume(event_id, caller, num_seen)


def usage_of(request: Request) -> UsageRecorder:
    recorder: UsageRecorder = request.app.state.usage
    return recorder


def caller_of(request: Request) -> Caller:
    """Return the caller on whose account the request runs; the auth middleware sets it."""
    caller: Caller = request.scope.get("owner") or Caller()
    return caller


async def parse_off_loop(request: Request, parse: Callable[[], R]) -> R:
    """Run a function that interprets the body, in a thread if the body is long. ``swarm.num_added`` of the scope: bytes
    that the body's references stand for."""
    if len(request.scope.get("swarm.body") or b"") + request.scope.get("swarm.num_added", 0) <= LONG_BODY:
        return parse()
    return await service_of(request).body_threads.run(parse)
