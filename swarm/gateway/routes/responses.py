"""Routes of OpenAI's Responses API, below /v1/responses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from swarm.gateway.apis import responses, shapes
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.errors import ApiError
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import caller_of, handler_for, parse_off_loop, resume_answer, select_service, swarms_of
from swarm.gateway.routes import conversation

PREFIX = "resp_"

router = APIRouter()


@router.post("/v1/responses")
async def respond(request: Request, body: responses.ResponseBody) -> Response:
    """Answer a conversation of items."""
    return await conversation.answer_conversation(
        request, body, responses.to_request, responses.to_resume_state, ResponseWriter
    )


@router.post("/v1/responses/input_tokens", responses=shapes.response_doc(shapes.InputTokensShape))
async def count(request: Request, body: responses.InputTokensBody) -> Response:
    """Count the tokens of a prompt."""
    service, served = await select_service(request, body.model)
    completion_request = await parse_off_loop(request, lambda: responses.to_request(body, served))
    num_tokens = len((await service.prepare(completion_request, served)).ids)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.get("/v1/responses/{response_id}")
async def fetch(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=10**8)] = None,
) -> Response:
    """Return an answer's current state, if it was requested with ``store``; its reader continues. With ``stream``, take
    over as its reader after the event with this ``sequence_number``."""
    request_id, owner = response_id.removeprefix(PREFIX), caller_of(request)
    if stream:
        num_seen = 0 if starting_after is None else starting_after + 1
        return await resume_answer(request, request_id, num_seen)
    service = await swarms_of(request).find_answer(request_id, owner)
    return await handler_for(request, service).look_up(request_id, owner, responses.is_stored)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str) -> Response:
    """Refuse: answers expire by themselves."""
    text = f"{response_id[:80]!r} can't be deleted: answers expire by themselves soon after their end"
    raise ApiError(400, text, code="unsupported")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str) -> Response:
    """Refuse: no answer runs in the background."""
    text = f"{response_id[:80]!r} does not run in the background: closing the connection cancels it"
    raise ApiError(400, text, code="unsupported")
