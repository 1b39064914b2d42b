"""The one loop that asks the broker, while somebody looks, and tells all who do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, cast

from swarm.client.client import AsyncClient
from swarm.errors import SwarmError
from swarm.gateway.console.audience import KEPT_EVENTS, MAX_WAITING, Audience
from swarm.gateway.console.figures import Figures
from swarm.gateway.console.pace import AWAY_S, PATIENCE_S, Load, Pace, What
from swarm.gateway.console.patch import Tree
from swarm.gateway.console.view import Known, seen_by, view
from swarm.govern.events import AWAY, BACK, NOTHING, Event, Look, after_absence, happened, remembered
from swarm.log import get_logger
from swarm.wire.messages import Json

MAX_VIEWERS: Final = 64
QUIET_S: Final = 2.0  # without news, until it is looked whether a reader may still look
LINGER_S: Final = 60.0  # for which those are told on who may come back
SEEN_NOW: Final = (AWAY.name, BACK.name, "not_serving")  # what is so as we look, also when we look first
MAX_AUDIENCES: Final = 32  # each remembers what it was told

log = get_logger(__name__)


class Viewer:
    """One open page. What it hasn't taken is bounded: beyond, it gets a whole view in the place of all of it."""

    def __init__(self, audience: Audience, told: Sequence[bytes] | None) -> None:
        """``told``: what it lacks; None: all."""
        self.audience = audience
        self._waiting: list[bytes] = list(told or ())
        self._is_behind = told is None
        self._is_over = False
        self._news = asyncio.Event()
        if told is None or told:
            self._news.set()

    def tell(self, told: Sequence[bytes]) -> None:
        if len(self._waiting) + len(told) > MAX_WAITING:
            self._is_behind = True
        if self._is_behind:
            self._waiting.clear()
        else:
            self._waiting += told
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    async def has_news(self) -> bool:
        """Wait for news, or the end; False: there were none for a while."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def is_behind(self) -> bool:
        return self._is_behind

    def take(self) -> bytes:
        """What was told, or the whole instead, if it is behind. Nothing comes between this and what is told next."""
        told = b"".join(self._waiting)
        self._waiting.clear()
        self._is_behind = False
        return told


class Watch:
    """One for a gateway."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        """``make_client``: one that asks nothing else."""
        self._make_client = make_client
        self._audiences: dict[str | None, Audience] = {}
        self._viewers: set[Viewer] = set()
        self._figures, self._pace, self._load = Figures(), Pace(), Load()
        self._known = Known(time.time())
        self._view: Tree = {}
        self._events: list[Tree] = []
        self._untold: list[Tree] = []  # what has happened as well, and waits for room
        self._before: Look = NOTHING
        self._heard_at = 0.0
        self._is_away = False
        self._looking: asyncio.Task[None] | None = None
        self._planning: asyncio.Task[Json] | None = None  # the question for the plan, under way
        self._tasks: set[asyncio.Task[None]] = set()  # the one that looks, and those that are ending
        self._first = asyncio.Event()  # there has been a look
        self._call = asyncio.Event()  # somebody hurries us
        self._is_over = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def known(self) -> Known:
        return self._known

    def hurry(self) -> None:
        """An order is given: look at what comes of it, from its beginning on."""
        self._pace.hurry(time.monotonic())
        self._call.set()

    # --- readers

    def join(self, tenant: str | None, last_event_id: str) -> Viewer | None:
        """A reader more; None: there are as many as there may be."""
        if self._is_over or len(self._viewers) >= MAX_VIEWERS:
            return None
        audience = self._audience(tenant)
        viewer = Viewer(audience, audience.since(last_event_id))
        self._viewers.add(viewer)
        if self._looking is None:
            self._heard_at = time.monotonic()
            self._pace.ask_all()
            self._first.clear()
            self._looking = asyncio.ensure_future(self._look_on())
            self._tasks.add(self._looking)
            self._looking.add_done_callback(self._looked)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The last one ends the looking."""
        self._viewers.discard(viewer)
        if not self._viewers and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def read(self, viewer: Viewer, still_may: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
        """What it is told, to the end of the gateway, of its right to it, or of its interest."""
        while still_may():
            if not await viewer.has_news():
                continue
            if viewer.is_behind:
                await self._first.wait()
            if viewer.is_over or not still_may():
                return
            whole = self._whole(viewer.audience) if viewer.is_behind else b""
            if told := whole + viewer.take():
                yield told

    def _whole(self, audience: Audience) -> bytes:
        at = self._known.at  # an idle swarm's view is older: by this moment the page sets its clock
        return audience.whole({"at": round(at, 3), "series": self._figures.series(at)}, self._events)

    def end(self) -> None:
        """For good: all streams end."""
        self._is_over = True
        self._end_all()

    def _end_all(self) -> None:
        for viewer in list(self._viewers):
            viewer.end()
        self._first.set()  # nobody waits for it any more

    async def aclose(self) -> None:
        """End, and let go of the broker."""
        self.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _audience(self, tenant: str | None) -> Audience:
        found = self._audiences.get(tenant)
        if found is None:
            self._forget(MAX_AUDIENCES - 1)
            found = self._audiences[tenant] = Audience(secrets.token_hex(8), tenant, read_at=time.monotonic())
            if self._view:
                found.begin(seen_by(tenant, self._view))
        return found

    def _forget(self, most: int) -> None:
        """Keep no more audiences than that, but for those that have readers."""
        read = {viewer.audience.tenant for viewer in self._viewers}
        for tenant in [tenant for tenant in self._audiences if tenant not in read][: len(self._audiences) - most]:
            del self._audiences[tenant]

    # --- looking

    def _looked(self, looking: asyncio.Task[None]) -> None:
        """It ends when nobody looks. A fault of ours ends the streams, too: their readers come again."""
        self._tasks.discard(looking)
        if not looking.cancelled() and (fault := looking.exception()) is not None:
            log.error("console_broke", exc_info=fault)
            self._looking = None
            self._end_all()

    async def _look_on(self) -> None:
        """Until cancelled. The client lives as long: nobody looks, nothing is connected."""
        async with self._make_client() as client:
            try:
                while True:
                    began = time.monotonic()
                    fresh = await self._asked(client)
                    computing = time.thread_time()
                    self._heard(fresh, time.monotonic())
                    cost_s, load = time.thread_time() - computing, self._load.now(time.process_time(), time.monotonic())
                    has_requests = fresh is not None and "requests" in fresh
                    cost_s = self._pace.took(cost_s, load, time.monotonic(), has_requests=has_requests)
                    await self._rest(began if fresh else time.monotonic(), cost_s, load)
            finally:
                if self._planning is not None:
                    self._planning.cancel()
                    await asyncio.gather(self._planning, return_exceptions=True)
                    self._planning = None

    async def _rest(self, since: float, cost_s: float, load: float) -> None:
        """Until the pace wants another look. An order changes what it wants."""
        while (wait_s := since + self._pace.wait_s(since, cost_s, load) - time.monotonic()) > 0:
            self._call.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._call.wait()

    async def _asked(self, client: AsyncClient) -> dict[What, Json] | None:
        """The answers; None: the broker gives none. While it is away that is told, and waited on."""
        asking = asyncio.ensure_future(self._ask(client))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=PATIENCE_S)
                silent_s = time.monotonic() - self._heard_at
                if not asking.done() and silent_s >= (AWAY_S if client.is_connected else PATIENCE_S):
                    self._heard(None, time.monotonic())
            return asking.result()
        except SwarmError:
            return None
        finally:
            asking.cancel()

    async def _ask(self, client: AsyncClient) -> dict[What, Json]:
        """The plan's report may take the broker's solver seconds, just when all else is news: nobody waits for it, but
        whoever knows none yet."""
        due: list[What] = ["status", *self._pace.due(time.monotonic())]
        if "plan" in due and self._known.plan:
            due.remove("plan")
            if self._planning is None:
                self._planning = asyncio.ensure_future(client.query("plan"))
            else:
                self._pace.ask_again("plan")  # what is under way may be of before
        found = await asyncio.gather(*(client.query(what) for what in due), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return dict(zip(due, cast("list[Json]", found), strict=True)) | self._planned()

    def _planned(self) -> dict[What, Json]:
        """The report of the plan, if it has come."""
        planning = self._planning
        if planning is None or not planning.done():
            return {}
        self._planning = None
        if planning.exception() is not None:  # whether the broker is away, the other questions tell
            self._pace.ask_again("plan")
            return {}
        return {"plan": planning.result()}

    def _heard(self, fresh: dict[What, Json] | None, now: float) -> None:
        """Make a view of what is known, and tell it."""
        unix, before = time.time(), self._known
        if fresh is None:
            self._known = replace(self._known, at=unix, away_s=now - self._heard_at)
            self._pace.ask_all()
        else:
            self._heard_at = now
            self._known = replace(self._known, at=unix, away_s=None, **fresh)
            if "stats" in fresh:
                self._figures.add(fresh["stats"], now)
            if fresh.get("plan", before.plan).get("epoch") != before.plan.get("epoch"):
                self._pace.ask_again("recoveries")  # by its plan it is told who took the layers
            self._figures.tick(unix)  # not while it is away: what was so before is nothing of then
        was, self._view = self._view, view(self._known, self._figures.rates, self._view, before)
        if fresh is not None:
            self._pace.heard(self._known.status, now, is_recovering=self._view["recovery"] is not None)
        self._untold = [*self._untold, *self._news(fresh, unix)][-KEPT_EVENTS:]
        is_of_recoveries = any(self._view[name] != was.get(name) for name in ("recovery", "recoveries"))
        if self._pace.may_tell(now, is_of_recoveries=is_of_recoveries):
            self._pace.told(self._tell(self._tellable(now)), now)

    def _news(self, fresh: dict[What, Json] | None, unix: float) -> list[Tree]:
        if fresh is None:
            found = [] if self._is_away else [AWAY]
            self._is_away = True
        else:
            after = Look(self._known.status, self._known.nodes, self._known.recoveries)
            found = happened(self._before, after)
            found = after_absence(found) if self._is_away else found
            self._before, self._is_away = remembered(self._before, after), False
        is_first = not self._first.is_set()  # then the rest was so before, nobody knows since when
        return [_event(each, None if is_first and each.name not in SEEN_NOW else unix) for each in found]

    def _tellable(self, now: float) -> list[Tree]:
        """What happened, once there is room for it."""
        if not self._pace.may_tell_news(now):
            return []
        news, self._untold = self._untold, []
        self._events = [*self._events, *news][-KEPT_EVENTS:]
        return news

    def _tell(self, news: list[Tree]) -> int:
        """How many events one reader gets, at most."""
        most, now = 0, time.monotonic()
        for viewer in self._viewers:
            viewer.audience.read_at = now
        for tenant, audience in list(self._audiences.items()):
            if now > audience.read_at + LINGER_S:
                del self._audiences[tenant]
                continue
            seen = seen_by(tenant, self._view)
            if not audience.view:
                audience.begin(seen)
            told = audience.tell(seen, news)
            most = max(most, len(told))
            for viewer in self._viewers:
                if viewer.audience is audience and told:
                    viewer.tell(told)
        self._first.set()
        return most


def _event(event: Event, at: float | None) -> Tree:
    """As ``swarmctl events --json`` tells it."""
    when = None if at is None else datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    return {"time": when, "event": event.name, "text": event.text, **event.fields}
