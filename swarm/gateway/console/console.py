"""What the console's routes stand on: one for a gateway. It asks the broker, gives orders, and says so in the log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from swarm.client.client import AsyncClient
from swarm.errors import InvalidRequest, RequestFailed, SwarmError
from swarm.gateway.console import household, orders
from swarm.gateway.console.files import File, shipped
from swarm.gateway.console.household import STRANGERS, Household
from swarm.gateway.console.orders import Cancel, Join, Kill, Order, Stop
from swarm.gateway.console.watch import Watch
from swarm.gateway.desk.desk import Owner
from swarm.gateway.errors import Problem, problem_of
from swarm.govern.orders import plain_id
from swarm.log import get_logger
from swarm.wire.messages import Json, Steer

_NO_PLAN: Final = "nothing was changed: the swarm would wait for "

log = get_logger(__name__)


@dataclass(slots=True)
class Console:
    """One for a gateway."""

    client: AsyncClient
    home: Household = STRANGERS
    files: dict[str, File] = field(default_factory=lambda: dict(shipped()))
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.client)

    @property
    def open_paths(self) -> frozenset[str]:
        """What needs no key: it tells nothing of the swarm."""
        return frozenset(self.files)

    async def give(self, body: object, owner: Owner) -> Json:
        """Carry an order out. Raises Problem."""
        order = orders.order_of(body)
        is_own = isinstance(order, Cancel) and not owner.is_admin and await self._is_own(order.request_id, owner)
        orders.check_may(order, is_admin=owner.is_admin, is_demo=self.home.is_demo, is_own=is_own)
        try:
            text, answer = await self._carried_out(order)
        except Problem as problem:
            log.info("console_order_refused", by=owner.tenant, order=_told(order), reason=problem.message)
            raise
        log.info("console_order", by=owner.tenant, order=_told(order), text=text)
        return {"text": text, "body": answer}

    async def suppose(self, body: object) -> Json:
        """The plan that would be made, or why there is none."""
        wanted = orders.supposed(body)
        try:
            if isinstance(wanted, Steer):
                return await self.client.steer(wanted)
            return await self.client.suppose_plan(wanted)
        except RequestFailed as error:
            why = str(error)
            if not why.startswith(_NO_PLAN):
                raise _refused(error) from None
            return {"state": "no plan", "waits_for": why.removeprefix(_NO_PLAN), "stages": []}
        except SwarmError as error:
            raise problem_of(error) from None

    async def trace(self, request_id: str, owner: Owner) -> Json:
        """Where each token's time went. Raises Problem."""
        request_id = plain_id(request_id)
        if not owner.is_admin and not await self._is_own(request_id, owner):
            raise Problem(404, "you have no such request", code="not_found")
        try:
            return await self.client.trace(request_id)
        except RequestFailed as error:
            raise Problem(404, str(error), code="not_found") from None
        except SwarmError as error:
            raise problem_of(error) from None

    async def _is_own(self, request_id: str, owner: Owner) -> bool:
        try:
            return (await self.client.recall(request_id)).tenant == owner.tenant
        except InvalidRequest:
            return False
        except SwarmError as error:
            raise problem_of(error) from None

    async def _carried_out(self, order: Order) -> tuple[str, Json]:
        try:
            match order:
                case Cancel(request_id):
                    await self.client.cancel(request_id)
                    return f"the request {request_id} is ended", {"request_id": request_id, "state": "ended"}
                case Stop(worker, force):
                    body = await self.client.stop_worker(worker, force=force)
                    return f"{worker} hands over its layers and leaves", body
                case Join(count):
                    body = await self.client.join(count)
                    return "a worker is started" if count == 1 else f"{count} workers are started", body
                case Kill(worker):
                    nodes = await self.client.query("nodes")
                    pid = await asyncio.to_thread(household.kill, worker, nodes)
                    return f"{worker} was killed (process {pid})", {"worker": worker, "pid": pid}
                case Steer():
                    body = await self.client.steer(order)
                    return _steered(order, body), body
        except RequestFailed as error:
            raise _refused(error) from None
        except SwarmError as error:
            raise problem_of(error) from None


def _refused(error: RequestFailed) -> Problem:
    """What the broker says no to, in its words."""
    text = str(error)
    return Problem(404, text, code="not_found") if text.startswith("no worker") else Problem(409, text, code="refused")


def _steered(order: Steer, body: Json) -> str:
    match order.verb:
        case "drain":
            return f"{order.worker} hands over its layers, and gets none until it is uncordoned"
        case "cordon":
            return f"{order.worker} gets no new layers"
        case "uncordon":
            return f"{order.worker} may have layers again"
    return f"the plan {body.get('state')}"


def _told(order: Order) -> str:
    """For the log: what, of whom."""
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
