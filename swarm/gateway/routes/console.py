"""Routes of the console. The auth middleware has identified the caller; permissions are decided in ``console``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarm.gateway.console.commands import check_admin
from swarm.gateway.console.console import Console
from swarm.gateway.errors import ApiError
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.sse import EventStream
from swarm.gateway.http.state import caller_of, service_of
from swarm.version import __version__
from swarm.wire.greeting import Greeting
from swarm.wire.schema import schema

SLOW_READER_S: Final = 30.0  # seconds without reading a byte after which a stream is ended
_AWAY: Final = "away"

router = APIRouter(include_in_schema=False)


def console_of(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


@router.get("/console/me")
async def me(request: Request) -> Response:
    """Return the caller's identity and the features available here."""
    console, owner = console_of(request), caller_of(request)
    try:
        described = await service_of(request).description()
        state, model = described.state, described.manifest.name if described.manifest else ""
    except ApiError:
        state, model = _AWAY, ""
    is_keyed = "swarm.key" in request.scope
    greeting = Greeting(schema=schema())
    return JsonResponse(
        {
            "name": owner.tenant if is_keyed else None,
            "admin": owner.is_admin,
            "needs_key": is_keyed,
            "is_demo": console.local_swarm.is_demo,
            "has_logs": console.local_swarm.logs is not None,
            "model": model,
            "state": state,
            "version": __version__,
            "protocol": list(greeting.versions),
            "messages": greeting.schema,
            "base_url": f"{request.base_url}v1",
        }
    )


@router.get("/console/live")
async def live(request: Request) -> Response:
    """Stream the console's view as it changes."""
    owner, poller = caller_of(request), console_of(request).poller
    viewer = poller.add_viewer(None if owner.is_admin else owner.tenant, request.headers.get("last-event-id", ""))
    if viewer is None:
        raise ApiError(503, "too many consoles are open", code="overloaded", retry_after_s=5.0)
    is_allowed: Callable[[], bool] = request.scope.get("swarm.still_may", lambda: True)
    return EventStream(
        poller.stream_updates(viewer, is_allowed), lambda: poller.remove_viewer(viewer), {}, SLOW_READER_S
    )


@router.post("/console/orders")
async def give(request: Request) -> Response:
    return JsonResponse(await console_of(request).run_command(_body(request), caller_of(request)))


@router.post("/console/plan")
async def plan(request: Request) -> Response:
    check_admin(is_admin=caller_of(request).is_admin)
    return JsonResponse(await console_of(request).preview_plan(_body(request)))


@router.get("/console/logs")
async def logs(request: Request) -> Response:
    """List the available logs."""
    check_admin(is_admin=caller_of(request).is_admin)
    return JsonResponse(await console_of(request).logs())


@router.get("/console/logs/{name}")
async def log(request: Request, name: str, search: str = "", before: int | None = None) -> Response:
    """Return a page of a log."""
    check_admin(is_admin=caller_of(request).is_admin)
    return JsonResponse(await console_of(request).log(name, before, search))


@router.get("/console/keys")
async def keys(request: Request) -> Response:
    """Return the limits and the usage of each key."""
    check_admin(is_admin=caller_of(request).is_admin)
    return JsonResponse(console_of(request).key_usage())


@router.get("/console/settings")
async def settings(request: Request) -> Response:
    """Return this gateway's settings and the source of each."""
    check_admin(is_admin=caller_of(request).is_admin)
    return JsonResponse(console_of(request).settings())


@router.get("/console/trace/{request_id}")
async def trace(request: Request, request_id: str) -> Response:
    return JsonResponse(await console_of(request).trace(request_id[:200], caller_of(request)))


@router.head("/")
@router.get("/")
@router.get("/docs")
@router.get("/console/{name:path}")
async def file(request: Request) -> Response:
    """Return a file of the page."""
    page_file = console_of(request).files.get(request.url.path)
    if page_file is None:
        raise ApiError(404, f"there is no {request.url.path[:80]!r} here", code="not_found")
    is_packed = "gzip" in request.headers.get("accept-encoding", "")
    headers = page_file.headers(is_packed=is_packed)
    if request.headers.get("if-none-match") == page_file.tag:
        return Response(status_code=304, headers=headers)
    return Response(page_file.packed if is_packed else page_file.content, media_type=page_file.kind, headers=headers)


def _body(request: Request) -> Any:
    return request.scope.get("swarm.json")
