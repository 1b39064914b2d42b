"""Routes /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.errors import ClientError
from swarm.gateway.apis import tokenizing
from swarm.gateway.errors import problem_of
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import desk_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: tokenizing.TokenizeBody) -> Response:
    """Return the tokens of a text, or of a conversation's prompt."""
    desk = desk_of(request)
    served = await desk.served()
    ask = tokenizing.ask_of(body, served)
    try:
        if ask is not None:
            ids = (await desk.order(ask, served)).ids
        else:
            text = body.prompt or body.content or ""
            ids = await desk.threads_for(len(text)).run(tokenizing.ids_of, body, served)
    except ClientError as error:
        raise problem_of(error) from None
    return JsonResponse(await desk.threads_for(len(ids)).run(tokenizing.tokenized, body, ids, served))


@router.post("/detokenize")
async def detokenize(request: Request, body: tokenizing.DetokenizeBody) -> Response:
    """Return the text of tokens."""
    desk = desk_of(request)
    served = await desk.served()
    return JsonResponse(await desk.threads_for(len(body.tokens)).run(tokenizing.detokenized, body, served))
