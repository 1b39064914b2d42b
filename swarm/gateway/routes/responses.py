"""Routes of OpenAI's Responses API, below /v1/responses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from swarm.gateway.apis import responses, shapes
from swarm.gateway.apis.bodies import encode_json
from swarm.gateway.apis.items import MAX_REFERENCED, find_references
from swarm.gateway.apis.response_writer import ResponseWriter
from swarm.gateway.apis.writer import Json
from swarm.gateway.errors import ApiError, invalid_field
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import caller_of, handler_for, parse_off_loop, resume_answer, select_service, swarms_of
from swarm.gateway.routes import conversation

PREFIX = "resp_"

router = APIRouter()


@router.post("/v1/responses")
async def respond(request: Request, body: responses.ResponseBody) -> Response:
    """Answer a conversation of items."""
    await _fill_in_references(request, body)
    return await conversation.answer_conversation(
        request, body, responses.to_request, responses.to_resume_state, ResponseWriter
    )


@router.post("/v1/responses/input_tokens", responses=shapes.response_doc(shapes.InputTokensShape))
async def count(request: Request, body: responses.InputTokensBody) -> Response:
    """Count the tokens of a prompt."""
    await _fill_in_references(request, body)
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


async def _fill_in_references(request: Request, body: responses.InputTokensBody) -> None:
    """Replace each ``item_reference`` of an input with its item, from an earlier answer. Raises ApiError."""
    if not isinstance(body.input, list):
        return
    num_added = 0
    for request_id, references in find_references(body.input).items():
        items = {item["id"]: (item, len(encode_json(item, "input"))) for item in await _items_of(request, request_id)}
        for number, item_id in references:
            if item_id not in items:
                raise _no_such_item(number, item_id)
            body.input[number], num_bytes = items[item_id]
            if body.input[number]["status"] == "in_progress":
                text = f"the item {item_id!r} is not finished yet: wait for its answer's end"
                raise ApiError(409, text, param=f"input[{number}].id", code="conflict")
            num_added += num_bytes
            if num_added > MAX_REFERENCED:
                raise invalid_field("input", f"refers to more than {MAX_REFERENCED} bytes of items")
    request.scope["swarm.num_added"] = num_added


async def _items_of(request: Request, request_id: str) -> list[Json]:
    """Return the items of a stored answer, none if there is no such answer. Raises ApiError."""
    caller = caller_of(request)
    try:
        service = await swarms_of(request).find_answer(request_id, caller)
        _, answer = await handler_for(request, service).read_stored(request_id, caller, responses.is_stored)
    except ApiError as error:
        if error.status in (400, 404):  # no id of a request, or of none that is stored
            return []
        raise
    items: list[Json] = answer["output"]
    return items


def _no_such_item(number: int, item_id: str) -> ApiError:
    text = f"the item {item_id[:80]!r} is not stored here: send the item itself, as clients do with store: false"
    return ApiError(404, text, param=f"input[{number}].id", code="not_found")


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
