"""Fast path for the most frequent requests: bypasses route matching and framework layers.

It handles completion requests whose bodies are valid. Everything else is passed to the application, which has the same
routes and reports what is wrong. So answers are identical, only sooner.

A POST that resumes a stream is handled here, too: its body is not read, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.apis.anthropic import CountBody, MessageBody
from swarm.gateway.apis.chat import ChatBody
from swarm.gateway.apis.completions import CompletionBody
from swarm.gateway.apis.ollama import GenerateBody, OllamaChatBody
from swarm.gateway.apis.ollama_vectors import EmbedBody, PromptEmbeddingBody
from swarm.gateway.apis.responses import ResponseBody
from swarm.gateway.apis.tokenizing import DetokenizeBody, TokenizeBody
from swarm.gateway.apis.vectors import EmbeddingBody, RerankBody
from swarm.gateway.app import chat_completions, error_response, first_validation_error, internal_error, text_completions
from swarm.gateway.errors import ApiError
from swarm.gateway.http.sse import resume_event_id
from swarm.gateway.http.state import resume_answer
from swarm.gateway.routes.messages import answer, count
from swarm.gateway.routes.ollama import chat, embed, embed_prompt, generate
from swarm.gateway.routes.responses import respond
from swarm.gateway.routes.tokenizing import detokenize, tokenize
from swarm.gateway.routes.vectors import embeddings, rerank
from swarm.gateway.swarms import Swarms
from swarm.gateway.thread_pool import LONG_BODY

BODY = "swarm.body"  # key of the scope: the whole body
JSON = "swarm.json"  # key of the scope: the decoded body, if there is one

_Route = tuple[type[BaseModel], Callable[[Request, Any], Awaitable[Response]]]
ROUTES: dict[str, _Route] = {
    "/v1/chat/completions": (ChatBody, chat_completions),
    "/v1/completions": (CompletionBody, text_completions),
    "/v1/messages": (MessageBody, answer),
    "/v1/messages/count_tokens": (CountBody, count),
    "/v1/responses": (ResponseBody, respond),
    "/api/chat": (OllamaChatBody, chat),
    "/api/generate": (GenerateBody, generate),
    "/api/embed": (EmbedBody, embed),
    "/api/embeddings": (PromptEmbeddingBody, embed_prompt),
    "/v1/embeddings": (EmbeddingBody, embeddings),
    "/v1/rerank": (RerankBody, rerank),
    "/tokenize": (TokenizeBody, tokenize),
    "/detokenize": (DetokenizeBody, detokenize),
}


class FastPath:
    """ASGI application in front of the FastAPI application, whose state its requests use."""

    def __init__(self, app: FastAPI) -> None:
        self._full_app = app
        self._fast_app: ASGIApp = ServerErrorMiddleware(self._answer, handler=internal_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_resumed = scope["type"] == "http" and bool(resume_event_id(scope))
        checked = None if is_resumed else await self._validate_body(scope)
        if checked is None and not is_resumed:
            await self._full_app(scope, receive, send)
            return
        scope["app"], scope["swarm.checked"] = self._full_app, checked
        await self._fast_app(scope, receive, send)

    async def _validate_body(self, scope: Scope) -> BaseModel | ApiError | None:
        """Return the body as its API's model; None for a request that goes through the application. An error in a long
        body is returned here: the application would decode it again and look for all errors, on the loop."""
        if scope["type"] != "http" or scope["method"] != "POST" or JSON not in scope:
            return None
        route = ROUTES.get(scope["path"])
        if route is None or scope.get("root_path"):
            return None
        is_long = len(scope[BODY]) > LONG_BODY
        swarms: Swarms = self._full_app.state.swarms
        try:
            checked = (
                await swarms.first.body_threads.run(_validate, route[0], scope[JSON])
                if is_long
                else _validate(route[0], scope[JSON])
            )
        except ApiError as problem:  # too many long bodies are being read
            return problem
        return None if isinstance(checked, ApiError) and not is_long else checked

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, checked = Request(scope, receive, send), scope.pop("swarm.checked")
        try:
            if checked is None:
                response = await resume_answer(request, resume_event_id(scope))
            elif isinstance(checked, ApiError):
                raise checked
            else:
                response = await ROUTES[scope["path"]][1](request, checked)
        except ApiError as problem:
            response = error_response(request, problem)
        await response(scope, receive, send)


def _validate(model: type[BaseModel], decoded: object) -> BaseModel | ApiError:
    try:
        return model.model_validate(decoded)
    except ValidationError as error:
        return first_validation_error(error.errors(include_url=False, include_context=False, include_input=False))
