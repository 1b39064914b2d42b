"""Access to the application's objects for routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from swarm.gateway.completion.service import Caller, CompletionService
from swarm.gateway.http.handler import CompletionHandler
from swarm.gateway.http.usage import UsageRecorder
from swarm.gateway.thread_pool import LONG_BODY

R = TypeVar("R")


def service_of(request: Request) -> CompletionService:
    service: CompletionService = request.app.state.desk
    return service


def handler_of(request: Request) -> CompletionHandler:
    handler: CompletionHandler = request.app.state.counter
    return handler


def usage_of(request: Request) -> UsageRecorder:
    recorder: UsageRecorder = request.app.state.usage
    return recorder


def caller_of(request: Request) -> Caller:
    """Return the caller on whose account the request runs; the auth middleware sets it."""
    caller: Caller = request.scope.get("owner") or Caller()
    return caller


async def parse_off_loop(request: Request, parse: Callable[[], R]) -> R:
    """Run a function that interprets the body, in a thread if the body is long."""
    if len(request.scope.get("swarm.body") or b"") <= LONG_BODY:
        return parse()
    return await service_of(request).body_threads.run(parse)
