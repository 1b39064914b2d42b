"""Common path of the APIs with a single conversation: from a body to its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.http.handler import CompletionJob, WriterFactory
from swarm.gateway.http.identity import new_identity
from swarm.gateway.http.state import caller_of, handler_for, parse_off_loop, select_service
from swarm.gateway.resume_state import ResumeState


class StreamableBody(Protocol):
    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...


B = TypeVar("B", bound=StreamableBody)


async def answer_conversation(
    request: Request,
    body: B,
    to_request: Callable[[B, ServedModel], CompletionRequest],
    to_resume_state: Callable[[B, CompletionRequest, int], ResumeState],
    make_writer: WriterFactory,
) -> Response:
    """Answer a conversation. Raises ApiError."""
    (service, served), identity = await select_service(request, body.model), new_identity(request)

    def parse_body() -> tuple[CompletionRequest, ResumeState]:
        ask = to_request(body, served)
        return ask, to_resume_state(body, ask, identity.created)

    completion_request, resume_state = await parse_off_loop(request, parse_body)
    request_id = identity.request_id
    job = CompletionJob(
        request_id, [completion_request], resume_state, make_writer(resume_state, served, request_id), bool(body.stream)
    )
    return await handler_for(request, service).serve(request, served, caller_of(request), job)
