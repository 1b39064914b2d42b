"""Poller: the one loop that queries the broker while any page is open, and sends updates to all pages."""

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
QUIET_S: Final = 2.0  # seconds without updates after which a reader's permission is checked again
LINGER_S: Final = 60.0  # seconds that updates are buffered for readers that may reconnect
# events that describe the present state, also at the first poll
SEEN_NOW: Final = (AWAY.name, BACK.name, "not_serving")
MAX_AUDIENCES: Final = 32  # each has a buffer of updates

log = get_logger(__name__)


class Viewer:
    """One open page. Its unread updates are bounded: beyond the limit, a snapshot replaces all of them."""

    def __init__(self, audience: Audience, told: Sequence[bytes] | None) -> None:
        """Create a viewer. ``updates``: the updates it lacks; None: it needs a snapshot."""
        self.audience = audience
        self._waiting: list[bytes] = list(told or ())  # unread updates
        self._is_behind = told is None  # needs a snapshot
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
        """Wait for updates or the end. Returns False if there were none for ``QUIET_S``."""
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
        """Return the unread updates, or nothing if a snapshot replaces them. Later updates follow without a gap."""
        told = b"".join(self._waiting)
        self._waiting.clear()
        self._is_behind = False
        return told


class Watch:
    """Poller of a gateway."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        """Create the poller. ``make_client``: makes a client that is used for nothing else."""
        self._make_client = make_client
        self._audiences: dict[str | None, Audience] = {}
        self._viewers: set[Viewer] = set()
        self._figures, self._pace, self._load = Figures(), Pace(), Load()
        self._known = Known(time.time())
        self._view: Tree = {}
        self._events: list[Tree] = []  # recent events, sent with each snapshot
        self._untold: list[Tree] = []  # events that wait for the event limit
        self._before: Look = NOTHING
        self._heard_at = 0.0  # monotonic time of the broker's last answer
        self._is_away = False
        self._looking: asyncio.Task[None] | None = None
        self._planning: asyncio.Task[Json] | None = None  # the query for the plan in progress
        self._tasks: set[asyncio.Task[None]] = set()  # the polling task, and former ones that are ending
        self._first = asyncio.Event()  # set once there has been a poll
        self._call = asyncio.Event()  # set to request an early poll
        self._is_over = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def known(self) -> Known:
        return self._known

    def hurry(self) -> None:
        """Poll quickly from now on, to show the effects of a command from their beginning."""
        self._pace.hurry(time.monotonic())
        self._call.set()

    # --- readers

    def join(self, tenant: str | None, last_event_id: str) -> Viewer | None:
        """Add a reader. Returns None if the limit of readers is reached."""
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
        """Remove a reader. Polling stops when there are none."""
        self._viewers.discard(viewer)
        if not self._viewers and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def read(self, viewer: Viewer, still_may: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
        """Yield the viewer's updates until the gateway ends or the viewer's permission does."""
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
        at = self._known.at  # the view of an idle swarm is older; the page sets its clock by this timestamp
        return audience.whole({"at": round(at, 3), "series": self._figures.series(at)}, self._events)

    def end(self) -> None:
        """End all streams, and accept no further readers."""
        self._is_over = True
        self._end_all()

    def _end_all(self) -> None:
        for viewer in list(self._viewers):
            viewer.end()
        self._first.set()  # release any reader that waits for it

    async def aclose(self) -> None:
        """End all streams, and disconnect from the broker."""
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
        """Keep at most this many broadcasts, apart from those with readers."""
        read = {viewer.audience.tenant for viewer in self._viewers}
        for tenant in [tenant for tenant in self._audiences if tenant not in read][: len(self._audiences) - most]:
            del self._audiences[tenant]

    # --- polling

    def _looked(self, looking: asyncio.Task[None]) -> None:
        """Handle the end of polling, normally because there are no readers. After an internal error all streams end;
        their readers reconnect."""
        self._tasks.discard(looking)
        if not looking.cancelled() and (fault := looking.exception()) is not None:
            log.error("console_broke", exc_info=fault)
            self._looking = None
            self._end_all()

    async def _look_on(self) -> None:
        """Poll until cancelled. The client exists only meanwhile, so nothing is connected while there are no
        readers."""
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
        """Wait for the next poll. A command can make it earlier."""
        while (wait_s := since + self._pace.wait_s(since, cost_s, load) - time.monotonic()) > 0:
            self._call.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._call.wait()

    async def _asked(self, client: AsyncClient) -> dict[What, Json] | None:
        """Return the reports, or None if the broker does not answer. While it is away, update the view and keep
        waiting."""
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
        """Request the reports that are due. The plan's report may take the broker's solver seconds, often just when
        other reports change, so it is awaited only if there is none yet."""
        due: list[What] = ["status", *self._pace.due(time.monotonic())]
        if "plan" in due and self._known.plan:
            due.remove("plan")
            if self._planning is None:
                self._planning = asyncio.ensure_future(client.query("plan"))
            else:
                self._pace.ask_again("plan")  # the report in progress may be from before the change
        found = await asyncio.gather(*(client.query(what) for what in due), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return dict(zip(due, cast("list[Json]", found), strict=True)) | self._planned()

    def _planned(self) -> dict[What, Json]:
        """Return the plan's report if it has arrived."""
        planning = self._planning
        if planning is None or not planning.done():
            return {}
        self._planning = None
        if planning.exception() is not None:  # the other queries show whether the broker is away
            self._pace.ask_again("plan")
            return {}
        return {"plan": planning.result()}

    def _heard(self, fresh: dict[What, Json] | None, now: float) -> None:
        """Build a view from the latest reports, and send it."""
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
                self._pace.ask_again("recoveries")  # the plan shows which workers took over the layers
            self._figures.tick(unix)  # not while the broker is away: earlier values do not describe that time
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
        is_first = not self._first.is_set()  # at the first poll, all other states began earlier, at an unknown time
        return [_event(each, None if is_first and each.name not in SEEN_NOW else unix) for each in found]

    def _tellable(self, now: float) -> list[Tree]:
        """Return the events to send now, as far as the event limit allows."""
        if not self._pace.may_tell_news(now):
            return []
        news, self._untold = self._untold, []
        self._events = [*self._events, *news][-KEPT_EVENTS:]
        return news

    def _tell(self, news: list[Tree]) -> int:
        """Send updates to all readers. Returns the largest number of events that one reader got."""
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
    """Format an event as ``swarmctl events --json`` does."""
    when = None if at is None else datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    return {"time": when, "event": event.name, "text": event.text, **event.fields}
