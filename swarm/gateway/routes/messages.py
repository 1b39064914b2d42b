"""Routes of Anthropic's API, below /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.gateway.apis import anthropic
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import parse_off_loop, select_service
from swarm.gateway.routes import conversation

router = APIRouter()


@router.post("/v1/messages")
async def answer(request: Request, body: anthropic.MessageBody) -> Response:
    """Answer a conversation."""
    return await conversation.answer_conversation(
        request, body, anthropic.to_request, anthropic.to_resume_state, MessageWriter
    )


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: anthropic.CountBody) -> Response:
    """Count the tokens of a prompt."""
    service, served = await select_service(request, body.model)
    prepared = await service.prepare(
        await parse_off_loop(request, lambda: anthropic.to_count_request(body, served)), served
    )
    return JsonResponse({"input_tokens": len(prepared.ids)})
