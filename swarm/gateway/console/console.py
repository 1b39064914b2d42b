"""Console service behind the console's routes: queries the broker, carries out commands, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.client.client import AsyncClient
from swarm.errors import InvalidRequest, RequestFailed, SwarmError
from swarm.gateway.console import household, logs, orders
from swarm.gateway.console.files import File, shipped
from swarm.gateway.console.household import STRANGERS, Household
from swarm.gateway.console.orders import Cancel, Join, Kill, Order, Stop
from swarm.gateway.console.watch import Watch
from swarm.gateway.desk.desk import Owner
from swarm.gateway.errors import Problem, problem_of
from swarm.govern.orders import plain_id
from swarm.keys.keys import Key
from swarm.log import get_logger
from swarm.wire.messages import Json, Steer

MAX_QUESTIONS: Final = 16  # queries in progress at a time
_NO_PLAN: Final = "nothing was changed: the swarm would wait for "

log = get_logger(__name__)


MakeClient = Callable[[], AsyncClient]


@dataclass(slots=True)
class Console:
    """Console of a gateway. ``make_client``: makes a client that submits no requests, since a client cannot cancel its
    own. ``keys``: returns the API keys. ``usage``: returns a key's tokens of today, and its answers in progress.
    ``settings``: returns a report of the gateway's settings."""

    make_client: MakeClient
    keys: Callable[[], Iterable[Key]] = tuple
    usage: Callable[[str], tuple[int, int]] = lambda _: (0, 0)
    home: Household = STRANGERS
    settings: Callable[[], Json] = dict
    files: dict[str, File] = field(default_factory=lambda: dict(shipped()))
    watch: Watch = field(init=False)
    _client: AsyncClient = field(init=False)
    _asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_QUESTIONS))

    def __post_init__(self) -> None:
        self.watch = Watch(self.make_client)
        self._client = self.make_client()

    async def aclose(self) -> None:
        await self.watch.aclose()
        await self._client.aclose()

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key, since they reveal nothing about the swarm."""
        return frozenset(self.files)

    @contextlib.asynccontextmanager
    async def _asked(self) -> AsyncIterator[AsyncClient]:
        """Provide the client for a query, and turn errors of the broker into ApiError."""
        if self._asking.locked():
            text = "too many console queries are in progress"
            raise Problem(429, text, code="overloaded", retry_after_s=1.0)
        async with self._asking:
            try:
                yield self._client
            except RequestFailed as error:
                raise _refused(error) from None
            except SwarmError as error:
                raise problem_of(error) from None

    async def give(self, body: object, owner: Owner) -> Json:
        """Carry out a command from the console's page. Raises ApiError."""
        order = orders.order_of(body)
        try:
            async with self._asked() as client:
                is_own = isinstance(order, Cancel) and await _is_own(client, order.request_id, owner)
                orders.check_may(order, is_admin=owner.is_admin, is_demo=self.home.is_demo, is_own=is_own)
                if not isinstance(order, Cancel):
                    self.watch.hurry()
                text, answer = await _carried_out(client, order)
        except Problem as problem:
            log.info("console_order_refused", by=owner.tenant, order=_told(order), reason=problem.message)
            raise
        log.info("console_order", by=owner.tenant, order=_told(order), text=text)
        return {"text": text, "body": answer}

    async def suppose(self, body: object) -> Json:
        """Return the plan that would be made, or the reason why there is none. Raises ApiError."""
        wanted = orders.supposed(body)
        try:
            async with self._asked() as client:
                return await (client.steer(wanted) if isinstance(wanted, Steer) else client.suppose_plan(wanted))
        except Problem as problem:
            if not problem.message.startswith(_NO_PLAN):
                raise
            return {"state": "no plan", "waits_for": problem.message.removeprefix(_NO_PLAN), "stages": []}

    async def trace(self, request_id: str, owner: Owner) -> Json:
        """Return where the time of each token of a request went. Raises ApiError."""
        request_id = plain_id(request_id)
        async with self._asked() as client:
            if not owner.is_admin and not await _is_own(client, request_id, owner):
                raise Problem(404, "you have no such request", code="not_found")
            try:
                return await client.trace(request_id)
            except RequestFailed as error:
                raise Problem(404, str(error), code="not_found") from None

    async def logs(self) -> Json:
        """List the processes with logs. Raises ApiError if this gateway has no logs' folder."""
        folder = self._logs()
        beside = await asyncio.to_thread(lambda: household.names_of(household.children()))
        return {"processes": await asyncio.to_thread(logs.listed, folder, beside.keys())}

    async def log(self, name: str, before: int | None, search: str) -> Json:
        """Return a page of a process's log. Raises ApiError."""
        return await asyncio.to_thread(logs.page, self._logs(), name, before, search)

    def _logs(self) -> Path:
        if self.home.logs is None:
            text = "this gateway has no folder of logs: only swarm up provides one"
            raise Problem(404, text, code="no_logs")
        return self.home.logs

    def quotas(self) -> Json:
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


async def _is_own(client: AsyncClient, request_id: str, owner: Owner) -> bool:
    try:
        return (await client.recall(request_id)).tenant == owner.tenant
    except InvalidRequest:
        return False


async def _carried_out(client: AsyncClient, order: Order) -> tuple[str, Json]:
    """Carry out a command. Returns a description for the user, and the broker's answer. Raises ApiError and
    SwarmError."""
    match order:
        case Cancel(request_id):
            await client.cancel(request_id)
            return f"request {request_id} is cancelled", {"request_id": request_id, "state": "ended"}
        case Stop(worker, force):
            return f"{worker} hands over its layers and leaves", await client.stop_worker(worker, force=force)
        case Join(count):
            body = await client.join(count)
            return "a worker is started" if count == 1 else f"{count} workers are started", body
        case Kill(worker):
            pid = await asyncio.to_thread(household.kill, worker, await client.query("nodes"))
            return f"{worker} was killed (process {pid})", {"worker": worker, "pid": pid}
    body = await client.steer(order)
    note = body.get("note")
    return f"{_steered(order, body)}; {note}" if note else _steered(order, body), body


def _refused(error: RequestFailed) -> Problem:
    """Return the broker's refusal as an error response."""
    text = str(error)
    return Problem(404, text, code="not_found") if text.startswith("no worker") else Problem(409, text, code="refused")


def _steered(order: Steer, body: Json) -> str:
    match order.verb:
        case "drain":
            return f"{order.worker} hands over its layers, and gets none until it is uncordoned"
        case "cordon":
            return f"{order.worker} gets no new layers"
        case "uncordon" if body.get("state") == "free":
            return f"{order.worker} may have layers again"
        case "uncordon":
            return f"{order.worker} still gets no layers"
    return f"the plan {body.get('state')}"


def _told(order: Order) -> str:
    """Describe a command and its target for the log."""
    match order:
        case Cancel(request_id):
            return f"cancel {request_id}"
        case Stop(worker, force):
            return f"stop {worker}" + (" by force" if force else "")
        case Join(count):
            return f"join {count}"
        case Kill(worker):
            return f"kill {worker}"
    return f"{order.verb} {order.worker or order.by_hand}".strip()
