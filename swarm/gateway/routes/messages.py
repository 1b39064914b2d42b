"""Anthropic's /v1/messages."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.gateway.apis import anthropic
from swarm.gateway.apis.anthropic_writer import MessageWriter
from swarm.gateway.http.counter import Job
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import counter_of, desk_of, owner_of

router = APIRouter()


@router.post("/v1/messages")
async def answer(request: Request, body: anthropic.MessageBody) -> Response:
    """Answer a conversation."""
    if last := request.headers.get("last-event-id"):
        return await counter_of(request).resume(last, owner_of(request))
    served = await desk_of(request).served()
    ask = anthropic.ask_of(body, served)
    memo, request_id = anthropic.memo_of(body, ask, int(time.time())), secrets.token_hex(16)
    job = Job(request_id, [ask], memo, MessageWriter(memo, served, request_id), bool(body.stream))
    return await counter_of(request).serve(request, served, owner_of(request), job)


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: anthropic.CountBody) -> Response:
    """Count the tokens of a prompt."""
    desk = desk_of(request)
    served = await desk.served()
    order = await desk.order(anthropic.count_of(body, served), served)
    return JsonResponse({"input_tokens": len(order.ids)})
