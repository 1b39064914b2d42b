"""Routes /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.errors import ClientError
from swarm.gateway.apis import tokenizing
from swarm.gateway.errors import to_api_error
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import select_service

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: tokenizing.TokenizeBody) -> Response:
    """Return the tokens of a text, or of a conversation's prompt."""
    service, served = await select_service(request, body.model)
    completion_request = tokenizing.to_request(body, served)
    try:
        if completion_request is not None:
            ids = (await service.prepare(completion_request, served)).ids
        else:
            text = body.prompt or body.content or ""
            ids = await service.threads_for(len(text)).run(tokenizing.encode_text, body, served)
    except ClientError as error:
        raise to_api_error(error) from None
    return JsonResponse(await service.threads_for(len(ids)).run(tokenizing.token_response, body, ids, served))


@router.post("/detokenize")
async def detokenize(request: Request, body: tokenizing.DetokenizeBody) -> Response:
    """Return the text of tokens."""
    service, served = await select_service(request, body.model)
    return JsonResponse(await service.threads_for(len(body.tokens)).run(tokenizing.text_response, body, served))
