"""Routes of OpenAI's Files and Batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response, StreamingResponse

from swarm.gateway.batches.multipart import parse_boundary
from swarm.gateway.batches.objects import (
    BatchRecord,
    FileRecord,
    NewBatch,
    check_metadata,
    not_found,
    parse_max_age,
    parse_window,
)
from swarm.gateway.batches.service import BatchService
from swarm.gateway.errors import ApiError, invalid_field, unsupported_field
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.state import caller_of, swarms_of

router = APIRouter()


class ExpiresAfter(BaseModel):
    """When the files of a batch expire."""

    anchor: str
    seconds: int


class BatchBody(BaseModel):
    """Body of an order to create a batch."""

    model_config = ConfigDict(extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def service_of(request: Request) -> BatchService:
    service: BatchService | None = request.app.state.batches
    if service is None:
        raise ApiError(503, "this gateway has no batches", code="unavailable")
    return service


# --- files


@router.post("/v1/files")
async def upload(request: Request) -> Response:
    """Store an input file for batches (multipart/form-data with ``purpose=batch`` and ``file``)."""
    boundary = parse_boundary(request.headers.get("content-type", ""))
    record = await service_of(request).upload(caller_of(request).owner, boundary, request.stream())
    return JsonResponse(record.to_json())


@router.get("/v1/files")
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the caller's files."""
    owner, ascending = caller_of(request).owner, order == "asc"
    page = await service_of(request).list_files(owner, purpose, after, limit, ascending=ascending)
    return await swarms_of(request).first.body_threads.run(_list, "file", after, page)  # they may be 10,000


@router.get("/v1/files/{file_id}")
async def file(request: Request, file_id: str) -> Response:
    """Return a file's description."""
    return _describe("file", file_id, await service_of(request).file(file_id, caller_of(request).owner))


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no unfinished batch reads."""
    if not await service_of(request).delete_file(file_id, caller_of(request).owner):
        raise not_found("file", file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content")
async def content(request: Request, file_id: str) -> Response:
    """Return a file's content."""
    service, owner = service_of(request), caller_of(request).owner
    record, first = await service.file(file_id, owner), await service.read_content(file_id, owner, 0)
    if record is None or first is None:
        raise not_found("file", file_id)
    headers = {
        "content-length": str(record.num_bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(record.filename)}",
    }
    return StreamingResponse(_pages(service, owner, file_id, first), 200, headers, "application/jsonl")


async def _pages(service: BatchService, owner: str, file_id: str, first: tuple[bytes, int]) -> AsyncIterator[bytes]:
    page: tuple[bytes, int] | None = first
    while page is not None and page[0]:
        yield page[0]
        page = await service.read_content(file_id, owner, page[1])


# --- batches


@router.post("/v1/batches")
async def create_batch(request: Request, body: BatchBody) -> Response:
    """Create a batch from an input file."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            raise unsupported_field(name)
    offered: list[str] = request.app.state.batch_endpoints
    if body.endpoint not in offered:
        raise invalid_field("endpoint", f"must be one of {', '.join(offered)}, not {body.endpoint[:80]!r}")
    parse_window(body.completion_window)
    caller, expiry = caller_of(request), body.output_expires_after
    new = NewBatch(
        caller.owner,
        caller.tenant,
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        check_metadata(body.metadata or {}),
        tuple(sorted(caller.models)),
        None if expiry is None else parse_max_age("output_expires_after", expiry.anchor, expiry.seconds),
    )
    return JsonResponse((await service_of(request).create_batch(new)).to_json())


@router.get("/v1/batches")
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """List the caller's batches, the newest first."""
    return _list("batch", after, await service_of(request).list_batches(caller_of(request).owner, after, limit))


@router.get("/v1/batches/{batch_id}")
async def batch(request: Request, batch_id: str) -> Response:
    """Return the state of a batch."""
    return _describe("batch", batch_id, await service_of(request).batch(batch_id, caller_of(request).owner))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. The answers so far stay available."""
    return _describe("batch", batch_id, await service_of(request).cancel_batch(batch_id, caller_of(request).owner))


def _describe(kind: str, given: str, record: FileRecord | BatchRecord | None) -> Response:
    if record is None:
        raise not_found(kind, given)
    return JsonResponse(record.to_json())


def _list(
    kind: str, after: str | None, page: tuple[list[FileRecord], bool] | tuple[list[BatchRecord], bool] | None
) -> Response:
    if page is None:
        raise invalid_field("after", f"there is no {kind} {(after or '')[:80]!r}")
    records, has_more = page
    data: list[dict[str, Any]] = [record.to_json() for record in records]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JsonResponse({"object": "list", "data": data, **ends, "has_more": has_more})
