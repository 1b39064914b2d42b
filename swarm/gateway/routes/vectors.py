"""Routes /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.client.results import VectorAnswer
from swarm.client.vectors import SCORES, check_dimensions, check_reranks, embedding_params, find_pooling, rank_documents
from swarm.errors import ClientError, RequestFailed
from swarm.gateway.answer import TokenCounts
from swarm.gateway.apis import shapes, vectors
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.errors import ApiError, to_api_error
from swarm.gateway.http.handler import CLIENT_CLOSED_REQUEST
from swarm.gateway.http.identity import identity_of, new_identity
from swarm.gateway.http.json import request_id_headers
from swarm.gateway.http.sse import wait_for_disconnect
from swarm.gateway.http.state import caller_of, parse_off_loop, select_service, usage_of
from swarm.params import SamplingParams
from swarm.wire.messages import Pooling

router = APIRouter()


@router.post("/v1/embeddings", responses=shapes.response_doc(shapes.EmbeddingsShape))
async def embeddings(request: Request, body: vectors.EmbeddingBody) -> Response:
    """Return the embedding of each input."""
    service, served = await select_service(request, body.model)

    def respond(answers: Sequence[VectorAnswer], pooling: Pooling) -> Json:
        return vectors.embedding_response(answers, body, served, pooling)

    return await answer_embeddings(request, service, served, body, respond)


async def answer_embeddings(
    request: Request,
    service: CompletionService,
    served: ServedModel,
    body: vectors.EmbeddingBody,
    to_response: Callable[[Sequence[VectorAnswer], Pooling], Json],
    *,
    api: str = "embeddings",
    field: str = "input",
) -> Response:
    """Answer with the inputs' embeddings. ``api``: where the request is counted. ``field``: the client's name of the
    inputs. Raises ApiError."""
    limits = vectors.check_body(body, served)
    try:
        pooling = find_pooling(served.manifest)
        check_dimensions(body.dimensions, served.manifest)
    except ClientError as error:
        raise to_api_error(error) from None
    inputs = await parse_off_loop(request, lambda: vectors.parse_inputs(body.input))

    def encode() -> list[tuple[int, ...]]:
        return vectors.encode_inputs(inputs, body, served)

    def respond(answers: Sequence[VectorAnswer], _: str) -> Json:
        return to_response(answers, pooling)

    job = _VectorJob(request, service, served, limits, embedding_params(pooling), api=api, field=field)
    return await job.run(encode, sum(map(len, inputs)), respond)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", responses=shapes.response_doc(shapes.RerankShape))
async def rerank(request: Request, body: vectors.RerankBody) -> Response:
    """Return how well each document answers the query, the best first."""
    service, served = await select_service(request, body.model)
    limits = vectors.check_body(body, served)
    try:
        check_reranks(served.manifest)
    except ClientError as error:
        raise to_api_error(error) from None
    texts = await parse_off_loop(request, lambda: vectors.parse_documents(body))

    def encode() -> list[tuple[int, ...]]:
        return vectors.encode_inputs(texts, body, served, query=body.query)

    def respond(answers: Sequence[VectorAnswer], request_id: str) -> Json:
        return vectors.rerank_response(rank_documents(answers), body, texts, served, request_id)

    job = _VectorJob(request, service, served, limits, SCORES, api="rerank", field="documents")
    return await job.run(encode, len(body.query) * len(texts) + sum(map(len, texts)), respond)


class _VectorJob:
    """A body whose vectors are computed. ``limits``: its priority and deadline."""

    def __init__(
        self,
        request: Request,
        service: CompletionService,
        served: ServedModel,
        limits: tuple[int, float | None],
        params: SamplingParams,
        *,
        api: str,
        field: str,
    ) -> None:
        identity = identity_of(request)
        if identity is not None:  # a repetition must be the same request
            params = msgspec.structs.replace(params, seed=identity.seed)
        params = served.adapted(params)
        self._request, self._service, self._params, self._runs_on = request, service, params, identity is not None
        self._priority, self._deadline_s = limits
        self._caller, self._id, self._field = caller_of(request), new_identity(request).request_id, field
        self._counts: TokenCounts | None = None  # of the computed vectors; None before all are
        self._account = usage_of(request).start(
            self._caller, api, served.name, self._id, request.headers.get("traceparent"), traced=False
        )

    async def run(
        self,
        encode: Callable[[], list[tuple[int, ...]]],
        size: int,
        respond: Callable[[Sequence[VectorAnswer], str], Json],
    ) -> Response:
        """Encode the inputs of about ``size`` characters, compute, and respond, unless the client disconnects before.
        Raises ApiError."""
        threads = self._service.threads_for(size)

        def encode_response(answers: Sequence[VectorAnswer]) -> bytes:
            return msgspec.json.encode(respond(answers, self._id))

        async def answer() -> bytes:
            answers = await self._compute(await threads.run(encode))
            self._counts = TokenCounts(
                sum(each.num_prompt for each in answers), 0, sum(each.num_cached for each in answers)
            )
            return await threads.run(encode_response, answers)

        answering = asyncio.ensure_future(answer())
        watcher = asyncio.ensure_future(wait_for_disconnect(self._request.receive))
        try:
            await asyncio.wait({answering, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._close("left")
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            content = answering.result()
            self._close("done")
            return Response(content, media_type="application/json", headers=request_id_headers(self._id))
        except ClientError as error:
            problem = to_api_error(error)
            if isinstance(error, RequestFailed):  # it was accepted
                problem.is_counted = True
                self._close("failed")
            else:
                self._account.discard()
            raise (problem.set_param(self._field) if problem.param == "prompt" else problem) from None
        except ApiError as problem:
            if self._counts is None:
                self._account.discard()
            else:  # the vectors were computed, and too many threads are busy to encode them
                problem.is_counted = True
                self._close("failed")
            raise
        finally:
            for task in (answering, watcher):
                task.cancel()
            await asyncio.gather(answering, watcher, return_exceptions=True)

    def _close(self, outcome: str) -> None:
        self._account.close(outcome, self._counts or TokenCounts(0, 0))

    async def _compute(self, sources: list[tuple[int, ...]]) -> list[VectorAnswer]:
        self._account.num_prompt = sum(map(len, sources))
        return await self._service.client.compute_vectors(
            sources,
            self._params,
            request_id=self._id,
            detached=self._runs_on,
            tenant=self._caller.tenant,
            priority=min(self._priority, self._caller.max_priority),
            deadline_s=self._deadline_s,
        )
