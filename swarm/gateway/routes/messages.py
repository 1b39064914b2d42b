"""Routes of Anthropic's API, below /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.gateway.apis import anthropic
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import beside, desk_of
from swarm.gateway.routes import asking

router = APIRouter()


@router.post("/v1/messages")
async def answer(request: Request, body: anthropic.MessageBody) -> Response:
    """Answer a conversation."""
    return await asking.answer(request, body, anthropic.ask_of, anthropic.memo_of, MessageWriter)


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: anthropic.CountBody) -> Response:
    """Count the tokens of a prompt."""
    desk = desk_of(request)
    served = await desk.served()
    order = await desk.order(await beside(request, lambda: anthropic.count_of(body, served)), served)
    return JsonResponse({"input_tokens": len(order.ids)})
