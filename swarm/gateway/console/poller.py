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

from swarm.admin.events import (
    AWAY,
    BACK,
    NO_SNAPSHOT,
    SwarmEvent,
    SwarmSnapshot,
    carry_over,
    diff_events,
    events_after_absence,
)
from swarm.client.client import AsyncClient
from swarm.errors import SwarmError
from swarm.gateway.console.broadcast import KEPT_EVENTS, MAX_WAITING, Broadcast
from swarm.gateway.console.patch import Tree
from swarm.gateway.console.polling import AWAY_S, PATIENCE_S, LoadMeter, PollSchedule, ReportName
from swarm.gateway.console.recent_metrics import RecentMetrics
from swarm.gateway.console.view import LatestReports, build_view, restrict_to_tenant
from swarm.log import get_logger
from swarm.wire.messages import Json

MAX_VIEWERS: Final = 64
QUIET_S: Final = 2.0  # seconds without updates after which a reader's permission is checked again
LINGER_S: Final = 60.0  # seconds that updates are buffered for readers that may reconnect
# events that describe the present state, also at the first poll
STATE_EVENTS: Final = (AWAY.name, BACK.name, "not_serving")
MAX_BROADCASTS: Final = 32  # each has a buffer of updates

log = get_logger(__name__)


class Viewer:
    """One open page. Its unread updates are bounded: beyond the limit, a snapshot replaces all of them."""

    def __init__(self, broadcast: Broadcast, updates: Sequence[bytes] | None) -> None:
        """Create a viewer. ``updates``: the updates it lacks; None: it needs a snapshot."""
        self.broadcast = broadcast
        self._waiting: list[bytes] = list(updates or ())  # unread updates
        self._is_behind = updates is None  # needs a snapshot
        self._has_ended = False
        self._has_updates = asyncio.Event()
        if updates is None or updates:
            self._has_updates.set()

    def send(self, updates: Sequence[bytes]) -> None:
        if len(self._waiting) + len(updates) > MAX_WAITING:
            self._is_behind = True
        if self._is_behind:
            self._waiting.clear()
        else:
            self._waiting += updates
        self._has_updates.set()

    def end(self) -> None:
        self._has_ended = True
        self._has_updates.set()

    async def wait_for_updates(self) -> bool:
        """Wait for updates or the end. Returns False if there were none for ``QUIET_S``."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self._has_updates.wait()
        except TimeoutError:
            return False
        self._has_updates.clear()
        return True

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    @property
    def is_behind(self) -> bool:
        return self._is_behind

    def take_updates(self) -> bytes:
        """Return the unread updates, or nothing if a snapshot replaces them. Later updates follow without a gap."""
        updates = b"".join(self._waiting)
        self._waiting.clear()
        self._is_behind = False
        return updates


class SwarmPoller:
    """Poller of a gateway."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        """Create the poller. ``make_client``: makes a client that is used for nothing else."""
        self._make_client = make_client
        self._broadcasts: dict[str | None, Broadcast] = {}
        self._viewers: set[Viewer] = set()
        self._metrics, self._schedule, self._load = RecentMetrics(), PollSchedule(), LoadMeter()
        self._reports = LatestReports(time.time())
        self._view: Tree = {}
        self._events: list[Tree] = []  # recent events, sent with each snapshot
        self._waiting_events: list[Tree] = []  # events that wait for the event limit
        self._last_snapshot: SwarmSnapshot = NO_SNAPSHOT
        self._answered_at = 0.0  # monotonic time of the broker's last answer
        self._is_away = False
        self._polling: asyncio.Task[None] | None = None
        self._plan_query: asyncio.Task[Json] | None = None  # the query for the plan in progress
        self._tasks: set[asyncio.Task[None]] = set()  # the polling task, and former ones that are ending
        self._has_polled = asyncio.Event()  # set once there has been a poll
        self._wakeup = asyncio.Event()  # set to request an early poll
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def reports(self) -> LatestReports:
        return self._reports

    def poll_quickly(self) -> None:
        """Poll quickly from now on, to show the effects of a command from their beginning."""
        self._schedule.poll_quickly(time.monotonic())
        self._wakeup.set()

    # --- readers

    def add_viewer(self, tenant: str | None, last_event_id: str) -> Viewer | None:
        """Add a reader. Returns None if the limit of readers is reached."""
        if self._is_closed or len(self._viewers) >= MAX_VIEWERS:
            return None
        audience = self._broadcast_for(tenant)
        viewer = Viewer(audience, audience.updates_since(last_event_id))
        self._viewers.add(viewer)
        if self._polling is None:
            self._answered_at = time.monotonic()
            self._schedule.request_all()
            self._has_polled.clear()
            self._polling = asyncio.ensure_future(self._poll_forever())
            self._tasks.add(self._polling)
            self._polling.add_done_callback(self._on_polling_ended)
        return viewer

    def remove_viewer(self, viewer: Viewer) -> None:
        """Remove a reader. Polling stops when there are none."""
        self._viewers.discard(viewer)
        if not self._viewers and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def stream_updates(
        self, viewer: Viewer, is_allowed: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Yield the viewer's updates until the gateway ends or the viewer's permission does."""
        while is_allowed():
            if not await viewer.wait_for_updates():
                continue
            if viewer.is_behind:
                await self._has_polled.wait()
            if viewer.has_ended or not is_allowed():
                return
            whole = self._snapshot(viewer.broadcast) if viewer.is_behind else b""
            if updates := whole + viewer.take_updates():
                yield updates

    def _snapshot(self, broadcast: Broadcast) -> bytes:
        at = self._reports.at  # the view of an idle swarm is older; the page sets its clock by this timestamp
        return broadcast.snapshot({"at": round(at, 3), "series": self._metrics.series(at)}, self._events)

    def end_streams(self) -> None:
        """End all streams, and accept no further readers."""
        self._is_closed = True
        self._end_all()

    def _end_all(self) -> None:
        for viewer in list(self._viewers):
            viewer.end()
        self._has_polled.set()  # release any reader that waits for it

    async def aclose(self) -> None:
        """End all streams, and disconnect from the broker."""
        self.end_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _broadcast_for(self, tenant: str | None) -> Broadcast:
        broadcast = self._broadcasts.get(tenant)
        if broadcast is None:
            self._drop_broadcasts(MAX_BROADCASTS - 1)
            broadcast = self._broadcasts[tenant] = Broadcast(secrets.token_hex(8), tenant, read_at=time.monotonic())
            if self._view:
                broadcast.set_first_view(restrict_to_tenant(tenant, self._view))
        return broadcast

    def _drop_broadcasts(self, max_broadcasts: int) -> None:
        """Keep at most this many broadcasts, apart from those with readers."""
        read = {viewer.broadcast.tenant for viewer in self._viewers}
        for tenant in [tenant for tenant in self._broadcasts if tenant not in read][
            : len(self._broadcasts) - max_broadcasts
        ]:
            del self._broadcasts[tenant]

    # --- polling

    def _on_polling_ended(self, looking: asyncio.Task[None]) -> None:
        """Handle the end of polling, normally because there are no readers. After an internal error all streams end;
        their readers reconnect."""
        self._tasks.discard(looking)
        if not looking.cancelled() and (fault := looking.exception()) is not None:
            log.error("console_broke", exc_info=fault)
            self._polling = None
            self._end_all()

    async def _poll_forever(self) -> None:
        """Poll until cancelled. The client exists only meanwhile, so nothing is connected while there are no
        readers."""
        async with self._make_client() as client:
            try:
                while True:
                    began = time.monotonic()
                    fresh = await self._fetch_reports(client)
                    computing = time.thread_time()
                    self._update_view(fresh, time.monotonic())
                    cost_s, load = (
                        time.thread_time() - computing,
                        self._load.measure(time.process_time(), time.monotonic()),
                    )
                    has_requests = fresh is not None and "requests" in fresh
                    cost_s = self._schedule.charge(cost_s, load, time.monotonic(), has_requests=has_requests)
                    await self._wait_for_next_poll(began if fresh else time.monotonic(), cost_s, load)
            finally:
                if self._plan_query is not None:
                    self._plan_query.cancel()
                    await asyncio.gather(self._plan_query, return_exceptions=True)
                    self._plan_query = None

    async def _wait_for_next_poll(self, since: float, cost_s: float, load: float) -> None:
        """Wait for the next poll. A command can make it earlier."""
        while (wait_s := since + self._schedule.wait_s(since, cost_s, load) - time.monotonic()) > 0:
            self._wakeup.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wakeup.wait()

    async def _fetch_reports(self, client: AsyncClient) -> dict[ReportName, Json] | None:
        """Return the reports, or None if the broker does not answer. While it is away, update the view and keep
        waiting."""
        asking = asyncio.ensure_future(self._request_reports(client))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=PATIENCE_S)
                silent_s = time.monotonic() - self._answered_at
                if not asking.done() and silent_s >= (AWAY_S if client.is_connected else PATIENCE_S):
                    self._update_view(None, time.monotonic())
            return asking.result()
        except SwarmError:
            return None
        finally:
            asking.cancel()

    async def _request_reports(self, client: AsyncClient) -> dict[ReportName, Json]:
        """Request the reports that are due. The plan's report may take the broker's solver seconds, often just when
        other reports change, so it is awaited only if there is none yet."""
        due: list[ReportName] = ["status", *self._schedule.take_due(time.monotonic())]
        if "plan" in due and self._reports.plan:
            due.remove("plan")
            if self._plan_query is None:
                self._plan_query = asyncio.ensure_future(client.query("plan"))
            else:
                self._schedule.request_again("plan")  # the report in progress may be from before the change
        answers = await asyncio.gather(*(client.query(what) for what in due), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(due, cast("list[Json]", answers), strict=True)) | self._take_plan_report()

    def _take_plan_report(self) -> dict[ReportName, Json]:
        """Return the plan's report if it has arrived."""
        planning = self._plan_query
        if planning is None or not planning.done():
            return {}
        self._plan_query = None
        if planning.exception() is not None:  # the other queries show whether the broker is away
            self._schedule.request_again("plan")
            return {}
        return {"plan": planning.result()}

    def _update_view(self, fresh: dict[ReportName, Json] | None, now: float) -> None:
        """Build a view from the latest reports, and send it."""
        unix, before = time.time(), self._reports
        if fresh is None:
            self._reports = replace(self._reports, at=unix, away_s=now - self._answered_at)
            self._schedule.request_all()
        else:
            self._answered_at = now
            self._reports = replace(self._reports, at=unix, away_s=None, **fresh)
            if "stats" in fresh:
                self._metrics.add(fresh["stats"], now)
            if fresh.get("plan", before.plan).get("epoch") != before.plan.get("epoch"):
                self._schedule.request_again("recoveries")  # the plan shows which workers took over the layers
            self._metrics.tick(unix)  # not while the broker is away: earlier values do not describe that time
        was, self._view = self._view, build_view(self._reports, self._metrics.rates, self._view, before)
        if fresh is not None:
            self._schedule.on_status(self._reports.status, now, is_recovering=self._view["recovery"] is not None)
        self._waiting_events = [*self._waiting_events, *self._new_events(fresh, unix)][-KEPT_EVENTS:]
        is_of_recoveries = any(self._view[name] != was.get(name) for name in ("recovery", "recoveries"))
        if self._schedule.may_send_changes(now, is_of_recoveries=is_of_recoveries):
            self._schedule.record_sent(self._send_updates(self._take_events(now)), now)

    def _new_events(self, fresh: dict[ReportName, Json] | None, unix: float) -> list[Tree]:
        if fresh is None:
            found = [] if self._is_away else [AWAY]
            self._is_away = True
        else:
            after = SwarmSnapshot(self._reports.status, self._reports.nodes, self._reports.recoveries)
            found = diff_events(self._last_snapshot, after)
            found = events_after_absence(found) if self._is_away else found
            self._last_snapshot, self._is_away = carry_over(self._last_snapshot, after), False
        # at the first poll, all other states began earlier, at an unknown time
        is_first = not self._has_polled.is_set()
        return [_format_event(each, None if is_first and each.name not in STATE_EVENTS else unix) for each in found]

    def _take_events(self, now: float) -> list[Tree]:
        """Return the events to send now, as far as the event limit allows."""
        if not self._schedule.may_send_events(now):
            return []
        news, self._waiting_events = self._waiting_events, []
        self._events = [*self._events, *news][-KEPT_EVENTS:]
        return news

    def _send_updates(self, events: list[Tree]) -> int:
        """Send updates to all readers. Returns the largest number of events that one reader got."""
        most, now = 0, time.monotonic()
        for viewer in self._viewers:
            viewer.broadcast.read_at = now
        for tenant, broadcast in list(self._broadcasts.items()):
            if now > broadcast.read_at + LINGER_S:
                del self._broadcasts[tenant]
                continue
            seen = restrict_to_tenant(tenant, self._view)
            if not broadcast.view:
                broadcast.set_first_view(seen)
            updates = broadcast.publish(seen, events)
            most = max(most, len(updates))
            for viewer in self._viewers:
                if viewer.broadcast is broadcast and updates:
                    viewer.send(updates)
        self._has_polled.set()
        return most


def _format_event(event: SwarmEvent, at: float | None) -> Tree:
    """Format an event as ``swarmctl events --json`` does."""
    when = None if at is None else datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    return {"time": when, "event": event.name, "text": event.text, **event.fields}
