"""The loop that asks: only while somebody looks, for all at once; slow readers, those who come back, and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self, cast

import pytest

from swarm.client.client import AsyncClient
from swarm.errors import Unavailable
from swarm.gateway.console import poller as watching
from swarm.gateway.console.broadcast import MAX_WAITING, Broadcast
from swarm.gateway.console.poller import MAX_VIEWERS, SwarmPoller, Viewer
from swarm.gateway.console.polling import ReportName

Json = dict[str, Any]
PATIENCE_S = 20.0


class Broker:
    """A stand-in for the client: answers from ``reports``, and counts what it is asked."""

    is_connected = True

    def __init__(self) -> None:
        self.reports: dict[str, Json] = {
            "status": {
                "state": "serving",
                "epoch": 1,
                "uptime_s": 5.0,
                "num_running": 0,
                "model": "m",
                "num_stages": 1,
            },
            "nodes": {"workers": []},
            "requests": {"requests": []},
        }
        self.num_asked = self.num_open = 0
        self.is_away = False
        self.plans = asyncio.Event()  # set: the solver has time
        self.plans.set()

    async def __aenter__(self) -> Self:
        self.num_open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.num_open -= 1

    async def query(self, what: str) -> Json:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("nobody answers")
        report = dict(self.reports.get(what, {}))  # another one each time, as from a socket
        if what == "plan":
            await self.plans.wait()
        return report


class Seen(SwarmPoller):
    """Says that something may have changed: after each look, and when a reader has read."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        super().__init__(make_client)
        self.moved = asyncio.Event()

    def _update_view(self, fresh: dict[ReportName, Json] | None, now: float) -> None:
        try:
            super()._update_view(fresh, now)
        finally:
            self.moved.set()


class Reader:
    """One open page: what it has read so far, applied."""

    def __init__(self, watch: Seen, tenant: str | None = None, last: str = "") -> None:
        self.watch = watch
        viewer = watch.add_viewer(tenant, last)
        assert viewer is not None
        self.viewer = viewer
        self.events: list[tuple[str, str, Any]] = []
        self.view: Json = {}
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for told in self.watch.stream_updates(self.viewer):
            for block in told.decode().removesuffix("\n\n").split("\n\n"):
                fields = dict(line.split(": ", 1) for line in block.split("\n"))
                self.events.append((fields["id"], fields["event"], json.loads(fields["data"])))
            self.watch.moved.set()

    def of(self, name: str) -> list[Any]:
        return [data for _, event, data in self.events if event == name]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.watch.moved.clear()
                await self.watch.moved.wait()

    async def leave(self) -> None:
        self.watch.remove_viewer(self.viewer)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.02)
    monkeypatch.setattr("swarm.gateway.console.polling.BUSY_S", 0.01)
    monkeypatch.setattr("swarm.gateway.console.polling.IDLE_S", 0.01)


def made(broker: Broker) -> Seen:
    return Seen(lambda: cast(AsyncClient, broker))


async def all_is_quiet() -> None:
    """Wait until nobody is left who could ask: all other tasks have ended."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


async def test_nothing_is_asked_while_nobody_looks(quick: None) -> None:
    """Nor is anything connected, before the first and after the last."""
    broker = Broker()
    watch = made(broker)
    await all_is_quiet()
    assert (broker.num_asked, broker.num_open) == (0, 0)
    one, other = Reader(watch), Reader(watch)
    await other.until(lambda: one.events and other.events)
    assert broker.num_open == 1
    await one.leave()
    asked = broker.num_asked
    await other.until(lambda: broker.num_asked > asked)
    await other.leave()
    await all_is_quiet()
    assert broker.num_open == 0
    await watch.aclose()


async def test_a_plan_that_takes_long_to_report_holds_nothing_back(quick: None) -> None:
    """What else is new is told meanwhile, and nobody is called away; a plan that was overtaken is asked for anew."""
    broker = Broker()
    broker.reports["plan"] = {"epoch": 1, "stages": [{"worker": "w0", "layers": [0, 3]}]}
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.of("snapshot"))
    assert watch.reports.plan["epoch"] == 1
    broker.plans.clear()
    broker.reports["status"] = broker.reports["status"] | {"epoch": 2}
    await reader.until(lambda: watch.reports.status["epoch"] == 2)
    broker.reports["status"] = broker.reports["status"] | {"state": "waiting", "epoch": 3}
    await reader.until(lambda: watch.reports.status["epoch"] == 3)
    assert (watch.reports.plan["epoch"], watch.reports.away_s) == (1, None)
    broker.reports["plan"] = broker.reports["plan"] | {"epoch": 3}
    broker.plans.set()
    await reader.until(lambda: watch.reports.plan["epoch"] == 3)
    await reader.leave()
    await watch.aclose()


async def test_an_order_is_followed_at_once(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the recovery that it brings about is told, though the next usual look is far away."""
    monkeypatch.setattr("swarm.gateway.console.polling.IDLE_S", 1000.0)
    broker = Broker()
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.events)
    row: Json = {"detected_at": 7.5, "epoch": 2, "cause": "w1 was lost", "workers": ["w1"]}
    broker.reports["recoveries"] = {"recoveries": [row]}
    watch.poll_quickly()
    await reader.until(lambda: any(delta.get("recovery") for delta in reader.of("delta")))
    broker.reports["recoveries"] = {"recoveries": [row | {"planned_at": 7.6}]}
    await reader.until(lambda: watch.reports.recoveries == broker.reports["recoveries"])
    broker.reports["recoveries"] = {"recoveries": [row | {"resumed_all_at": 7.7}]}
    await reader.until(lambda: any("recoveries" in delta for delta in reader.of("delta")))
    told = [
        [phase["state"] for phase in delta["recovery"]["phases"]]
        for delta in reader.of("delta")
        if delta.get("recovery")
    ]
    assert [states[:3] for states in told] == [["done", "runs", "waits"], ["done", "done", "runs"]]
    await reader.leave()
    await watch.aclose()


@pytest.mark.slow
async def test_who_took_the_layers_is_told_as_soon_as_the_plan_is(quick: None) -> None:
    """A plan's report may come after the recovery's end."""
    broker = Broker()
    recovery = {"detected_at": 7.0, "workers": ["w1"], "lost": [[3, 6]], "age_s": 1.0, "epoch": 2, "sequences": 1}
    broker.reports["plan"] = {"epoch": 1, "stages": [{"worker": "w1", "layers": [3, 6]}]}
    broker.reports["recoveries"] = {"recoveries": [recovery]}
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: watch.reports.plan and reader.events)
    broker.plans.clear()
    broker.reports["status"] = broker.reports["status"] | {"epoch": 2}
    broker.reports["plan"] = {"epoch": 2, "stages": [{"worker": "w0", "layers": [0, 6]}]}
    broker.reports["recoveries"] = {"recoveries": [recovery | {"resumed_all_at": 8.0}]}
    await reader.until(lambda: any(delta.get("recoveries") for delta in reader.of("delta")))
    asked = broker.num_asked
    await reader.until(lambda: broker.num_asked > asked + 10)
    broker.plans.set()
    async with asyncio.timeout(2.0):
        await reader.until(lambda: "w0 took layers 3–5" in json.dumps(reader.of("delta"), ensure_ascii=False))
    await reader.leave()
    await watch.aclose()


async def test_a_reader_gets_the_whole_and_then_what_changes(quick: None) -> None:
    broker = Broker()
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.of("events"))
    assert reader.events[0][1] == "snapshot"
    assert reader.events[0][2]["status"]["state"] == "serving"
    assert set(reader.events[0][2]["series"]) >= {"at", "queued"}
    assert reader.of("events")[0][0]["event"] == "serving"
    assert reader.of("events")[0][0]["time"] is None  # of before the first look
    broker.reports["status"] = broker.reports["status"] | {"state": "waiting", "waits_for": "memory"}
    await reader.until(lambda: len(reader.of("events")) > 1)
    assert reader.of("delta")[-1]["status"] == {"state": "waiting", "waits_for": "memory"}
    assert reader.of("events")[-1][-1]["text"] == "waiting: memory"
    assert reader.of("events")[-1][-1]["time"] is not None
    await reader.leave()
    await watch.aclose()


async def test_a_snapshot_of_an_idle_swarm_says_what_time_it_is(quick: None) -> None:
    """Pages set their clocks by it, however long nothing has changed."""
    watch = made(Broker())
    first = Reader(watch)
    await first.until(lambda: first.events)
    made_at = first.of("snapshot")[0]["at"]
    await first.until(lambda: watch.reports.at > made_at + 0.02)
    second = Reader(watch)
    await second.until(lambda: second.events)
    assert second.of("snapshot")[0]["at"] >= made_at + 0.02
    for reader in (first, second):
        await reader.leave()
    await watch.aclose()


async def test_charts_have_a_gap_while_the_broker_is_away(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    monkeypatch.setattr(watching.RecentMetrics, "tick", lambda _, unix: ticks.append(unix))
    broker = Broker()
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: ticks)
    broker.is_away = True
    await reader.until(lambda: watch.reports.away_s is not None)
    num, away_s = len(ticks), watch.reports.away_s or 0.0
    await reader.until(lambda: (watch.reports.away_s or 0.0) > away_s + 0.05)
    assert len(ticks) == num
    broker.is_away = False
    await reader.until(lambda: len(ticks) > num)
    await reader.leave()
    await watch.aclose()


async def test_who_comes_back_goes_on(quick: None) -> None:
    """Even if nobody looked meanwhile."""
    broker = Broker()
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.events)
    last = reader.events[-1][0]
    await reader.leave()
    broker.reports["status"] = broker.reports["status"] | {"epoch": 2}
    again = Reader(watch, last=last)
    await again.until(lambda: again.of("delta"))
    assert again.of("snapshot") == []
    assert again.of("delta")[0]["status"] == {"epoch": 2}
    stranger = Reader(watch, last="f" * 16 + "-3")
    await stranger.until(lambda: stranger.events)
    assert stranger.events[0][1] == "snapshot"
    for each in (again, stranger):
        await each.leave()
    await watch.aclose()


async def test_a_broker_that_is_away_is_told_and_the_stream_goes_on(quick: None) -> None:
    broker = Broker()
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.events)
    broker.is_away = True
    await reader.until(lambda: any("away_s" in delta for delta in reader.of("delta")))
    told = [event["event"] for events in reader.of("events") for event in events]
    assert told.count("broker_away") == 1
    broker.is_away = False
    await reader.until(lambda: reader.of("delta")[-1].get("away_s", 0) is None)
    await reader.until(lambda: "broker_back" in [event["event"] for events in reader.of("events") for event in events])
    await reader.leave()
    await watch.aclose()


async def test_what_is_so_at_the_first_look_has_its_time(quick: None) -> None:
    """Else it would stand above all as "earlier"; what was so before has none, since nobody knows since when."""
    broker = Broker()
    broker.is_away = True
    watch = made(broker)
    reader = Reader(watch)
    await reader.until(lambda: reader.of("events"))
    ((away,),) = reader.of("events")
    assert (away["event"], away["time"] is None) == ("broker_away", False)
    await reader.leave()
    await watch.aclose()
    reader = Reader(watch := made(Broker()))
    await reader.until(lambda: reader.of("events"))
    assert {event["time"] for event in reader.of("events")[0] if event["event"] != "not_serving"} == {None}
    await reader.leave()
    await watch.aclose()


async def test_the_end_of_the_gateway_ends_streams_at_once(quick: None) -> None:
    watch = made(Broker())
    readers = [Reader(watch) for _ in range(3)]
    await readers[0].until(lambda: readers[2].events)
    watch.end_streams()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(reader.task for reader in readers))
    assert watch.add_viewer(None, "") is None
    await watch.aclose()


async def test_the_end_comes_before_the_first_look_too(quick: None) -> None:
    broker = Broker()
    broker.is_away = True
    watch = made(broker)
    reader = Reader(watch)
    watch.end_streams()
    async with asyncio.timeout(PATIENCE_S):
        await reader.task
    await watch.aclose()


async def test_so_many_may_look(quick: None) -> None:
    watch = made(Broker())
    viewers = [watch.add_viewer(None, "") for _ in range(MAX_VIEWERS)]
    assert all(viewers)
    assert watch.add_viewer(None, "") is None
    viewer = viewers[0]
    assert viewer is not None
    watch.remove_viewer(viewer)
    assert watch.add_viewer(None, "") is not None
    await watch.aclose()


async def test_tenants_see_their_own(quick: None) -> None:
    broker = Broker()
    row = {"request_id": "r", "state": "running", "tenant": "alice", "age_s": 1.0}
    broker.reports["requests"] = {"requests": [row]}
    watch = made(broker)
    readers = {tenant: Reader(watch, tenant) for tenant in ("alice", "bob", None)}
    await readers[None].until(lambda: all(reader.events for reader in readers.values()))
    seen = {tenant: (len(r.events[0][2]["requests"]), r.events[0][2]["requests_more"]) for tenant, r in readers.items()}
    assert seen == {"alice": (1, 0), "bob": (0, 1), None: (1, 0)}
    other = Reader(watch, "carol", last=readers["alice"].events[-1][0])
    await other.until(lambda: other.events)
    assert other.events[0][1] == "snapshot"  # another's number is none of this audience
    for reader in (*readers.values(), other):
        await reader.leave()
    await watch.aclose()


def test_who_lags_behind_gets_the_whole_instead() -> None:
    """What waits for a reader is bounded."""
    viewer = Viewer(Broadcast("0" * 16), ())
    assert not viewer.is_behind
    for _ in range(MAX_WAITING):
        viewer.send([b"x"])
    assert not viewer.is_behind
    viewer.send([b"x"])
    assert viewer.is_behind
    viewer.send([b"y"])
    assert viewer.take_updates() == b""
    assert not viewer.is_behind
    viewer.send([b"z"])
    assert viewer.take_updates() == b"z"


async def test_a_fault_of_ours_ends_the_streams_and_the_next_reader_begins_anew(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Json:
        raise RuntimeError("a fault")

    watch = made(Broker())
    monkeypatch.setattr(watching, "build_view", broken)
    reader = Reader(watch)
    async with asyncio.timeout(PATIENCE_S):
        await reader.task
    await reader.leave()
    monkeypatch.undo()
    again = Reader(watch)
    await again.until(lambda: again.events)
    await again.leave()
    await watch.aclose()


async def test_who_may_look_no_more_is_told_nothing_more(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is taken back ends its streams, whether anything happens or not."""
    monkeypatch.setattr(watching, "QUIET_S", 0.02)
    watch, rights = made(Broker()), [True]
    viewer = watch.add_viewer(None, "")
    assert viewer is not None
    told: list[bytes] = []

    async def read() -> None:
        async for each in watch.stream_updates(viewer, lambda: rights[0]):
            told.append(each)
            rights[0] = False

    async with asyncio.timeout(PATIENCE_S):
        await read()
    assert len(told) == 1
    watch.remove_viewer(viewer)
    await watch.aclose()


async def test_who_does_not_come_back_is_forgotten(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was told is remembered for a while, and no longer: here for none."""
    monkeypatch.setattr(watching, "LINGER_S", 0.0)
    broker = Broker()
    watch = made(broker)
    stays, goes = Reader(watch), Reader(watch, "alice")
    await stays.until(lambda: stays.events and goes.events)
    last = goes.events[-1][0]
    await goes.leave()
    asked = broker.num_asked
    await stays.until(lambda: broker.num_asked > asked + 6)  # one look after that, whatever it asks
    again = Reader(watch, "alice", last)
    await again.until(lambda: again.events)
    assert again.events[0][1] == "snapshot"
    for reader in (stays, again):
        await reader.leave()
    await watch.aclose()
