"""A short way for the requests that everybody sends: no matching of routes, no layers between.

It takes what asks for an answer with a body that is right in all its fields. Everything else goes the ordinary way
through the application, which has the same routes and says what is wrong. So no answer is another, but it comes sooner.

A POST that goes on with a stream is answered here, too: its body is not read, whatever it is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.apis.anthropic import MessageBody
from swarm.gateway.apis.chat import ChatBody
from swarm.gateway.apis.completions import CompletionBody
from swarm.gateway.apis.responses import ResponseBody
from swarm.gateway.app import broken, chat_completions, refuse, text_completions
from swarm.gateway.errors import Problem
from swarm.gateway.http.sse import resumed_by
from swarm.gateway.http.state import counter_of, owner_of
from swarm.gateway.routes.messages import answer
from swarm.gateway.routes.responses import respond

BODY = "swarm.body"  # of a scope: the whole body, which has been read and found to be JSON

_Route = tuple[type[BaseModel], Callable[[Request, Any], Awaitable[Response]]]
ROUTES: dict[str, _Route] = {
    "/v1/chat/completions": (ChatBody, chat_completions),
    "/v1/completions": (CompletionBody, text_completions),
    "/v1/messages": (MessageBody, answer),
    "/v1/responses": (ResponseBody, respond),
}


class Lane:
    """Stands before an application, which is also what its requests ask for state."""

    def __init__(self, app: FastAPI) -> None:
        self._ordinary = app
        self._short: ASGIApp = ServerErrorMiddleware(self._answer, handler=broken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_resumed = scope["type"] == "http" and bool(resumed_by(scope))
        body = None if is_resumed else _checked(scope)
        if body is None and not is_resumed:
            await self._ordinary(scope, receive, send)
            return
        scope["app"], scope["swarm.checked"] = self._ordinary, body
        await self._short(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, body = Request(scope, receive, send), scope.pop("swarm.checked")
        try:
            if body is None:
                response = await counter_of(request).resume(resumed_by(scope), owner_of(request))
            else:
                response = await ROUTES[scope["path"]][1](request, body)
        except Problem as problem:
            response = refuse(request, problem)
        await response(scope, receive, send)


def _checked(scope: Scope) -> BaseModel | None:
    """The body as its API's model; None for what goes the ordinary way."""
    if scope["type"] != "http" or scope["method"] != "POST" or not scope.get(BODY):
        return None
    route = ROUTES.get(scope["path"])
    if route is None or scope.get("root_path"):
        return None
    try:
        return route[0].model_validate(json.loads(scope[BODY]))
    except (ValueError, RecursionError):
        return None
