"""Console service behind the console's routes: queries the broker, carries out commands, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.admin.orders import parse_request_id
from swarm.api_keys.keys import ApiKey
from swarm.client.client import AsyncClient
from swarm.errors import InvalidRequest, RequestFailed, SwarmError
from swarm.gateway.completion.service import Caller
from swarm.gateway.console import commands, logs
from swarm.gateway.console import local_swarm as household
from swarm.gateway.console.commands import CancelCommand, ConsoleCommand, JoinCommand, KillCommand, StopCommand
from swarm.gateway.console.files import PageFile, load_page_files
from swarm.gateway.console.local_swarm import NO_LOCAL_SWARM, LocalSwarm
from swarm.gateway.console.poller import SwarmPoller
from swarm.gateway.errors import ApiError, to_api_error
from swarm.log import get_logger
from swarm.wire.messages import Json, PlanCommand

MAX_QUERIES: Final = 16  # queries in progress at a time
_NO_PLAN: Final = "nothing was changed: the swarm would wait for "

log = get_logger(__name__)


MakeClient = Callable[[], AsyncClient]


@dataclass(slots=True)
class Console:
    """Console of a gateway. ``make_client``: makes a client that submits no requests, since a client cannot cancel its
    own. ``keys``: returns the API keys. ``usage``: returns a key's tokens of today, and its answers in progress.
    ``settings``: returns a report of the gateway's settings."""

    make_client: MakeClient
    keys: Callable[[], Iterable[ApiKey]] = tuple
    usage: Callable[[str], tuple[int, int]] = lambda _: (0, 0)
    local_swarm: LocalSwarm = NO_LOCAL_SWARM
    settings: Callable[[], Json] = dict
    files: dict[str, PageFile] = field(default_factory=lambda: dict(load_page_files()))
    poller: SwarmPoller = field(init=False)
    _client: AsyncClient = field(init=False)
    _query_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_QUERIES))

    def __post_init__(self) -> None:
        self.poller = SwarmPoller(self.make_client)
        self._client = self.make_client()

    async def aclose(self) -> None:
        await self.poller.aclose()
        await self._client.aclose()

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key, since they reveal nothing about the swarm."""
        return frozenset(self.files)

    @contextlib.asynccontextmanager
    async def _query_client(self) -> AsyncIterator[AsyncClient]:
        """Provide the client for a query, and turn errors of the broker into ApiError."""
        if self._query_slots.locked():
            text = "too many console queries are in progress"
            raise ApiError(429, text, code="overloaded", retry_after_s=1.0)
        async with self._query_slots:
            try:
                yield self._client
            except RequestFailed as error:
                raise _refusal_error(error) from None
            except SwarmError as error:
                raise to_api_error(error) from None

    async def run_command(self, body: object, caller: Caller) -> Json:
        """Carry out a command from the console's page. Raises ApiError."""
        command = commands.parse_command(body)
        try:
            async with self._query_client() as client:
                is_own = isinstance(command, CancelCommand) and await _is_own(client, command.request_id, caller)
                commands.check_allowed(
                    command, is_admin=caller.is_admin, is_demo=self.local_swarm.is_demo, is_own=is_own
                )
                if not isinstance(command, CancelCommand):
                    self.poller.poll_quickly()
                text, answer = await _execute(client, command)
        except ApiError as problem:
            log.info(
                "console_order_refused", by=caller.tenant, order=_describe_command(command), reason=problem.message
            )
            raise
        log.info("console_order", by=caller.tenant, order=_describe_command(command), text=text)
        return {"text": text, "body": answer}

    async def preview_plan(self, body: object) -> Json:
        """Return the plan that would be made, or the reason why there is none. Raises ApiError."""
        question = commands.parse_plan_question(body)
        try:
            async with self._query_client() as client:
                return await (
                    client.steer(question) if isinstance(question, PlanCommand) else client.suppose_plan(question)
                )
        except ApiError as problem:
            if not problem.message.startswith(_NO_PLAN):
                raise
            return {"state": "no plan", "waits_for": problem.message.removeprefix(_NO_PLAN), "stages": []}

    async def trace(self, request_id: str, caller: Caller) -> Json:
        """Return where the time of each token of a request went. Raises ApiError."""
        request_id = parse_request_id(request_id)
        async with self._query_client() as client:
            if not caller.is_admin and not await _is_own(client, request_id, caller):
                raise ApiError(404, "you have no such request", code="not_found")
            try:
                return await client.trace(request_id)
            except RequestFailed as error:
                raise ApiError(404, str(error), code="not_found") from None

    async def logs(self) -> Json:
        """List the processes with logs. Raises ApiError if this gateway has no logs' folder."""
        folder = self._logs_folder()
        running = await asyncio.to_thread(lambda: household.pids_by_name(household.sibling_commands()))
        return {"processes": await asyncio.to_thread(logs.list_logs, folder, running.keys())}

    async def log(self, name: str, before: int | None, search: str) -> Json:
        """Return a page of a process's log. Raises ApiError."""
        return await asyncio.to_thread(logs.read_page, self._logs_folder(), name, before, search)

    def _logs_folder(self) -> Path:
        if self.local_swarm.logs is None:
            text = "this gateway has no folder of logs: only swarm up provides one"
            raise ApiError(404, text, code="no_logs")
        return self.local_swarm.logs

    def key_usage(self) -> Json:
        """Return the limits and the usage of each key, without anything of its secret."""
        rows = []
        for key in self.keys():
            spent, under_way = self.usage(key.name)
            limits = key.limits
            rows.append(
                {
                    "name": key.name,
                    "admin": key.admin,
                    "rate_per_min": limits.rate_per_min,
                    "concurrency": limits.concurrency,
                    "tokens_per_day": limits.tokens_per_day,
                    "spent_today": spent,
                    "under_way": under_way,
                    "created": key.created,
                }
            )
        return {"keys": rows}


async def _is_own(client: AsyncClient, request_id: str, caller: Caller) -> bool:
    try:
        return (await client.recall(request_id)).tenant == caller.tenant
    except InvalidRequest:
        return False


async def _execute(client: AsyncClient, command: ConsoleCommand) -> tuple[str, Json]:
    """Carry out a command. Returns a description for the user, and the broker's answer. Raises ApiError and
    SwarmError."""
    match command:
        case CancelCommand(request_id):
            await client.cancel(request_id)
            return f"request {request_id} is cancelled", {"request_id": request_id, "state": "ended"}
        case StopCommand(worker, force):
            return f"{worker} hands over its layers and leaves", await client.stop_worker(worker, force=force)
        case JoinCommand(count):
            body = await client.join(count)
            return "a worker is started" if count == 1 else f"{count} workers are started", body
        case KillCommand(worker):
            pid = await asyncio.to_thread(household.kill_worker, worker, await client.query("nodes"))
            return f"{worker} was killed (process {pid})", {"worker": worker, "pid": pid}
    body = await client.steer(command)
    note = body.get("note")
    return f"{_describe_plan_command(command, body)}; {note}" if note else _describe_plan_command(command, body), body


def _refusal_error(error: RequestFailed) -> ApiError:
    """Return the broker's refusal as an error response."""
    text = str(error)
    return (
        ApiError(404, text, code="not_found") if text.startswith("no worker") else ApiError(409, text, code="refused")
    )


def _describe_plan_command(command: PlanCommand, body: Json) -> str:
    match command.verb:
        case "drain":
            return f"{command.worker} hands over its layers, and gets none until it is uncordoned"
        case "cordon":
            return f"{command.worker} gets no new layers"
        case "uncordon" if body.get("state") == "free":
            return f"{command.worker} may have layers again"
        case "uncordon":
            return f"{command.worker} still gets no layers"
    return f"the plan {body.get('state')}"


def _describe_command(command: ConsoleCommand) -> str:
    """Describe a command and its target for the log."""
    match command:
        case CancelCommand(request_id):
            return f"cancel {request_id}"
        case StopCommand(worker, force):
            return f"stop {worker}" + (" by force" if force else "")
        case JoinCommand(count):
            return f"join {count}"
        case KillCommand(worker):
            return f"kill {worker}"
    return f"{command.verb} {command.worker or command.by_hand}".strip()
